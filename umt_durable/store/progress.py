"""Progress: what the bodies of a run have said of how far they are."""

from __future__ import annotations

from collections.abc import Sequence

from umt_durable import sql
from umt_durable.database import Connection
from umt_durable.records import Note, Progress
from umt_durable.store.guard import Guard


def note(guard: Guard, notes: Sequence[Note]) -> bool:
    """Keep what a body has said, each note under its key; False when nothing of it is new, or the grant has ended."""
    rows = sql.count(
        guard.conn,
        "note_progress",
        keys=[one.key for one in notes],
        turns=[one.turn for one in notes],
        statuses=[one.status for one in notes],
        dones=[one.done for one in notes],
        totals=[one.total for one in notes],
        payloads=[one.payload for one in notes],
        **guard.key,
    )
    return rows > 0


def of_run(conn: Connection, run: int) -> list[Progress]:
    """Read what the bodies of a run have said, that of the run itself first."""
    return [
        Progress(key, conn.vault.readable(status) or None, *rest)
        for key, status, *rest in sql.many(conn, "read_progress", run=run)
    ]
