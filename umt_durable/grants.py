"""What each kind of process may do in the schema: four database roles, with no more than they need.

    owner     whoever migrates; owns everything, and is not used at run time
    app       starts, signals, cancels, looks up: by functions alone, without a right on any table
    worker    workers, relay and maintenance, and the people who operate them
    ui        looks at everything but payloads and tokens: by views alone

`apply` grants exactly this to roles that exist, and `migrate` grants it again when the schema has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

import psycopg
from psycopg import sql

from umt_durable.errors import ConfigurationError, DatabaseUnavailableError, SchemaError
from umt_durable.redaction import redact_text
from umt_durable.settings import libpq_url

SETTING: Final = "roles"
"""Under this name the schema keeps to which roles it was granted."""


class Role(StrEnum):
    """A kind of process that a database role is for; `umt_` and this is the role's usual name."""

    APP = "app"
    WORKER = "worker"
    UI = "ui"

    @property
    def usual(self) -> str:
        """Return the name that the role has where nothing else is said."""
        return f"umt_{self}"


READ: Final = ("SELECT",)
APPEND: Final = ("SELECT", "INSERT")
CHANGE: Final = ("SELECT", "INSERT", "UPDATE")
ALL: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")

VIEWS: Final = (
    *(
        "run_view",
        "attempt_view",
        "step_view",
        "progress_view",
        "wait_view",
        "fact_view",
        "outbox_view",
        "op_view",
        "worker_view",
    ),
    *("key_view", "audit_view", "pause_view", "payload_keys"),
)

RELATIONS: Final[Mapping[Role, Mapping[str, tuple[str, ...]]]] = {
    Role.APP: {"umt_version": READ, "run_view": READ},
    Role.WORKER: {
        **dict.fromkeys(("umt_version", "setting", *VIEWS), READ),
        **dict.fromkeys(("audit", "fact_read"), APPEND),  # what was written there is never changed
        "idempotency_key": ("SELECT", "UPDATE"),  # made by `enqueue_run`
        **dict.fromkeys(("run", "fact", "op_ledger", "broker_marker"), CHANGE),
        **dict.fromkeys(("attempt", "step", "progress", "wait", "outbox_event", "worker", "pause"), ALL),
    },
    Role.UI: dict.fromkeys(("umt_version", *VIEWS), READ),
}
"""The rights on tables and views."""

FUNCTIONS: Final[Mapping[Role, tuple[str, ...] | None]] = {
    Role.APP: (
        *("enqueue", "signal", "emit", "cancel", "emit_outbox", "lookup"),
        *("check_text", "check_payload", "check_start"),
        *("enqueue_run", "signal_run", "emit_fact", "emit_event", "keep_message", "now"),
        *("complete_step", "signing_key"),
    ),
    Role.WORKER: None,
    Role.UI: ("now", "key_of"),
}
"""The functions that a role may call; None is all of them."""

_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('umt_durable.migrate'), hashtext({schema_text}))"
_REMEMBER: Final = """
INSERT INTO {schema}.setting AS s (name, value) VALUES ({setting}, {roles}::jsonb)
ON CONFLICT (name) DO UPDATE SET value = s.value || excluded.value
"""
_EXECUTE: Final = """
DO $$ DECLARE f regprocedure; BEGIN
    FOR f IN SELECT p.oid FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
              WHERE n.nspname = {schema_text} AND ({names}::text[] IS NULL OR p.proname = ANY({names}::text[]))
    LOOP EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', f, {role_text}); END LOOP;
END $$
"""


def statements(schema: str, roles: Mapping[Role, str]) -> list[str]:
    """Return the SQL that gives each role what it may and takes away whatever else it has in the schema.

    Shape: `roles` are the names of database roles, which have to exist. Run all of it in one transaction.
    """
    name = sql.Identifier(schema)
    found: list[sql.Composable] = [sql.SQL(_LOCK).format(schema_text=sql.Literal(schema))]
    for role, grantee in roles.items():
        found += _of_role(name, schema, role, grantee)
    named = json.dumps({str(role): grantee for role, grantee in roles.items()})
    found.append(sql.SQL(_REMEMBER).format(schema=name, setting=sql.Literal(SETTING), roles=sql.Literal(named)))
    return [one.as_string(None).strip() for one in found]


