"""Users' events on their way: each starts exactly one run, or leaves as a message, or is dead with a reason.

The run and the mark that the event was dispatched are one commit, so that a kill in between leaves neither. An event
whose type has no route here is left to the process that declares one, as long as that process lives; if none does, it
is dead at once, and comes back by itself when a relay with the route looks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    DecodingError,
    EncodingError,
    IdempotencyConflictError,
    InputError,
    UnknownTaskError,
)
from umt_durable.records import Enqueued, NewRun, OutboxEntry
from umt_durable.redaction import redact_text
from umt_durable.services.transactions import RETRY_SECONDS, commit
from umt_durable.settings import Settings
from umt_durable.store import outbox, runs

logger = logging.getLogger(__name__)

HOPELESS: Final = (InputError, EncodingError, DecodingError, IdempotencyConflictError, UnknownTaskError)
"""What no repetition can change: the row is dead at once, with the reason."""

NO_ROUTE: Final = "no route for events"
"""How the reason of an event begins that is dead for lack of a route, and lives again when there is one."""

REVIVE_EVERY_SECONDS: Final = 60.0
REVIVE_BATCH: Final = 500


class Events(Protocol):
    """The routes of this process."""

    @property
    def types(self) -> Collection[str]:
        """The types of events that have a route here."""

    def run_of(self, event: OutboxEntry) -> NewRun | None:
        """Make the run that an event starts; None where it is to leave as a message of an ordinary task.

        Errors: one of HOPELESS when it never can start one.
        """


def declared(types: Collection[str]) -> list[str]:
    """Return how a live process with a relay declares its routes beside the versions of its tasks."""
    return [f"@outbox:{type}" for type in sorted(types)]


@dataclass(slots=True)
class Handled:
    """What became of a batch of events. `messages` are still to be published; one in no part is tried again soon."""

    started: set[UUID] = field(default_factory=set)
    elsewhere: set[UUID] = field(default_factory=set)
    refused: dict[UUID, str] = field(default_factory=dict)
    hopeless: dict[UUID, str] = field(default_factory=dict)
    messages: list[OutboxEntry] = field(default_factory=list)


class EventStarter:
    """Starts the runs of events, for one relay."""

    def __init__(self, database: Database, settings: Settings, events: Events | None) -> None:
        self._database = database
        self._settings = settings
        self._events = events
        self._revive_at = 0.0

    def handle(self, entries: Sequence[OutboxEntry], relay: UUID) -> Handled:
        """Start what can be started; one bad event stops no other.

        Errors: DatabaseUnavailableError.
        """
        handled = Handled()
        for entry in entries:
            try:
                self._handle(entry, relay, handled)
            except DatabaseBusyError:
                continue  # somebody holds the same new key: his commit decides
            except DatabaseUnavailableError:
                raise
            except HOPELESS as error:
                handled.hopeless[entry.id] = _reason(error)
            except Exception as error:
                logger.exception("an outbox event cannot be dispatched", extra={"event": str(entry.id)})
                handled.refused[entry.id] = _reason(error)
        return handled

    def revive(self) -> int:
        """Put back what is dead for lack of a route that is here; a look now and then, return how many rows."""
        types = () if self._events is None else self._events.types
        if not types or boottime() < self._revive_at:
            return 0
        revived = self._database.do(
            lambda conn: outbox.replay(conn, types=sorted(types), reason_begins=NO_ROUTE, limit=REVIVE_BATCH),
            seconds=RETRY_SECONDS,
        )
        if revived < REVIVE_BATCH:
            self._revive_at = boottime() + REVIVE_EVERY_SECONDS
        if revived:
            logger.info("%d events that had no route are dispatched now", revived)
        return revived

    def _handle(self, entry: OutboxEntry, relay: UUID, handled: Handled) -> None:
        if self._events is None or entry.type not in self._events.types:
            if entry.live:
                handled.elsewhere.add(entry.id)
            else:
                handled.hopeless[entry.id] = _unrouted(entry.type)
            return
        run = self._events.run_of(entry)
        if run is None:
            handled.messages.append(entry)
        elif self._start(entry, run, relay):
            handled.started.add(entry.id)

    def _start(self, entry: OutboxEntry, run: NewRun, relay: UUID) -> bool:
        """Commit the run and that the event was dispatched; False when another relay has the event by now."""

        def start(conn: Connection) -> Enqueued:
            done = runs.enqueue(conn, run, deliver_seconds=self._settings.deliver_seconds)
            if done.outcome == "conflict":
                raise IdempotencyConflictError(run.task, run.key or "", done.id)
            if not outbox.dispatched(conn, [entry.id], relay=relay, run=done.id):
                raise _OvertakenError
            return done

        try:
            done = commit(self._database, "event", start, limited=True)
        except _OvertakenError:
            return False
        telemetry.count(telemetry.Counter.DISPATCHED_EVENT)
        if done.outcome == "created":
            telemetry.count(telemetry.Counter.ENQUEUED_RUN)
        return True


class _OvertakenError(Exception):
    """Another relay has claimed the event since: what this one began is rolled back."""


def _unrouted(type: str) -> str:
    return (
        f"{NO_ROUTE} of type {type!r}: no live process declares one. Declare it with"
        f" durable.outbox.route({type!r}, task) in the code that a relay loads: the event is then dispatched by itself"
    )


def _reason(error: Exception) -> str:
    return redact_text(f"{type(error).__name__}: {error}")[:500]
