"""Workers: the leases of processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from umt_durable import sql
from umt_durable.database import Connection
from umt_durable.records import WorkerRecord


def register(
    conn: Connection,
    *,
    id: UUID,
    node: UUID,
    pid: int,
    host: str,
    lease_seconds: float,
    versions: Sequence[str],
    queues: Mapping[str, str] | None = None,
    boottime: float | None = None,
) -> None:
    """Begin a lease under a fresh id.

    Shape: `queues` are those of the declared tasks, for runs that were started without one.
    Units: `boottime` is the running time of the process's machine, in seconds (`clock.boottime`).
    """
    sql.count(
        conn,
        "register_worker",
        id=id,
        node=node,
        pid=pid,
        host=host,
        lease=timedelta(seconds=lease_seconds),
        versions=list(versions),
        queues=json.dumps(dict(queues or {})),
        boottime=boottime,
    )


def renew(
    conn: Connection,
    id: UUID,
    *,
    lease_seconds: float,
    reserved: Mapping[str, int],
    counters: Mapping[str, int],
    claimed: bool,
) -> bool:
    """Prolong a lease; False when it has ended and this id is lost for good."""
    rows = sql.count(
        conn,
        "renew_lease",
        id=id,
        lease=timedelta(seconds=lease_seconds),
        reserved=json.dumps(dict(reserved)),
        counters=json.dumps(dict(counters)),
        claimed=claimed,
    )
    return rows == 1


def is_live(conn: Connection, id: UUID) -> bool:
    """Say whether the database holds a lease as live, whatever its process believes."""
    return bool(sql.one(conn, "worker_is_live", id=id)[0])


def end(conn: Connection, id: UUID, *, counters: Mapping[str, int] | None = None) -> None:
    """Give a lease up at once."""
    sql.count(conn, "end_lease", id=id, counters=None if counters is None else json.dumps(dict(counters)))


def end_process(conn: Connection, *, node: UUID, pid: int, seen: float) -> list[UUID]:
    """End the leases of a process that is known to have ended; return the workers it was.

    Units: `seen` is the running time of its machine at which it was seen to have ended; a worker that began later is
    another process with the same number.
    """
    return [row[0] for row in sql.many(conn, "end_leases_of_process", node=node, pid=pid, seen=seen)]


def next_end(conn: Connection) -> float | None:
    """Return in how many seconds the first lease that holds a run ends."""
    seconds: float | None = sql.one(conn, "next_lease_end")[0]
    return seconds


def live_versions(conn: Connection) -> set[str]:
    """Return what live workers declare: `task` and `task@version`."""
    return {row[0] for row in sql.many(conn, "live_versions")}


def reserved(conn: Connection) -> dict[str, int]:
    """Sum the hints that live processes hold in hand, by queue."""
    return {row[0]: int(row[1]) for row in sql.many(conn, "reserved_hints")}


def recent(conn: Connection, *, limit: int = 200) -> list[WorkerRecord]:
    """Read live workers and those started within a day, the newest first."""
    return [WorkerRecord(*row) for row in sql.many(conn, "list_workers", limit=limit)]


def sum_counters(conn: Connection) -> dict[str, int]:
    """Sum the counters of all processes still remembered."""
    return dict(sql.many(conn, "sum_counters"))


def forget(conn: Connection) -> int:
    """Delete workers that ended more than a day ago; return how many."""
    return sql.count(conn, "forget_workers")
