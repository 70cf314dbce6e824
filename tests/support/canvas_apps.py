"""A Celery app for canvas: durable tasks that suspend as often as they are told, and ordinary ones beside them.

`celery -A tests.support.canvas_apps:app worker` reads its environment like `tests.support.apps`; a test builds the same
tasks with `build`. Every body writes to the body log what it was called with, and whose child it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from celery import Celery, chain, chord, current_task, group, shared_task
from celery.exceptions import Ignore, Reject
from pydantic import BaseModel

from tests.support import bodylog, gates
from tests.support.apps import _given
from tests.support.queues import QUEUE
from umt_durable import Durable, DurableTask, TaskContext, current_context

NAP = timedelta(milliseconds=50)


class CanvasError(Exception):
    """What the failing tasks raise."""


class Pair(BaseModel):
    """What a task takes and gives whose arguments Celery itself turns into models."""

    left: int
    right: int


@dataclass(frozen=True)
class Canvas:
    """The app and its tasks, built for one environment."""

    app: Celery
    durable: Durable
    hop: Any
    hop_total: Any
    fail: Any
    swap: Any
    classic_swap: Any
    classic: Any
    classic_values: Any
    classic_model: Any
    classic_again: Any
    classic_gated: Any
    classic_loose: Any
    classic_request: Any
    long_nap: Any
    family: Any
    options: Any
    held: Any
    add: Any
    total: Any
    boom: Any
    mark: Any
    old_errback: Any
    new_errback: Any
    seeing_errback: Any
    durable_errback: Any


def build(environ: Mapping[str, str] | None = None, **conf: Any) -> Canvas:
    """Return an app with all tasks for an environment, that of this process when none is given."""
    environ = os.environ if environ is None else environ
    app = Celery("umt-canvas", broker=environ.get("CELERY_BROKER_URL"), backend=environ.get("CELERY_RESULT_BACKEND"))
    app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
    app.conf.update(result_extended=True, accept_content=["json", "msgpack"], **conf)
    if environ.get("UMT_TEST_CHORD_EXPIRES"):
        app.conf.result_chord_expires = float(environ["UMT_TEST_CHORD_EXPIRES"])
    durable = Durable(app, **_given(environ))
    return Canvas(
        app=app,
        durable=durable,
        **_durable_tasks(durable),
        **_more_tasks(durable),
        **_classic_tasks(app),
        **_plain_tasks(app),
    )


def nap(ctx: TaskContext, times: int) -> None:
    """Suspend the run that often."""
    for _ in range(times):
        ctx.step.wait_for_fact("never", timeout=NAP, default=None)


def log_family(step: str) -> None:
    """Write who the current request says it belongs to."""
    request = current_task.request
    bodylog.write(step, f"{request.root_id}|{request.parent_id}|{request.group}", run=str(request.id))


def _durable_tasks(durable: Durable) -> dict[str, Any]:
    @durable.task(name="canvas.hop")
    def hop(ctx: TaskContext, value: int, naps: int = 0, add: int = 1, label: str = "hop") -> int:
        log_family("family")
        nap(ctx, naps)
        log_family("family")
        return ctx.step.run("only", _log_and_add, label, value, add)

    @durable.task(name="canvas.hop_total")
    def hop_total(ctx: TaskContext, values: list[int], naps: int = 0) -> int:
        nap(ctx, naps)
        return ctx.step.run("only", _log_and_add, "total", sum(values), 0)

    @durable.task(name="canvas.fail")
    def fail(ctx: TaskContext, value: int = 0, naps: int = 0) -> int:
        nap(ctx, naps)
        raise CanvasError(f"failed with {value}")

    @durable.task(name="canvas.swap")
    def swap(ctx: TaskContext, value: int, kind: str, naps: int = 0) -> Any:
        nap(ctx, naps)
        ctx.step.run("before", _log_and_add, f"swap-{kind}", value, 0)
        try:
            return swap.replace(_replacement(kind, value, hop, durable.app))
        except Exception:  # noqa: BLE001 - the point: user code that catches all must not lose the replacement
            return -1

    @durable.task(name="canvas.long_nap")
    def long_nap(ctx: TaskContext, value: int, seconds: float) -> int:
        ctx.step.sleep("long", timedelta(seconds=seconds))
        return value

    @durable.task(name="canvas.family")
    def family(ctx: TaskContext, value: int, naps: int = 0) -> dict[str, Any]:
        nap(ctx, naps)
        request = current_task.request
        stamps = dict(request.stamps or {})
        return {"value": value, "stamps": stamps, "headers": request.headers}

    @durable.task(name="canvas.durable_errback")
    def durable_errback(ctx: TaskContext, task_id: str) -> str:
        ctx.step.run("only", _log_and_add, f"errback-{task_id}", 0, 0)
        return task_id

    return {
        "hop": hop,
        "hop_total": hop_total,
        "fail": fail,
        "swap": swap,
        "long_nap": long_nap,
        "family": family,
        "durable_errback": durable_errback,
    }


def _more_tasks(durable: Durable) -> dict[str, Any]:
    app = durable.app

    @app.task(name="canvas.classic", base=DurableTask, shared=False)
    def classic(value: int) -> int:
        bodylog.write("classic", "begin")
        return value + 1

    @app.task(name="canvas.classic_swap", base=DurableTask, bind=True, shared=False)
    def classic_swap(self: Any, value: int, kind: str) -> Any:
        nap(current_context(), 1)
        return self.replace(_replacement(kind, value, app.tasks["canvas.hop"], app))

    @durable.task(name="canvas.options")
    def options(ctx: TaskContext, value: Any = None, naps: int = 0) -> dict[str, Any]:
        nap(ctx, naps)
        request = current_task.request
        names = ("shadow", "timelimit", "eta", "expires", "ignore_result", "retries", "correlation_id")
        said = {name: getattr(request, name) for name in names}
        return {**said, "value": value, "mine": (request.headers or {}).get("mine"), "priority": ctx.priority}

    @durable.task(name="canvas.held")
    def held(ctx: TaskContext) -> int:
        return int(ctx.step.wait_for_fact("go").payload)

    return {
        "classic": classic,
        "classic_swap": classic_swap,
        "options": options,
        "held": held,
    }


def _classic_tasks(app: Celery) -> dict[str, Any]:
    """Return tasks that are written as for Celery alone."""

    @app.task(name="canvas.classic_values", base=DurableTask, bind=True, shared=False)
    def classic_values(self: Any, kind: str, given: Any = None) -> int:  # an annotation that Celery never looks at
        values = {
            "tuple": (1, ("two", given)),
            "keys": {1: given, "moment": datetime(2026, 11, 30, tzinfo=UTC)},
            "result": self.AsyncResult("some-id"),
            "given": given,
        }
        return cast("int", values[kind])

    @app.task(name="canvas.classic_again", base=DurableTask, bind=True, max_retries=3, shared=False)
    def classic_again(self: Any, value: int, how: str, seconds: float = 0.0) -> Any:
        request, info = self.request, self.request.delivery_info
        nap(current_context(), 1)
        bodylog.write(f"again-{how}", "begin", run=request.id)
        if how == "args" and not request.retries:
            raise self.retry(args=(value + 1, how), countdown=0)
        if how == "kwargs" and not request.retries:
            raise self.retry(args=(), kwargs={"value": value + 1, "how": how}, countdown=0)
        if how == "cause" and not request.retries:
            raise self.retry(exc=CanvasError("the cause"), countdown=seconds)
        if how == "ignore":
            raise Ignore
        if how == "reject" or (how == "requeue" and not info.get("redelivered")):
            raise Reject(f"{how} it", requeue=how == "requeue")
        return {"value": value, "retries": request.retries, "redelivered": bool(info.get("redelivered"))}

    @app.task(name="canvas.classic_gated", base=DurableTask, shared=False)
    def classic_gated(gate: str, more: Any = None) -> str:
        gates.pass_through(gate)
        return gate

    @app.task(name="canvas.classic_loose", base=DurableTask, typing=False, shared=False)
    def classic_loose(left: int, right: int) -> int:
        return left + right

    @app.task(
        name="canvas.classic_request", base=DurableTask, bind=True, time_limit=60, soft_time_limit=45, shared=False
    )
    def classic_request(self: Any) -> dict[str, Any]:
        request = self.request
        limits = [request.time_limit, request.soft_time_limit]
        return {"limits": limits, "app_id": request.properties.get("app_id")}

    @app.task(name="canvas.classic_model", base=DurableTask, pydantic=True, shared=False)
    def classic_model(given: Pair) -> Pair:
        return Pair(left=given.right, right=given.left)

    return {
        "classic_values": classic_values,
        "classic_model": classic_model,
        "classic_again": classic_again,
        "classic_gated": classic_gated,
        "classic_loose": classic_loose,
        "classic_request": classic_request,
    }


def _plain_tasks(app: Celery) -> dict[str, Any]:
    @app.task(name="canvas.add", shared=False)
    def add(left: int, right: int) -> int:
        bodylog.write("add", "begin")
        return left + right

    @app.task(name="canvas.total", shared=False)
    def total(values: list[int]) -> int:
        bodylog.write("plain-total", "begin")
        return sum(values)

    @app.task(name="canvas.boom", shared=False)
    def boom(*values: object) -> None:
        raise CanvasError("boom")

    @app.task(name="canvas.mark", shared=False)
    def mark(value: Any, name: str) -> Any:
        bodylog.write(f"mark-{name}", "begin")
        return value

    @app.task(name="canvas.old_errback", shared=False)
    def old_errback(task_id: str) -> None:
        bodylog.write(f"old-{task_id}", "begin")

    @app.task(name="canvas.seeing_errback", shared=False)
    def seeing_errback(task_id: str) -> None:
        bodylog.write(f"saw-{app.AsyncResult(task_id).state}-{task_id}", "begin")

    @app.task(name="canvas.new_errback", shared=False)
    def new_errback(request: Any, error: Exception, trace: Any) -> None:
        bodylog.write(f"new-{request.id}-{type(error).__name__}", "begin")

    return {
        "add": add,
        "total": total,
        "boom": boom,
        "mark": mark,
        "old_errback": old_errback,
        "new_errback": new_errback,
        "seeing_errback": seeing_errback,
    }


def _replacement(kind: str, value: int, hop: Any, app: Celery) -> Any:
    """Return what a `swap` is replaced by; each gives 10 more than its value, in a list where it is a group."""
    add = app.tasks["canvas.add"]
    match kind:
        case "durable":
            return hop.s(value, naps=1, add=10)
        case "durable-now":
            return hop.s(value, add=10)
        case "ordinary":
            return add.s(value, 10)
        case "chain":
            return chain(hop.s(value, naps=1, add=4), add.s(5), hop.s(add=1))
        case "ordinary-chain":
            return chain(add.s(value, 4), hop.s(naps=1, add=6))
        case "group":
            return group(hop.s(value, naps=1, add=10), add.s(value, 10))
        case "chord":
            return chord([hop.s(value, add=4), add.s(0, 6)], app.tasks["canvas.total"].s())
        case "again":
            return app.tasks["canvas.swap"].s(value, "durable")
    raise AssertionError(kind)


def _log_and_add(label: str, value: int, add: int) -> int:
    with bodylog.body(label):
        return value + add


def names_of(results: Sequence[Any]) -> list[str]:
    """Return the ids of results."""
    return [str(one.id) for one in results]


@shared_task(name="canvas.shared", base=DurableTask)
def shared(value: int) -> int:
    """Be a durable task of every app of the process that has a `Durable`."""
    return value * 2


def __getattr__(name: str) -> Any:
    # Built when asked for: the tests import this module in processes that have no broker and no database.
    if name in ("app", "durable"):
        canvas = build()
        globals().update(app=canvas.app, durable=canvas.durable)
        return globals()[name]
    raise AttributeError(name)
