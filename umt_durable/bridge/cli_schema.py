"""`durable migrate`: the one command, beside `serve --role migrate` and `all`, that changes the schema."""

from __future__ import annotations

import click

from umt_durable import migrate as schema_of
from umt_durable.bridge.console import emit, json_option, say
from umt_durable.bridge.durable import Durable
from umt_durable.bridge.project import project_of
from umt_durable.settings import Settings


@click.command()
@click.option(
    "--sql", "as_sql", is_flag=True, help="Print the DDL for an empty database instead; nothing is contacted."
)
@click.option("--schema", metavar="NAME", help="The schema; by default the one the app is configured for.")
@json_option
@click.pass_context
def migrate(ctx: click.Context, as_sql: bool, schema: str | None, as_json: bool) -> None:
    """Bring the schema to the revision of this version.

    Any number of these may run at the same time: they take turns.
    """
    if as_sql and as_json:
        raise click.UsageError("--sql prints SQL: it cannot be combined with --json")
    durable = project_of(ctx).durable("nothing" if as_sql else "database")
    if as_sql:
        click.echo(schema_of.migration_sql(checked(durable, schema)))
        return
    before, after = bring(durable, schema)
    name = checked(durable, schema)
    if as_json:
        emit({"schema": name, "before": before, "after": after}, [], as_json=True)
    else:
        say(told(name, before, after))


def bring(durable: Durable, schema: str | None = None) -> tuple[str | None, str]:
    """Bring a schema to the revision of this code; return the revision before and after.

    Errors: SchemaError when it is ahead; DatabaseUnavailableError; ConfigurationError for a name that is none.
    """
    url, name = durable.database.url, checked(durable, schema)
    before = schema_of.read_revision(url, name)
    return before, schema_of.migrate_engine_schema(url, name)


def told(schema: str, before: str | None, after: str) -> str:
    """Say in one line what a migration did."""
    if before == after:
        return f"schema {schema!r} is at revision {after}; there was nothing to do"
    return f"schema {schema!r} is at revision {after} now" + (f"; it was at {before}" if before else "")


def checked(durable: Durable, schema: str | None) -> str:
    """Return the schema that is meant.

    Errors: ConfigurationError for a name that Postgres would not take as it is.
    """
    return durable.settings.schema if schema is None else Settings(schema=schema).schema
