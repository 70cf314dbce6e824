"""The journal against the code: what may change inside a version, and what parks the run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.errors import (
    NonDeterminismError,
)
from umt_durable.settings import Settings
from umt_durable.states import RunState


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def test_the_journal_refuses_a_renamed_step_with_other_inputs_and_parks_the_run(engine: Engine, clock: Clock) -> None:
    amount = [1]

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        try:
            ctx.step.run("charge", lambda value: value, amount[0])
        except Exception:  # noqa: BLE001 - user code that catches all does not get past it
            ctx.step.run("other", lambda: 1)
        ctx.step.sleep("nap", timedelta(minutes=1))

    run_id, _ = engine.run("t")
    amount[0] = 2
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Parked)
    run = engine.client.get(run_id)
    assert (run.state, run.reason) == (RunState.QUARANTINED, "nondeterminism")
    failure = engine.client.failure(run)
    assert failure is not None
    assert failure.type == NonDeterminismError.__name__


def test_inserting_and_appending_steps_is_allowed_inside_a_version(engine: Engine, clock: Clock) -> None:
    new_code = [False]
    entered: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        if new_code[0]:
            ctx.step.run("inserted", lambda: entered.append("inserted"))
        ctx.step.run("a", lambda: entered.append("a"))
        ctx.step.sleep("nap", timedelta(minutes=1))
        if new_code[0]:
            ctx.step.run("appended", lambda: entered.append("appended"))

    run_id, _ = engine.run("t")
    new_code[0] = True
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert entered == ["a", "inserted", "appended"]


def test_a_flipped_byte_in_a_recorded_result_parks_the_run(
    engine: Engine, clock: Clock, conn: Connection, schema: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        value = ctx.step.run("a", lambda: 1)
        ctx.step.sleep("nap", timedelta(minutes=1))
        return value

    run_id, _ = engine.run("t")
    conn.execute(f"UPDATE \"{schema}\".step SET result = '2' WHERE key = 'a'".encode())
    clock.advance(seconds=61)
    engine.timers()
    engine.process().deliver(run_id, "t")

    assert engine.client.get(run_id).reason == "journal_corrupt"


def test_d1_input_that_does_not_fit_the_code_parks_the_run(engine: Engine, conn: Connection, schema: str) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, amount: int) -> None: ...

    run_id = engine.start("t", amount=1)
    wrong = b'{"args":[],"kwargs":{"amount":"much"}}'
    conn.execute(f'UPDATE "{schema}".run SET args = %s'.encode(), (wrong,))
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Parked)
    run = engine.client.get(run_id)
    assert (run.state, run.reason) == (RunState.QUARANTINED, "bad_input")
    assert "amount" in str(engine.client.failure(run))
