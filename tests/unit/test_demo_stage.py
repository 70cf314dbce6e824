"""What the demo takes over from the shell it was started in."""

from __future__ import annotations

import os

import pytest

from examples.orders.stage import take_environment, without_settings


def test_settings_of_another_app_do_not_reach_the_demo() -> None:
    inherited = {
        "DURABLE_SCHEMA": "foo",
        "DURABLE_DATABASE_URL": "postgresql://db/theirs",
        "CELERY_BROKER_READ_URL": "redis://broker",
        "CELERY_CONFIG_MODULE": "theirs",
        "HOME": "/home/ann",
        "PATH": "/bin",
    }

    assert without_settings(inherited) == {"HOME": "/home/ann", "PATH": "/bin"}


def test_the_demo_itself_has_no_setting_that_its_workers_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_SCHEMA", "foo")
    environ = {**without_settings(os.environ), "DURABLE_LEASE_SECONDS": "3"}
    monkeypatch.setattr(os, "environ", dict(os.environ))

    take_environment(environ)

    assert os.environ == environ
