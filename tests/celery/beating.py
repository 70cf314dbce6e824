"""A schedule of Celery's own beat: durable tasks that beat's app has, and one that it knows by name only.

`celery -A tests.celery.beating:beat_app beat` has the schedule; `...:worker_app` has all tasks. All entries are on a
clock that stands shortly before a full minute when beat first looks at it, so that a crontab is due soon.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from celery import Celery
from celery.schedules import crontab, schedule

from tests.support.apps import log_and_pass
from tests.support.queues import QUEUE
from umt_durable import Durable, TaskContext

SHIFT = "UMT_TEST_BEAT_SHIFT"
"""Names the file that says how many seconds the entries' clock is ahead."""
TO_THE_MINUTE = 4.0
KNOWN, STRANGE = "beating.known", "beating.strange"


def _app() -> tuple[Celery, Durable]:
    app = Celery("beating", broker=os.environ["CELERY_BROKER_URL"], backend=os.environ["CELERY_RESULT_BACKEND"])
    app.conf.update(task_default_queue=QUEUE, broker_connection_retry_on_startup=True)
    app.conf.update(beat_max_loop_interval=1, beat_sync_every=1)
    durable = Durable(app)

    @durable.task(name=KNOWN)
    def known(ctx: TaskContext, entry: str) -> str:
        ctx.step.run("tick", log_and_pass, entry, 1)
        return entry

    return app, durable


def shifted_now() -> datetime:
    """Return what time it is on the clock of all entries: one for all, since beat compares what is due by it."""
    return datetime.now().astimezone() + timedelta(seconds=_shift())


@cache
def _shift() -> float:
    # Found out by the first beat when it looks at its clock first, however long it took to start; kept for the next.
    file = Path(os.environ[SHIFT])
    if not file.exists():
        file.write_text(str(60.0 - TO_THE_MINUTE - datetime.now().astimezone().second))
    return float(file.read_text())


def _beat() -> Celery:
    app, _ = _app()
    app.conf.beat_schedule = {
        "by interval": {"task": KNOWN, "schedule": every(1.0), "args": ("by interval",)},
        "by name": {"task": STRANGE, "schedule": every(1.5), "args": ("by name",)},
        "by crontab": {"task": KNOWN, "schedule": crontab(nowfun=shifted_now), "kwargs": {"entry": "by crontab"}},
        "with an expiry": {
            "task": KNOWN,
            "schedule": every(2.0),
            "args": ("with an expiry",),
            "options": {"expires": 3600},
        },
    }
    return app


def every(seconds: float) -> schedule:
    """Return an interval on that clock."""
    return schedule(seconds, nowfun=shifted_now)


def _worker() -> Celery:
    app, durable = _app()

    @durable.task(name=STRANGE)
    def strange(ctx: TaskContext, entry: str) -> str:
        ctx.step.run("tick", log_and_pass, entry, 1)
        return entry

    return app


def __getattr__(name: str) -> Any:
    # Built when asked for: each process has one of them.
    made = {"beat_app": _beat, "worker_app": _worker}.get(name)
    if made is None:
        raise AttributeError(name)
    globals()[name] = made()
    return globals()[name]
