"""The app of a pytest-celery worker with this package: three lines below are replaced by the plugin for each test."""

from __future__ import annotations

from celery import Celery

from umt_durable import Durable

imports = None

app = Celery("celery_test_app")
config = None

if config:
    app.config_from_object(config)  # type: ignore[unreachable]  # the line above is one of the three

durable = Durable(app)
