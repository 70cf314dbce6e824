"""Broker markers: the incarnation of each broker that was last seen."""

from __future__ import annotations

from umt_durable import sql
from umt_durable.database import Connection


def read(conn: Connection, broker: str) -> str | None:
    """Return the incarnation recorded for a broker."""
    row = sql.maybe(conn, "read_marker", broker=broker)
    return None if row is None else str(row[0])


def write(conn: Connection, broker: str, incarnation: str) -> None:
    """Record the incarnation seen at a broker."""
    sql.count(conn, "write_marker", broker=broker, incarnation=incarnation)


def swap(conn: Connection, broker: str, *, expected: str, incarnation: str) -> bool:
    """Replace the incarnation recorded for a broker if it is still the expected one; False when it is another."""
    return sql.maybe(conn, "swap_marker", broker=broker, expected=expected, incarnation=incarnation) is not None
