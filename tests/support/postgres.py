"""Postgres servers for the tests: a private one of this test process, and an older one that somebody runs already.

Each test process works in a database of its own and each test in a schema of its own, made by the migrations in some
fifty milliseconds, so that any number of test processes share one server and no test sees another's rows.
"""

from __future__ import annotations

import os
import re
import uuid
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tests.support import guard
from tests.support.ports import answers
from tests.support.proxy import Proxy
from tests.support.wait import until
from umt_durable.settings import libpq_url

VARIABLE = "DURABLE_TEST_DATABASE_URL"
_LOCAL_PORT = 5432
_OLDEST = 150000
_NAME = "the_schema_to_be_named"

Mode = Literal["fast", "immediate"]


class UnusableError(Exception):
    """The server that was named for the tests cannot be used."""


class Postgres(Protocol):
    """A server, and in it a database of this test process."""

    name: str

    @property
    def url(self) -> str:
        """Return the URL of the database, with host and port."""

    def restart(self, mode: Mode = "fast") -> None:
        """Stop the server and start it on the same port; return once it answers."""

    def close(self) -> None:
        """Remove what this test process had there."""


class PrivatePostgres:
    """A server of this test process alone, from the wheel, on a loopback port; it does not wait for its disk."""

    name = "private"

    def __init__(self, home: Path) -> None:
        from umt_durable.embedded import PostgresServer  # imported late: unit tests need no wheel

        self._server = PostgresServer(home, durable=False, tcp=True)
        guard.watch(home)
        self._server.start()
        with psycopg.connect(self.url, autocommit=True) as conn:
            # What was acknowledged must survive an immediate stop; a power cut may take it.
            conn.execute(f"ALTER DATABASE {conn.info.dbname} SET synchronous_commit = on".encode())

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def log(self) -> Path:
        """Return where the server writes its log."""
        return self._server.log

    def stop(self, mode: Mode = "fast") -> None:
        """Stop the server; `immediate` makes the next start recover from the log, as after a crash."""
        self._server.stop(mode)

    def start(self) -> None:
        """Start the server on the port it had."""
        self._server.start()

    def restart(self, mode: Mode = "fast") -> None:
        self.stop(mode)
        self.start()

    def close(self) -> None:
        self.stop("immediate")


class SharedPostgres:
    """A server that is not ours: a database of our own in it, removed at the end; it is never stopped."""

    def __init__(self, server_url: str) -> None:
        self._admin = server_url
        self._database = f"umt_test_{os.getpid()}_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(server_url, autocommit=True) as conn:
            conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._database)))
            self.name = f"postgres-{conn.info.server_version // 10000}"

    @property
    def url(self) -> str:
        parts = conninfo_to_dict(self._admin)
        login = str(parts.get("user", "postgres"))
        if parts.get("password"):
            login += f":{parts['password']}"
        host, port = address(self._admin)
        return f"postgresql://{login}@{host}:{port}/{self._database}"

    def restart(self, mode: Mode = "fast") -> None:
        raise AssertionError("a shared Postgres is never restarted; use the fixture `private_postgres`")

    def close(self) -> None:
        with psycopg.connect(self._admin, autocommit=True) as conn:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(self._database)))


def address(url: str) -> tuple[str, int]:
    """Return host and port of a database URL."""
    parts = conninfo_to_dict(libpq_url(url))
    return str(parts.get("host") or "127.0.0.1"), int(parts.get("port") or _LOCAL_PORT)


def through(url: str, proxy: Proxy) -> str:
    """Return a database URL that leads through a proxy."""
    host, port = address(url)
    assert f"{host}:{port}" in url
    return url.replace(f"{host}:{port}", f"{proxy.host}:{proxy.port}", 1)


def find_older() -> tuple[str | None, str]:
    """Return the URL of a reachable server that the tests may use beside the private one, and what was found.

    The one that DURABLE_TEST_DATABASE_URL names must answer; without it one on the usual loopback port is looked for.
    Errors: UnusableError when the named one does not answer or is too old.
    """
    named = os.environ.get(VARIABLE)
    if named is None and not answers(_LOCAL_PORT):
        return None, f"no Postgres answers on loopback port {_LOCAL_PORT} and {VARIABLE} is not set"
    url = libpq_url(named) if named else f"postgresql://postgres@127.0.0.1:{_LOCAL_PORT}/postgres"
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=5) as conn:
            version = conn.info.server_version
            may = conn.execute("SELECT rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    except psycopg.OperationalError as error:
        if named is not None:
            raise UnusableError(f"{VARIABLE} is set, but: {error}") from error
        return None, f"the Postgres on loopback port {_LOCAL_PORT} lets us not in: {str(error).strip()[-120:]}"
    if version < _OLDEST or may != (True,):
        if named is not None:
            raise UnusableError(f"{VARIABLE}: version {version} (15 is needed), may create databases: {may}")
        return None, f"the Postgres on loopback port {_LOCAL_PORT} is too old or lets us make no database"
    return url, f"Postgres {version // 10000}"


def make_schema(url: str, name: str) -> None:
    """Make a schema at the revision of this code, by the statements of the migrations in one go."""
    assert re.fullmatch(r"[a-z0-9_]+", name), name
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(_migrations().replace(_NAME, name).encode())


@cache
def _migrations() -> str:
    from umt_durable.migrate import migration_sql  # imported late: Alembic is slow, and unit tests need none

    return migration_sql(_NAME)


def drop_schema(url: str, name: str) -> None:
    """Remove a schema with all it holds; whoever still holds a lock in the database is disconnected."""

    def drop() -> bool:
        with psycopg.connect(url, autocommit=True, options="-c lock_timeout=2s") as conn:
            try:
                conn.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))
            except psycopg.errors.LockNotAvailable:
                others = b"datname = current_database() AND pid <> pg_backend_pid()"
                conn.execute(b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE " + others)
                return False
            return True

    until(drop, timeout=30, what=f"schema {name} to be dropped")
