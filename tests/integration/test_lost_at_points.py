"""The reply to each kind of commit is lost once: the run ends as if it had not been (I24).

What breaks is the connection as the engine sees it, after the server has committed. That a real one which breaks there
is seen like this is proven in `test_engine_lost_replies.py`, through a proxy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import psycopg
import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, enter, losing_at
from umt_durable import OpInfo
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.exits import Released
from umt_durable.engine.outcomes import Continued, Dropped, Finished, Outcome, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.undoing import undo
from umt_durable.settings import Settings
from umt_durable.states import RunState

IN_A_LIFE: Final = (
    "enqueue.commit.r",
    "claim.r",
    "continue.commit.r",
    "handover.commit.r",
    "step.commit.r",
    "items.commit.r",
    "txstep.commit.r",
    "op.begin.r",
    "op.done.r",
    "wait.commit.r",
    "signal.commit.r",
    "sleep.suspend.r",
    "retry.commit.r",
    "finish.commit.r",
)
"""The points that one run passes which does everything once."""

undone: list[str] = []


@undo
def unreserve(receipt: str) -> None:
    undone.append(receipt)


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def live(engine: Engine, clock: Clock, run_id: str) -> Outcome:
    """Deliver a run until it has ended, and give it what it waits for."""
    process = engine.process()
    while True:
        match outcome := process.deliver(run_id, "life"):
            case Parked(state=RunState.WAITING):
                engine.client.signal(run_id, "go", 6)
            case Parked():
                clock.advance(seconds=61)
                engine.timers()
            case Finished():
                return outcome
            case _:
                assert isinstance(outcome, Continued | Dropped), outcome


@pytest.mark.parametrize("point", IN_A_LIFE)
def test_i24_a_reply_that_is_lost_changes_nothing_of_a_run(
    engine: Engine, conn: Connection, schema: str, clock: Clock, point: str
) -> None:
    entered: list[Any] = []
    conn.execute(f'CREATE TABLE "{schema}".booking (run text)'.encode())

    def book(tx: psycopg.Connection[Any], run: str) -> int:
        tx.execute(f'INSERT INTO "{schema}".booking VALUES (%s)'.encode(), (run,))
        return 4

    @engine.task("life", retry=RetryPolicy(2, initial=timedelta(minutes=1)))
    def life(ctx: TaskContext, begins: bool) -> list[int]:
        if begins:
            ctx.continue_as_new(False)
        one = ctx.step.run("one", lambda: enter(entered, "one", 1))
        if "left" not in entered:
            entered.append("left")
            ctx._pass.leave(Released("shutdown"))
        many = ctx.step.map("many", lambda item: enter(entered, item, item), [2, 3], key=str)
        booked = ctx.step.transaction("book", book, ctx.run_id)
        shipped = ctx.step.effect("ship:1", lambda info: enter(entered, "ship", 5))
        said = ctx.step.wait_for_fact("go").payload
        ctx.step.sleep("nap", timedelta(minutes=1))
        if "failed" not in entered:
            entered.append("failed")
            raise OSError("once")
        return [one, *many, booked, shipped, said]

    with losing_at(point) as reached:
        run_id = engine.start("life", True)
        outcome = live(engine, clock, run_id)

    assert reached
    assert isinstance(outcome, Finished)
    assert outcome.value == [1, 2, 3, 4, 5, 6], outcome.error
    assert Counter(entered) == dict.fromkeys(["one", "left", 2, 3, "ship", "failed"], 1)
    for table, where in (("booking", ""), ("run", ""), ("fact", " WHERE name = 'go'")):
        row = conn.execute(f'SELECT count(*) FROM "{schema}".{table}{where}'.encode()).fetchone()
        assert row == (1,), table


def test_i24_a_grant_whose_reply_is_lost_lets_its_body_be_entered_once(engine: Engine, clock: Clock) -> None:
    entered: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        # The proof is older than is allowed by then, so the next body asks for its grant.
        ctx._pass.attempt._proof = None
        return ctx.step.run("one", lambda: enter(entered, "one", 1))

    with losing_at("step.grant.r") as reached:
        _, outcome = engine.run("t")

    assert reached
    assert isinstance(outcome, Finished)
    assert (outcome.value, entered) == (1, ["one"])


def test_i24_a_quarantine_whose_reply_is_lost_is_one(engine: Engine) -> None:
    def fails(info: OpInfo) -> None:
        raise OSError("who knows")

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.effect("ship:2", fails)

    with losing_at("quarantine.commit.r") as reached:
        run_id, outcome = engine.run("t")

    assert reached
    assert isinstance(outcome, Parked)
    found = engine.client.get(run_id)
    assert (found.state, found.reason) == (RunState.QUARANTINED, "uncertain_op")
    assert len(engine.client.history(run_id).attempts) == 1


@pytest.mark.parametrize("point", ["cancel.commit.r", "undo.commit.r"])
def test_i24_a_cancel_whose_reply_is_lost_undoes_once(engine: Engine, clock: Clock, point: str) -> None:
    undone.clear()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.options(undo=unreserve).run("reserve", lambda: "12A")
        engine.client.cancel(ctx.run_id, actor="ann", compensate=True)
        ctx.step.sleep("nap", timedelta(minutes=1))

    with losing_at(point) as reached:
        run_id, outcome = engine.run("t")
        while not isinstance(outcome, Finished):
            outcome = engine.process().deliver(run_id, "t")

    assert reached
    assert engine.state(run_id) is RunState.CANCELLED
    assert undone == ["12A"]
    assert [act.act for act in engine.client.history(run_id).audit] == ["cancel"]
