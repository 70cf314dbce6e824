"""`durable ledger install`: what transaction steps need in a database that does not hold the runs."""

from __future__ import annotations

import click

from umt_durable import ledger as ledgers
from umt_durable.bridge.console import emit, json_option, say


@click.group()
def ledger() -> None:
    """Ledgers in other databases, for transaction steps whose rows are there."""


@ledger.command()
@click.argument("url", metavar="URL", required=False)
@click.option("--role", metavar="ROLE", help="Who executes steps there, if that is not the user who installs.")
@click.option("--sql", "as_sql", is_flag=True, help="Print the statements instead; nothing is contacted.")
@click.option("--schema", metavar="NAME", default=ledgers.SCHEMA, show_default=True, help="The schema of the ledger.")
@json_option
def install(url: str | None, role: str | None, as_sql: bool, schema: str, as_json: bool) -> None:
    """Install a ledger in the database at URL; repeating it changes nothing.

    A password belongs into PGPASSWORD or ~/.pgpass rather than into URL, which others see in the list of processes.
    The user needs CREATE on the database and owns the schema afterwards.
    """
    if as_sql and as_json:
        raise click.UsageError("--sql prints SQL: it cannot be combined with --json")
    if as_sql:
        click.echo(ledgers.ledger_sql(schema, role=role), nl=False)
        return
    if url is None:
        raise click.UsageError("Missing argument 'URL': where the other database is")
    ledgers.install_ledger(url, schema, role=role)
    if as_json:
        emit({"schema": schema, "role": role}, [], as_json=True)
    else:
        say(f"there is a ledger in schema {schema!r}" + (f", and {role} may write to it" if role else ""))
