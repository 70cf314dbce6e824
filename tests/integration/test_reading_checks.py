"""Checks that are given a connection: asked once the wait is there, with no lock held, and able to read and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.support.clock import Clock
from tests.support.engine import Engine
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.waitables import FactWait
from umt_durable.errors import DefinitionError
from umt_durable.settings import Settings
from umt_durable.sql import quote
from umt_durable.states import RunState
from umt_durable.store import waits

Reading = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def orders(conn: Connection) -> str:
    """Return the name of a table of the application's."""
    kit.table(conn, "CREATE TABLE {}.orders (number int, shipped text)")
    kit.table(conn, "INSERT INTO {}.orders VALUES (7, NULL)")
    return f"{quote(conn.schema)}.orders"


def waiting_for(engine: Engine, check: Callable[..., Any], **options: Any) -> str:
    """Declare a task that waits with a check, start it and deliver it once."""

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        fact = ctx.step.wait_for_fact("shipped", check=check, poll=timedelta(minutes=1), **options)
        return [fact.payload, fact.source]

    return engine.run("t")[0]


def find(orders: str, conn: Reading) -> str | None:
    """Look whether the order was shipped."""
    row = conn.execute(f"SELECT shipped FROM {orders} WHERE number = 7".encode()).fetchone()
    return None if row is None else row[0]


def test_d14_a_check_reads_the_business_row_at_each_look(
    engine: Engine, conn: Connection, clock: Clock, orders: str
) -> None:
    run_id = waiting_for(engine, partial(find, orders))
    assert engine.state(run_id) is RunState.WAITING

    kit.table(conn, "UPDATE {}.orders SET shipped = 'today'")
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == ["today", "check"]


def test_d14_the_wait_is_there_and_no_lock_is_held_while_a_check_reads(
    engine: Engine, conn: Connection, orders: str
) -> None:
    seen: list[Any] = []

    def check(reading: Reading) -> bool:
        seen.append(kit.table(conn, "SELECT name, state FROM {}.wait"))
        seen.append(kit.table(conn, "SELECT state FROM {}.run FOR UPDATE NOWAIT"))
        seen.append(waits.try_lock_address(conn, waits.run_address(engine.client.list()[0].id, "shipped")))
        return True

    run_id = waiting_for(engine, check)

    assert engine.state(run_id) is RunState.SUCCEEDED
    assert seen == [[("shipped", "pending")], [("running",)], True]


@pytest.mark.parametrize("pooler", [False, True])
def test_d14_a_check_cannot_write(database: Database, settings: Settings, orders: str, pooler: bool) -> None:
    through = Database(replace(settings, pooler=pooler))
    engine = Engine(through, settings)
    errors: list[type[Exception]] = []

    def check(reading: Reading) -> bool:
        for text in (f"INSERT INTO {orders} VALUES (8, NULL)", f"SELECT 1 FROM {orders} FOR UPDATE"):
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction) as caught:
                reading.execute(text.encode())
            errors.append(caught.type)
            reading.rollback()
        with reading.transaction(), pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            reading.execute(f"DELETE FROM {orders}".encode())
        return True

    waiting_for(engine, check)

    assert len(errors) == 2
    engine.close()
    through.close()


def test_d14_a_check_gets_a_connection_in_autocommit_that_is_closed_afterwards(engine: Engine) -> None:
    lent: list[Reading] = []

    def check(reading: Reading) -> bool:
        assert reading.autocommit
        reading.execute("SELECT 1")
        assert reading.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        lent.append(reading)
        return True

    waiting_for(engine, check)
    assert [one.closed for one in lent] == [True]


def test_d14_a_part_of_a_group_reads_too(engine: Engine, orders: str) -> None:
    @engine.task("g")
    def body(ctx: TaskContext) -> Any:
        row = FactWait("row", check=lambda reading: find(orders, reading) is None)
        return ctx.step.wait_any({"row": row, "never": "never"}).label

    _, outcome = engine.run("g")
    assert isinstance(outcome, Finished)
    assert outcome.value == "row"


class Looks:
    """A check with a state of its own."""

    def look(self, reading: Reading) -> bool:
        """Read something."""
        return reading.execute("SELECT true").fetchone() == (True,)


@pytest.mark.parametrize(
    "check",
    [lambda: True, lambda number=7: number == 7, lambda *more: not more, lambda **more: not more, Looks().look],
)
def test_only_a_check_that_asks_for_a_connection_is_given_one(engine: Engine, check: Callable[..., Any]) -> None:
    assert engine.state(waiting_for(engine, check)) is RunState.SUCCEEDED


@pytest.mark.parametrize("check", [lambda reading, more: True, lambda *, reading: True])
def test_a_check_that_asks_for_more_is_refused_before_anything_is_written(
    engine: Engine, check: Callable[..., Any]
) -> None:
    run_id = waiting_for(engine, check)
    assert engine.state(run_id) is RunState.FAILED
    assert b"check takes nothing, or a connection to read with" in (engine.client.get(run_id).error or b"")
    assert engine.client.history(run_id).waits == []
    with pytest.raises(DefinitionError, match="'row'"):
        FactWait("row", check=check)


def test_an_error_of_a_check_is_the_bodys_and_leaves_the_wait(engine: Engine) -> None:
    def check(reading: Reading) -> bool:
        reading.execute("SELECT * FROM nowhere_at_all")
        return True

    run_id = waiting_for(engine, check)
    assert engine.state(run_id) is RunState.FAILED
    assert b"UndefinedTable" in (engine.client.get(run_id).error or b"")


def test_a_true_answer_is_recorded_and_not_asked_for_again(engine: Engine, clock: Clock) -> None:
    asked: list[int] = []

    def check(reading: Reading) -> int:
        asked.append(1)
        return 5

    @engine.task("once")
    def body(ctx: TaskContext) -> Any:
        found = ctx.step.wait_for_fact("row", check=check).payload
        ctx.step.sleep("nap", timedelta(minutes=1))
        return found

    run_id, outcome = engine.run("once")
    assert isinstance(outcome, Parked)
    clock.advance(seconds=61)
    engine.timers()
    assert isinstance(engine.process().deliver(run_id, "once"), Finished)
    assert asked == [1]
