"""The app under load: a task that does everything once, and its child.

Worker processes find their servers in the environment, as any Celery app does. Every entry into a body is logged, and
every effect leaves a row or a line that nothing makes unique, so that a double shows.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Final

from celery import Celery

from tests.support import bodylog, provider
from umt_durable import Done, Durable, NotDone, OpInfo, RetryPolicy, TaskContext

NEWS: Final = "chaos.news"
KEYS: Final = 8
"""Under how many keys news are emitted; a run waits for those of its number."""

OFTEN: Final = RetryPolicy(20, initial=timedelta(milliseconds=200), maximum=timedelta(seconds=2))

app = Celery("chaos")
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    result_expires=86_400,
    task_default_queue="chaos",
)
durable = Durable(app)


WORK_SECONDS: Final = 0.4
"""How long the longest bodies take, so that what happens to a process finds it in one."""


def passed(step: str, value: int) -> int:
    """Be a body: log the entry, take some time, and return the value."""
    with bodylog.body(step):
        time.sleep(WORK_SECONDS * (value % 7) / 6)
        return value


def flaky(step: str, value: int, failures: int) -> int:
    """Be a body that fails some times first; how often it was entered stands in the log."""
    with bodylog.body(step):
        if len(bodylog.BodyLog.from_environment().entries(step=step, mark="begin")) <= failures:
            raise OSError(f"not yet: {step}")
        return value


def book(tx: Any, run: str, number: int) -> int:
    """Write a row of the application's, which has no unique constraint."""
    with bodylog.body("book"):
        tx.execute(b"INSERT INTO chaos.chaos_booking VALUES (%s, %s)", (run, number))
        return number


def ship(info: OpInfo) -> int:
    """Have the provider apply an effect; its answer is a number of its own."""
    with bodylog.body("ship"):
        provider.apply(info)
        return 1


def look(info: OpInfo) -> Done[int] | NotDone:
    """Ask the provider whether it has applied an effect."""
    return NotDone() if provider.look_up(info) is None else Done(1)


@durable.task(name="chaos.child", retry=OFTEN)
def child(ctx: TaskContext, number: int) -> int:
    """Sleep a moment and double a number."""
    ctx.step.sleep("nap", timedelta(milliseconds=50 * (number % 5)))
    return ctx.step.run("double", passed, "double", 2 * number)


@durable.task(name="chaos.canary", retry=OFTEN)
def canary(ctx: TaskContext, number: int) -> list[int]:
    """Do everything once: what comes back is `expected(number)`, however often a process died on the way."""
    first = ctx.step.run("first", passed, "first", number)
    parts = ctx.step.map("parts", lambda part: passed(f"parts[{part}]", part), [0, 1, 2], key=str)
    booked = ctx.step.transaction("book", book, ctx.run_id, number)
    shipped = ctx.step.effect(f"ship:{ctx.run_id}", ship, reconcile=look)
    ctx.step.sleep("nap", timedelta(milliseconds=100 * (number % 30)))
    said = ctx.step.wait_for_fact("go").payload
    tried = ctx.step.options(retry=OFTEN).run("flaky", flaky, f"flaky:{ctx.run_id}", 7, number % 3)
    news = ctx.step.wait_for_fact(NEWS, key=str(number % KEYS)).payload
    doubled = ctx.step.call("child", child, number)
    last = ctx.step.run("last", passed, "last", number)
    return [first, *parts, booked, shipped, said, tried, news, doubled, last]


def expected(number: int) -> list[int]:
    """Return what the run of a number gives."""
    return [number, 0, 1, 2, number, 1, number + 1, 7, number % KEYS, 2 * number, number]
