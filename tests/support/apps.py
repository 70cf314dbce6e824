"""The Celery app that the tests' worker processes run: durable tasks that log every entry into a body.

`celery -A tests.support.apps:app worker` reads its broker, result backend, database and schema from the environment;
a test process builds the same tasks for its own environment with `build`. Gates named in the arguments let a test stop
a run inside a chosen step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from celery import Celery

from tests.support import bodylog, gates, provider
from tests.support.queues import QUEUE
from umt_durable import (
    Durable,
    DurableTask,
    Ledger,
    OpInfo,
    Policy,
    RetryPolicy,
    StepFailedError,
    TaskContext,
    current_context,
    undo,
)

LEDGER = "UMT_TEST_LEDGER"
ELSEWHERE = "UMT_TEST_ELSEWHERE"
"""The URL of another database, with a ledger and a table `booking`."""
MAX_PRIORITY = "UMT_TEST_MAX_PRIORITY"
"""With what `x-max-priority` queues are declared; RabbitMQ heeds no priority without."""
REDELIVERY = "UMT_TEST_REDELIVERY_SECONDS"
"""After how many seconds Redis gives out again what nobody has acked; its own is an hour, and only Redis has one."""


def log_and_pass(step: str, value: int, gate: str = "") -> int:
    """Be the body of most steps: log the entry, stop at a gate, return the value."""
    with bodylog.body(step):
        gates.pass_through(gate)
        return value


@undo(name="tests.unpick")
def unpick(value: int) -> None:
    """Undo a pick, which only the log shows."""
    log_and_pass(f"undo-{value}", value)


def write_ledger(step: str, value: int) -> int:
    """Write one row into the application's ledger, which has no unique constraint, so that a double shows."""
    with bodylog.body(step):
        with psycopg.connect(os.environ["DURABLE_DATABASE_URL"], autocommit=True) as conn:
            conn.execute(f"INSERT INTO {os.environ[LEDGER]} (step, value) VALUES (%s, %s)".encode(), (step, value))
        return value


def book(tx: Any, step: str, value: int, gate: str = "") -> int:
    """Write one row into the same ledger through the step's own transaction, which is open while it stops at a gate."""
    with bodylog.body(step):
        gates.pass_through(gate)
        tx.execute(f"INSERT INTO {os.environ[LEDGER]} (step, value) VALUES (%s, %s)".encode(), (step, value))
        return value


def book_elsewhere(tx: Any, step: str, value: int) -> int:
    """Write one row into a table of another database, which has no unique constraint, so that a double shows."""
    with bodylog.body(step):
        tx.execute("INSERT INTO booking (value) VALUES (%s)", (value,))
        return value


def book_by_model(tx: Any, step: str, amount: int) -> int:
    """Write one row with Django's ORM into the table `booking` of the runs' own database and schema."""
    from tests.support.django_db import Booking  # imported late: it configures Django

    with bodylog.body(step):
        Booking.objects.using(tx.alias).create(amount=amount)
        return amount


def ship(info: OpInfo) -> int:
    """Have the provider apply an effect."""
    with bodylog.body(info.op_key):
        return provider.apply(info)


def keep_label(tx: Any, label: int) -> None:
    """Write the answer of an effect into the same ledger, in the transaction that records it."""
    if LEDGER in os.environ:
        tx.execute(f"INSERT INTO {os.environ[LEDGER]} (step, value) VALUES ('ship', %s)".encode(), (label,))


def fail_first(step: str, times: int) -> int:
    """Raise at the first `times` entries over all processes, then return how many entries there were."""
    with bodylog.body(step):
        entered = bodylog.BodyLog.from_environment().count(current_context().run_id, step)
        if entered <= times:
            raise FlakyError(f"{step} fails for the {entered}. time")
        return entered


class FlakyError(Exception):
    """What `fail_first` raises; it may be tried again."""


@dataclass(frozen=True)
class Tasks:
    """The app and its tasks, built for one environment."""

    app: Celery
    durable: Durable
    ten_steps: Any
    one_step: Any
    no_step: Any
    ledger: Any
    booking: Any
    elsewhere: Any
    ordering: Any
    shipping: Any
    sleeper: Any
    looper: Any
    waiter: Any
    picker: Any
    forker: Any
    flaky_step: Any
    flaky_run: Any
    broken: Any
    exiting: Any
    classic: Any
    automatic: Any
    unstorable: Any
    swallower: Any
    add: Any
    total: Any
    note: Any
    undoing: Any


