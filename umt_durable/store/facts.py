"""Facts: one INSERT each, in the caller's transaction; never updated but for `routed_at`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from umt_durable import sql
from umt_durable.database import Connection
from umt_durable.records import Completed, FactRecord
from umt_durable.states import CompletionOutcome


def signal(conn: Connection, parameters: dict[str, Any]) -> UUID | None:
    """Say a fact to one run; None when there is no such run.

    Shape: `parameters` are run, name, payload, actor, dedupe, fact (its id, made by the caller).
    """
    row = sql.maybe(conn, "signal_run", **parameters)
    return None if row is None else row[0]


def ask(conn: Connection, parameters: dict[str, Any]) -> UUID | None:
    """Say a fact of a reserved name to one run; None when there is no such run. Shape: as `signal`."""
    row = sql.maybe(conn, "ask_run", **parameters)
    return None if row is None else row[0]


def complete(conn: Connection, parameters: dict[str, Any]) -> Completed:
    """Say what a begun step ended in.

    Shape: `parameters` are run, nesting, key, generation, payload, actor, fact (its id, made by the caller).
    """
    return read_completed(sql.one(conn, "complete_step", **parameters))


def read_completed(row: tuple[Any, ...]) -> Completed:
    """Read the reply of the statement that completes a step."""
    return Completed(None if row[0] is None else UUID(str(row[0])), CompletionOutcome(row[1]))


def may_apply(conn: Connection) -> bool:
    """Say whether this user may apply what a fact says, and not only say it."""
    return bool(sql.one(conn, "may_apply", name=conn.schema)[0])


def emit(conn: Connection, parameters: dict[str, Any]) -> UUID:
    """Say a fact under a name and key.

    Shape: `parameters` are name, key, payload, actor, dedupe, fact (its id, made by the caller).
    """
    fact: UUID = sql.one(conn, "emit_fact", **parameters)[0]
    return fact


def look_for(conn: Connection, address: str, *, run: int, of_run: bool, mode: str) -> UUID | None:
    """Find the fact that satisfies a wait; the caller holds the address lock, taken in an earlier statement."""
    row = sql.maybe(conn, "look_for_fact", address=address, run=run, of_run=of_run, mode=mode)
    return None if row is None else row[0]


def contradicting(conn: Connection, address: str, fact: UUID, *, run: int) -> int:
    """Count the routed facts at an address that say something else than a given one, and that a run has not read."""
    return int(sql.one(conn, "contradicting_facts", address=address, fact=fact, run=run)[0])


def unrouted(conn: Connection, *, limit: int) -> list[tuple[UUID, str, str]]:
    """List (id, address, name) of the oldest facts no router has finished with."""
    return [(row[0], row[1], row[2]) for row in sql.many(conn, "unrouted_facts", limit=limit)]


def get_unrouted(conn: Connection, fact: UUID) -> FactRecord | None:
    """Read a fact that is still to be routed."""
    row = sql.maybe(conn, "unrouted_fact", fact=fact)
    return None if row is None else FactRecord(*row)


def unrouted_at(conn: Connection, address: str) -> list[UUID]:
    """List the unrouted facts of an address whose lock the caller holds."""
    return [row[0] for row in sql.many(conn, "unrouted_at", address=address)]


def cancels_of_children(conn: Connection, run_id: str, *, limit: int) -> list[UUID]:
    """List the unrouted cancels of the live children that end with a run which has ended."""
    return [row[0] for row in sql.many(conn, "cancels_of_children", run=run_id, limit=limit)]


def mark_all_routed(conn: Connection, ids: Sequence[UUID]) -> int:
    """Record that some facts of one address have been dealt with."""
    return sql.count(conn, "mark_all_routed", facts=list(ids))


def mark_routed(conn: Connection, fact: UUID) -> None:
    """Record that a fact has been dealt with; the last statement of its transaction."""
    sql.count(conn, "mark_routed", fact=fact)


def of_run(conn: Connection, pattern: str) -> list[tuple[UUID, str, str | None, datetime, datetime | None]]:
    """List (id, name, actor, at, routed_at) of the facts whose address matches a LIKE pattern."""
    return [(row[0], row[1], row[2], row[3], row[4]) for row in sql.many(conn, "facts_of_run", pattern=pattern)]