def _of_role(schema: sql.Identifier, text: str, role: Role, grantee: str) -> Iterator[sql.Composable]:
    to = sql.Identifier(grantee)
    for kind in ("TABLES", "SEQUENCES", "FUNCTIONS"):
        yield sql.SQL("REVOKE ALL ON ALL {kind} IN SCHEMA {schema} FROM {to}").format(
            kind=sql.SQL(kind), schema=schema, to=to
        )
    yield sql.SQL("REVOKE ALL ON SCHEMA {schema} FROM {to}").format(schema=schema, to=to)
    yield sql.SQL("GRANT USAGE ON SCHEMA {schema} TO {to}").format(schema=schema, to=to)
    for relation, rights in RELATIONS[role].items():
        yield sql.SQL("GRANT {rights} ON {schema}.{relation} TO {to}").format(
            rights=sql.SQL(", ").join(map(sql.SQL, rights)), schema=schema, relation=sql.Identifier(relation), to=to
        )
    names = FUNCTIONS[role]
    yield sql.SQL(_EXECUTE).format(
        schema_text=sql.Literal(text),
        names=sql.SQL("NULL") if names is None else sql.Literal(list(names)),
        role_text=sql.Literal(grantee),
    )


def apply(url: str, schema: str, roles: Mapping[Role, str]) -> None:
    """Grant to each of these database roles what it needs in a schema, and nothing else; repeating it changes nothing.

    Errors: ConfigurationError when a role does not exist, with the statement that makes it; SchemaError when there is
    no schema yet, or this user does not own it; DatabaseUnavailableError.
    """
    try:
        with psycopg.connect(libpq_url(url), connect_timeout=5) as conn:
            missing = _missing(conn, roles.values())
            if missing:
                made = " ".join(
                    sql.SQL("CREATE ROLE {};").format(sql.Identifier(one)).as_string(None) for one in missing
                )
                raise ConfigurationError(
                    f"there is no database role {', '.join(missing)}: a superuser makes it by {made}"
                )
            _execute(conn, statements(schema, roles))
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(f"Postgres cannot be reached: {redact_text(str(error))}") from None
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
        raise SchemaError(
            f"the rights in schema {schema!r} cannot be granted: {redact_text(str(error)).splitlines()[0]}."
            " That is done by its owner, the user who migrates, after `umt-durable migrate`"
        ) from None


def renew(conn: psycopg.Connection[Any], schema: str) -> None:
    """Grant again, in the transaction of a migration, what was granted in a schema before; roles that are gone are left
    out."""
    query = sql.SQL("SELECT value FROM {}.setting WHERE name = {}").format(sql.Identifier(schema), sql.Literal(SETTING))
    row = conn.execute(query).fetchone()
    if row is None:
        return
    known = {Role(kind): str(name) for kind, name in row[0].items() if kind in set(Role)}
    gone = set(_missing(conn, known.values()))
    kept = {role: name for role, name in known.items() if name not in gone}
    _execute(conn, statements(schema, kept))


def needed(role: Role) -> tuple[list[str], list[str]]:
    """Return what a role needs on tables and views, as two lists of one length: their names, and one right on each."""
    pairs = [(relation, right) for relation, rights in RELATIONS[role].items() for right in rights]
    return [relation for relation, _ in pairs], [right for _, right in pairs]


def _missing(conn: psycopg.Connection[Any], names: Any) -> list[str]:
    query = "SELECT name FROM unnest(%s::text[]) AS name WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name)"
    return [row[0] for row in conn.execute(query, [list(names)]).fetchall()]


def _execute(conn: psycopg.Connection[Any], texts: list[str]) -> None:
    for text in texts:
        conn.execute(text.encode())
