"""Waits: registered under the lock of their address, settled once under the lock of their run (I8, I9)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, TypeAlias
from uuid import UUID

from umt_durable import sql
from umt_durable.database import Connection
from umt_durable.records import Awaited, WaitEntry
from umt_durable.states import WaitState
from umt_durable.store.guard import Guard
from umt_durable.store.journal import INLINE_BYTES, MOST_BYTES

TIMER: Final = '["timer"]'
"""Where a timer waits: no fact has this address."""


def run_address(run_id: str, name: str) -> str:
    """Return the address of facts said to one run; the SQL function `ask_run` computes the same text."""
    return json.dumps(["run", run_id, name], ensure_ascii=False)


def key_address(name: str, key: str) -> str:
    """Return the address of facts emitted under a name and key."""
    return json.dumps(["key", name, key], ensure_ascii=False)


def _space(conn: Connection) -> str:
    return f"umt_durable.address/{conn.schema}"


def lock_address(conn: Connection, address: str) -> None:
    """Take the lock of an address until the transaction ends. Look for facts only in a later statement."""
    sql.one(conn, "lock_address", space=_space(conn), address=address)


def lock_addresses(conn: Connection, addresses: Sequence[str]) -> None:
    """Take the locks of several addresses, in one order whoever takes them, until the transaction ends."""
    sql.one(conn, "lock_addresses", space=_space(conn), addresses=list(addresses))


def try_lock_address(conn: Connection, address: str) -> bool:
    """Take the lock of an address if nobody holds it."""
    return bool(sql.one(conn, "try_lock_address", space=_space(conn), address=address)[0])


def register(
    guard: Guard,
    *,
    key: str,
    seq: int,
    name: str,
    address: str,
    mode: str,
    timeout: timedelta | None,
    until: datetime | None = None,
    part_of: str | None = None,
    need: int | None = None,
    announced: bool = True,
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
        until=until,
        part_of=part_of,
        need=need,
        announced=announced,
        **guard.key,
    )
    return None if row is None else bool(row[0])


def await_answer(
    guard: Guard, *, key: str, seq: int, name: str, address: str, timeout: timedelta | None, token: UUID
) -> bool | None:
    """Record the wait for an answer, once, and say whether a cancel is pending; None when fenced."""
    row = sql.maybe(
        guard.conn,
        "await_answer",
        key=key,
        seq=seq,
        name=name,
        address=address,
        timeout=timeout,
        token=token,
        **guard.key,
    )
    return None if row is None else bool(row[0])


def join_address(run: int, step: str) -> str:
    """Return the address of the facts that children of a step have ended; `finish_run` computes the same text."""
    return json.dumps(["join", run, step], ensure_ascii=False)


def await_children(guard: Guard, *, key: str, seq: int, name: str, address: str) -> bool | None:
    """Record the wait for the children of a step; say whether a cancel is pending; None when fenced."""
    row = sql.maybe(guard.conn, "await_children", key=key, seq=seq, name=name, address=address, **guard.key)
    return None if row is None else bool(row[0])


def joining(conn: Connection, address: str) -> tuple[int, str] | None:
    """Find (run, key) of the pending wait for children at an address."""
    row = sql.maybe(conn, "joining_wait", address=address)
    return None if row is None else (row[0], row[1])


def awaited(conn: Connection, run_id: str, nesting: int | None, key: str) -> Awaited | None:
    """Read the wait for an answer of a run of this id; without a nesting, of the one with the highest."""
    row = sql.maybe(conn, "awaited_answer", id=run_id, nesting=nesting, key=key)
    return None if row is None else Awaited(*sql.typed(row, 3, WaitState))


def unanswered(conn: Connection, run: int) -> list[str]:
    """List the addresses at which a run still waits for an answer, or did so when it ended."""
    return [row[0] for row in sql.many(conn, "awaited_tasks", run=run)]


def give_up_answer(conn: Connection, run: int, step: str) -> bool:
    """Make a locked run's wait for the answer of a step due now; False when it has a deadline, or an outcome."""
    return sql.maybe(conn, "give_up_answer", run=run, step=step) is not None


