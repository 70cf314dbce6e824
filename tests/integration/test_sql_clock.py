"""Statements that read the clock: once for each decision, and no row that no scan would find again."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import uuid4

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from umt_durable.database import Connection, Database
from umt_durable.records import NewRun
from umt_durable.services.maintenance import Maintenance
from umt_durable.settings import Settings
from umt_durable.states import RunState, StepKind
from umt_durable.store import journal, outbox, runs
from umt_durable.store.guard import Guard

READS = 8


def tick(conn: Connection) -> datetime:
    """Have the clock go on by a second each time it is read; return what it shows first."""
    kit.table(conn, "CREATE SEQUENCE IF NOT EXISTS {}.ticks")
    query = """CREATE OR REPLACE FUNCTION {}.now() RETURNS timestamptz LANGUAGE sql VOLATILE AS
               $$ SELECT timestamptz '2030-01-01 00:00:00+00' + nextval('{}.ticks') * interval '1 second' $$"""
    kit.table(conn, query)
    now: datetime = kit.table(conn, "SELECT {}.now()")[0][0]
    return now


@pytest.mark.parametrize("way", ["enqueue", "intake"])
def test_i1_a_run_whose_time_comes_while_it_is_inserted_is_ready_with_a_hint_or_sleeps_until_then(
    way: str, conn: Connection
) -> None:
    for after in range(READS):
        begun = tick(conn)
        new = NewRun(id=f"r{after}", task=kit.TASK, wake_at=begun + timedelta(seconds=after + 0.5))
        if way == "enqueue":
            runs.enqueue(conn, new, deliver_seconds=30.0)
        else:
            runs.intake(conn, new, deliver_seconds=30.0)

    found = kit.table(conn, "SELECT state, wake_at IS NOT NULL FROM {}.run")
    assert set(found) == {("ready", False), ("sleeping", True)}
    hints = kit.table(conn, "SELECT count(*) FROM {}.outbox_event")[0][0]
    assert hints == (found.count(("ready", False)) if way == "enqueue" else 0)


def test_i10_a_sleep_that_ends_while_that_is_asked_is_done_in_the_journal_or_not_over(conn: Connection) -> None:
    _, grant, _ = kit.running(conn)
    guard = Guard(conn, grant.token)
    seen = set()

    for after in range(READS):
        nap = kit.entry(f"nap{after}", seq=after, kind=StepKind.SLEEP)
        journal.start_sleep(guard, nap, until=tick(conn) + timedelta(seconds=after + 0.5))
        due = journal.end_sleep(guard, nap.key)

        assert due is not None
        assert due.seconds is not None
        is_over = due.seconds <= 0
        seen.add(is_over)
        done = kit.table(conn, "SELECT state = 'done' FROM {}.step WHERE key = %s", nap.key)[0][0]
        assert done is is_over

    assert seen == {True, False}


@pytest.mark.parametrize("state", ["sleeping", "retrying"])
def test_i1_no_run_sleeps_without_an_end(state: str, conn: Connection) -> None:
    kit.enqueue(conn)

    with pytest.raises(psycopg.errors.CheckViolation, match="run_due_while_asleep"):
        kit.table(conn, "UPDATE {}.run SET state = %s", state)


def test_i1_no_run_is_ready_without_a_delivery_deadline(conn: Connection) -> None:
    kit.enqueue(conn)

    with pytest.raises(psycopg.errors.CheckViolation, match="run_delivered_while_ready"):
        kit.table(conn, "UPDATE {}.run SET deliver_by = NULL")


def test_i1_a_run_parked_for_a_step_that_is_over_meanwhile_is_due_at_once(conn: Connection, clock: Clock) -> None:
    _, grant, _ = kit.running(conn)

    assert runs.suspend(Guard(conn, grant.token), state=RunState.SLEEPING, steps=["of no sleep"], waits=[])

    assert runs.wake_due(conn, limit=10, deliver_seconds=30.0) == 1


def test_a_hint_of_low_priority_is_not_passed_over_for_ever(
    conn: Connection, clock: Clock, database: Database, settings: Settings
) -> None:
    low = kit.number(conn, kit.enqueue(conn, priority=0).id)
    first = []

    for _ in range(5):
        newcomer = kit.number(conn, kit.enqueue(conn, priority=3).id)
        kit.table(conn, "DELETE FROM {}.outbox_event WHERE run NOT IN (%s, %s)", low, newcomer)
        for _ in range(2):  # another process has the same duty
            Maintenance(database, settings).run_once()
        with conn.transaction(force_rollback=True):
            claimed = outbox.claim(conn, relay=uuid4(), limit=1, hold_seconds=15.0)
        first.append(claimed[0].run == low)
        clock.advance(seconds=61)

    assert first == [False, False, False, True, True]


def test_a_backlog_of_one_priority_is_left_as_it_is(conn: Connection, clock: Clock) -> None:
    for _ in range(3):
        kit.enqueue(conn, priority=4)
    clock.advance(seconds=600)

    assert outbox.age(conn, limit=10) == 0


def test_of_each_priority_the_oldest_rise_first_and_none_above_the_highest(conn: Connection, clock: Clock) -> None:
    ids = []
    for priority in (0, 0, 2, 2, 3):
        ids.append(kit.enqueue(conn, priority=priority).id)
        clock.advance(seconds=1)
    clock.advance(seconds=61)

    assert outbox.age(conn, limit=1) == 2
    assert outbox.age(conn, limit=9) == 2  # those that rose wait for their next minute
    clock.advance(seconds=61)
    assert outbox.age(conn, limit=9) == 2

    found = dict(kit.table(conn, "SELECT r.id, o.priority FROM {}.outbox_event AS o JOIN {}.run AS r ON r.no = o.run"))
    assert [found[id] for id in ids] == [2, 2, 3, 3, 3]


def test_i19_runs_that_waited_for_a_version_are_brought_piece_by_piece(conn: Connection) -> None:
    for n in range(7):
        kit.enqueue(conn, version=1 + n % 2)
    kit.table(conn, "UPDATE {}.run SET redelivers = 3, deliver_by = {}.now() + interval '1 hour' + no * interval '1 s'")
    place: runs.ReadyPlace | None = runs.FIRST_READY
    pieces = []

    while place is not None:
        brought, place = runs.bring_versions(conn, [f"{kit.TASK}@2"], after=place, limit=2)
        pieces.append(brought)

    assert pieces == [1, 1, 1, 0]
    assert kit.table(conn, "SELECT version, deliver_by <= {}.now(), count(*) FROM {}.run GROUP BY 1, 2 ORDER BY 1") == [
        (1, False, 4),
        (2, True, 3),
    ]
