"""Ledgers: how a transaction step is exactly once in a database that does not hold the runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from umt_durable import texts
from umt_durable.errors import ConfigurationError, DatabaseUnavailableError, DefinitionError, SchemaError
from umt_durable.redaction import redact_text
from umt_durable.session import Binding, check_binding
from umt_durable.settings import Settings, libpq_url

SCHEMA: Final = "umt_durable_ledger"
INSTALL: Final = "umt-durable ledger install URL"

# Installed by several at once, each waits for the others: CREATE … IF NOT EXISTS alone would fail in all but one.
_DDL: Final = """
SELECT pg_advisory_xact_lock(hashtextextended({schema_text}, 0));
CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE IF NOT EXISTS {schema}.entry (
    ledger text NOT NULL,
    run_id text NOT NULL,
    step text NOT NULL,
    fence bigint NOT NULL,
    claim uuid NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    result bytea,
    digest bytea,
    done_at timestamptz,
    CONSTRAINT entry_pkey PRIMARY KEY (ledger, run_id, step),
    CONSTRAINT entry_done_has_result
        CHECK ((done_at IS NULL) = (result IS NULL) AND (result IS NULL) = (digest IS NULL))
);
CREATE INDEX IF NOT EXISTS entry_done_at ON {schema}.entry (done_at);
COMMENT ON TABLE {schema}.entry IS 'Transaction steps of durable runs whose rows are in this database: one row a step';
"""
_GRANT: Final = """
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE ON {schema}.entry TO {role};
"""


@dataclass(frozen=True, slots=True)
class Ledger:
    """A binding of `step.transaction` to another database than that of the runs, in which a ledger is installed.

    Shape: `binding` is what `on` takes otherwise, leading to that database. `name` says whose runs these are:
    installations of ours that share one ledger have a name each, which never changes. `schema` holds the table.
    Errors: DefinitionError.
    """

    binding: Binding
    name: str = "default"
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.binding is None or isinstance(self.binding, Ledger):
            raise DefinitionError("a ledger is over a binding of its own: an Engine, a URL, a Django connection …")
        check_binding(self.binding)
        if isinstance(self.binding, str) and "://" not in self.binding:
            raise DefinitionError(f"the binding of a ledger is given itself, not by a name such as {self.binding!r}")
        if self.name is None:
            raise DefinitionError("the name of a ledger is missing")
        texts.check("the name of a ledger", self.name)
        _check_schema(self.schema)


def ledger_sql(schema: str = SCHEMA, *, role: str | None = None) -> str:
    """Return the SQL that installs a ledger, for those who run DDL by hand; repeating it changes nothing.

    Shape: `role` is the database role that executes steps there, if that is not the owner.
    Errors: ConfigurationError.
    """
    _check_schema(schema)
    if role is not None and (not isinstance(role, str) or not role):
        raise ConfigurationError(f"the role of a ledger is the name of a database role, not {role!r}")
    names = {"schema": sql.Identifier(schema), "schema_text": sql.Literal(schema)}
    text = sql.SQL(_DDL).format(**names).as_string(None)
    if role is not None:
        text += sql.SQL(_GRANT).format(schema=sql.Identifier(schema), role=sql.Identifier(role)).as_string(None)
    return f"BEGIN;{text}COMMIT;\n"


def install_ledger(url: str, schema: str = SCHEMA, *, role: str | None = None) -> None:
    """Install a ledger in a database; repeating it changes nothing.

    Shape: as `ledger_sql`. The user owns the schema afterwards; it needs CREATE on the database.
    Errors: ConfigurationError for a URL, schema or role that is none; SchemaError when this user may not;
    DatabaseUnavailableError.
    """
    text = ledger_sql(schema, role=role)
    if not isinstance(url, str):
        raise ConfigurationError(f"the URL of the database of a ledger is text, not {type(url).__name__}")
    try:
        with psycopg.connect(libpq_url(url), connect_timeout=5, autocommit=True) as conn:
            conn.execute(text.encode())
    except psycopg.ProgrammingError as error:
        told = redact_text(str(error)).strip().splitlines()[0]
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            raise SchemaError(
                f"this user may not install a ledger in schema {schema!r}: {told}. It needs CREATE on the database, or"
                " to own the schema"
            ) from None
        raise ConfigurationError(f"a ledger cannot be installed in schema {schema!r}: {told}") from None
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(f"Postgres cannot be reached: {redact_text(str(error))}") from None


def _check_schema(schema: str) -> None:
    Settings(schema=schema)
