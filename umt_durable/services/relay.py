"""The relay: takes due rows of the outbox to the broker and the result backend, and deletes those that arrived; users'
events start their runs and are kept as dispatched.

Any number of relays run side by side. A claim is committed before anything is published, and a row is deleted only
after the broker has confirmed it: a crash in between publishes twice, never zero times (I1). Messages of awaited tasks
that are not idempotent are the exception: of those, twice would be once too often (see `awaited`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID, uuid4

from umt_durable import failpoints, telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.errors import BrokerUnavailableError
from umt_durable.records import FinishedRun, OutboxEntry, event_id
from umt_durable.redaction import redact_text
from umt_durable.services.awaited import AT_ONCE, BROKER_LEFT, RELAY_DIED, AwaitedMessages
from umt_durable.services.events import Events, EventStarter
from umt_durable.services.outage import Outage
from umt_durable.services.rows import each
from umt_durable.services.transactions import RETRY_SECONDS
from umt_durable.settings import Settings
from umt_durable.states import OutboxStatus, OutboxType, RunState
from umt_durable.store import outbox, runs

logger = logging.getLogger(__name__)

REPORTS: Final = (OutboxType.RESULT, OutboxType.CALLBACK)
BATCH: Final = 100
RETURN_SECONDS: Final = 0.2
ELSEWHERE_SECONDS: Final = 1.0
"""How long an event that only another process can route is left to it."""
REFUSAL_SECONDS, LONGEST_REFUSAL_SECONDS = 0.5, 300.0
SHORTEST_REST_SECONDS, LONGEST_REST_SECONDS = 0.2, 5.0


class Report(Protocol):
    """What became of a batch. A row in neither part is tried again soon."""

    @property
    def confirmed(self) -> Collection[UUID]:
        """The rows that arrived."""

    @property
    def refused(self) -> Mapping[UUID, str]:
        """The rows that alone could not leave, each with its reason."""

    @property
    def hopeless(self) -> Mapping[UUID, str]:
        """The rows that can never leave as they are, each with its reason."""

    @property
    def doubtful(self) -> Collection[UUID]:
        """The rows that were handed over, at least in part, of which it is not known whether they arrived."""


class Dispatcher(Protocol):
    """Takes rows where they belong."""

    def dispatch(
        self,
        hints: Sequence[OutboxEntry],
        reports: Sequence[tuple[OutboxEntry, FinishedRun]],
        others: Sequence[OutboxEntry],
    ) -> Report:
        """Publish hints, results and callbacks of finished runs, and ordinary tasks; each list's first one first.

        Errors: BrokerUnavailableError when the broker, not a row, is the trouble; `confirmed` names what had arrived,
        `doubtful` what perhaps had.
        """


@dataclass(frozen=True, slots=True)
class RelayCounts:
    """What one look at the outbox did, in rows.

    Shape: `dropped` were hints of an earlier ready period, or of steps that wait no more; `shelved` those of a version
    that no live worker declares; `started` users' events whose run was committed; `doubted` messages put aside.
    """

    claimed: int = 0
    published: int = 0
    refused: int = 0
    returned: int = 0
    dropped: int = 0
    shelved: int = 0
    started: int = 0
    doubted: int = 0


@dataclass(slots=True)
class _Batch:
    hints: list[OutboxEntry] = field(default_factory=list)
    reports: list[tuple[OutboxEntry, FinishedRun]] = field(default_factory=list)
    others: list[OutboxEntry] = field(default_factory=list)
    awaited: list[OutboxEntry] = field(default_factory=list)
    events: list[OutboxEntry] = field(default_factory=list)
    stale: list[OutboxEntry] = field(default_factory=list)
    unwanted: list[OutboxEntry] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.hints or self.reports or self.others)

    def singly(self) -> list[_Batch]:
        """Return one batch for each row that is to leave."""
        return [
            *(_Batch(hints=[one]) for one in self.hints),
            *(_Batch(reports=[one]) for one in self.reports),
            *(_Batch(others=[one]) for one in self.others),
        ]

    @property
    def sole(self) -> OutboxEntry:
        """Return the only row of a batch that `singly` made."""
        return [*self.hints, *(entry for entry, _ in self.reports), *self.others][0]


@dataclass(slots=True)
class _Sent:
    confirmed: set[UUID] = field(default_factory=set)
    refused: dict[UUID, str] = field(default_factory=dict)
    hopeless: dict[UUID, str] = field(default_factory=dict)
    doubtful: set[UUID] = field(default_factory=set)
    outage: BrokerUnavailableError | None = None

    def add(self, other: _Sent) -> None:
        """Take in what became of a further part of the batch."""
        self.confirmed |= other.confirmed
        self.refused |= other.refused
        self.hopeless |= other.hopeless
        self.doubtful |= other.doubtful
        self.outage = self.outage or other.outage


class Relay:
    """One relay, for one thread.

    Keeps: no lock is held over I/O; one bad row never stops a batch; an outage of the broker uses up no attempts.
    """

    def __init__(
        self, database: Database, settings: Settings, dispatcher: Dispatcher, events: Events | None = None
    ) -> None:
        self._database = database
        self._settings = settings
        self._dispatcher = dispatcher
        self._starter = EventStarter(database, settings, events)
        self._awaited = AwaitedMessages(database, settings)
        self._outage = Outage("the broker", logger)
        self._rest = 0.0
        self._resume_at = 0.0
        self.recoveries = 0
        """How often the broker came back: each time its loss marker should be looked at."""

    def rest_seconds(self) -> float:
        """Return for how long the broker is left alone after it failed."""
        return max(0.0, self._resume_at - boottime())

    def run_once(self) -> RelayCounts:
        """Take one batch out of the outbox; nothing while the broker is left alone.

        Errors: DatabaseUnavailableError; rows claimed by then are due again after `hold_seconds`.
        """
        if self.rest_seconds() > 0:
            return RelayCounts()
        self._starter.revive()
        self._awaited.tidy()
        relay = uuid4()  # one for each batch, so that a late deletion never hits a row that was claimed again
        entries = self._claim(relay)
        if not entries:
            return RelayCounts()
        batch = self._sort(entries)
        shelved = self._shelve(batch.unwanted, relay)
        handled = self._starter.handle(batch.events, relay)
        batch.others += handled.messages
        sent = self._send(batch)
        dropped = {entry.id for entry in batch.stale}
        kept = sent.confirmed & {entry.id for entry in handled.messages}
        self._clear([*(sent.confirmed - kept), *dropped], list(kept), relay)
        dropped |= self._send_awaited(batch.awaited, relay, sent)
        doubted = self._put_aside(batch.awaited, relay, sent)
        sent.refused |= handled.refused
        sent.hopeless |= handled.hopeless
        refused = sent.refused | sent.hopeless
        each(
            "relay", [entry for entry in entries if entry.id in refused], lambda entry: self._refuse(entry, sent, relay)
        )
        left = handled.started | sent.confirmed | refused.keys() | dropped | shelved | doubted
        rest = {entry.id for entry in entries} - left - handled.elsewhere
        self._give_back(rest, relay, max(RETURN_SECONDS, self.rest_seconds()), perhaps=rest & sent.doubtful)
        self._give_back(handled.elsewhere, relay, ELSEWHERE_SECONDS * random.uniform(0.5, 1.0))
        return RelayCounts(
            claimed=len(entries),
            published=len(sent.confirmed),
            refused=len(refused),
            returned=len(rest) + len(handled.elsewhere),
            dropped=len(dropped),
            shelved=len(shelved),
            started=len(handled.started),
            doubted=len(doubted),
        )

    def _claim(self, relay: UUID) -> list[OutboxEntry]:
        def claim(conn: Connection) -> list[OutboxEntry]:
            entries = outbox.claim(conn, relay=relay, limit=BATCH, hold_seconds=self._settings.hold_seconds)
            failpoints.point("relay.claim.r")
            return entries

        failpoints.point("relay.claim.b")
        entries = self._database.do(claim, seconds=RETRY_SECONDS)
        failpoints.point("relay.claim.a")
        return entries

    def _sort(self, entries: Sequence[OutboxEntry]) -> _Batch:
        ended = [entry.run for entry in entries if entry.type in REPORTS and entry.run is not None]
        finished = self._finished(ended)
        batch = _Batch()
        for entry in entries:
            match entry.type:
                case OutboxType.RUN if not is_current(entry):
                    batch.stale.append(entry)
                case OutboxType.RUN if entry.live:
                    batch.hints.append(entry)
                case OutboxType.RUN:
                    batch.unwanted.append(entry)
                case OutboxType.RESULT | OutboxType.CALLBACK:  # REPORTS
                    run = None if entry.run is None else finished.get(entry.run)
                    if run is None:
                        batch.stale.append(entry)
                    else:
                        batch.reports.append((entry, run))
                case OutboxType.CELERY if entry.step is not None:
                    batch.awaited.append(entry)
                case OutboxType.CELERY:
                    batch.others.append(entry)
                case _:
                    batch.events.append(entry)
        return batch

    def _finished(self, numbers: Collection[int]) -> dict[int, FinishedRun]:
        def read(conn: Connection) -> dict[int, FinishedRun]:
            found = {run: runs.for_report(conn, run) for run in set(numbers)}
            return {run: finished for run, finished in found.items() if finished is not None}

        return self._database.do(read, seconds=RETRY_SECONDS) if numbers else {}

    def _shelve(self, entries: Sequence[OutboxEntry], relay: UUID) -> set[UUID]:
        """Drop the hints that no live worker could use. Redispatch, or the worker that can, finds their runs."""
        if not entries:
            return set()
        rows = {entry.run: entry.id for entry in entries if entry.run is not None}

        def set_aside(conn: Connection) -> set[UUID]:
            ids = {rows[run] for run in runs.shelve(conn, list(rows))}
            outbox.delete(conn, list(ids), relay=relay)
            return ids

        return self._database.atomically(set_aside, seconds=RETRY_SECONDS)

    def _send(self, batch: _Batch) -> _Sent:
        sent = _Sent()
        if not batch:
            return sent
        failpoints.point("relay.publish.b")
        self._dispatch(batch, sent)
        failpoints.point("relay.publish.a")
        failpoints.point("relay.confirm.r")
        if sent.outage is not None:
            self._begin_rest(sent.outage)
        else:
            self._rest = self._resume_at = 0.0
            self.recoveries += self._outage.worked()
        telemetry.count(telemetry.Counter.PUBLISHED, len(sent.confirmed))
        return sent

    def _send_awaited(self, entries: Sequence[OutboxEntry], relay: UUID, sent: _Sent) -> set[UUID]:
        """Publish messages of awaited tasks, some at a time; return those that are of no use to anybody any more."""
        dropped: set[UUID] = set()
        clear = [entry for entry in entries if not entry.doubtful]
        for start in range(0, len(clear), AT_ONCE):
            if sent.outage is not None:
                break  # what is left has not left
            some = clear[start : start + AT_ONCE]
            may = self._awaited.leave(some, relay, hold_seconds=self._settings.hold_seconds)
            stale = {entry.id for entry in some} - may
            found = self._send(_Batch(others=[entry for entry in some if entry.id in may]))
            once = {entry.id for entry in some if entry.once} & found.confirmed
            self._clear([*stale, *(found.confirmed - once)], [], relay, once=once)
            sent.add(found)
            dropped |= stale
        return dropped

    def _put_aside(self, entries: Sequence[OutboxEntry], relay: UUID, sent: _Sent) -> set[UUID]:
        """Put aside what may leave once and perhaps has; return the rows."""
        doubtful = [entry for entry in entries if entry.doubtful or (entry.once and entry.id in sent.doubtful)]

        def put_aside(entry: OutboxEntry) -> bool:
            return self._awaited.doubt(entry, relay, RELAY_DIED if entry.doubtful else BROKER_LEFT)

        each("relay", doubtful, put_aside)
        return {entry.id for entry in doubtful}  # one whose run is held stays as it is, and is found again

    def _dispatch(self, batch: _Batch, sent: _Sent) -> None:
        """Have a batch published, row by row if the dispatcher fails over one of them."""
        try:
            self._dispatch_together(batch, sent)
        except Exception:
            # Left to itself such a row would be claimed first for ever, and stop all others behind it (I26).
            logger.exception("a batch of the outbox could not be dispatched; its rows are tried one by one")
            sent.doubtful |= {entry.id for entry in batch.others if entry.once}
            for one in batch.singly():
                if one.sole.id in sent.doubtful:
                    continue
                if sent.outage is not None:
                    return
                try:
                    self._dispatch_together(one, sent)
                except Exception as error:
                    logger.exception("an outbox row cannot be dispatched", extra={"event": str(one.sole.id)})
                    sent.refused[one.sole.id] = redact_text(f"{type(error).__name__}: {error}")[:500]

    def _dispatch_together(self, batch: _Batch, sent: _Sent) -> None:
        try:
            report = self._dispatcher.dispatch(batch.hints, batch.reports, batch.others)
        except BrokerUnavailableError as error:
            sent.confirmed |= error.confirmed
            sent.doubtful |= error.doubtful
            sent.outage = error
        else:
            sent.confirmed |= set(report.confirmed)
            sent.doubtful |= set(report.doubtful)
            sent.refused |= report.refused
            sent.hopeless |= report.hopeless

    def _begin_rest(self, error: BrokerUnavailableError) -> None:
        telemetry.count(telemetry.Counter.PUBLISH_OUTAGE)
        self._outage.failed(error)
        self._rest = min(LONGEST_REST_SECONDS, max(SHORTEST_REST_SECONDS, self._rest * 2))
        self._resume_at = boottime() + self._rest * random.uniform(0.8, 1.0)

    def _clear(self, ids: Sequence[UUID], kept: Sequence[UUID], relay: UUID, *, once: Collection[UUID] = ()) -> None:
        """Delete rows that have left; keep those of users' events as dispatched."""

        def delete(conn: Connection) -> None:
            if ids:
                outbox.delete(conn, ids, relay=relay)
            if once:
                outbox.drop_left(conn, once)
            if kept:
                outbox.dispatched(conn, kept, relay=relay)
            failpoints.point("relay.delete.r")

        if ids or kept or once:
            failpoints.point("relay.delete.b")
            self._database.do(delete, seconds=self._settings.hold_seconds)  # what stays is published again
            failpoints.point("relay.delete.a")

    def _refuse(self, entry: OutboxEntry, sent: _Sent, relay: UUID) -> None:
        hopeless = entry.id in sent.hopeless
        reason = sent.hopeless[entry.id] if hopeless else sent.refused[entry.id]
        longest = min(LONGEST_REFUSAL_SECONDS, REFUSAL_SECONDS * 2 ** min(entry.attempts, 20))
        status = self._database.do(
            lambda conn: outbox.refuse(
                conn,
                entry.id,
                relay=relay,
                reason=reason,
                delay_seconds=longest * random.uniform(0.5, 1.0),
                max_attempts=0 if hopeless else self._settings.max_publish_attempts,
            ),
            seconds=RETRY_SECONDS,
        )
        told = {"event": str(entry.id), "type": entry.type, "run": entry.run}
        telemetry.count(telemetry.Counter.PUBLISH_REFUSED, **told)
        if status is OutboxStatus.DEAD:
            telemetry.count(telemetry.Counter.DEAD_EVENT, **told)
            logger.error("an outbox row is dead, tries: %d: %s", entry.attempts, reason, extra=told)

    def _give_back(self, ids: Collection[UUID], relay: UUID, delay: float, *, perhaps: Collection[UUID] = ()) -> None:
        if ids:
            self._database.do(
                lambda conn: outbox.give_back(conn, list(ids), relay=relay, delay_seconds=delay, perhaps=perhaps),
                seconds=RETRY_SECONDS,
            )


def is_current(entry: OutboxEntry) -> bool:
    """Say whether a hint is of the ready period its run is in; an older one is of no use to anybody."""
    return (
        entry.run is not None
        and entry.fence is not None
        and entry.state is RunState.READY
        and not entry.paused
        and entry.id == event_id(entry.run, entry.fence, OutboxType.RUN, 0)
    )
