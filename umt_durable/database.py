"""Connections to Postgres: ours, in autocommit, with time limits, repeated after a lost reply."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format
from psycopg.sql import SQL, Identifier

from umt_durable import telemetry
from umt_durable.errors import (
    FOR_APPS,
    MIGRATE,
    ConfigurationError,
    DatabaseBusyError,
    DatabaseUnavailableError,
    PrivilegeError,
    SchemaError,
)
from umt_durable.payloads import PLAIN, Vault
from umt_durable.redaction import redact_text
from umt_durable.settings import Settings, libpq_url

if TYPE_CHECKING:
    from psycopg.abc import RV, Buffer, PQGen
    from psycopg_pool import ConnectionPool

T = TypeVar("T")

STATEMENT_TIMEOUT_MS, LOCK_TIMEOUT_MS, IDLE_IN_TRANSACTION_MS = 10_000, 3_000, 15_000
CONNECT_TIMEOUT_SECONDS = 5
POOL_WAIT_SECONDS = 1.0
"""How long a pooled connection is waited for, and made, in one go. Then it is asked for anew: that alone makes the pool
try again at once, where left to itself it waits longer each time."""
POOL_NAME = "umt_durable"
RETRY_SECONDS = 30.0

# A reply was lost, or the server asks for another try. Everything we run may be repeated blindly (I24).
TRANSIENT = (psycopg.OperationalError, psycopg.InterfaceError)
NOT_MIGRATED = (pg.InvalidSchemaName, pg.UndefinedTable, pg.UndefinedFunction, pg.UndefinedColumn)


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection of ours: in autocommit, READ COMMITTED stated in every BEGIN, and bound to one schema.

    Units: `patience_seconds` bounds the wait for one answer; the connection is of no further use then. Without it a
    network that swallows packets holds the caller for as long as TCP tries, which may be a quarter of an hour.
    """

    schema: str = "umt_durable"
    vault: Vault = PLAIN
    patience_seconds: float | None = None

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Consume a generator that talks to the server; psycopg calls this for every statement."""
        if self.patience_seconds is not None and timeout is None:
            gen = _impatient(gen, self.patience_seconds)
        return super().wait(gen, interval, timeout)


def _impatient(gen: PQGen[RV], seconds: float) -> PQGen[RV]:
    """Pass a generator on, but give up when its time is over and nothing has come."""
    deadline = time.monotonic() + seconds
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline:  # psycopg reports "nothing yet" at each interval
                raise psycopg.OperationalError(f"no answer within {seconds:g} s")
            wanted = gen.send(ready)
    except StopIteration as end:
        answer: RV = end.value
        return answer


def is_refusal(error: BaseException) -> bool:
    """Say whether the server refused what was asked, and will again, though psycopg files the error with outages.

    Of the classes that psycopg makes OperationalErrors these are: a limit of the program (54: a value too large for an
    index, a statement too deep), a limit somebody configured (53400: temporary files), a wrong use of a function,
    savepoint or object (2F, 38, 39, 3B, 55000). A full disk, too many connections, a shutdown, a failed log-in pass by.
    """
    state = getattr(error, "sqlstate", None) or ""
    return state[:2] in ("2F", "38", "39", "3B", "54") or state in ("53400", "55000")


def after_fork(method: Callable[[], None]) -> None:
    """Have a bound method called in each forked child, as long as its object lives.

    A lock that another thread holds at the moment of the fork stays locked in the child for ever: it must be replaced.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=call)


