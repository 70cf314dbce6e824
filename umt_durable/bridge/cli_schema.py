"""`durable migrate`: the one command, beside `serve --role migrate` and `all`, that changes the schema; and `durable
grants`, which says who may do what in it."""

from __future__ import annotations

from typing import Final

import click

from umt_durable import grants as rights_in
from umt_durable import migrate as schema_of
from umt_durable.bridge.console import emit, json_option, say
from umt_durable.bridge.durable import Durable
from umt_durable.bridge.project import project_of
from umt_durable.settings import Settings

_WHO: Final = {
    rights_in.Role.APP: "an app does: start, signal, cancel and look up runs",
    rights_in.Role.WORKER: "workers, relay, maintenance and operators do",
    rights_in.Role.UI: "a page does: read the views",
}


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


@click.command()
@click.option("--app-role", metavar="ROLE", help="Who starts, signals and cancels runs, from Python or SQL.")
@click.option("--worker-role", metavar="ROLE", help="Workers, relay and maintenance, and who operates them.")
@click.option("--ui-role", metavar="ROLE", help="Who looks at runs, without payloads.")
@click.option("--sql", "as_sql", is_flag=True, help="Print the statements instead; nothing is contacted.")
@click.option("--schema", metavar="NAME", help="The schema; by default the one the app is configured for.")
@json_option
@click.pass_context
def grants(
    ctx: click.Context,
    app_role: str | None,
    worker_role: str | None,
    ui_role: str | None,
    as_sql: bool,
    schema: str | None,
    as_json: bool,
) -> None:
    """Give database roles what they need in the schema, and take away what else they have there.

    Without a role all three: umt_app, umt_worker, umt_ui. They have to exist. Done as the owner of the schema;
    `migrate` does it again when the schema changes.
    """
    if as_sql and as_json:
        raise click.UsageError("--sql prints SQL: it cannot be combined with --json")
    given = {rights_in.Role.APP: app_role, rights_in.Role.WORKER: worker_role, rights_in.Role.UI: ui_role}
    roles = {role: name for role, name in given.items() if name} or {role: role.usual for role in rights_in.Role}
    durable = project_of(ctx).durable("nothing" if as_sql else "database")
    name = checked(durable, schema)
    if as_sql:
        click.echo("BEGIN;\n" + "".join(f"{one};\n" for one in rights_in.statements(name, roles)) + "COMMIT;")
        return
    rights_in.apply(durable.database.url, name, roles)
    if as_json:
        emit({"schema": name, "roles": {str(role): grantee for role, grantee in roles.items()}}, [], as_json=True)
    else:
        for role, grantee in roles.items():
            say(f"{grantee} may do in schema {name!r} what {_WHO[role]}")


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
