"""The app of tests/celery/signalling.py in workers that do not wait long for a result backend that is away."""

from __future__ import annotations

from tests.celery.signalling import tasks

APP = "tests.celery.impatient:app"

app = tasks.app
app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 1, "interval_start": 0, "interval_max": 0}}
