"""The app of tests/support/apps.py with every Celery signal of a task's end written into the body log.

`celery -A tests.celery.signalling:app worker` runs it. An entry's step is `signal:NAME`, its mark the interesting
fields.
"""

from __future__ import annotations

from typing import Any

from celery import signals

from tests.support import bodylog
from tests.support.apps import build

APP = "tests.celery.signalling:app"

tasks = build()
app, durable = tasks.app, tasks.durable


def _write(name: str, run: str, mark: str = "begin") -> None:
    bodylog.write(f"signal:{name}", mark, run=run)


@signals.task_success.connect
def _on_success(sender: Any = None, **_: object) -> None:
    _write("success", sender.request.id)


@signals.task_failure.connect
def _on_failure(sender: Any = None, task_id: str = "", **_: object) -> None:
    _write("failure", task_id)


@signals.task_retry.connect
def _on_retry(sender: Any = None, request: Any = None, **_: object) -> None:
    _write("retry", request.id)


@signals.task_revoked.connect
def _on_revoked(
    sender: Any = None, request: Any = None, terminated: bool = False, signum: Any = None, **_: object
) -> None:
    _write("revoked", request.id, f"{sender.name} {terminated} {None if signum is None else int(signum)}")
