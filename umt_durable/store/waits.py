"""Waits: registered under the lock of their address, settled once under the lock of their run (I8, I9)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, TypeAlias
from uuid import UUID

from umt_durable import sql
from umt_durable.database import Connection
from umt_durable.records import WaitEntry
from umt_durable.states import WaitState
from umt_durable.store.guard import Guard


def run_address(run_id: str, name: str) -> str:
    """Return the address of facts said to one run; the SQL function `signal_run` computes the same text."""
    return json.dumps(["run", run_id, name], ensure_ascii=False)


def key_address(name: str, key: str) -> str:
    """Return the address of facts emitted under a name and key."""
    return json.dumps(["key", name, key], ensure_ascii=False)


def _space(conn: Connection) -> str:
    return f"umt_durable.address/{conn.schema}"


def lock_address(conn: Connection, address: str) -> None:
    """Take the lock of an address until the transaction ends. Look for facts only in a later statement."""
    sql.one(conn, "lock_address", space=_space(conn), address=address)


def try_lock_address(conn: Connection, address: str) -> bool:
    """Take the lock of an address if nobody holds it."""
    return bool(sql.one(conn, "try_lock_address", space=_space(conn), address=address)[0])


def register(
    guard: Guard, *, key: str, seq: int, name: str, address: str, mode: str, timeout: timedelta | None
) -> bool | None:
    """Record a wait, once, and say whether a cancel is pending; None when fenced. The caller holds the address lock."""
    row = sql.maybe(
        guard.conn,
        "register_wait",
        key=key,
        seq=seq,
        name=name,
        address=address,
        mode=mode,
        timeout=timeout,
        **guard.key,
    )
    return None if row is None else bool(row[0])


def settle(
    conn: Connection, run: int, key: str, *, state: WaitState, fact: UUID | None = None, payload: bytes | None = None
) -> bool:
    """Give a pending wait of a locked run its outcome; False when it has one."""
    return sql.maybe(conn, "settle_wait", run=run, key=key, state=state, fact=fact, payload=payload) is not None


def settle_by_check(guard: Guard, key: str, *, payload: bytes) -> bool | None:
    """Give a pending wait the answer of its check; say whether a cancel is pending; None when fenced."""
    row = sql.maybe(guard.conn, "settle_wait_by_check", key=key, payload=payload, **guard.key)
    return None if row is None else bool(row[0])


def time_out(conn: Connection, run: int) -> list[str]:
    """Time out the overdue waits of a locked run; return their keys."""
    return [row[0] for row in sql.many(conn, "time_out_waits", run=run)]


def pending(conn: Connection, fact: UUID, *, after: tuple[int, str], limit: int) -> list[tuple[int, str]]:
    """List (run, key) of the pending waits that a fact satisfies, after a given one."""
    rows = sql.many(conn, "pending_waits", fact=fact, after_run=after[0], after_key=after[1], limit=limit)
    return [(row[0], row[1]) for row in rows]


def count_settled(conn: Connection, run: int, keys: Sequence[str]) -> int:
    """Of the waits a pass believes pending, count those that are not. The caller holds the run lock."""
    return int(sql.one(conn, "count_settled", run=run, keys=list(keys))[0])


def of_run(conn: Connection, run: int) -> list[WaitEntry]:
    """Read the waits of a run in the order they were registered."""
    return [WaitEntry(*sql.typed(row, 6, WaitState)) for row in sql.many(conn, "read_waits", run=run)]


Place: TypeAlias = tuple[str, int, str]  # address, run and key of a wait
START: Final[Place] = ("", 0, "")


def missed(conn: Connection, *, after: Place, limit: int) -> tuple[list[Place], Place | None]:
    """Look through the next pending waits after a place for those that a routed fact satisfies.

    Shape: (the missed ones, where to go on; None when that was the last of them).
    """
    rows = sql.many(conn, "missed_waits", address=after[0], run=after[1], key=after[2], limit=limit)
    if not rows:
        return [], None
    found: list[Place] = [(row[0], row[1], row[2]) for row in rows if row[3]]
    address, run, key, _, looked_at = rows[-1]
    return found, (address, run, key) if looked_at == limit else None
