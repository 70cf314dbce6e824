"""Users' Django connections. The one module that knows Django, which it imports only for something of Django's.

A Django connection belongs to one thread. As `conn` it is the transaction that is open on it; as a binding it stands
for its alias, and the step is executed on the connection that its own thread has under that alias.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg

from umt_durable import forked
from umt_durable.bound import BUSY, ENDED, Bound, UserTransaction, is_over
from umt_durable.errors import AutocommitError, DefinitionError
from umt_durable.payloads import Vault

logger = logging.getLogger(__name__)

_INHERITED = (
    "Django gave a connection that was opened before this process was forked, and that its parent may use: close its"
    " pool in a handler of `worker_process_init`"
)
_left_to_parent: list[object] = []  # never closed: their sockets belong to the parent


def is_django(value: object) -> bool:
    """Say whether something is a Django connection, or `django.db.connection`, which stands for one."""
    if "django.db" not in sys.modules:
        return False
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.utils.connection import ConnectionProxy

    # Caches have proxies of the same class.
    return isinstance(value, BaseDatabaseWrapper) or (
        isinstance(value, ConnectionProxy) and hasattr(value, "in_atomic_block")
    )


class DjangoCaller:
    """The transaction that is open on a Django connection."""

    def __init__(self, conn: Any) -> None:
        _check(conn)
        conn.validate_thread_sharing()
        if not conn.in_atomic_block and conn.get_autocommit():
            raise AutocommitError(
                f"the Django connection {conn.alias!r} is in autocommit with no transaction open: use"
                f" `with transaction.atomic(using={conn.alias!r}):`"
            )
        conn.validate_no_broken_transaction()
        conn.ensure_connection()
        self._conn = conn

    def one(self, query: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Run a statement and return its row; errors are those of Django."""
        with self._conn.wrap_database_errors, _cursor(self._conn.connection) as cursor:
            return cursor.execute(query.encode(), params).fetchone()

    def after_commit(self, hook: Callable[[], None]) -> None:
        """Have a hook called after the commit, once however often it is added, unless its savepoint is rolled back."""
        conn = self._conn
        if not conn.in_atomic_block:  # DATABASES has AUTOCOMMIT off: Django has no hooks then
            return
        open_now = set(conn.savepoint_ids)
        if not any(added == hook and set(within) <= open_now for within, added, *_ in conn.run_on_commit):
            conn.on_commit(hook, robust=True)


@contextmanager
def transaction(binding: Any, schema: str, vault: Vault) -> Iterator[UserTransaction]:
    """Open a transaction on the connection that this thread has under the alias of a binding.

    Keeps: a connection that is too old by CONN_MAX_AGE, or fails its health check, is replaced before and closed
    after, as Django does around requests; one that a forked process has from its parent is left alone.
    Errors: DefinitionError for another database than Postgres, psycopg 2, a connection with a transaction open, or
    AUTOCOMMIT off, since `atomic` then does not commit.
    """
    from django.db import connections
    from django.db.transaction import atomic

    conn = connections[binding.alias]
    _check(conn)
    if conn.in_atomic_block:
        raise DefinitionError(BUSY)
    if not conn.settings_dict["AUTOCOMMIT"]:
        raise DefinitionError(f"AUTOCOMMIT is off for Django's database {conn.alias!r}: its `atomic` does not commit")
    _drop_unusable(conn)
    conn.close_if_unusable_or_obsolete()
    conn.ensure_connection()
    if forked.is_inherited(conn.connection.fileno()):
        raise DefinitionError(_INHERITED)
    if not is_over(conn.connection):
        raise DefinitionError(BUSY)
    try:
        with atomic(using=conn.alias):
            yield _opened(conn, schema, vault)
    finally:
        conn.close_if_unusable_or_obsolete()


def cause(error: BaseException) -> BaseException | None:
    """Return what the driver said behind an error of Django's; None for another one's."""
    if "django.db" not in sys.modules:
        return None
    from django.db import Error, InterfaceError

    if not isinstance(error, Error):
        return None
    # Django says by itself that a connection was closed, as the driver would.
    return error.__cause__ or (psycopg.InterfaceError(str(error)) if isinstance(error, InterfaceError) else None)


def leave_thread() -> None:
    """Close the Django connections of a thread that ends: nobody else could."""
    if "django.db" in sys.modules:
        from django.db import connections

        connections.close_all()


def _check(conn: Any) -> None:
    """Refuse what is not Postgres by psycopg 3.

    Errors: DefinitionError.
    """
    if conn.vendor != "postgresql":
        raise DefinitionError(f"Django's database {conn.alias!r} is {conn.vendor}, not PostgreSQL")
    if conn.Database is not psycopg:
        raise DefinitionError(f"Django's database {conn.alias!r} uses psycopg 2: install psycopg 3, which it prefers")


def _drop_unusable(conn: Any) -> None:
    """Have Django forget a connection that is closed, or that is the parent's of this process."""
    raw = conn.connection
    if raw is not None and raw.closed:
        conn.close()
    elif raw is not None and forked.is_inherited(raw.fileno()):
        _left_to_parent.append(raw)
        conn.connection = None


def _cursor(raw: Any) -> psycopg.Cursor[tuple[Any, ...]]:
    """Return a cursor that binds on the server, as our statements expect; Django's binds by itself."""
    return psycopg.Cursor(raw, row_factory=psycopg.rows.tuple_row)


def _opened(conn: Any, schema: str, vault: Vault) -> UserTransaction:
    raw, depth = conn.connection, len(conn.savepoint_ids)
    hooks: list[Any] = []

    def run(query: bytes, params: Any) -> Any:
        with conn.wrap_database_errors:
            return _cursor(raw).execute(query, params)

    def flush() -> None:
        nonlocal hooks
        is_ours = conn.connection is raw and conn.in_atomic_block and len(conn.savepoint_ids) == depth
        if not is_ours or conn.needs_rollback or is_over(raw):
            raise DefinitionError(ENDED)
        hooks = conn.run_on_commit  # Django takes from this very list what it calls, and makes a new one otherwise

    def arrived() -> None:
        while hooks:
            hook = hooks.pop(0)[1]
            try:
                hook()
            except Exception:
                logger.exception("a hook that was to be called after the commit of a step failed")

    return UserTransaction(conn, Bound(schema, vault, run), flush, lambda: bool(raw.closed), arrived)
