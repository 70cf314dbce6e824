"""A process that shuts down hands its runs over between two steps: at once, nothing re-executed, no crash counted."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest

from tests.support.engine import Engine, Process, enter
from tests.support.wait import until
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, RunState
from umt_durable.store import outbox


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def leave(process: Process) -> None:
    """Tell every attempt of a process that it shuts down."""
    for held in process.lease.attempts():
        held.abort("shutdown")


def test_a_run_is_ready_for_another_process_and_repeats_nothing(engine: Engine, conn: Connection) -> None:
    entered: list[str] = []
    leaver, other = engine.process(), engine.process()

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        first: int = ctx.step.run("first", partial(enter, entered), "first", 1)
        if len(entered) == 1:
            leave(leaver)
        second: int = ctx.step.run("second", partial(enter, entered), "second", 2)
        return first + second

    run_id = engine.start("t")
    outcome = leaver.deliver(run_id, "t")

    assert isinstance(outcome, Dropped)
    run = engine.client.get(run_id)
    assert (run.state, run.crashes, run.failures, run.wake_at) == (RunState.READY, 0, 0, None)
    assert [one.outcome for one in engine.client.history(run_id).attempts] == [AttemptOutcome.SUSPENDED]
    assert outbox.status(conn)[0] == 2  # that of the enqueue, which no relay took here, and the one of the hand-over
    ended = other.deliver(run_id, "t")
    assert isinstance(ended, Finished)
    assert ended.value == 3
    assert entered == ["first", "second"]


def test_a_step_that_is_being_executed_is_recorded_first(engine: Engine) -> None:
    entered: list[str] = []
    leaver = engine.process()

    def work() -> int:
        entered.append("work")
        leave(leaver)
        return 7

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        value = ctx.step.run("work", work)
        ctx.step.sleep("nap", timedelta(days=1))
        return value

    run_id = engine.start("t")
    leaver.deliver(run_id, "t")

    assert engine.state(run_id) is RunState.READY
    engine.process().deliver(run_id, "t")
    assert engine.state(run_id) is RunState.SLEEPING
    assert entered == ["work"]


def test_a_body_that_is_at_its_end_finishes(engine: Engine) -> None:
    leaver = engine.process()

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        leave(leaver)
        return 7

    run_id = engine.start("t")
    outcome = leaver.deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert engine.state(run_id) is RunState.SUCCEEDED


def test_i11_a_cancel_that_is_pending_ends_the_run_instead(engine: Engine) -> None:
    leaver = engine.process()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        engine.client.cancel(ctx.run_id)
        leave(leaver)
        ctx.step.run("never", enter, [], "never", 1)

    run_id = engine.start("t")
    leaver.deliver(run_id, "t")

    assert engine.state(run_id) is RunState.CANCELLED


def test_crashes_counted_before_stay_counted(engine: Engine) -> None:
    leaver = engine.process()
    lost = engine.process()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        if lost.lease.attempts():
            raise SystemExit
        leave(leaver)
        ctx.step.run("never", enter, [], "never", 1)

    run_id = engine.start("t")
    with pytest.raises(SystemExit):
        lost.deliver(run_id, "t")
    crashed = engine.client.get(run_id).crashes

    claimable_at_once(engine, run_id)
    leaver.deliver(run_id, "t")

    run = engine.client.get(run_id)
    assert (run.state, run.crashes) == (RunState.READY, crashed)
    assert crashed == 1


def claimable_at_once(engine: Engine, run_id: str) -> None:
    """Return once the delay of a take-over is over."""

    def due() -> bool:
        with engine.database.connection() as conn:
            query = f"SELECT wake_at <= {engine.settings.schema}.now() FROM {engine.settings.schema}.run WHERE id = %s"
            row = conn.execute(query.encode(), (run_id,)).fetchone()
        return bool(row and row[0])

    until(due, what="the run to be claimable")
