"""Where the product ends and its user's own database begins: rights, migrations, references, connections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from tests.support.engine import Engine
from tests.support.postgres import drop_schema
from tests.support.wait import until
from umt_durable import TaskContext, TaskRegistry, define_task, migrate_engine_schema
from umt_durable.database import Connection, Database
from umt_durable.engine.client import Client
from umt_durable.errors import SchemaError
from umt_durable.migrate import head, migration_sql, read_revision
from umt_durable.records import NewRun
from umt_durable.settings import Settings


@pytest.fixture
def empty_schema(database_url: str) -> Iterator[str]:
    """Return the name of a schema that does not exist yet; it is dropped after the test."""
    name = f"test_boundary_{uuid4().hex[:12]}"
    yield name
    drop_schema(database_url, name)


@pytest.fixture
def plain_user(database_url: str) -> Iterator[str]:
    """Return a role of the server that owns nothing and may create nothing."""
    name = f"test_user_{uuid4().hex[:12]}"
    role = sql.Identifier(name)
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        yield name
        conn.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(role))
        conn.execute(sql.SQL("DROP ROLE {}").format(role))


def acting_as(url: str, user: str) -> str:
    """Return a URL whose sessions act with the rights of another role."""
    return psycopg.conninfo.make_conninfo(url, options=f"-c role={user}")


def test_a_user_without_the_right_to_migrate_is_told_which_one_is_missing(
    database_url: str, empty_schema: str, plain_user: str
) -> None:
    with pytest.raises(SchemaError, match="needs CREATE on the database, or to own the schema"):
        migrate_engine_schema(acting_as(database_url, plain_user), empty_schema)

    assert read_revision(database_url, empty_schema) is None


def test_a_user_who_may_not_even_read_the_schema_is_told_so(database_url: str, schema: str, plain_user: str) -> None:
    with pytest.raises(SchemaError, match="may not read schema"):
        read_revision(acting_as(database_url, plain_user), schema)


def test_the_owner_of_a_schema_migrates_it_without_rights_on_the_database(
    database_url: str, empty_schema: str, plain_user: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        made = sql.SQL("CREATE SCHEMA {} AUTHORIZATION {}")
        conn.execute(made.format(sql.Identifier(empty_schema), sql.Identifier(plain_user)))

    revision = migrate_engine_schema(acting_as(database_url, plain_user), empty_schema)

    assert revision == read_revision(database_url, empty_schema) == head()


def test_a5_a_registry_says_what_it_has_and_migrating_connects_and_leaves_again(
    database_url: str, empty_schema: str, conn: Connection
) -> None:
    registry = TaskRegistry()
    registry.add(define_task("shop.fulfil", 2, handler=fulfil))
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    before = conn.execute(others).fetchone()

    revision = migrate_engine_schema(database_url, empty_schema)

    assert revision == head()
    assert registry.has("shop.fulfil")
    assert registry.has("shop.fulfil", 2)
    assert not registry.has("shop.fulfil", 1)
    until(lambda: conn.execute(others).fetchone() == before, what="the migrator's connection to be closed")


def test_threads_of_one_process_migrate_and_print_at_the_same_time(database_url: str, empty_schema: str) -> None:
    """Alembic keeps what it works on in globals of its module."""
    with ThreadPoolExecutor(4) as pool:
        printed = [pool.submit(migration_sql, name) for name in ("a", "b")]
        made = [pool.submit(migrate_engine_schema, database_url, empty_schema) for _ in range(2)]

    assert [one.result() for one in made] == [head(), head()]
    assert ['CREATE TABLE "a".run ' in printed[0].result(), 'CREATE TABLE "b".run ' in printed[1].result()] == [
        True
    ] * 2


def test_b4_a_users_page_joins_its_own_rows_with_runs_by_their_reference(
    conn: Connection, schema: str, database: Database, settings: Settings
) -> None:
    Client(database, settings).enqueue(
        NewRun(id="run-1", task="shop.fulfil", ref="order:17", attributes='{"vip": true}')
    )

    joined = sql.SQL(
        "SELECT o.ref, v.state, v.attributes FROM (VALUES ('order:17')) AS o (ref) JOIN {}.run_view AS v USING (ref)"
    )
    plan = conn.execute(sql.SQL("SET enable_seqscan = off"))
    plan = conn.execute(sql.SQL("EXPLAIN ") + joined.format(sql.Identifier(schema)))

    assert any("run_ref" in line for (line,) in plan.fetchall())
    assert conn.execute(joined.format(sql.Identifier(schema))).fetchall() == [("order:17", "ready", {"vip": True})]


DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "reference" / "schema.md"


def test_b3_every_table_has_the_documented_columns_and_no_other(conn: Connection, schema: str) -> None:
    """Whoever adds a column has to say what it is for; business state has none."""
    columns = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = %s"
    tables = dict.fromkeys(table for table, _ in conn.execute(columns, [schema]).fetchall())
    documented = section_words(DOCUMENTED.read_text(encoding="utf-8"))

    assert set(tables) - {"umt_version"} == set(documented)
    for table in documented:
        of_table = conn.execute(columns + " AND table_name = %s", [schema, table]).fetchall()
        assert {column for _, column in of_table} - documented[table] == set(), table


def section_words(page: str) -> dict[str, set[str]]:
    """Return the words in code spans of the section of each table and view, by its name."""
    found: dict[str, set[str]] = {}
    for title, text in re.findall(r"^#{2,3} (.+?)\n(.*?)(?=^#{2,3} |\Z)", page, re.DOTALL | re.MULTILINE):
        names = re.findall(r"`(\w+)`", title)
        words = {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", span)}
        found |= dict.fromkeys(names, words)
    return found


def test_b5_looking_at_runs_changes_no_row(
    conn: Connection, schema: str, database: Database, settings: Settings
) -> None:
    engine = Engine(database, settings)

    @engine.task("shop.look")
    def body(ctx: TaskContext) -> int:
        ctx.step.wait_for_fact("paid")
        return ctx.step.run("count", lambda: 1)

    parked, _ = engine.run("shop.look")
    ended, _ = engine.run("shop.look")
    engine.client.signal(ended, "paid")
    engine.route()
    engine.process().deliver(ended, "shop.look")
    ready = engine.start("shop.look", key="once")
    engine.close()
    before = all_rows(conn, schema)

    for run_id in (parked, ended, ready):
        engine.client.get(run_id)
        engine.client.history(run_id)
    assert {run.id for run in engine.client.list()} == {parked, ended, ready}
    assert engine.client.result(engine.client.get(ended)) == 1

    assert {"run", "attempt", "step", "wait", "fact", "outbox_event", "worker"} <= {table for table, *_ in before}
    assert all_rows(conn, schema) == before


def all_rows(conn: Connection, schema: str) -> list[tuple[str, str]]:
    """Return every row of every table, with the transactions that wrote or locked it: an update in place shows."""
    tables = conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s ORDER BY 1", [schema]).fetchall()
    found: list[tuple[str, str]] = []
    for (table,) in tables:
        query = sql.SQL("SELECT concat_ws(' ', t.xmin, t.xmax, t.ctid, t::text) FROM {}.{} AS t ORDER BY 1")
        rows = conn.execute(query.format(sql.Identifier(schema), sql.Identifier(table))).fetchall()
        found += [(table, row) for (row,) in rows]
    return found


def test_c10_a_schema_made_by_hand_from_the_printed_sql_takes_runs_over_the_users_own_connection(
    database_url: str, empty_schema: str, settings: Settings
) -> None:
    with psycopg.connect(database_url) as user:
        user.execute(migration_sql(empty_schema).encode())
    theirs = Settings(database_url=database_url, schema=empty_schema)
    database = Database(theirs)
    client = Client(database, theirs)

    with psycopg.connect(database_url) as user:
        client.enqueue(NewRun(id="run-1", task="shop.fulfil"), conn=user)

    assert client.get("run-1").task == "shop.fulfil"
    database.close()


def fulfil(ctx: TaskContext) -> None:
    """Stand for a durable body."""
