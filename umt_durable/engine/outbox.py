"""What callers do with the outbox: emit events, keep messages, and see to what was given up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar
from uuid import UUID, uuid4

from umt_durable import codec, texts, tracing
from umt_durable.database import Connection
from umt_durable.engine.client import Access
from umt_durable.engine.ops import check_page
from umt_durable.errors import DefinitionError, IdempotencyConflictError, UnknownEventError
from umt_durable.payloads import opened
from umt_durable.records import OutboxEvent
from umt_durable.session import caller
from umt_durable.states import OutboxType
from umt_durable.store import outbox

T = TypeVar("T")

RESERVED: Final = "umt."
REPLAY_BATCH: Final = 1000


def _opened(row: OutboxEvent) -> OutboxEvent:
    """Return a row with its payload as it was before it was sealed, where that can be had here."""
    return replace(row, payload=opened(row.payload))


class OutboxClient(Access):
    """The verbs on the outbox, for one schema.

    Shape: `conn` as for the verbs on runs: the row then exists if and only if the caller commits (I2).
    """

    def emit(self, type: str, payload: Any = None, *, conn: object = None, idempotency_key: str | None = None) -> UUID:
        """Keep an event for the task its type is routed to, and return the event's id.

        A second one of the same type and `idempotency_key` changes nothing and gives the id of the first.
        Errors: EncodingError, naming the path, for a payload that cannot be stored; DefinitionError for a reserved
        type or a key that cannot be stored; IdempotencyConflictError when the key was used with another payload;
        AutocommitError; DatabaseUnavailableError.
        """
        check_type(type)
        texts.check(f"idempotency_key of event {type!r}", idempotency_key)
        data = codec.encode(payload, codec.EMPTY, where=f"the payload of event {type!r}").data
        trace = outbox.stored_trace(tracing.current())
        parameters: dict[str, Any] = {
            "type": type,
            "payload": data,
            "key": idempotency_key,
            "event": uuid4(),
            "trace": trace,
        }
        event, outcome = self._write("emit_event", parameters, conn, lambda own: outbox.emit(own, parameters))
        if outcome == "conflict":
            raise IdempotencyConflictError(type, str(idempotency_key), str(event), kind="event")
        return UUID(str(event))

    def keep_message(
        self, id: UUID, payload: bytes, *, due: datetime | None, delay: timedelta | None, conn: object = None
    ) -> None:
        """Keep a packed signature of ordinary tasks, to be published when it is due.

        Errors: AutocommitError; DatabaseUnavailableError.
        """
        trace = tracing.current()
        parameters = outbox.message_parameters(id, payload, due=due, delay=delay, trace=trace)
        self._write(
            "keep_message",
            parameters,
            conn,
            lambda own: (outbox.keep_message(own, id, payload, due=due, delay=delay, trace=trace),),
        )

    def get(self, event: UUID | str) -> OutboxEvent:
        """Read one row. Events stay when they were dispatched; rows of ours are gone once they have left.

        Errors: UnknownEventError.
        """
        id = _id(event)
        found = self._do(lambda conn: outbox.get(conn, id))
        if found is None:
            raise UnknownEventError(event)
        return _opened(found)

    def dead(self, *, type: str | None = None, limit: int = 100, before: UUID | str | None = None) -> list[OutboxEvent]:
        """Read a page of the rows that were given up, the newest first. `before` is the id of the last one seen.

        Errors: DefinitionError for a limit outside 1 to 1000; UnknownEventError when `before` is no row any more.
        """
        texts.check("type", type)
        check_page(limit)
        last = None if before is None else self.get(before)
        rows = self._do(lambda conn: outbox.dead(conn, type=type, before=last, limit=limit))
        return [_opened(row) for row in rows]

    def replay(self, event: UUID | str | None = None, *, type: str | None = None) -> int:
        """Put a dead row, or all dead rows of a type, back as if it had never been tried; return how many those were.

        A row that is not dead is left as it is. Rows of ours may be replayed too: what has become of no use is dropped.
        By its type no message of an awaited task is put back that may have left: it would be published twice.
        Errors: DefinitionError unless exactly one of the two is given; UnknownEventError.
        """
        if (event is None) is (type is None):
            raise DefinitionError("replay needs either the id of a row or a type")
        if event is not None:
            one = self.get(event).id
            count = self._do(lambda conn: outbox.replay(conn, id=one, limit=1))
        else:
            texts.check("type", type)
            count = self._replay_all(str(type))
        if count:
            self._notify()
        return count

    def _replay_all(self, type: str) -> int:
        count, batch = 0, REPLAY_BATCH
        while batch == REPLAY_BATCH:
            batch = self._do(lambda conn: outbox.replay(conn, types=[type], limit=REPLAY_BATCH))
            count += batch
        return count

    def _write(
        self,
        statement: str,
        parameters: Mapping[str, Any],
        conn: object,
        own: Callable[[Connection], tuple[Any, ...]],
    ) -> tuple[Any, ...]:
        """Insert in the caller's transaction, or in a short one of our own."""
        if conn is not None:
            row = self._call(caller(conn), statement, parameters)
            assert row is not None
            return row
        done = self._do(own)
        self._notify()
        return done


def check_type(type: str) -> None:
    """Refuse a type that no user's event can have.

    Errors: DefinitionError.
    """
    if type is None:
        raise DefinitionError("the type of an event is missing")
    texts.check("the type of an event", type)
    if type in set(OutboxType) or type.startswith(RESERVED):
        reserved = ", ".join(sorted(OutboxType))
        raise DefinitionError(f"events of type {type!r} are ours: {reserved}, and what begins with {RESERVED!r}")


def _id(event: UUID | str) -> UUID:
    try:
        return event if isinstance(event, UUID) else UUID(event)
    except (ValueError, AttributeError, TypeError):
        raise UnknownEventError(event) from None
