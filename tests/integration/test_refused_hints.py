"""Hints that came to a process without the code for their runs: they come back, in time, and never many together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingBroker, RecordingDispatcher, empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.engine import Engine
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished
from umt_durable.services import refusals as refusals_module
from umt_durable.services.lease import Lease
from umt_durable.services.redispatch import Redispatch
from umt_durable.services.refusals import Refusals
from umt_durable.services.relay import Relay
from umt_durable.settings import Settings

LATER = "SELECT round(extract(epoch FROM next_attempt_at - {}.now()), 1)::float8 FROM {}.outbox_event ORDER BY run"


@pytest.fixture
def refusals(database: Database, settings: Settings) -> Refusals:
    return Refusals(database, settings)


@pytest.fixture
def still(conn: Connection, schema: str) -> None:
    """Have the clock of the schema stand still."""
    kit.table(
        conn,
        "CREATE OR REPLACE FUNCTION {}.now() RETURNS timestamptz LANGUAGE sql VOLATILE AS"
        " $$SELECT timestamptz '2026-11-30 12:00:00Z'$$",
    )


def published(conn: Connection, **given: Any) -> str:
    """Insert a ready run whose hint has left."""
    run_id = kit.enqueue(conn, **given).id
    kit.drop_hints(conn)
    return run_id


def test_i19_a_refused_hint_comes_back_soon_while_a_live_worker_has_the_code_and_ever_later(
    conn: Connection, still: None, refusals: Refusals
) -> None:
    run_id = published(conn)
    kit.worker(conn)

    given = []
    for _ in range(7):
        assert refusals.refuse(run_id, 0)
        given.append(kit.table(conn, LATER)[0][0])
        kit.drop_hints(conn)

    assert given == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert telemetry.snapshot()[telemetry.Counter.REFUSED_HINT] >= 7


def test_i22_a_hint_that_is_being_published_when_it_is_refused_makes_no_second_one(
    conn: Connection, still: None, database: Database, settings: Settings, refusals: Refusals
) -> None:
    run_id = kit.enqueue(conn).id
    kit.worker(conn)
    dispatcher = RecordingDispatcher()
    dispatcher.during = lambda: refusals.refuse(run_id, 0)

    Relay(database, settings, dispatcher).run_once()

    assert [event[:2] for event in kit.events(conn)] == [(kit.number(conn, run_id), "pending")]
    assert kit.table(conn, LATER) == [(0.5,)]


def test_i19_a_backlog_of_refused_hints_comes_back_one_by_one(
    conn: Connection, still: None, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals_module, "boottime", lambda: 1000.0)
    monkeypatch.setattr(refusals_module, "A_SECOND", 2)
    kit.worker(conn)
    for _ in range(5):
        refusals.refuse(published_more(conn), 0)

    assert kit.table(conn, LATER) == [(0.5,), (0.5,), (1.0,), (1.5,), (2.0,)]


def published_more(conn: Connection) -> str:
    """Insert a ready run without a hint beside others that have theirs."""
    run_id = kit.enqueue(conn).id
    kit.table(conn, "DELETE FROM {}.outbox_event WHERE run = %s", kit.number(conn, run_id))
    return run_id


@pytest.mark.parametrize("why", ["running", "paused", "unknown", "ours"])
def test_what_was_no_refusal_changes_nothing(why: str, conn: Connection, refusals: Refusals) -> None:
    run_id = published(conn)
    worker = kit.worker(conn)
    versions: list[int] = []
    match why:
        case "running":
            kit.claim(conn, run_id, worker)
        case "paused":
            kit.table(conn, "UPDATE {}.run SET paused_at = {}.now()")
        case "unknown":
            run_id = "nobody"
        case "ours":
            versions = [kit.VERSION]
    before = kit.table(conn, "SELECT redelivers, deliver_by FROM {}.run")

    assert not refusals.refuse(run_id, 0, task=kit.TASK, versions=versions)

    assert kit.table(conn, "SELECT redelivers, deliver_by FROM {}.run") == before
    assert kit.events(conn) == []


def test_i19_a_hint_refused_while_nobody_has_the_code_is_written_when_a_worker_brings_it_however_full_its_queue(
    conn: Connection, database: Database, settings: Settings, refusals: Refusals
) -> None:
    run_id = published(conn, version=2)
    broker = RecordingBroker(depths={"q": 500})
    redispatch = Redispatch(database, settings, broker)
    assert refusals.refuse(run_id, 0)
    assert kit.events(conn) == []
    assert redispatch.run_once().work == 0
    lease = Lease(database, settings, node=kit.NODE, versions=[kit.TASK, f"{kit.TASK}@2"])

    lease.ensure()
    counts = redispatch.run_once()
    lease.stop()

    assert (counts.hinted, counts.postponed) == (1, 0)


def test_i19_runs_that_nobody_can_take_are_looked_at_ever_less_often_and_stay_known_to_lack_their_hint(
    conn: Connection, database: Database, settings: Settings, refusals: Refusals, clock: Clock
) -> None:
    run_id = published(conn, version=2)
    refusals.refuse(run_id, 0)
    redispatch = Redispatch(database, settings, RecordingBroker(depths={"q": 500}))

    for _ in range(3):
        clock.advance(seconds=3601)
        assert redispatch.run_once().postponed == 1
    assert kit.table(conn, "SELECT redelivers FROM {}.run") == [(-4,)]
    kit.worker(conn, versions=[f"{kit.TASK}@2"], seconds=864_000)
    clock.advance(seconds=3601)

    assert redispatch.run_once().hinted == 1


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def test_i19_a_process_with_another_version_hands_the_hint_on_and_its_own_runs_are_executed(
    engine: Engine, conn: Connection, still: None
) -> None:
    @engine.task(kit.TASK)
    def body(ctx: TaskContext) -> int:
        return 1

    newer, own = kit.enqueue(conn, version=2), engine.start(kit.TASK)
    kit.drop_hints(conn)
    kit.worker(conn, versions=[kit.TASK, f"{kit.TASK}@2"])
    process = engine.process()

    assert process.deliver(newer.id, kit.TASK) == Dropped("this worker has not the run's version")

    assert kit.table(conn, LATER) == [(0.5,)]
    assert isinstance(process.deliver(own, kit.TASK), Finished)
