"""`umt-durable migrate`: what it makes, beside others, and the SQL that makes the same."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

import umt_durable
from tests.integration.cli_kit import Cli, cli_for, one_line, set_revision
from tests.support import guard
from tests.support.postgres import drop_schema
from tests.support.wait import until
from umt_durable.migrate import head
from umt_durable.settings import Settings

PROGRAM = str(Path(sys.executable).with_name("umt-durable"))
ODD = ("plain", "with space", "50%", "50%% of it", 'say "it"', "o'clock", "a:b", "{schema}", "Ünï")

# Everything that makes a schema what it is, without the names and numbers that differ between two of them.
SHAPE = {
    "columns": """
        SELECT table_name, ordinal_position, column_name, data_type, is_nullable, column_default, is_identity
          FROM information_schema.columns WHERE table_schema = %(name)s""",
    "constraints": """
        SELECT c.conrelid::regclass::text, c.conname, c.contype, pg_get_constraintdef(c.oid)
          FROM pg_constraint AS c JOIN pg_namespace AS n ON n.oid = c.connamespace WHERE n.nspname = %(name)s""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = %(name)s",
    "functions": """
        SELECT p.proname, pg_get_function_identity_arguments(p.oid), pg_get_functiondef(p.oid)
          FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = %(name)s""",
    "views": "SELECT viewname, definition FROM pg_views WHERE schemaname = %(name)s",
    "options": """
        SELECT c.relname, c.relkind, c.reloptions
          FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = %(name)s""",
}


@pytest.fixture
def empty(database_url: str) -> Iterator[Settings]:
    """Return settings for a schema that does not exist yet."""
    name = f"cli_{uuid.uuid4().hex[:12]}"
    yield Settings(database_url=database_url, schema=name)
    drop_schema(database_url, name)


@pytest.fixture
def cli(empty: Settings) -> Iterator[Cli]:
    with cli_for(empty) as cli:
        yield cli


def shape(url: str, name: str) -> dict[str, list[tuple[object, ...]]]:
    """Return what a schema holds, with its name taken out of every text."""
    quoted = '"' + name.replace('"', '""') + '"'
    found: dict[str, list[tuple[object, ...]]] = {}
    with psycopg.connect(url, autocommit=True, options="-c search_path=pg_catalog") as conn:
        for kind, query in SHAPE.items():
            rows = conn.execute(query.encode(), {"name": name}).fetchall()
            # Postgres quotes a name in its texts only where it must.
            texts: list[tuple[object, ...]] = [
                tuple(str(cell).replace(quoted + ".", "S.").replace(f"{name}.", "S.") for cell in row) for row in rows
            ]
            found[kind] = sorted(texts, key=repr)
        # Each schema has a secret of its own.
        shown = "CASE WHEN name = 'signing_key' THEN length(value::text)::text ELSE value::text END"
        seed = sql.SQL("SELECT name, " + shown + " FROM {}.setting ORDER BY 1").format(sql.Identifier(name))
        found["settings"] = conn.execute(seed).fetchall()
        version = sql.SQL("SELECT version_num FROM {}.umt_version").format(sql.Identifier(name))
        found["revision"] = conn.execute(version).fetchall()
    return found


def test_c8_migrate_makes_a_schema_and_a_second_time_finds_nothing_to_do(cli: Cli, empty: Settings) -> None:
    first, second = cli("migrate").stdout, cli("migrate").stdout

    assert first == f"schema '{empty.schema}' is at revision {head()} now\n"
    assert second == f"schema '{empty.schema}' is at revision {head()}; there was nothing to do\n"
    assert cli.lines("status")


def test_a5_c8_the_function_connects_migrates_and_leaves_no_connection(empty: Settings) -> None:
    url = str(empty.database_url)
    ours = sql.SQL(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )

    with psycopg.connect(url, autocommit=True) as conn:
        before = conn.execute(ours).fetchone()
        revision = umt_durable.migrate_engine_schema(url, empty.schema)
        until(lambda: conn.execute(ours).fetchone() == before, what="the migrator's connection to end")

    assert revision == head()
    assert shape(url, empty.schema)["revision"] == [(head(),)]


def test_sql_as_json_is_a_wrong_command_line(cli: Cli) -> None:
    refused = cli("migrate", "--sql", "--json", status=2)

    assert refused.stdout == ""
    assert "--sql prints SQL: it cannot be combined with --json" in refused.stderr


@pytest.mark.private_postgres_only
@pytest.mark.parametrize("odd", ODD)
def test_b2_the_sql_makes_the_same_schema_as_migrating_whatever_its_name(cli: Cli, database_url: str, odd: str) -> None:
    name = f"{odd} {uuid.uuid4().hex[:8]}"
    try:
        cli("migrate", "--schema", name)
        migrated = shape(database_url, name)
        drop_schema(database_url, name)
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute(cli("migrate", "--sql", "--schema", name).stdout.encode())
        written = shape(database_url, name)
    finally:
        drop_schema(database_url, name)

    assert migrated["columns"]
    assert migrated["functions"]
    assert written == migrated


@pytest.mark.parametrize("odd", ["with space", "50% off"])
def test_b2_runs_live_in_a_schema_with_an_odd_name(database_url: str, odd: str) -> None:
    name = f"{odd} {uuid.uuid4().hex[:8]}"
    try:
        with cli_for(Settings(database_url=database_url, schema=name)) as cli:
            cli("migrate")
            run = cli.tasks.one_step.enqueue(1).id
            cli("signal", run, "go")
            assert [line[1] for line in cli.lines("runs")] == [run]
            assert ["runs", "ready", "1"] in cli.lines("status")
    finally:
        drop_schema(database_url, name)


def test_concurrent_migrators_take_turns(empty: Settings, cli: Cli) -> None:
    environ = guard.clean_environment(
        {"DURABLE_DATABASE_URL": str(empty.database_url), "DURABLE_SCHEMA": empty.schema, "DURABLE_EMBEDDED": "0"}
    )
    running = [
        subprocess.Popen([PROGRAM, "migrate"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    done = [process.communicate(timeout=120) for process in running]

    assert [process.returncode for process in running] == [0] * 4, done
    assert shape(str(empty.database_url), empty.schema)["revision"] == [(head(),)]
    assert cli.lines("status")


def test_a_schema_that_is_ahead_is_left_alone(cli: Cli, empty: Settings) -> None:
    cli("migrate")
    set_revision(str(empty.database_url), empty.schema, "9999")

    told = one_line(cli("migrate", status=1))

    assert "newer than this code's" in told
    assert shape(str(empty.database_url), empty.schema)["revision"] == [("9999",)]


@pytest.mark.private_postgres_only
@pytest.mark.parametrize("name", ["", "x" * 64, "a\0b"])
def test_a_name_that_is_none_is_refused(cli: Cli, name: str) -> None:
    assert "is no Postgres schema name" in one_line(cli("migrate", "--schema", name, status=1))


@pytest.mark.private_postgres_only
def test_the_sql_is_printed_without_a_database() -> None:
    with cli_for(Settings(database_url="postgresql://shop@127.0.0.1:1/shop", schema="shop")) as cli:
        printed = cli("migrate", "--sql").stdout

    assert 'CREATE SCHEMA IF NOT EXISTS "shop"' in printed
    assert printed.rstrip().endswith("COMMIT;")
