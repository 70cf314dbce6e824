"""An app that writes every Celery signal and every handler of its durable tasks into the body log.

`celery -A tests.celery.observed:app worker` runs it. An entry's step is `signal:NAME` or `handler:NAME`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery import signals

from tests.support import bodylog
from tests.support.apps import FlakyError, build
from umt_durable import DurableTask, RetryPolicy, current_context

APP = "tests.celery.observed:app"

POLICY = RetryPolicy(max_attempts=2, initial=timedelta(seconds=3))

tasks = build()
app, durable = tasks.app, tasks.durable


class Observed(DurableTask):
    """A durable task with all of Celery's handlers."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Write that a delivery begins."""
        bodylog.write("handler:before_start", "begin", run=task_id)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Write that the run succeeded."""
        bodylog.write("handler:on_success", "begin", run=task_id)

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Write that the run failed."""
        bodylog.write("handler:on_failure", type(exc).__name__, run=task_id)

    def on_retry(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Write that the run will be tried again."""
        bodylog.write("handler:on_retry", type(exc).__name__, run=task_id)

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Write that the run is over."""
        bodylog.write("handler:after_return", status, run=task_id)


@app.task(name="observed.run", base=Observed, shared=False)
def run(suspensions: int, fails: bool) -> int:
    """Sleep as often as asked, then end."""
    step = current_context().step
    for number in range(suspensions):
        step.sleep(f"nap-{number}", timedelta(seconds=2))
    if fails:
        raise FlakyError("as asked")
    return suspensions


@app.task(name="observed.again", base=Observed, shared=False, durable_retry=POLICY)
def again() -> int:
    """Fail at the first attempt, which its policy allows to be tried again."""
    if current_context().attempt == 1:
        raise FlakyError("not yet")
    return current_context().attempt


@app.task(name="observed.classic", base=Observed, shared=False, bind=True, max_retries=1)
def classic(self: Any) -> int:
    """Fail at the first attempt, and ask for another as Celery's tasks do."""
    if not self.request.retries:
        raise self.retry(exc=FlakyError("not yet"), countdown=3)
    return int(self.request.retries)


def _watch(name: str) -> None:
    def write(sender: Any = None, request: Any = None, task_id: str = "", **_: object) -> None:
        run_id = task_id or (request if request is not None else sender.request).id
        bodylog.write(f"signal:{name}", "begin", run=run_id)

    getattr(signals, f"task_{name}").connect(write, weak=False)


for _name in ("prerun", "postrun", "success", "failure", "retry", "revoked", "internal_error"):
    _watch(_name)
