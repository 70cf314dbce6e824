"""Users' own connections: SQLAlchemy's, psycopg's and, by `django_session.py`, Django's.

The one module that knows SQLAlchemy, which it imports only when a caller hands over something of SQLAlchemy's.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus

from umt_durable import django_session, forked
from umt_durable.bound import BUSY, ENDED, INHERITED, Bound, Caller, UserTransaction, is_over
from umt_durable.database import NOT_MIGRATED, is_refusal
from umt_durable.errors import AutocommitError, DefinitionError
from umt_durable.payloads import PLAIN, Vault
from umt_durable.settings import libpq_url

Binding: TypeAlias = Any
"""Where `step.transaction` writes.

A SQLAlchemy Engine or sessionmaker, a database URL, a callable that opens a psycopg Connection, a Django connection,
which stands for its alias; or a SQLAlchemy Session or psycopg Connection of the caller's, with no transaction open,
which stays open afterwards.
"""

_NOT_MIGRATED_STATES = frozenset(one.sqlstate for one in NOT_MIGRATED)
"""asyncpg has classes of its own."""
_NAMED = re.compile(r"%\((\w+)\)s")


def caller(conn: object) -> Caller:
    """Return the open transaction that a caller gives as `conn`.

    Shape: a SQLAlchemy Session or Connection, a psycopg Connection, or a Django connection.
    Errors: AutocommitError when there is no transaction that our rows could join; DefinitionError for anything else.
    """
    if isinstance(conn, psycopg.Connection):
        return _PsycopgCaller(conn)
    if isinstance(conn, _AsyncPsycopgCaller | _AsyncSqlalchemyCaller):
        return conn
    kind = _sqlalchemy_kind(conn)
    if kind is not None:
        return _SqlalchemyCaller(conn, kind)
    if django_session.is_django(conn):
        return django_session.DjangoCaller(conn)
    given = f"{type(conn).__module__}.{type(conn).__name__}"
    if _is_async(conn):
        raise DefinitionError(f"conn is async ({given}): await the call that begins with `a`, such as `aenqueue`")
    raise DefinitionError(
        f"conn must be a SQLAlchemy Session or Connection, a psycopg Connection or a Django connection, not {given}"
    )


def async_caller(conn: object) -> Caller:
    """Return the open transaction that a caller gives on the running event loop, to be used from another thread.

    Shape: a SQLAlchemy AsyncSession or AsyncConnection, with any driver, or a psycopg AsyncConnection.
    Errors: as `caller`.
    """
    loop = asyncio.get_running_loop()
    if isinstance(conn, psycopg.AsyncConnection):
        return _AsyncPsycopgCaller(conn, loop)
    if django_session.is_django(conn):
        raise DefinitionError(
            "Django's connections are sync: make the call without its `a`, where the transaction is open, inside"
            " `sync_to_async`"
        )
    if not _is_async(conn):
        return caller(conn)
    return _AsyncSqlalchemyCaller(conn, loop)


class _PsycopgCaller:
    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        if conn.autocommit and conn.info.transaction_status is TransactionStatus.IDLE:
            raise AutocommitError(
                "the psycopg connection is in autocommit with no transaction open: use `with conn.transaction():`"
            )
        self._conn = conn

    def one(self, query: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        with self._conn.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            return cursor.execute(query.encode(), params).fetchone()

    def after_commit(self, hook: Callable[[], None]) -> None:
        """psycopg has no such hook: the relay's poll finds the row."""


