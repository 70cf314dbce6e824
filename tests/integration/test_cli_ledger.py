"""`umt-durable ledger install`: what it makes in another database, and what it says where it cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psycopg
import pytest

from tests.integration.cli_kit import Cli, cli_for, one_line
from umt_durable.ledger import ledger_sql
from umt_durable.settings import Settings


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings) as cli:
        yield cli


def columns(url: str, schema: str) -> list[str]:
    """Return the columns of the ledger in a database."""
    query = "SELECT column_name FROM information_schema.columns WHERE table_schema = %s ORDER BY ordinal_position"
    with psycopg.connect(url, autocommit=True) as conn:
        return [row[0] for row in conn.execute(query, (schema,)).fetchall()]


def test_it_installs_a_ledger_in_the_database_named_and_again_without_effect(cli: Cli, other_database_url: str) -> None:
    first = cli("ledger", "install", other_database_url)
    again = json.loads(cli("ledger", "install", other_database_url, "--json").stdout)

    assert "there is a ledger in schema 'umt_durable_ledger'" in first.output
    assert again == {"schema": "umt_durable_ledger", "role": None}
    assert columns(other_database_url, "umt_durable_ledger")[:3] == ["ledger", "run_id", "step"]


def test_the_sql_makes_the_same_and_needs_no_url(cli: Cli, other_database_url: str) -> None:
    text = cli("ledger", "install", "--sql", "--schema", 'say "it"').stdout
    cli("ledger", "install", other_database_url, "--schema", "by_url")

    assert text == ledger_sql('say "it"')
    with psycopg.connect(other_database_url, autocommit=True) as conn:
        conn.execute(text.encode())
    assert columns(other_database_url, 'say "it"') == columns(other_database_url, "by_url")


def test_what_cannot_be_done_is_told_in_one_line_without_a_password(cli: Cli, other_database_url: str) -> None:
    nobody = one_line(cli("ledger", "install", other_database_url, "--role", "no such role", status=1))
    nowhere = one_line(cli("ledger", "install", "postgresql://ann:hunter2@127.0.0.1:1/books", status=1))
    no_url = one_line(cli("ledger", "install", "not-a-url", status=1))
    cli("ledger", "install", status=2)
    cli("ledger", "install", "--sql", "--json", status=2)

    assert "no such role" in nobody
    assert "cannot be reached" in nowhere
    assert "hunter2" not in nowhere
    assert "not-a-url" in no_url or "cannot be installed" in no_url


def test_a_user_without_the_right_to_create_is_told_what_it_needs(cli: Cli, other_database_url: str) -> None:
    role = f"clerk_{other_database_url[-12:]}"
    with psycopg.connect(other_database_url, autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'pw'".encode())
        try:
            address = other_database_url.rpartition("@")[2]
            told = one_line(cli("ledger", "install", f"postgresql://{role}:pw@{address}", status=1))
        finally:
            conn.execute(f"DROP ROLE {role}".encode())

    assert "It needs CREATE on the database" in told