def announce(guard: Guard, key: str) -> bool | None:
    """Record that a wait's address was handed out; say whether a cancel is pending; None when fenced."""
    row = sql.maybe(guard.conn, "announce_wait", key=key, **guard.key)
    return None if row is None else bool(row[0])


def settle(
    conn: Connection, run: int, key: str, *, state: WaitState, fact: UUID | None = None, payload: bytes | None = None
) -> bool | None:
    """Give a pending wait of a locked run its outcome, and end its group with that if it needs no more.

    Shape: None when the wait has an outcome; otherwise whether the body has to go on: not yet, when it was a part of a
    group that needs more.
    """
    row = sql.maybe(conn, "settle_wait", run=run, key=key, state=state, fact=fact, payload=payload)
    if row is None:
        return None
    return row[0] is None or bool(close_groups(conn, run, [row[0]]))


def settle_by_check(guard: Guard, key: str, *, payload: bytes, part_of: str | None = None) -> bool | None:
    """Give a pending wait the answer of its check; say whether a cancel is pending; None when fenced."""
    with guard.conn.transaction():
        row = sql.maybe(guard.conn, "settle_wait_by_check", key=key, payload=payload, **guard.key)
        if row is not None and part_of is not None:
            close_groups(guard.conn, guard.token.run, [part_of])
    return None if row is None else bool(row[0])


def close_groups(conn: Connection, run: int, groups: Sequence[str]) -> list[str]:
    """Settle the groups of a locked run that have all they need, and cancel what is left of their parts."""
    return [row[0] for row in sql.many(conn, "close_groups", run=run, groups=list(groups))]


def time_out(conn: Connection, run: int) -> list[str]:
    """Time out the overdue waits of a locked run; return their keys.

    Keeps: of a group's parts, and of its own time-out, those count that were due first.
    """
    over = [row[0] for row in sql.many(conn, "time_out_waits", run=run)]
    while (row := sql.maybe(conn, "time_out_part", run=run)) is not None:
        over.append(row[0])
        close_groups(conn, run, [row[1]])
    return over


def contradicted(conn: Connection, fact: UUID, run_id: str) -> list[tuple[int, str]]:
    """List (run, key) of the waits that took the first fact at an address where this one says something else."""
    return [(row[0], row[1]) for row in sql.many(conn, "contradicted_waits", fact=fact, run_id=run_id)]


def pending(conn: Connection, fact: UUID, *, after: tuple[int, str], limit: int) -> list[tuple[int, str, str]]:
    """List (run, key, mode) of the pending waits at a fact's address that may see it, after a given one."""
    rows = sql.many(conn, "pending_waits", fact=fact, after_run=after[0], after_key=after[1], limit=limit)
    return [(row[0], row[1], row[2]) for row in rows]


def count_settled(conn: Connection, run: int, keys: Sequence[str]) -> int:
    """Of the waits a pass believes pending, count those that are not. The caller holds the run lock."""
    return int(sql.one(conn, "count_settled", run=run, keys=list(keys))[0])


def of_run(
    conn: Connection, run: int, keys: Sequence[str] | None = None, *, inline: int | None = INLINE_BYTES
) -> list[WaitEntry]:
    """Read the waits of a run, or those with some keys, in the order they were registered.

    Units: payloads of more than `inline` bytes are left out; None: none is.
    """
    most = MOST_BYTES if inline is None else inline
    rows = sql.many(conn, "read_waits", run=run, keys=None if keys is None else list(keys), inline=most)
    return [WaitEntry(*sql.typed(row, 6, WaitState)) for row in rows]


def payload(conn: Connection, run: int, key: str) -> bytes:
    """Read a payload that the waits were read without."""
    data: bytes = sql.one(conn, "read_payload", run=run, key=key)[0]
    return data


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
