"""What a failing test shows of the database: every row that matters, without payloads."""

from __future__ import annotations

import psycopg
from psycopg import sql

_ORDER = {
    "run": "no",
    "attempt": "run, fence",
    "step": "run, seq",
    "wait": "run, seq",
    "fact": "at",
    "outbox_event": "next_attempt_at",
    "worker": "started_at",
}
_MOST = 100
_PAYLOADS = ["args", "envelope", "digest", "result", "payload", "fingerprint", "codec"]


def rows(url: str, schema: str) -> str:
    """Return the rows of a schema as text, one a line; a table that cannot be read says why."""
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=3, options="-c statement_timeout=5s") as conn:
            return "\n".join(_table(conn, table, schema) for table in _ORDER)
    except psycopg.OperationalError as error:
        return f"(the database does not answer: {error})"


def _table(conn: psycopg.Connection[tuple[object, ...]], table: str, schema: str) -> str:
    query = sql.SQL("SELECT (jsonb_strip_nulls(to_jsonb(r)) - %s::text[])::text FROM {} r ORDER BY {} LIMIT {}")
    filled = query.format(sql.Identifier(schema, table), sql.SQL(_ORDER[table]), sql.Literal(_MOST))
    try:
        found = conn.execute(filled, (_PAYLOADS,)).fetchall()
    except psycopg.Error as error:
        return f"{table}: {str(error).strip()}"
    return "\n".join([f"{table}: {len(found)}", *(f"    {row[0]}" for row in found)])
