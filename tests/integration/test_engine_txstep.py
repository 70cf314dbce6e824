"""The transaction step: a user's rows and the step's result are committed together, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, in_thread, take_over
from tests.support.proxy import Proxy
from tests.support.wait import until
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished
from umt_durable.errors import UnknownRunError
from umt_durable.session import Binding
from umt_durable.settings import Settings
from umt_durable.states import RunState


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def ledger(conn: Connection, schema: str) -> str:
    """Return a table of the application without a unique constraint, so that doubles show."""
    name = f'"{schema}".ledger'
    conn.execute(f"CREATE TABLE {name} (run text, amount int)".encode())
    return name


def booked(conn: Connection, ledger: str) -> int:
    """Count the rows of the application's table."""
    row = conn.execute(f"SELECT count(*) FROM {ledger}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def insert(tx: Any, ledger: str) -> None:
    """Insert a row of the application's through what a transaction step is given."""
    statement = f"INSERT INTO {ledger} VALUES ('r', 1)"
    if isinstance(tx, Session):
        tx.connection().exec_driver_sql(statement)
    else:
        tx.execute(statement.encode())


@pytest.fixture(params=["psycopg", "sqlalchemy"])
def binding(request: pytest.FixtureRequest, database: Database) -> Iterator[Binding | None]:
    """Return what leads a transaction step to our database, by a connection or a session."""
    source = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database.url))
    yield None if request.param == "psycopg" else source
    source.dispose()


@pytest.mark.parametrize("kind", ["psycopg", "sqlalchemy"])
def test_i16_user_rows_and_the_recorded_result_commit_together(
    engine: Engine, database: Database, conn: Connection, ledger: str, kind: str
) -> None:
    def book(tx: Any, run: str, amount: int) -> int:
        if kind == "psycopg":
            tx.execute(f"INSERT INTO {ledger} VALUES (%s, %s)".encode(), (run, amount))
        else:
            assert isinstance(tx, Session)
            tx.connection().exec_driver_sql(f"INSERT INTO {ledger} VALUES (%s, %s)", (run, amount))
        return amount * 2

    source = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database.url))
    binding = None if kind == "psycopg" else source

    @engine.task("t")
    def body(ctx: TaskContext, amount: int) -> int:
        return ctx.step.transaction("book", book, ctx.run_id, amount, on=binding)

    _, outcome = engine.run("t", 21)
    source.dispose()

    assert isinstance(outcome, Finished)
    assert outcome.value == 42
    assert booked(conn, ledger) == 1


def test_i16_a_zombies_transaction_is_rolled_back_whole(
    engine: Engine, conn: Connection, ledger: str, clock: Clock
) -> None:
    gate = Gate()
    entered = [0]

    def book(tx: Any) -> int:
        entered[0] += 1
        tx.execute(f"INSERT INTO {ledger} VALUES ('r', {entered[0]})".encode())
        if entered[0] == 1:
            gate.pass_through()
        return entered[0]

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.transaction("book", book)

    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        outcome = heir.deliver(run_id, "t")
        gate.open()

    assert isinstance(outcome, Finished)
    assert outcome.value == 2
    assert isinstance(late[0], Dropped)
    assert booked(conn, ledger) == 1


def test_i16_a_result_that_cannot_be_stored_rolls_the_users_rows_back(
    engine: Engine, conn: Connection, ledger: str
) -> None:
    def book(tx: Any) -> Any:
        tx.execute(f"INSERT INTO {ledger} VALUES ('r', 1)".encode())
        return {1, 2}

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.transaction("book", book)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.FAILED
    assert booked(conn, ledger) == 0


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("kind", ["psycopg", "sqlalchemy"])
def test_i16_i24_a_commit_whose_reply_was_lost_is_looked_up_before_anything_is_repeated(
    engine: Engine, proxied_url: str, database_proxy: Proxy, conn: Connection, ledger: str, kind: str, committed: bool
) -> None:
    entered = [0]
    source = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(proxied_url))

    def book(tx: Any) -> int:
        entered[0] += 1
        insert(tx, ledger)
        return entered[0]

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.transaction("book", book, on=proxied_url if kind == "psycopg" else source)

    if committed:
        cut = database_proxy.cut_after_commit(match=b"commit_step")
    else:
        cut = database_proxy.cut_before("commit_step")
    _, outcome = engine.run("t")
    source.dispose()

    assert cut.fired == 1
    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.SUCCEEDED
    assert booked(conn, ledger) == 1
    assert entered[0] == (1 if committed else 2)


def test_i2_i16_what_is_started_and_said_through_the_steps_transaction_is_committed_with_it(
    engine: Engine, conn: Connection, ledger: str, binding: Binding | None
) -> None:
    started: list[str] = []

    def book(tx: Any, fails: bool) -> None:
        insert(tx, ledger)
        started.append(engine.start("other", conn=tx))
        engine.client.emit("booked", "r", conn=tx)
        if fails:
            raise ValueError("no such account")

    @engine.task("other")
    def other(ctx: TaskContext) -> None:
        """Do nothing."""

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        with pytest.raises(ValueError, match="no such account"):
            ctx.step.transaction("refused", book, True, on=binding)
        ctx.step.transaction("book", book, False, on=binding)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.SUCCEEDED
    assert (booked(conn, ledger), facts(engine, conn)) == (1, 1)
    with pytest.raises(UnknownRunError):
        engine.client.get(started[0])
    assert engine.state(started[1]) is RunState.READY


def test_i5_i16_what_a_zombie_starts_and_says_through_the_steps_transaction_is_rolled_back_with_it(
    engine: Engine, conn: Connection, ledger: str, clock: Clock, binding: Binding | None
) -> None:
    gate, started = Gate(), []

    def book(tx: Any) -> None:
        insert(tx, ledger)
        started.append(engine.start("other", conn=tx))
        engine.client.emit("booked", "r", conn=tx)
        gate.pass_through()

    @engine.task("other")
    def other(ctx: TaskContext) -> None:
        """Do nothing."""

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.transaction("book", book, on=binding)

    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        with in_thread(lambda: heir.deliver(run_id, "t")) as outcome:
            until(lambda: len(started) == 2, what="the heir to enter the step")
            gate.open()

    assert isinstance(outcome[0], Finished)
    assert isinstance(late[0], Dropped)
    assert (booked(conn, ledger), facts(engine, conn)) == (1, 1)
    with pytest.raises(UnknownRunError):
        engine.client.get(started[0])
    assert engine.state(started[1]) is RunState.READY


def facts(engine: Engine, conn: Connection) -> int:
    """Count the facts that were said."""
    row = conn.execute(f'SELECT count(*) FROM "{engine.database.schema}".fact'.encode()).fetchone()
    assert row is not None
    return int(row[0])