def build(environ: Mapping[str, str] | None = None) -> Tasks:
    """Return an app with all tasks for an environment, that of this process when none is given."""
    environ = os.environ if environ is None else environ
    app = Celery("umt-tests", broker=environ.get("CELERY_BROKER_URL"), backend=environ.get("CELERY_RESULT_BACKEND"))
    app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
    if REDELIVERY in environ:
        again = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}
        app.conf.broker_transport_options = {"visibility_timeout": float(environ[REDELIVERY]), **again}
    if MAX_PRIORITY in environ:
        app.conf.task_queue_max_priority = int(environ[MAX_PRIORITY])
    durable = Durable(app, **_given(environ))
    return Tasks(app=app, durable=durable, **_durable_tasks(durable), **_plain_tasks(app))


def _given(environ: Mapping[str, str]) -> dict[str, Any]:
    names = tuple(
        f"DURABLE_{name}" for name in ("DATABASE_URL", "SCHEMA", "LEASE_SECONDS", "EMBEDDED", "PAYLOAD_CODEC")
    )
    return {name.removeprefix("DURABLE_").lower(): environ[name] for name in names if name in environ}


def _durable_tasks(durable: Durable) -> dict[str, Any]:
    @durable.task(name="tests.ten_steps", version=1)
    def ten_steps(ctx: TaskContext, gate_step: int = 0, gate: str = "") -> list[int]:
        return [
            ctx.step.run(f"step-{number}", log_and_pass, f"step-{number}", number, gate if number == gate_step else "")
            for number in range(1, 11)
        ]

    @durable.task(name="tests.one_step", version=1)
    def one_step(ctx: TaskContext, value: int, gate: str = "") -> int:
        return ctx.step.run("only", log_and_pass, "only", value, gate)

    @durable.task(name="tests.no_step", version=1)
    def no_step(ctx: TaskContext, value: int) -> int:
        return log_and_pass("body", value)

    @durable.task(name="tests.ledger", version=1)
    def ledger(ctx: TaskContext, value: int) -> int:
        return ctx.step.run("write", write_ledger, "write", value)

    @durable.task(name="tests.shipping", version=1)
    def shipping(ctx: TaskContext, op_key: str, policy: str = "idempotent_key") -> int:
        return ctx.step.effect(op_key, ship, commit=keep_label, policy=Policy(policy))

    @durable.task(name="tests.sleeper", version=1)
    def sleeper(ctx: TaskContext, seconds: float, value: int = 0) -> int:
        ctx.step.run("before", log_and_pass, "before", value)
        ctx.step.sleep("nap", timedelta(seconds=seconds))
        return ctx.step.run("after", log_and_pass, "after", value)

    @durable.task(name="tests.looper", version=1)
    def looper(ctx: TaskContext, number: int, last: int) -> int:
        ctx.step.run("turn", log_and_pass, f"turn-{number}", number)
        if number < last:
            ctx.continue_as_new(number + 1, last)
        return number

    @durable.task(name="tests.waiter", version=1)
    def waiter(ctx: TaskContext, fact: str, key: str | None = None, timeout: float | None = None) -> Any:
        ctx.step.run("before", log_and_pass, "before", 0)
        limit = None if timeout is None else timedelta(seconds=timeout)
        found = ctx.step.wait_for_fact(fact, key=key, timeout=limit)
        ctx.step.run("after", log_and_pass, "after", 0)
        return found.payload

    @durable.task(name="tests.undoing", version=1)
    def undoing(ctx: TaskContext) -> None:
        for number in (1, 2, 3):
            ctx.step.options(undo=unpick).run(f"pick-{number}", log_and_pass, f"pick-{number}", number)
        ctx.step.wait_for_fact("go")

    return {
        "undoing": undoing,
        "ten_steps": ten_steps,
        "one_step": one_step,
        "no_step": no_step,
        "ledger": ledger,
        "shipping": shipping,
        "sleeper": sleeper,
        "looper": looper,
        "waiter": waiter,
        **_writing_tasks(durable),
        **_parallel_tasks(durable),
        **_failing_tasks(durable),
    }


def _writing_tasks(durable: Durable) -> dict[str, Any]:
    @durable.task(name="tests.booking", version=1)
    def booking(ctx: TaskContext, value: int, gate: str = "") -> int:
        return ctx.step.transaction("book", book, "book", value, gate)

    @durable.task(name="tests.elsewhere", version=1)
    def elsewhere(ctx: TaskContext, value: int) -> int:
        return ctx.step.transaction("book", book_elsewhere, "book", value, on=Ledger(os.environ[ELSEWHERE]))

    @durable.task(name="tests.ordering", version=1)
    def ordering(ctx: TaskContext, value: int) -> int:
        from tests.support.django_db import declare

        shop = declare("shop", os.environ["DURABLE_DATABASE_URL"], os.environ["DURABLE_SCHEMA"], CONN_MAX_AGE=None)
        return ctx.step.transaction("book", book_by_model, "book", value, on=shop)

    return {"booking": booking, "elsewhere": elsewhere, "ordering": ordering}


