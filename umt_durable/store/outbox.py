"""The outbox: rows claimed by a relay, published, then deleted; users' events are kept as dispatched."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from umt_durable import sql, texts
from umt_durable.database import Connection
from umt_durable.records import OutboxEntry, OutboxEvent, StepMessage
from umt_durable.states import OutboxStatus, RunState
from umt_durable.store.guard import Guard


def claim(conn: Connection, *, relay: UUID, limit: int, hold_seconds: float) -> list[OutboxEntry]:
    """Take the due rows for one relay, higher priority first."""
    hold = timedelta(seconds=hold_seconds)
    rows = sql.many(conn, "claim_events", relay=relay, limit=limit, hold=hold)
    return [OutboxEntry(*sql.typed(row, 12, RunState)) for row in rows]


def age(conn: Connection, *, limit: int) -> int:
    """Raise the priority of rows that more urgent ones keep waiting, by one a minute; return how many rose.

    Shape: at most `limit` of each priority, the oldest first.
    """
    return sql.count(conn, "age_events", limit=limit)


def delete(conn: Connection, ids: Sequence[UUID], *, relay: UUID) -> int:
    """Forget rows that have left, but for those someone has taken since."""
    return sql.count(conn, "delete_events", ids=list(ids), relay=relay)


def delete_claimed(conn: Connection, ids: Sequence[UUID], claims: Sequence[UUID]) -> int:
    """Forget the rows that finished attempts published themselves."""
    return sql.count(conn, "delete_claimed", ids=list(ids), claims=list(claims))


def keep_callback(guard: Guard, *, payload: bytes, hold_seconds: float) -> None:
    """Store the one callback of a run that this guard's transaction has just ended; its finisher publishes it."""
    hold = timedelta(seconds=hold_seconds)
    sql.count(guard.conn, "keep_callback", run=guard.token.run, claim=guard.token.claim, payload=payload, hold=hold)


def emit(conn: Connection, parameters: dict[str, Any]) -> tuple[UUID, str]:
    """Keep a user's event; give the event's id and `created`, `existing` (the key was there) or `conflict`.

    Shape: `parameters` are type, payload, key, event (its id, made by the caller), trace (see `stored_trace`).
    """
    event, outcome = sql.one(conn, "emit_event", **parameters)
    return event, outcome


def dispatched(conn: Connection, ids: Sequence[UUID], *, relay: UUID, run: str | None = None) -> int:
    """Keep users' events as dispatched, with the id of the run they started, but for those someone has taken since."""
    return sql.count(conn, "dispatch_events", ids=list(ids), relay=relay, run=run)


def replay(
    conn: Connection,
    *,
    id: UUID | None = None,
    types: Sequence[str] | None = None,
    reason_begins: str | None = None,
    limit: int,
) -> int:
    """Put dead rows back, as if they had never been tried; return how many. Conditions that are None let all pass."""
    listed = None if types is None else list(types)
    return sql.count(conn, "replay_events", id=id, types=listed, prefix=reason_begins, limit=limit)


def get(conn: Connection, id: UUID) -> OutboxEvent | None:
    """Read one row."""
    row = sql.maybe(conn, "get_event", id=id)
    return None if row is None else OutboxEvent(*sql.typed(row, 2, OutboxStatus))


def dead(conn: Connection, *, type: str | None, before: OutboxEvent | None, limit: int) -> list[OutboxEvent]:
    """Read a page of dead rows, the newest first, after the row `before`."""
    at, last = (None, None) if before is None else (before.created_at, before.id)
    rows = sql.many(conn, "dead_rows", type=type, at=at, before=last, limit=limit)
    return [OutboxEvent(*sql.typed(row, 2, OutboxStatus)) for row in rows]


def keep_message(
    conn: sql.SchemaConnection,
    id: UUID,
    payload: bytes,
    *,
    due: datetime | None = None,
    delay: timedelta | None = None,
    trace: Mapping[str, str] | None = None,
) -> bool:
    """Keep a message of ordinary Celery tasks in the caller's transaction; a relay publishes it once that committed.

    Shape: `payload` is what `bridge.sending.pack` makes; `due` or `delay` say when it may leave, at once without them;
    `trace` is the carrier it belongs to. Repeating it with the same id changes nothing and gives False.
    """
    return bool(sql.one(conn, "keep_message", **message_parameters(id, payload, due=due, delay=delay, trace=trace))[0])


