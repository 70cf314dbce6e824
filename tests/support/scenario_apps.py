"""A Celery app with the tasks of the acceptance scenarios that need code of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from celery import Celery
from pydantic import BaseModel

from tests.support import bodylog
from tests.support.apps import _given, log_and_pass
from tests.support.queues import QUEUE
from umt_durable import Durable, FactTimeoutError, FactWait, RetryPolicy, TaskContext, current_context

CAP = RetryPolicy(max_attempts=4, initial=timedelta(hours=1), factor=1.0, maximum=timedelta(hours=1))
LIMIT = timedelta(days=14)
NEEDED = 2


class CappedError(Exception):
    """What every attempt of a capped run raises, with its number."""


class Invoice(BaseModel):
    """A model of the application, as a step returns it."""

    number: int
    total: Decimal
    due: date


def approval(order: str, person: str) -> str:
    """Return the key under which one person's answer about an order is said."""
    return f"{order}/{person}"


def fail_always(step: str) -> None:
    """Log the entry and raise, naming which one over all processes it was."""
    with bodylog.body(step):
        entered = bodylog.BodyLog.from_environment().count(current_context().run_id, step)
        raise CappedError(f"failure {entered}")


def make(step: str, kind: type) -> Callable[[], Any]:
    """Return a step's function, annotated with a type, that gives the value of that name."""

    def give() -> Any:
        with bodylog.body(step):
            return typed_values()[step][0]

    give.__annotations__["return"] = kind
    return give


@dataclass(frozen=True)
class Scenarios:
    """The app and its tasks, built for one environment."""

    app: Celery
    durable: Durable
    capped_run: Any
    capped_step: Any
    approve: Any
    typed: Any
    unstorable: Any
    parent: Any
    child: Any


def build(environ: Mapping[str, str] | None = None) -> Scenarios:
    """Return an app with all tasks for an environment, that of this process when none is given."""
    environ = os.environ if environ is None else environ
    app = Celery("umt-scenarios", broker=environ.get("CELERY_BROKER_URL"), backend=environ.get("CELERY_RESULT_BACKEND"))
    app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
    durable = Durable(app, **_given(environ))
    return Scenarios(
        app=app, durable=durable, **_capped_tasks(durable), **_approving(durable), **_typed(durable), **_family(durable)
    )


def _capped_tasks(durable: Durable) -> dict[str, Any]:
    @durable.task(name="scenarios.capped_run", retry=CAP)
    def capped_run(ctx: TaskContext) -> None:
        fail_always("body")

    @durable.task(name="scenarios.capped_step", raises=(CappedError,))
    def capped_step(ctx: TaskContext) -> None:
        ctx.step.options(retry=CAP).run("body", fail_always, "body")

    return {"capped_run": capped_run, "capped_step": capped_step}


def _approving(durable: Durable) -> dict[str, Any]:
    @durable.task(name="scenarios.approve")
    def approve(ctx: TaskContext, order: str, requester: str, people: list[str]) -> dict[str, Any]:
        """Wait for the answers of two approvers; who asks is none of them."""
        approvers = [person for person in people if person != requester]
        ctx.step.run("ask", log_and_pass, "ask", len(approvers))
        waits = {person: FactWait("approval", key=approval(order, person)) for person in approvers}
        try:
            answers = ctx.step.wait_quorum(NEEDED, waits, timeout=LIMIT)
        except FactTimeoutError:
            ctx.step.run("remind", log_and_pass, "remind", 0)
            return {"approved": False}
        ctx.step.run("order", log_and_pass, "order", len(answers))
        return {"approved": True, "answers": {str(answer.label): answer.payload for answer in answers}}

    return {"approve": approve}


def typed_values() -> dict[str, tuple[Any, type]]:
    """Return the values of scenario 13 by name, each with the type its step is annotated with."""
    return {
        "zoned": (datetime(2026, 3, 29, 1, 30, tzinfo=ZoneInfo("Europe/Berlin")), datetime),
        "utc": (datetime(2026, 10, 25, 0, 30, 1, 5, tzinfo=UTC), datetime),
        "decimal": (Decimal("12.340"), Decimal),
        "uuid": (UUID("6f2b3c1e-0a4d-4e4f-9a3b-2f1c0d9e8b7a"), UUID),
        "bytes": (b"\x00\xff\x80", bytes),
        "date": (date(2026, 2, 28), date),
        "model": (Invoice(number=7, total=Decimal("0.10"), due=date(2026, 3, 1)), Invoice),
    }


def _typed(durable: Durable) -> dict[str, Any]:
    @durable.task(name="scenarios.typed")
    def typed(ctx: TaskContext, gate: str) -> list[str]:
        """Make each value in a step, stop, and tell which of them are other ones than were made."""
        made = typed_values()
        found = {name: ctx.step.run(name, make(name, kind)) for name, (_, kind) in made.items()}
        ctx.step.run("gate", log_and_pass, "gate", 0, gate)
        return [name for name, value in found.items() if not _is_same(value, made[name][0])]

    @durable.task(name="scenarios.unstorable")
    def unstorable(ctx: TaskContext, kind: str) -> None:
        def give() -> Any:
            with bodylog.body("bad"):
                return {1, 2, 3} if kind == "set" else open(os.devnull)

        ctx.step.options(retry=CAP).run(f"gives-{kind}", give)

    return {"typed": typed, "unstorable": unstorable}


def _is_same(found: Any, made: Any) -> bool:
    zones = [getattr(value, "tzinfo", None) and value.utcoffset() for value in (found, made)]
    return type(found) is type(made) and bool(found == made) and zones[0] == zones[1]


def _family(durable: Durable) -> dict[str, Any]:
    @durable.task(name="scenarios.child")
    def child(ctx: TaskContext, number: int) -> int:
        return ctx.step.run("square", lambda: number * number)

    @durable.task(name="scenarios.parent")
    def parent(ctx: TaskContext, children: int) -> list[int]:
        results = ctx.step.gather("all", [child.s(number) for number in range(children)])
        ctx.step.run("joined", log_and_pass, "joined", len(results))
        return results

    return {"child": child, "parent": parent}


def __getattr__(name: str) -> Any:
    # Built when asked for: the tests import this module in processes that have no broker and no database.
    if name in ("app", "durable"):
        found = build()
        globals().update(app=found.app, durable=found.durable)
        return globals()[name]
    raise AttributeError(name)