def _parallel_tasks(durable: Durable) -> dict[str, Any]:
    @durable.task(name="tests.picker", version=1)
    def picker(ctx: TaskContext, items: int, gate_item: int = -1, gate: str = "", concurrency: int = 4) -> list[int]:
        def pick(item: int) -> int:
            return log_and_pass(f"item-{item}", item, gate if item == gate_item else "")

        return ctx.step.map("pick", pick, range(items), key=int, concurrency=concurrency)

    @durable.task(name="tests.forker", version=1)
    def forker(ctx: TaskContext, seconds: float, gate: str = "") -> dict[str, Any]:
        def steps() -> list[int]:
            numbers = range(1, 4)
            return [
                ctx.step.run("one", log_and_pass, f"step-{number}", number, gate if number == 2 else "")
                for number in numbers
            ]

        def sleeps() -> int:
            ctx.step.run("before", log_and_pass, "before", 0)
            ctx.step.sleep("nap", timedelta(seconds=seconds))
            return ctx.step.run("after", log_and_pass, "after", 4)

        def waits() -> Any:
            found = ctx.step.wait_for_fact("go", timeout=timedelta(hours=1)).payload
            return ctx.step.run("went", log_and_pass, "went", found)

        return ctx.step.parallel({"steps": steps, "sleeps": sleeps, "waits": waits})

    return {"picker": picker, "forker": forker}


def _failing_tasks(durable: Durable) -> dict[str, Any]:
    quick = RetryPolicy(max_attempts=4, initial=timedelta(milliseconds=100), maximum=timedelta(seconds=1))

    @durable.task(name="tests.flaky_step", version=1)
    def flaky_step(ctx: TaskContext, times: int) -> int:
        ctx.step.run("before", log_and_pass, "before", 0)
        return ctx.step.options(retry=quick).run("flaky", fail_first, "flaky", times)

    @durable.task(name="tests.flaky_run", version=1, retry=quick)
    def flaky_run(ctx: TaskContext, times: int) -> int:
        ctx.step.run("before", log_and_pass, "before", 0)
        return fail_first("body", times)

    @durable.task(name="tests.broken", version=1)
    def broken(ctx: TaskContext) -> None:
        raise FlakyError("always")

    @durable.task(name="tests.exiting", version=1)
    def exiting(ctx: TaskContext) -> None:
        with bodylog.body("exit"):
            sys.exit(3)

    @durable.app.task(name="tests.classic", base=DurableTask, bind=True, max_retries=3, shared=False)
    def classic(self: Any, times: int) -> int:
        try:
            return current_context().step.run("flaky", fail_first, "flaky", times)
        except (FlakyError, StepFailedError):
            fail_first("outside", 0)
        try:
            return fail_first("body", times)
        except FlakyError as error:
            raise self.retry(exc=error, countdown=0.05) from error

    again = {"max_retries": 2, "countdown": 0.05}

    @durable.app.task(
        name="tests.automatic", base=DurableTask, autoretry_for=(FlakyError,), retry_kwargs=again, shared=False
    )
    def automatic(times: int) -> int:
        return fail_first("automatic", times)

    @durable.task(name="tests.unstorable", version=1)
    def unstorable(ctx: TaskContext) -> None:
        ctx.step.run("bad", lambda: {"open": {1, 2, 3}})

    @durable.task(name="tests.swallower", version=1)
    def swallower(ctx: TaskContext, seconds: float) -> int:
        try:
            ctx.step.sleep("nap", timedelta(seconds=seconds))
        except Exception:  # noqa: BLE001  # the point of this task: user code that catches all must not lose the sleep
            return log_and_pass("swallowed", -1)
        return log_and_pass("slept", 1)

    return {
        "flaky_step": flaky_step,
        "flaky_run": flaky_run,
        "broken": broken,
        "exiting": exiting,
        "classic": classic,
        "automatic": automatic,
        "unstorable": unstorable,
        "swallower": swallower,
    }


def _plain_tasks(app: Celery) -> dict[str, Any]:
    @app.task(name="tests.add", shared=False)
    def add(left: int, right: int) -> int:
        return left + right

    @app.task(name="tests.total", shared=False)
    def total(values: list[int]) -> int:
        return sum(values)

    @app.task(name="tests.note", shared=False)
    def note(*values: object, step: str = "note") -> None:
        """Be a callback: log that it was called, with the name it was given."""
        bodylog.write(step, "begin")

    return {"add": add, "total": total, "note": note}


def __getattr__(name: str) -> Any:
    # Built when asked for: the tests import this module in processes that have no broker and no database.
    if name in ("app", "durable"):
        tasks = build()
        globals().update(app=tasks.app, durable=tasks.durable)
        return globals()[name]
    raise AttributeError(name)
