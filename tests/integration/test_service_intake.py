"""Intake on a real Postgres: foreign messages become runs, each once, in whole batches."""

from __future__ import annotations

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingBroker, empty_schema  # noqa: F401  a fixture
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.records import NewRun
from umt_durable.services.intake import take_in
from umt_durable.settings import Settings


def test_i3_a_foreign_message_makes_one_run_however_often_it_comes(
    conn: Connection, database: Database, settings: Settings
) -> None:
    batch = [NewRun(id=name, task=kit.TASK, queue="q", args=b"[]") for name in ("b", "a")]

    with kit.counted(telemetry.Counter.FOREIGN_INTAKE) as taken:
        take_in(database, settings, batch)
        take_in(database, settings, [*batch, NewRun(id="a", nesting=1, task=kit.TASK)])

        assert taken() == 3
    assert kit.table(conn, "SELECT id, nesting, state FROM {}.run ORDER BY id, nesting") == [
        ("a", 0, "ready"),
        ("a", 1, "ready"),
        ("b", 0, "ready"),
    ]
    assert kit.events(conn) == []  # the message in hand is the hint


@pytest.mark.parametrize("at", ["intake.insert.a", "intake.commit.b"])
def test_i3_a_batch_is_taken_in_whole_or_not_at_all(
    at: str, conn: Connection, database: Database, settings: Settings
) -> None:
    batch = [NewRun(id=name, task=kit.TASK) for name in ("a", "b")]

    with kit.failing(f"{at}=raise:RuntimeError"), pytest.raises(RuntimeError):
        take_in(database, settings, batch)
    with pytest.raises(psycopg.DataError):
        take_in(database, settings, [*batch, NewRun(id="c\0", task=kit.TASK)])

    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(0,)]


def test_i23_batches_with_the_same_messages_in_another_order_never_wait_in_a_ring(
    conn: Connection, database: Database, settings: Settings
) -> None:
    batch = [NewRun(id=f"r{n}", task=kit.TASK) for n in range(30)]

    with kit.counted(telemetry.Counter.SYSTEM_RETRY) as defects:
        beside = kit.Beside(lambda: take_in(database, settings, batch))
        take_in(database, settings, batch[::-1])
        beside.result()

        assert defects() == 0
    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(30,)]
