"""Every kind of a user's connection that is taken, or refused, as `conn` of a call or `on` of a transaction step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine as SqlalchemyEngine
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.support.engine import Engine
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished
from umt_durable.errors import AutocommitError, UnknownRunError
from umt_durable.session import Binding
from umt_durable.settings import Settings
from umt_durable.states import RunState

TASK = "kinds.wait"


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    """Return an engine with one task, which waits for a fact."""
    engine = Engine(database, settings)

    @engine.task(TASK)
    def body(ctx: TaskContext) -> None:
        ctx.step.wait_for_fact("go")

    yield engine
    engine.close()


@pytest.fixture
def source(database: Database) -> Iterator[SqlalchemyEngine]:
    """Return a user's SQLAlchemy engine on the same database."""
    source = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database.url))
    yield source
    source.dispose()


def assert_unknown(engine: Engine, run_id: str) -> None:
    with pytest.raises(UnknownRunError):
        engine.client.get(run_id)


# -- a caller's transaction -------------------------------------------------------------------------------------------


def test_b7_i2_a_sqlalchemy_connection_starts_a_run_with_its_commit_and_none_with_its_rollback(
    engine: Engine, source: SqlalchemyEngine
) -> None:
    with source.connect() as conn:
        kept = engine.start(TASK, conn=conn)
        conn.commit()
        lost = engine.start(TASK, conn=conn)
        conn.rollback()

    assert engine.state(kept) is RunState.READY
    assert_unknown(engine, lost)


def test_i2_a_sqlalchemy_connection_signals_emits_and_cancels_with_its_commit(
    engine: Engine, source: SqlalchemyEngine, conn: Connection, schema: str
) -> None:
    run_id = engine.start(TASK)

    def facts() -> int:
        row = conn.execute(f"SELECT count(*) FROM {schema}.fact".encode()).fetchone()
        assert row is not None
        return int(row[0])

    for end in ("rollback", "commit"):
        with source.connect() as user:
            engine.client.signal(run_id, "go", conn=user)
            engine.client.emit("paid", "order-1", conn=user)
            engine.client.cancel(run_id, conn=user)
            assert facts() == 0
            getattr(user, end)()

    assert facts() == 3
    engine.route()
    assert engine.state(run_id) is RunState.CANCELLED


def test_b7_i2_a_scoped_session_starts_a_run_with_its_commit_and_none_with_its_rollback(
    engine: Engine, source: SqlalchemyEngine
) -> None:
    scoped = scoped_session(sessionmaker(source))

    kept = engine.start(TASK, conn=scoped)
    scoped.commit()
    lost = engine.start(TASK, conn=scoped)
    scoped.rollback()
    scoped.remove()

    assert engine.state(kept) is RunState.READY
    assert_unknown(engine, lost)


@pytest.mark.parametrize("kind", ["connection", "session", "scoped_session"])
def test_a_sqlalchemy_caller_in_autocommit_is_refused_and_starts_nothing(
    engine: Engine, source: SqlalchemyEngine, kind: str
) -> None:
    automatic = source.execution_options(isolation_level="AUTOCOMMIT")
    callers: dict[str, Any] = {
        "connection": automatic.connect,
        "session": lambda: Session(automatic),
        "scoped_session": scoped_session(sessionmaker(automatic)),
    }
    given = callers[kind] if kind == "scoped_session" else callers[kind]()

    with pytest.raises(AutocommitError, match="AUTOCOMMIT"):
        engine.start(TASK, conn=given)
    given.close()

    assert engine.client.list() == []


# -- the transaction of a step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["engine", "sessionmaker", "url", "callable"])
def test_i16_a_transaction_step_writes_once_through_every_kind_of_binding(
    engine: Engine, source: SqlalchemyEngine, database: Database, conn: Connection, schema: str, kind: str
) -> None:
    table = f'"{schema}".effect'
    conn.execute(f"CREATE TABLE {table} (value int)".encode())
    bindings: dict[str, Binding] = {
        "engine": source,
        "sessionmaker": sessionmaker(source),
        "url": database.url,
        "callable": lambda: psycopg.connect(database.url),
    }

    def book(handle: Any, value: int) -> int:
        statement = f"INSERT INTO {table} VALUES ({value})"
        if isinstance(handle, Session):
            handle.connection().exec_driver_sql(statement)
        else:
            handle.execute(statement.encode())
        return value

    @engine.task("book")
    def body(ctx: TaskContext) -> int:
        return ctx.step.transaction("book", book, 3, on=bindings[kind])

    run_id, outcome = engine.run("book")

    assert isinstance(outcome, Finished)
    assert outcome.value == 3
    assert conn.execute(f"SELECT value FROM {table}".encode()).fetchall() == [(3,)]
    assert [step.state for step in engine.client.history(run_id).steps] == ["done"]
