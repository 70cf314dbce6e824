"""Pause and resume: a paused run is taken by nobody, and goes on where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, enter, in_thread
from tests.support.wait import until
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished
from umt_durable.errors import UnknownRunError, WrongStatusError
from umt_durable.services.relay import Relay
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import runs


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def simple(engine: Engine) -> str:
    """Start a run of one step."""

    @engine.task(kit.TASK)
    def body(ctx: TaskContext) -> int:
        return ctx.step.run("charge", lambda: 40)

    return engine.start(kit.TASK)


def test_a_paused_run_is_neither_claimed_nor_hinted_until_it_is_resumed(engine: Engine, conn: Connection) -> None:
    run_id = simple(engine)
    kit.worker(conn)
    dispatcher = kit.RecordingDispatcher()
    engine.client.pause(run_id, actor="ann", reason="stocktaking")

    Relay(engine.database, engine.settings, dispatcher).run_once()
    assert dispatcher.hinted == []
    assert isinstance(engine.process().deliver(run_id, kit.TASK), Dropped)
    assert engine.client.counts() == {"paused": 1}

    engine.client.resume(run_id, actor="bob")

    Relay(engine.database, engine.settings, dispatcher).run_once()
    assert dispatcher.hinted == [kit.number(conn, run_id)]
    assert isinstance(engine.process().deliver(run_id, kit.TASK), Finished)
    told = [(kept.act, kept.actor, kept.reason, kept.detail) for kept in engine.client.history(run_id).audit]
    assert told == [("pause", "ann", "stocktaking", "was ready"), ("resume", "bob", None, "was paused, ready")]


def test_a_running_run_ends_its_step_in_flight_and_lets_go_before_the_next(engine: Engine, conn: Connection) -> None:
    gate = Gate()
    entered: list[object] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        ctx.step.run("first", gate.pass_through, 1)
        return ctx.step.run("second", lambda: enter(entered, "second", 2))

    run_id = engine.start("t")
    process = engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as outcome:
        gate.wait_reached()
        engine.client.pause(run_id, actor="ann")
        [attempt] = process.lease.attempts()
        until(lambda: attempt.is_paused, what="the owner to be told of the pause")  # type: ignore[attr-defined]
        gate.open()

    assert outcome == [Dropped("the run is paused")]
    assert entered == []
    assert [step.state for step in engine.client.history(run_id).steps] == ["done"]
    assert kit.row(conn, kit.number(conn, run_id), "state", "crashes") == ("ready", 0)
    engine.client.resume(run_id, actor="ann")
    assert isinstance(engine.process().deliver(run_id, "t"), Finished)
    assert entered == ["second"]


def test_i10_a_paused_sleeper_is_woken_in_time_and_still_taken_by_nobody(
    engine: Engine, clock: Clock, conn: Connection
) -> None:
    new, no = kit.sleeping(conn, 60)
    engine.client.pause(new.id, actor="ann")
    clock.advance(seconds=61)

    engine.timers()

    assert kit.row(conn, no, "state", "paused_at IS NOT NULL") == ("ready", True)
    kit.drop_hints(conn)
    engine.client.resume(new.id, actor="ann")
    assert [run for run, *_ in kit.events(conn)] == [no]


def test_i24_a_claim_repeated_after_a_pause_gives_the_grant_it_had(engine: Engine, conn: Connection) -> None:
    new, by, claim = kit.enqueue(conn), kit.worker(conn), uuid4()

    def ask() -> object:
        return runs.claim(
            conn, id=new.id, nesting=0, task=kit.TASK, claim=claim, worker=by, versions=[1], limit_seconds=None
        )

    first = ask()
    engine.client.pause(new.id, actor="ann")

    assert first is not None
    assert ask() is not None


def test_i11_a_paused_run_can_be_cancelled(engine: Engine, conn: Connection) -> None:
    new = kit.enqueue(conn)
    engine.client.pause(new.id, actor="ann")

    engine.client.cancel(new.id)

    assert engine.state(new.id) is RunState.CANCELLED


def test_i2_a_pause_in_a_callers_transaction_holds_if_he_commits(engine: Engine, conn: Connection) -> None:
    new = kit.enqueue(conn)

    with psycopg.connect(engine.database.url) as own:
        engine.client.pause(new.id, actor="ann", conn=own)
        own.rollback()
        engine.route()
        assert engine.client.get(new.id).paused_at is None
        engine.client.pause(new.id, actor="ann", conn=own)
    engine.route()

    assert engine.client.get(new.id).paused_at is not None


def test_pausing_twice_is_one_act(engine: Engine, conn: Connection) -> None:
    new = kit.enqueue(conn)

    for _ in range(2):
        engine.client.pause(new.id, actor="ann")

    assert len(engine.client.history(new.id).audit) == 1


def test_a_run_that_has_ended_or_does_not_exist_is_refused(engine: Engine, conn: Connection) -> None:
    new, grant, _ = kit.running(conn)
    kit.finish(conn, grant.token)

    with pytest.raises(WrongStatusError, match="is succeeded"):
        engine.client.pause(new.id, actor="ann")
    with pytest.raises(WrongStatusError, match="nothing to resume"):
        engine.client.resume(new.id, actor="ann")
    with pytest.raises(UnknownRunError):
        engine.client.pause("nobody", actor="ann")


def test_paused_runs_cost_the_scans_of_ready_ones_nothing(engine: Engine, conn: Connection) -> None:
    [(definition,)] = kit.table(
        conn,
        "SELECT indexdef FROM pg_indexes WHERE indexname = 'run_ready' AND schemaname = %s",
        conn.schema,
    )
    kit.table(conn, "SET enable_seqscan = off")
    plan = kit.table(
        conn,
        "EXPLAIN SELECT 1 FROM {}.run WHERE state = 'ready' AND deliver_by <= (SELECT {}.now()) AND paused_at IS NULL",
    )

    assert "paused_at IS NULL" in definition
    assert any("Index" in line and "run_ready" in line for (line,) in plan)
    assert not any("Filter" in line for (line,) in plan)
