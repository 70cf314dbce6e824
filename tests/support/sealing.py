"""Payload codecs of the tests, and a look through everything a schema holds."""

from __future__ import annotations

from typing import Any

from psycopg import sql

from umt_durable.contrib.encryption import Encryption

OLD, NEW, HASH = bytes(range(32)), bytes(range(32, 64)), b"h" * 32
BOTH = Encryption({"old": OLD, "new": NEW}, hash_key=HASH)
ONLY_OLD = Encryption({"old": OLD}, hash_key=HASH)
ONLY_NEW = Encryption({"new": NEW}, hash_key=HASH)
WITH_OLD = Encryption({"old": OLD, "new": NEW}, hash_key=HASH, encrypt_with="old")
IN_CLEAR = Encryption({"old": OLD, "new": NEW}, hash_key=HASH, encrypt_with=None)

CANARY = "tiger-in-the-journal"


def everything(conn: Any, schema: str) -> str:
    """Return all rows of all tables and views of a schema as text, binary values as text too."""
    relations = conn.execute(
        "SELECT c.relname::text FROM pg_class AS c WHERE c.relnamespace = %s::regnamespace AND c.relkind IN ('r', 'v')",
        (f'"{schema}"',),
    ).fetchall()
    parts = []
    for (name,) in sorted(relations):
        query = sql.SQL("SELECT r::text FROM {} AS r").format(sql.Identifier(schema, name))
        parts += [f"{name}: {row[0]}" for row in conn.execute(query).fetchall()]
    return "\n".join(parts)


def leaks(conn: Any, schema: str, secret: str = CANARY) -> list[str]:
    """Return the rows in which a secret stands, as text or as bytes."""
    marks = (secret, secret.encode().hex())
    return [line for line in everything(conn, schema).splitlines() if any(mark in line for mark in marks)]
