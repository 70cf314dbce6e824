"""Attempts: the history of grants, opened and closed by the statements of `runs`."""

from __future__ import annotations

from umt_durable import sql
from umt_durable.database import Connection
from umt_durable.records import AttemptRecord
from umt_durable.states import AttemptOutcome
from umt_durable.store.guard import Guard


def look(guard: Guard) -> tuple[bool, AttemptOutcome | None]:
    """Say whether an attempt of ours is still there, and how it ended: the answer to a lost reply of its end (I24).

    One that is gone ended by its own word: a later generation of the run deletes those, and leaves what was lost.
    """
    row = sql.maybe(guard.conn, "look_attempt", **guard.key)
    return row is not None, AttemptOutcome(row[0]) if row and row[0] else None


def of_run(conn: Connection, run: int) -> list[AttemptRecord]:
    """Read the grants of a run, the first one first."""
    return [
        AttemptRecord(*sql.typed((*row[:5], conn.vault.readable(row[5])), 4, AttemptOutcome))
        for row in sql.many(conn, "list_attempts", run=run)
    ]