def message_parameters(
    id: UUID,
    payload: bytes,
    *,
    due: datetime | None = None,
    delay: timedelta | None = None,
    trace: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Return the parameters of `keep_message`, for a caller's own connection."""
    return {"id": id, "payload": payload, "due": due, "delay": delay, "trace": stored_trace(trace)}


def stored_trace(trace: Mapping[str, str] | None) -> str | None:
    """Return a carrier as a row keeps it; nothing where there is none."""
    return json.dumps(dict(trace)) if trace else None


def keep_for_step(guard: Guard, message: StepMessage) -> bool:
    """Keep the message of a task that a step awaits, in the transaction that has just written the step.

    Repeating it while its row is there changes nothing and gives False.
    """
    added = sql.count(
        guard.conn,
        "keep_step_message",
        id=message.id,
        run=guard.token.run,
        step=message.step,
        once=message.once,
        payload=message.payload,
        due=message.due,
        delay=message.delay,
        trace=stored_trace(message.trace),
    )
    return added > 0


def withdraw(guard: Guard, id: UUID) -> tuple[bool, bool] | None:
    """Take back the message of an awaited task, unless a relay has begun to publish it; None when fenced.

    Shape: whether a cancel is pending, whether it was taken back: it has not left then, and never will.
    """
    row = sql.maybe(guard.conn, "withdraw_message", id=id, **guard.key)
    return None if row is None else (bool(row[0]), bool(row[1]))


def leave(conn: Connection, ids: Collection[UUID], *, relay: UUID, hold_seconds: float) -> set[UUID]:
    """Note that messages of awaited tasks are about to be published, and hold them anew; return which may be.

    The others are nobody's business any more, or another relay's by now. Repeating it gives the same answer.
    """
    hold = timedelta(seconds=hold_seconds)
    return {row[0] for row in sql.many(conn, "leave_events", ids=list(ids), relay=relay, hold=hold)}


def doubt(conn: Connection, id: UUID, *, relay: UUID, reason: str) -> bool:
    """Put aside a message of which nobody knows whether it left; False when another relay has it."""
    return sql.count(conn, "doubt_event", id=id, relay=relay, reason=texts.storable(reason)) > 0


def drop_left(conn: Connection, ids: Collection[UUID]) -> int:
    """Forget messages that have left and must not do so twice, whoever holds their rows by now."""
    return sql.count(conn, "drop_left", ids=list(ids))


def drop_answered(conn: Connection, *, limit: int) -> int:
    """Forget messages that were put aside, of steps that wait no more."""
    return sql.count(conn, "drop_answered", limit=limit)


def give_back(
    conn: Connection, ids: Sequence[UUID], *, relay: UUID, delay_seconds: float, perhaps: Collection[UUID] = ()
) -> int:
    """Give rows back after an outage, without using up an attempt. Those in `perhaps` may have left all the same."""
    delay = timedelta(seconds=delay_seconds)
    return sql.count(conn, "return_events", ids=list(ids), relay=relay, delay=delay, perhaps=list(perhaps))


def refuse(
    conn: Connection, id: UUID, *, relay: UUID, reason: str, delay_seconds: float, max_attempts: int
) -> OutboxStatus | None:
    """Put a refused row back for later, or aside as dead; None when someone else has it.

    Shape: `reason` may be any text; what Postgres cannot store of it is replaced. Where payloads are sealed, only the
    name of the error is kept.
    """
    row = sql.maybe(
        conn,
        "refuse_event",
        id=id,
        relay=relay,
        reason=texts.storable(conn.vault.headline(reason)),
        delay=timedelta(seconds=delay_seconds),
        max_attempts=max_attempts,
    )
    return None if row is None else OutboxStatus(row[0])


def forget_unsent(conn: Connection, ids: Sequence[UUID]) -> int:
    """Forget messages of awaited tasks that no relay has begun to publish."""
    return sql.count(conn, "forget_unsent", ids=list(ids))


def report_again(conn: Connection, run: int) -> bool:
    """Put the result of a terminal run back into the outbox; False when the run is not terminal."""
    return sql.maybe(conn, "report_again", run=run) is not None


def status(conn: Connection) -> tuple[int, int, float]:
    """Return how many rows are pending and dead, and how long the oldest due one has waited, in seconds."""
    pending, dead, age = sql.one(conn, "outbox_status")
    return pending, dead, max(0.0, age)
