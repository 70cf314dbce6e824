"""Pauses: tasks and queues whose ready runs are taken by nobody."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from umt_durable import sql, texts
from umt_durable.database import Connection
from umt_durable.states import Scope


@dataclass(frozen=True, slots=True)
class Pause:
    """A paused task or queue: who paused it, why and when. `runs` are the ready ones that wait."""

    scope: Scope
    name: str
    actor: str
    reason: str | None
    at: datetime
    runs: int

    def __str__(self) -> str:
        why = "" if self.reason is None else f": {self.reason}"
        return f"{self.scope} {self.name} is paused by {self.actor} since {self.at.isoformat(timespec='seconds')}{why}"


class Resumed(NamedTuple):
    """A pause that was ended at a moment, and whose runs may wait yet."""

    scope: Scope
    name: str
    resumed_at: datetime


def parameters(scope: Scope, name: str, *, audit: UUID, actor: str, reason: str | None) -> dict[str, Any]:
    """Return the named parameters of the statements `pause_all` and `resume_all`."""
    kept = {"actor": texts.storable(actor), "reason": texts.storable(reason)}
    return {"scope": str(scope), "name": name, "audit": audit, **kept}


def act(conn: Connection, statement: str, given: dict[str, Any]) -> bool:
    """Pause or resume, by `pause_all` or `resume_all`; whether that changed anything."""
    return bool(sql.one(conn, statement, **given)[0])


def listed(conn: Connection) -> list[Pause]:
    """Read what is paused, the oldest pause first."""
    return [Pause(*sql.typed(row, 0, Scope)) for row in sql.many(conn, "list_pauses")]


def resumed(conn: Connection) -> list[Resumed]:
    """List what was resumed and whose runs may wait yet."""
    return [Resumed(*sql.typed(row, 0, Scope)) for row in sql.many(conn, "resumed_pauses")]


def forget(conn: Connection, ended: Resumed) -> bool:
    """Forget a pause whose runs go on; False when it was paused or resumed anew."""
    return sql.count(conn, "forget_pause", **ended._asdict()) == 1


def knows_queue(conn: Connection, name: str) -> bool:
    """Say whether a live worker's task or a run that has not ended has a queue of this name."""
    return bool(sql.one(conn, "knows_queue", name=name)[0])
