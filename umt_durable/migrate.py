"""The schema: its revision, and the one door to change it. Alembic and SQLAlchemy are imported only here."""

from __future__ import annotations

import io
import sys
import threading
from contextlib import redirect_stdout
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from umt_durable.errors import FOR_APPS, MIGRATE, DatabaseUnavailableError, SchemaError
from umt_durable.redaction import redact_text
from umt_durable.settings import libpq_url
from umt_durable.sql import quote

if TYPE_CHECKING:
    from alembic.config import Config

VERSION_TABLE = "umt_version"

# Alembic works on globals of its module, and offline SQL goes through `sys.stdout`: one thread at a time.
_ALEMBIC = threading.Lock()


def ddl(text: str, schema: str) -> str:
    """Render DDL for Alembic: the quoted schema name put in, colons in it kept from being read as parameters."""
    return text.replace("{schema}", quote(schema).replace(":", r"\:"))


def scripts() -> Path:
    """Return the folder of the migrations: beside the package in a source tree, inside it in a wheel."""
    source = Path(__file__).resolve().parent.parent / "migrations"
    if (source / "env.py").is_file():
        return source
    return Path(str(resources.files("umt_durable") / "_migrations"))


@cache
def head() -> str:
    """Return the revision this code needs. Reads the script files' names only, no Alembic."""
    return max(path.name.split("_", 1)[0] for path in (scripts() / "versions").glob("[0-9]*.py"))


def migrate_engine_schema(url: str, schema: str = "umt_durable") -> str:
    """Bring a schema to the revision of this code and return that revision.

    Errors: DatabaseUnavailableError; SchemaError when the schema is ahead of this code, or the user lacks a right.
    Keeps: concurrent migrators of one schema take turns by an advisory lock in the migrating transaction.
    """
    from alembic import command
    from sqlalchemy import exc

    current = read_revision(url, schema)
    if current is not None and current > head():
        raise SchemaError(_mismatch(schema, current))
    try:
        with _ALEMBIC:
            command.upgrade(_config(url, schema), "head")
    except exc.OperationalError as error:
        raise DatabaseUnavailableError(f"the migration stopped: {redact_text(str(error.orig))}") from error
    except exc.ProgrammingError as error:
        if not isinstance(error.orig, psycopg.errors.InsufficientPrivilege):
            raise
        text = f"this user may not migrate schema {schema!r}: {redact_text(str(error.orig))}"
        raise SchemaError(f"{text}. It needs CREATE on the database, or to own the schema") from error
    return head()


def migration_sql(schema: str = "umt_durable") -> str:
    """Return the SQL that makes an empty database ready, for those who run DDL by hand."""
    from alembic import command

    out = io.StringIO()
    with _ALEMBIC, redirect_stdout(out):
        command.upgrade(_config("postgresql://", schema, out), "head", sql=True)
    return out.getvalue()


def read_revision(url: str, schema: str) -> str | None:
    """Return the revision a schema is at, or None where there is none.

    Errors: DatabaseUnavailableError, without the URL's password; SchemaError when this user may not read it.
    """
    try:
        with psycopg.connect(libpq_url(url), connect_timeout=5, autocommit=True) as conn:
            exists = conn.execute(
                "SELECT to_regclass(%s) IS NOT NULL", (f"{quote(schema)}.{VERSION_TABLE}",)
            ).fetchone()
            if not exists or not exists[0]:
                return None
            query = sql.SQL("SELECT version_num FROM {}.{}").format(
                sql.Identifier(schema), sql.Identifier(VERSION_TABLE)
            )
            row = conn.execute(query).fetchone()
            return str(row[0]) if row else None
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(f"Postgres cannot be reached: {redact_text(str(error))}") from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaError(f"this user may not read schema {schema!r}: {redact_text(str(error))}") from None


def check_schema(url: str, schema: str) -> None:
    """Refuse a schema that is not at this code's revision.

    Errors: SchemaError with the command to run; DatabaseUnavailableError.
    """
    current = read_revision(url, schema)
    if current != head():
        raise SchemaError(_mismatch(schema, current))


def _mismatch(schema: str, current: str | None) -> str:
    if current is None:
        return f"the database has no schema {schema!r} yet: run `{MIGRATE}` ({FOR_APPS})"
    if current < head():
        return f"schema {schema!r} is at revision {current}, this code needs {head()}: run `{MIGRATE}` ({FOR_APPS})"
    return (
        f"schema {schema!r} is at revision {current}, which is newer than this code's {head()}:"
        " install the version of umt-durable that made it"
    )


def _config(url: str, schema: str, out: io.StringIO | None = None) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=out or sys.stdout)
    config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    config.attributes.update(url=libpq_url(url), schema=schema)
    return config
