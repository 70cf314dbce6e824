"""Users' own sessions on a real Postgres: hooks after their commits, and the transaction of a step, ours to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine as SqlalchemyEngine
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.support.engine import Engine
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.errors import DefinitionError
from umt_durable.session import Binding, caller, transaction
from umt_durable.settings import Settings
from umt_durable.states import RunState


@pytest.fixture
def source(database_url: str) -> Iterator[SqlalchemyEngine]:
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()


@pytest.fixture
def engine(database: Database, settings: Settings, schema: str) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def table(database_url: str, schema: str) -> str:
    """Return a user's table."""
    name = f'"{schema}".effect'
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(f"CREATE TABLE {name} (what text)".encode())
    return name


def effects(url: str, table: str) -> int:
    with psycopg.connect(url, autocommit=True) as conn:
        row = conn.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def listeners(session: Session) -> int:
    return len(list(session.dispatch.after_commit))


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_a_session_has_one_listener_however_often_it_is_used_and_calls_each_hook_once_a_commit(
    source: SqlalchemyEngine,
) -> None:
    called: list[str] = []

    def hook() -> None:
        called.append("hook")

    with Session(source) as session:
        for _ in range(3):
            for _ in range(2):
                caller(session).after_commit(hook)
            session.commit()

        assert called == ["hook"] * 3
        assert listeners(session) == 1


def test_hooks_of_a_scoped_session_stay_with_the_session_it_has_and_reach_no_other(source: SqlalchemyEngine) -> None:
    maker = sessionmaker(source)
    scoped = scoped_session(maker)
    called: list[str] = []

    for name in ("first", "second"):
        caller(scoped).after_commit(lambda name=name: called.append(name))  # type: ignore[misc]  # a default argument
        scoped.commit()
        scoped.remove()

    with maker() as stranger:
        assert listeners(stranger) == 0
        stranger.execute(text("SELECT 1"))
        stranger.commit()
    assert called == ["first", "second"]


def test_i2_a_hook_is_forgotten_with_the_transaction_it_was_meant_for(source: SqlalchemyEngine) -> None:
    called: list[str] = []
    with Session(source) as session:
        caller(session).after_commit(lambda: called.append("rolled back"))
        session.rollback()
        session.execute(text("SELECT 1"))
        session.commit()
        caller(session).after_commit(lambda: called.append("closed"))
        session.close()
        session.execute(text("SELECT 1"))
        session.commit()

    assert called == []


def test_a_released_savepoint_is_no_commit(source: SqlalchemyEngine) -> None:
    called: list[str] = []
    with Session(source) as session:
        with session.begin_nested():
            caller(session).after_commit(lambda: called.append("hook"))
        before = list(called)
        session.commit()

    assert before == []
    assert called == ["hook"]


# -- the transaction of a step ----------------------------------------------------------------------------------------


def insert(handle: Any, table: str) -> None:
    statement = f"INSERT INTO {table} VALUES ('x')"
    handle.execute(text(statement) if isinstance(handle, Session) else statement.encode())


@pytest.fixture(params=["url", "callable", "engine", "sessionmaker"])
def binding(request: pytest.FixtureRequest, database_url: str, source: SqlalchemyEngine) -> Binding:
    bindings: dict[str, Binding] = {
        "url": database_url,
        "callable": lambda: psycopg.connect(database_url),
        "engine": source,
        "sessionmaker": sessionmaker(source),
    }
    return bindings[request.param]


def run_step(binding: Binding, schema: str, table: str, end: Callable[[Any], None]) -> None:
    """Insert a row in the transaction of a step and end that transaction inside."""
    with transaction(binding, schema) as tx:
        insert(tx.handle, table)
        end(tx.handle)
        tx.flush()


def test_i16_a_user_s_commit_inside_a_step_is_refused_before_anything_is_committed(
    binding: Binding, database_url: str, schema: str, table: str
) -> None:
    with pytest.raises((DefinitionError, psycopg.ProgrammingError), match="commit"):
        run_step(binding, schema, table, lambda handle: handle.commit())

    assert effects(database_url, table) == 0


def test_i16_a_user_s_rollback_inside_a_step_makes_it_fail_with_nothing_recorded(
    binding: Binding, database_url: str, schema: str, table: str
) -> None:
    with pytest.raises((DefinitionError, psycopg.ProgrammingError), match=r"roll ?back"):
        run_step(binding, schema, table, lambda handle: handle.rollback())

    assert effects(database_url, table) == 0


@pytest.mark.filterwarnings("ignore:transaction already deassociated")
@pytest.mark.parametrize(
    "end",
    [
        lambda session: session.close(),
        lambda session: session.connection().rollback(),
        lambda session: session.connection().connection.driver_connection.rollback(),
        lambda session: session.execute(text("ROLLBACK")),
    ],
    ids=["close", "connection", "driver", "statement"],
)
def test_i16_a_session_whose_transaction_was_ended_behind_its_back_is_noticed(
    end: Callable[[Session], None], source: SqlalchemyEngine, schema: str, table: str, database_url: str
) -> None:
    with pytest.raises(DefinitionError, match="must not commit or roll back"):
        run_step(source, schema, table, end)

    assert effects(database_url, table) == 0


def test_i16_a_commit_sent_as_a_statement_is_noticed(database_url: str, schema: str, table: str) -> None:
    with pytest.raises(DefinitionError, match="must not commit or roll back"):
        run_step(database_url, schema, table, lambda handle: handle.execute("ROLLBACK"))


def test_a_savepoint_inside_a_step_is_the_user_s_own_affair(
    source: SqlalchemyEngine, schema: str, table: str, database_url: str
) -> None:
    with transaction(source, schema) as tx:
        with tx.handle.begin_nested():
            insert(tx.handle, table)
        savepoint = tx.handle.begin_nested()
        insert(tx.handle, table)
        savepoint.rollback()
        tx.flush()

    assert effects(database_url, table) == 1


def test_i16_a_step_that_commits_fails_its_run_and_leaves_no_row(
    engine: Engine, binding: Binding, database_url: str, table: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        def write(handle: Any) -> None:
            insert(handle, table)
            handle.commit()

        ctx.step.transaction("x", write, on=binding)

    run, _ = engine.run("t")

    assert engine.state(run) is RunState.FAILED
    assert effects(database_url, table) == 0
    assert [step.state for step in engine.client.history(run).steps] != ["done"]
