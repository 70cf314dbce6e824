"""Settings kept in the schema itself, and its clock."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from umt_durable import sql
from umt_durable.database import Connection


def read(conn: Connection, name: str) -> Any:
    """Return a setting of the schema, or None."""
    row = sql.maybe(conn, "read_setting", name=name)
    return None if row is None else json.loads(row[0])


def signing_key(conn: Connection) -> str | None:
    """Return the schema's own secret, which tokens are signed with where no other is configured; None: it is lost."""
    found: str | None = sql.one(conn, "signing_key")[0]
    return found


def now(conn: Connection) -> datetime:
    """Return the time of the clock that decides."""
    at: datetime = sql.one(conn, "now")[0]
    return at


def server(conn: Connection) -> tuple[datetime, float]:
    """Return when the server started, and its own clock in seconds."""
    started, seconds = sql.one(conn, "read_server")
    return started, seconds


def limit_lock_wait(conn: Connection, *, milliseconds: int) -> None:
    """Let the statements of this transaction wait for a lock no longer than that."""
    sql.one(conn, "limit_lock_wait", limit=f"{milliseconds}ms")
