"""One set of canvas tasks, twice: durable ones that suspend as they are told, and the same as ordinary Celery tasks.

`celery -A tests.support.matrix_apps:durable_app worker` has a `Durable`; `...:plain_app` knows nothing of this package,
and what it makes of a shape is what the durable one must make of it. Every body logs under its label who it belongs to
(`Entry.run` is its id, `Entry.mark` root, parent, group and stamps), and `begin` where it does its work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery, chain, chord, current_task, group

from tests.support import bodylog
from tests.support.queues import QUEUE
from umt_durable import Durable, DurableTask, TaskContext, current_context

PLAIN_QUEUE = f"{QUEUE}-plain"
NAP = timedelta(milliseconds=30)
BEGIN = "begin"


class MatrixError(Exception):
    """What the failing tasks raise."""


@dataclass(frozen=True)
class Tasks:
    """The app and the tasks that shapes are made of; those named `old` are ordinary in both apps."""

    app: Celery
    durable: Durable | None
    hop: Any
    total: Any
    fail: Any
    swap: Any
    classic_swap: Any
    errback: Any
    old: Any
    old_total: Any
    old_fail: Any
    old_errback: Any
    item: Any


def build(environ: Mapping[str, str], *, durable: bool) -> Tasks:
    """Return the tasks of one of the two apps, for an environment."""
    app = Celery("umt-matrix", broker=environ.get("CELERY_BROKER_URL"), backend=environ.get("CELERY_RESULT_BACKEND"))
    app.conf.update(task_default_queue=QUEUE if durable else PLAIN_QUEUE, broker_connection_retry_on_startup=True)
    # Acked late, the broker holds every message until what it leads to has been published: empty means all is done.
    app.conf.update(worker_prefetch_multiplier=1, result_extended=True, task_acks_late=True)
    if not durable:
        return Tasks(app=app, durable=None, **_plain(app), **_ordinary(app))
    ours = Durable(
        app,
        database_url=environ.get("DURABLE_DATABASE_URL"),
        schema=environ.get("DURABLE_SCHEMA"),
        embedded=False,
        lease_seconds=float(environ.get("DURABLE_LEASE_SECONDS", "3")),
        poll_seconds=float(environ.get("DURABLE_POLL_SECONDS", "0.2")),
    )
    return Tasks(app=app, durable=ours, **_durable(ours), **_ordinary(app))


def log_family(label: str) -> None:
    """Write who the current request says it belongs to."""
    request = current_task.request
    family = [request.root_id, request.parent_id, request.group, request.stamps or {}]
    bodylog.write(label, json.dumps(family, sort_keys=True), run=str(request.id))


def _work(label: str, value: int) -> int:
    bodylog.write(label, BEGIN)
    return value


def _nap(ctx: TaskContext, label: str, times: int) -> None:
    """Suspend the run that often, and say after each time who it belongs to."""
    log_family(label)
    for _ in range(times):
        ctx.step.wait_for_fact("never", timeout=NAP, default=None)
        log_family(label)


def _durable(durable: Durable) -> dict[str, Any]:
    app = durable.app

    @durable.task(name="matrix.hop")
    def hop(ctx: TaskContext, value: int, label: str, naps: int = 0, add: int = 1) -> int:
        _nap(ctx, label, naps)
        return ctx.step.run("only", _work, label, value + add)

    @durable.task(name="matrix.total")
    def total(ctx: TaskContext, values: list[int], label: str, naps: int = 0) -> int:
        _nap(ctx, label, naps)
        return ctx.step.run("only", _work, label, sum(values))

    @durable.task(name="matrix.fail")
    def fail(ctx: TaskContext, value: int, label: str, naps: int = 0) -> int:
        _nap(ctx, label, naps)
        ctx.step.run("only", _work, label, value)
        raise MatrixError(f"{label} failed with {value}")

    @durable.task(name="matrix.swap")
    def swap(ctx: TaskContext, value: int, label: str, kind: str, naps: int = 0) -> Any:
        _nap(ctx, label, naps)
        ctx.step.run("only", _work, label, value)
        return swap.replace(_replacement(app, kind, value, label))

    @app.task(name="matrix.classic_swap", base=DurableTask, bind=True, shared=False)
    def classic_swap(self: Any, value: int, label: str, kind: str, naps: int = 0) -> Any:
        ctx = current_context()
        _nap(ctx, label, naps)
        ctx.step.run("only", _work, label, value)
        return self.replace(_replacement(app, kind, value, label))

    @durable.task(name="matrix.errback")
    def errback(ctx: TaskContext, task_id: str, *, label: str, naps: int = 0) -> None:
        _nap(ctx, label, naps)
        ctx.step.run("only", _work, label, 0)

    @durable.task(name="matrix.item")
    def item(ctx: TaskContext, value: int, naps: int = 0) -> int:
        _nap(ctx, f"item-{value}", naps)
        return ctx.step.run("only", _work, f"item-{value}", value + 1)

    return {
        "hop": hop,
        "total": total,
        "fail": fail,
        "swap": swap,
        "classic_swap": classic_swap,
        "errback": errback,
        "item": item,
    }


def _plain(app: Celery) -> dict[str, Any]:
    def declare(name: str, body: Callable[..., Any], **options: Any) -> Any:
        return app.task(name=f"matrix.{name}", shared=False, **options)(body)

    def hop(value: int, label: str, naps: int = 0, add: int = 1) -> int:
        log_family(label)
        return _work(label, value + add)

    def total(values: list[int], label: str, naps: int = 0) -> int:
        log_family(label)
        return _work(label, sum(values))

    def fail(value: int, label: str, naps: int = 0) -> int:
        log_family(label)
        _work(label, value)
        raise MatrixError(f"{label} failed with {value}")

    def swap(self: Any, value: int, label: str, kind: str, naps: int = 0) -> Any:
        log_family(label)
        _work(label, value)
        return self.replace(_replacement(app, kind, value, label))

    def errback(task_id: str, *, label: str, naps: int = 0) -> None:
        log_family(label)
        _work(label, 0)

    def item(value: int, naps: int = 0) -> int:
        return _work(f"item-{value}", value + 1)

    return {
        "hop": declare("hop", hop),
        "total": declare("total", total),
        "fail": declare("fail", fail),
        "swap": declare("swap", swap, bind=True),
        "classic_swap": declare("classic_swap", swap, bind=True),
        "errback": declare("errback", errback),
        "item": declare("item", item),
    }


def _ordinary(app: Celery) -> dict[str, Any]:
    @app.task(name="matrix.old", shared=False)
    def old(value: int, label: str, add: int = 1) -> int:
        log_family(label)
        return _work(label, value + add)

    @app.task(name="matrix.old_total", shared=False)
    def old_total(values: list[int], label: str) -> int:
        log_family(label)
        return _work(label, sum(values))

    @app.task(name="matrix.old_fail", shared=False)
    def old_fail(value: int, label: str) -> int:
        log_family(label)
        _work(label, value)
        raise MatrixError(f"{label} failed with {value}")

    @app.task(name="matrix.old_errback", shared=False)
    def old_errback(request: Any, error: Exception, trace: Any, *, label: str) -> None:
        bodylog.write(label, BEGIN)  # called within the task that failed: it has no request of its own

    return {"old": old, "old_total": old_total, "old_fail": old_fail, "old_errback": old_errback}


def _replacement(app: Celery, kind: str, value: int, label: str) -> Any:
    """Return what a `swap` is replaced by; each gives 10 more than its value."""
    hop, old = app.tasks["matrix.hop"], app.tasks["matrix.old"]
    new = f"{label}>new"
    match kind:
        case "durable":
            return hop.s(value, label=new, naps=1, add=10)
        case "ordinary":
            return old.s(value, label=new, add=10)
        case "chain":
            return chain(hop.s(value, label=f"{new}1", naps=1, add=4), old.s(label=f"{new}2", add=6))
        case "ordinary chain":
            return chain(old.s(value, label=f"{new}1", add=4), hop.s(label=f"{new}2", naps=1, add=6))
        case "chord":
            header = [hop.s(value, label=f"{new}1", naps=1, add=4), old.s(0, label=f"{new}2", add=6)]
            return chord(group(header), app.tasks["matrix.total"].s(label=f"{new}3"))
        case "again":
            return app.tasks["matrix.swap"].s(value, label=new, kind="durable")
    raise AssertionError(kind)


def __getattr__(name: str) -> Any:
    # Built when asked for: the tests import this module in processes that have no broker and no database.
    if name in ("durable_app", "plain_app"):
        globals()[name] = build(os.environ, durable=name == "durable_app").app
        return globals()[name]
    raise AttributeError(name)