class Database:
    """The connections of one process to one schema. What they store and read is sealed and held by its vault.

    Keeps: no connection crosses a fork; a child that inherits this object opens its own.
    """

    def __init__(self, settings: Settings, vault: Vault = PLAIN) -> None:
        self._settings = settings
        self.vault = vault
        self._lock = threading.Lock()
        self._pool: ConnectionPool[Connection] | None = None
        self._inherited: list[object] = []  # never closed: their sockets belong to the parent
        after_fork(self._leave_to_parent)

    @property
    def schema(self) -> str:
        """Return the schema all statements are rendered for."""
        return self._settings.schema

    @property
    def url(self) -> str:
        """Return the libpq URL. It may hold a password: never log it."""
        if self._settings.database_url is None:
            raise ConfigurationError(
                "no database is configured: set DURABLE_DATABASE_URL or durable_database_url; to try things out without"
                " one, use `from umt_durable import app, durable`, which run on an embedded pair"
            )
        url = libpq_url(self._settings.database_url)
        try:
            conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            reason = redact_text(str(error)).strip()
            raise ConfigurationError(
                f"DURABLE_DATABASE_URL (durable_database_url) is no Postgres URL: {reason}"
            ) from None
        return url

    def connect(self, *, application: str = "umt_durable", patience_seconds: float | None = None) -> Connection:
        """Open a connection outside the pool, for a thread that keeps it.

        Errors: DatabaseUnavailableError, without the URL's password, after one try.
        """
        try:
            conn = self._prepared(Connection.connect(self.url, **self._options(application)))
        except psycopg.OperationalError as error:
            raise DatabaseUnavailableError(f"Postgres cannot be reached: {redact_text(str(error))}") from None
        conn.patience_seconds = patience_seconds
        return conn

    def listen(self) -> Connection:
        """Open a connection that hears what `notify` says; only for waiting on its socket.

        Errors: DatabaseUnavailableError, after one try.
        """
        conn = self.connect(application="umt_durable listen", patience_seconds=CONNECT_TIMEOUT_SECONDS)
        try:
            conn.execute(SQL("LISTEN {}").format(Identifier(self._settings.channel)))
        except TRANSIENT as error:
            conn.close()
            raise DatabaseUnavailableError(f"Postgres cannot be reached: {redact_text(str(error))}") from None
        return conn

    @contextmanager
    def reading(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Open a connection for code of the application's that may only read, and close it at the end.

        Shape: in autocommit, with our time limits; through a pooler in one transaction, since what is set for a session
        would stay with the pooler's connection. It is none of the pool's: whatever is changed on it ends with it.
        Errors: DatabaseUnavailableError, after one try.
        """
        options = self._options("umt_durable check")
        if self._settings.pooler:
            options["autocommit"] = False
        else:
            options["options"] += " -c default_transaction_read_only=on"
        try:
            conn = psycopg.Connection.connect(self.url, **options)
        except psycopg.OperationalError as error:
            raise DatabaseUnavailableError(f"Postgres cannot be reached: {redact_text(str(error))}") from None
        with closing(conn):
            conn.read_only = True
            yield conn

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Borrow a pooled connection in autocommit: each statement commits by itself."""
        with self._opened().connection() as conn:
            yield conn

    def do(self, work: Callable[[Connection], T], *, seconds: float = RETRY_SECONDS) -> T:
        """Run work on a connection in autocommit, again after a lost reply.

        Units: `seconds` bounds how long an unreachable server is tried.
        Errors: DatabaseUnavailableError when the time is over; the outcome of the last try is then unknown.
        PrivilegeError for a right that this user lacks.
        DatabaseBusyError instead when the last try was stopped by a lock or by its time limit: it had no effect. What
        the server refuses for good (`is_refusal`, and all that is no OperationalError) is raised at once as it is.
        """
        deadline, pause = time.monotonic() + seconds, 0.02
        while True:
            try:
                with self.connection() as conn:
                    return work(conn)
            except NOT_MIGRATED as error:
                raise SchemaError(
                    f"schema {self.schema!r} is missing or not at this code's revision: run `{MIGRATE}` ({FOR_APPS})"
                ) from error
            except pg.InsufficientPrivilege as error:
                raise PrivilegeError(
                    f"this database user may not do that: {redact_text(str(error)).splitlines()[0]}"
                    " (`umt-durable grants` gives each kind of process what it needs)"
                ) from error
            except TRANSIENT as error:
                if is_refusal(error):
                    raise
                _note(error)
                if time.monotonic() + pause > deadline:
                    raise self._given_up(error) from error
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, 1.0)

    def _given_up(self, error: Exception) -> DatabaseUnavailableError:
        """Return the error to raise when the time is over; the pool only says that it has no connection, not why."""
        if isinstance(error, pg.LockNotAvailable | pg.QueryCanceled):
            return DatabaseBusyError(f"Postgres stopped the statement: {redact_text(str(error))}")
        if "couldn't get a connection" in str(error):
            try:
                self.connect().close()
            except DatabaseUnavailableError as reason:
                return reason
        return DatabaseUnavailableError(f"Postgres did not answer: {redact_text(str(error))}")

    def atomically(self, work: Callable[[Connection], T], *, seconds: float = RETRY_SECONDS) -> T:
        """Run work in one short READ COMMITTED transaction, again after a lost reply, lost COMMIT replies included."""

        def transaction(conn: Connection) -> T:
            with conn.transaction():
                return work(conn)

        return self.do(transaction, seconds=seconds)

    def notify(self) -> None:
        """Wake relays and maintenance that listen. An accelerator only: a failure is left to the poll."""
        if self._settings.notify == "off" or self._settings.pooler:
            return
        try:
            with self.connection() as conn:
                conn.execute("SELECT pg_notify(%s, '')", (self._settings.channel,))
        except TRANSIENT as error:
            _note(error)

    def close(self) -> None:
        """Close the pool of this process. The object opens a new one when it is used again."""
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.close()

    def _leave_to_parent(self) -> None:
        self._inherited.append(self._pool)
        self._pool, self._lock = None, threading.Lock()

    def _opened(self) -> ConnectionPool[Connection]:
        pool = self._pool
        if pool is not None:
            return pool
        from psycopg_pool import ConnectionPool  # imported late: clients that only read settings need none

        with self._lock:
            if self._pool is None:
                logging.getLogger("psycopg.pool").addFilter(_not_of_our_pools)  # the same one is added once
                self._pool = ConnectionPool(
                    self.url,
                    name=POOL_NAME,
                    connection_class=Connection,
                    kwargs=self._options("umt_durable"),
                    configure=self._configure,
                    min_size=0,
                    max_size=self._settings.pool_size,
                    max_idle=300,
                    timeout=POOL_WAIT_SECONDS,
                    reconnect_timeout=POOL_WAIT_SECONDS,
                    num_workers=1,
                    open=True,
                )
            return self._pool

    def _options(self, application: str) -> dict[str, Any]:
        options: dict[str, Any] = {
            "autocommit": True,
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "application_name": application,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        }
        if self._settings.pooler:
            # PgBouncer refuses start-up options; the roles carry these limits there.
            options["prepare_threshold"] = None
        else:
            options["prepare_threshold"] = 1
            options["options"] = (
                f"-c statement_timeout={STATEMENT_TIMEOUT_MS} -c lock_timeout={LOCK_TIMEOUT_MS}"
                f" -c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_MS}"
            )
        return options

    def _prepared(self, conn: Connection) -> Connection:
        self._configure(conn)
        return conn

    def _configure(self, conn: Connection) -> None:
        conn.schema = self._settings.schema
        conn.vault = self.vault
        if not self.vault.is_plain:
            conn.adapters.register_loader("bytea", _loader(self.vault))
        conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED


def _loader(vault: Vault) -> type[Loader]:
    """Return what reads bytes so that sealed ones can be opened where they are used: few of them are."""

    class VaultLoader(Loader):
        format = Format.BINARY

        def load(self, data: Buffer) -> bytes:
            return vault.hold(bytes(data))

    return VaultLoader


def _not_of_our_pools(record: logging.LogRecord) -> bool:
    """Keep the pool from telling of each attempt of ours; whoever met the outage tells of it once."""
    about = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (about == POOL_NAME or isinstance(about, Connection))


def _note(error: Exception) -> None:
    """Count what was seen. Deadlocks among our own transactions are defects (I23) and have their own counter."""
    if isinstance(error, pg.DeadlockDetected | pg.SerializationFailure):
        telemetry.count(telemetry.Counter.SYSTEM_RETRY)
    else:
        telemetry.count(telemetry.Counter.LOST_REPLY)