class _AsyncPsycopgCaller:
    def __init__(self, conn: psycopg.AsyncConnection[Any], loop: asyncio.AbstractEventLoop) -> None:
        if conn.autocommit and conn.info.transaction_status is TransactionStatus.IDLE:
            raise AutocommitError(
                "the psycopg connection is in autocommit with no transaction open: use `async with conn.transaction():`"
            )
        self._conn, self._loop = conn, loop

    def one(self, query: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        async def execute() -> tuple[Any, ...] | None:
            async with self._conn.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
                await cursor.execute(query.encode(), params)
                return await cursor.fetchone()

        return asyncio.run_coroutine_threadsafe(execute(), self._loop).result()

    def after_commit(self, hook: Callable[[], None]) -> None:
        """psycopg has no such hook: the relay's poll finds the row."""


class _AsyncSqlalchemyCaller:
    """Leads to the sync Session or Connection that is inside an async one; its methods run on the caller's loop."""

    def __init__(self, conn: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._conn, self._loop = conn, loop

    def one(self, query: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        work = self._conn.run_sync(lambda inside: caller(inside).one(query, params))
        found: tuple[Any, ...] | None = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return found

    def after_commit(self, hook: Callable[[], None]) -> None:
        """Have the hook called in a thread: it may wait for the database, and the loop must not."""
        loop = self._loop
        work = self._conn.run_sync(lambda inside: caller(inside).after_commit(lambda: _in_thread(loop, hook)))
        asyncio.run_coroutine_threadsafe(work, loop).result()


class _SqlalchemyCaller:
    def __init__(self, conn: Any, kind: str) -> None:
        connection = conn.connection() if kind == "session" else conn
        level = connection.get_execution_options().get("isolation_level") or connection.default_isolation_level
        if str(level).upper() == "AUTOCOMMIT":
            raise AutocommitError(f"the SQLAlchemy {kind} is in AUTOCOMMIT: there is no transaction to join")
        self._connection, self._given, self._kind = connection, conn, kind

    def one(self, query: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        from sqlalchemy import text

        # A cast written as `::` follows some parameters; SQLAlchemy reads `:name` and leaves `::` alone.
        statement = text(_NAMED.sub(r"(:\1)", query).replace("%%", "%"))
        row = self._connection.execute(statement, dict(params)).fetchone()
        return None if row is None else tuple(row)

    def after_commit(self, hook: Callable[[], None]) -> None:
        if self._kind == "session":
            _Hooks.of(self._given).add(hook)


def _in_thread(loop: asyncio.AbstractEventLoop, hook: Callable[[], None]) -> None:
    """Have something done in a thread of a loop."""
    loop.run_in_executor(None, hook)


class _Hooks:
    """What is to be called after the commit of one Session's transaction; it lives as long as that Session.

    Keeps: one listener for each event and Session, however often something is enqueued with it; none on a class or
    factory, which other threads' Sessions would share.
    """

    _KEY = "umt_durable.hooks"

    def __init__(self, session: Any) -> None:
        from sqlalchemy import event

        self._pending: list[Callable[[], None]] = []
        event.listen(session, "after_commit", self._committed)
        event.listen(session, "after_transaction_end", self._ended)

    @classmethod
    def of(cls, given: Any) -> _Hooks:
        """Return those of a Session, or of the one that a scoped_session has at this moment."""
        from sqlalchemy.orm import scoped_session

        session = given() if isinstance(given, scoped_session) else given
        if cls._KEY not in session.info:
            session.info[cls._KEY] = cls(session)
        hooks: _Hooks = session.info[cls._KEY]
        return hooks

    def add(self, hook: Callable[[], None]) -> None:
        """Have a hook called once after the commit, however often it is added before."""
        if hook not in self._pending:
            self._pending.append(hook)

    def _committed(self, session: Any) -> None:
        if session.in_nested_transaction():  # a savepoint was released: nothing is committed yet
            return
        hooks, self._pending = self._pending, []
        for hook in hooks:
            hook()

    def _ended(self, session: Any, transaction: Any) -> None:
        if transaction.parent is None:  # after a commit nothing is left here
            self._pending.clear()


@contextmanager
def transaction(binding: Binding, schema: str, vault: Vault = PLAIN) -> Iterator[UserTransaction]:
    """Open a transaction on a binding; commit it at the end, roll it back on any exception.

    A commit or rollback inside is refused by psycopg and Django; with SQLAlchemy a commit is refused and a rollback
    noticed.
    Keeps: nothing is sent on a connection that a forked process has from its parent; an Engine opens new ones.
    Errors: DefinitionError for something that is no binding, a SQLAlchemy driver other than psycopg, or a psycopg
    connection from before the fork.
    """
    if isinstance(binding, str):
        with psycopg.connect(libpq_url(binding)) as conn, conn.transaction():
            yield _of_psycopg(conn, schema, vault)
    elif isinstance(binding, psycopg.Connection):
        if binding.info.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
            raise DefinitionError(BUSY)
        with binding.transaction():
            yield _of_psycopg(binding, schema, vault)
    elif _sqlalchemy_kind(binding) == "session":
        if binding.in_transaction():
            raise DefinitionError(BUSY)
        with binding.begin(), _commit_refused(binding):
            yield _of_session(binding, schema, vault)
    elif _is_sqlalchemy_source(binding):
        with _open_session(binding) as session, session.begin(), _commit_refused(session):
            yield _of_session(session, schema, vault)
    elif django_session.is_django(binding):
        with django_session.transaction(binding, schema, vault) as tx:
            yield tx
    elif callable(binding):
        with binding() as conn:
            if not isinstance(conn, psycopg.Connection):
                raise DefinitionError(f"the binding opened a {type(conn).__name__}, not a psycopg Connection")
            if forked.is_inherited(conn.fileno()):
                raise DefinitionError(INHERITED)
            with conn.transaction():
                yield _of_psycopg(conn, schema, vault)
    else:
        raise _no_binding(binding)


def check_binding(binding: Binding, where: str = "") -> None:
    """Refuse what leads to no database; `where` begins the text of the error.

    Errors: DefinitionError.
    """
    if not (
        isinstance(binding, str | psycopg.Connection)
        or callable(binding)
        or _sqlalchemy_kind(binding) == "session"
        or _is_sqlalchemy_source(binding)
        or django_session.is_django(binding)
    ):
        raise _no_binding(binding, where)


def _no_binding(binding: object, where: str = "") -> DefinitionError:
    return DefinitionError(
        f"{where}{type(binding).__name__} is no binding: give an Engine, a sessionmaker, a URL, a callable or a Django"
        " connection"
    )


def leave_thread() -> None:
    """Close what users' libraries keep for the thread that is about to end."""
    django_session.leave_thread()


def driver_error(error: BaseException) -> BaseException:
    """Return what the driver said behind an error of SQLAlchemy or Django; another one as it is."""
    return getattr(error, "orig", None) or django_session.cause(error) or error


def is_elsewhere(error: BaseException) -> bool:
    """Say whether an exception means that a statement of ours met a database without what it names."""
    behind = driver_error(error)
    return isinstance(behind, NOT_MIGRATED) or getattr(behind, "sqlstate", None) in _NOT_MIGRATED_STATES


def is_lost(error: BaseException) -> bool:
    """Say whether an exception means that the user's connection broke, so that the fate of its commit is unknown."""
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return not is_refusal(error)
    behind = django_session.cause(error)
    if behind is not None:
        return is_lost(behind)
    if "sqlalchemy" in sys.modules:
        from sqlalchemy import exc

        return isinstance(error, exc.DBAPIError) and (
            error.connection_invalidated or is_lost(error.orig or error.__cause__ or Exception())
        )
    return False


def _of_psycopg(conn: psycopg.Connection[Any], schema: str, vault: Vault) -> UserTransaction:
    def run(query: bytes, params: Any) -> Any:
        return conn.cursor(row_factory=psycopg.rows.tuple_row).execute(query, params)

    def flush() -> None:
        if is_over(conn):
            raise DefinitionError(ENDED)

    return UserTransaction(conn, Bound(schema, vault, run), flush, lambda: bool(conn.closed))


def _of_session(session: Any, schema: str, vault: Vault) -> UserTransaction:
    driver = session.get_bind().dialect.driver
    if driver != "psycopg":
        raise DefinitionError(
            f"step.transaction needs SQLAlchemy's psycopg driver (postgresql+psycopg://), not {driver}"
        )

    def run(query: bytes, params: Any) -> Any:
        return session.connection().exec_driver_sql(query.decode(), params)

    begun, root = session.get_transaction(), session.connection().get_transaction()

    def flush() -> None:
        if session.get_transaction() is not begun or not begun.is_active or not root.is_active:
            raise DefinitionError(ENDED)
        session.flush()
        driver: psycopg.Connection[Any] = session.connection().connection.driver_connection
        if session.connection().get_transaction() is not root or is_over(driver):
            raise DefinitionError(ENDED)

    # What SQLAlchemy knows of a broken connection is in its errors: `is_lost` looks there.
    return UserTransaction(session, Bound(schema, vault, run), flush, lambda: False)


@contextmanager
def _commit_refused(session: Any) -> Iterator[None]:
    """Have a Session refuse to commit; a savepoint may be released."""
    from sqlalchemy import event

    def refuse(session: Any) -> None:
        if not session.in_nested_transaction():
            raise DefinitionError(ENDED)

    event.listen(session, "before_commit", refuse)
    try:
        yield
    finally:
        event.remove(session, "before_commit", refuse)


def _open_session(source: Any) -> Any:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session, sessionmaker

    session = source() if isinstance(source, sessionmaker) else Session(source)
    engine = session.get_bind()
    if isinstance(engine, Engine) and forked.is_first_use(engine):
        engine.dispose(close=False)  # its idle connections are the parent's; those lent out stay with their borrowers
    return session


def _is_sqlalchemy_source(value: object) -> bool:
    if "sqlalchemy" not in sys.modules:
        return False
    from sqlalchemy import Engine
    from sqlalchemy.orm import sessionmaker

    return isinstance(value, Engine | sessionmaker)


def _is_async(value: object) -> bool:
    if isinstance(value, psycopg.AsyncConnection):
        return True
    if "sqlalchemy.ext.asyncio" not in sys.modules:
        return False
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    return isinstance(value, AsyncConnection | AsyncSession | async_scoped_session)


def _sqlalchemy_kind(value: object) -> str | None:
    if "sqlalchemy" not in sys.modules:
        return None
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(value, Session | scoped_session):
        return "session"
    return "connection" if isinstance(value, Connection) else None
