"""How services write: one short transaction at a time, with a fail point on each side of its commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from psycopg.errors import LockNotAvailable

from umt_durable import failpoints
from umt_durable.database import Connection, Database
from umt_durable.errors import DatabaseBusyError
from umt_durable.store import settings as schema_settings

T = TypeVar("T")

RETRY_SECONDS = 2.0
"""How long a service tries to reach the database before it leaves its work to the next look."""
LOCK_WAIT_MS = 300
"""How long a service waits for a row that somebody holds; then it goes on with the next one."""


def commit(database: Database, name: str, work: Callable[[Connection], T], *, limited: bool = False) -> T:
    """Run work in one transaction, again after a lost reply, and return what it gave.

    Shape: `name` is the prefix of the fail points; `limited` bounds each wait for a lock by LOCK_WAIT_MS.
    Errors: DatabaseUnavailableError; of these DatabaseBusyError when somebody else held a row for all that time.
    """

    def attempt(conn: Connection) -> T:
        try:
            with conn.transaction():
                if limited:
                    schema_settings.limit_lock_wait(conn, milliseconds=LOCK_WAIT_MS)
                result = work(conn)
                failpoints.point(f"{name}.commit.b")
        except LockNotAvailable as error:
            raise DatabaseBusyError(f"somebody holds a row: {error}") from error
        failpoints.point(f"{name}.commit.r")
        return result

    result = database.do(attempt, seconds=RETRY_SECONDS)
    failpoints.point(f"{name}.commit.a")
    return result
