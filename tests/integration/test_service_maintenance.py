"""Maintenance on a real Postgres: every duty has its turn, whatever the others do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingBroker, RecordingDispatcher, empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.errors import DatabaseUnavailableError
from umt_durable.services.maintenance import Due, Maintenance
from umt_durable.settings import Settings

# What is promised here does not depend on the server's version, and some of it takes seconds.
pytestmark = pytest.mark.private_postgres_only

EVERYTHING = Due(*[True] * 8)


def test_rg6_a_duty_that_fails_stops_no_other_is_logged_once_and_rests(
    conn: Connection, database: Database, settings: Settings, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    maintenance = Maintenance(database, settings)
    new, _ = kit.waiting(conn)
    kit.signal(conn, new.id)
    kit.sleeping(conn, 10)
    clock.advance(seconds=11)
    calls = []

    def broken() -> Any:
        calls.append(1)
        raise RuntimeError("a defect")

    timers = next(duty for duty in maintenance._duties if duty.name == "timers")
    works, timers.act = timers.act, broken
    with kit.counted(telemetry.Counter.DUTY_FAILED) as failed:
        maintenance.run_once()
        maintenance.run_once()
        timers.next_at = 0.0
        maintenance.run_once()

        assert failed() == 2
    states = kit.table(conn, "SELECT state FROM {}.run ORDER BY no")
    timers.act, timers.next_at = works, 0.0
    maintenance.run_once()

    assert len(calls) == 2
    assert states == [("ready",), ("sleeping",)]
    assert caplog.text.count("timers failed") == 1
    assert kit.table(conn, "SELECT DISTINCT state FROM {}.run") == [("ready",)]


def test_an_outage_of_the_database_is_the_one_thing_that_ends_a_round(database: Database, settings: Settings) -> None:
    maintenance = Maintenance(database, settings)

    def away() -> Any:
        raise DatabaseUnavailableError("gone")

    maintenance._duties[0].act = away

    with pytest.raises(DatabaseUnavailableError):
        maintenance.run_once(EVERYTHING)


def test_maintenance_does_all_its_duties_in_one_round(
    conn: Connection, database: Database, settings: Settings, clock: Clock
) -> None:
    woken: list[int] = []
    maintenance = Maintenance(database, settings, broker=RecordingBroker())
    maintenance.on_hints = lambda: woken.append(1)
    kit.sleeping(conn, 10)
    kit.waiting(conn, timeout=10)
    kit.running(conn)
    kit.enqueue(conn)
    told, _ = kit.waiting(conn, "paid")
    kit.drop_hints(conn)
    clock.advance(seconds=31)
    kit.worker(conn)
    kit.signal(conn, told.id, "paid")

    maintenance.run_once()

    assert kit.table(conn, "SELECT DISTINCT state FROM {}.run") == [("ready",)]
    assert len(kit.events(conn)) == 5
    assert woken
    assert kit.table(conn, "SELECT count(*) FROM {}.broker_marker") == [(1,)]


def test_workers_that_ended_long_ago_are_forgotten(
    conn: Connection, database: Database, settings: Settings, clock: Clock
) -> None:
    kit.worker(conn)
    clock.advance(seconds=2 * 86_400)
    kit.worker(conn)

    Maintenance(database, settings).run_once()

    assert kit.table(conn, "SELECT count(*) FROM {}.worker") == [(1,)]
