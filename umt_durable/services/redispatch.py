"""Redispatch: ready runs whose hint got lost get another one, and never many more than that.

A deep backlog looks like loss. Three things tell them apart: the time a hint may take doubles each time, the depth of
the queue shows whether anything is missing there at all, and a marker on the broker shows whether it lost its data.
"""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol
from uuid import uuid4

from umt_durable import failpoints, telemetry
from umt_durable.database import Connection, Database
from umt_durable.errors import BrokerUnavailableError
from umt_durable.services.transactions import RETRY_SECONDS, commit
from umt_durable.settings import Settings
from umt_durable.store import markers, runs, workers

logger = logging.getLogger(__name__)

BATCH: Final = 500
BATCHES: Final = 5
FULL_ENOUGH: Final = 0.9
"""Which part of the ready runs must be with the broker, or in the hands of workers, for nothing to be missing."""
REFILL_BATCH: Final = 100
REFILL_SECONDS: Final = 0.5
"""After a loss at most REFILL_BATCH fresh hints leave in this time: 200 a second."""
LOOKS_BEFORE_LOSS: Final = 2


class Broker(Protocol):
    """What the broker itself says. Each may raise BrokerUnavailableError."""

    def depth(self, queue: str) -> int | None:
        """Count the messages ready in a queue, over all priorities; None when that cannot be told."""

    def incarnation(self, expected: str) -> str | None:
        """Return the incarnation the broker holds: the expected one, another, or None when it holds none."""

    def mark(self, value: str) -> None:
        """Leave an incarnation on the broker, for good."""


@dataclass(frozen=True, slots=True)
class RedispatchCounts:
    """What one look did, in runs. `unavailable`: the broker did not answer, so nothing was done."""

    hinted: int = 0
    postponed: int = 0
    unavailable: bool = False

    @property
    def hints(self) -> int:
        """Return how many rows the outbox got."""
        return self.hinted

    @property
    def work(self) -> int:
        """Return how many runs were dealt with."""
        return self.hinted + self.postponed


class _Overdue(NamedTuple):
    run: int
    queue: str | None
    task: str
    live: bool
    dropped: bool


@dataclass(slots=True)
class _Queues:
    """What is known of the queues in one look: runs that should be there, and what was found of them."""

    ready: Mapping[str | None, int]
    reserved: Mapping[str, int]
    missing: dict[str | None, bool] = field(default_factory=dict)


class Redispatch:
    """Writes hints for overdue ready runs, and for all of them after the broker lost its data.

    Keeps: I1 (a lost hint costs latency), I21, I22 (an intact broker gets no copies, whatever the backlog).
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        broker: Broker | None = None,
        *,
        broker_name: str = "default",
        default_queue: Callable[[str], str | None] = lambda task: None,
    ) -> None:
        """Prepare redispatch for one broker, under whose name its incarnation is recorded.

        Shape: `default_queue` gives the queue of a task's runs that name none; None: unknown, and its depth not asked.
        """
        self._database = database
        self._settings = settings
        self._broker = broker
        self._name = broker_name
        self._default_queue = default_queue
        self._looks_in_vain = 0
        self.refilling = False
        """Whether fresh hints for all ready runs are on their way."""

    @property
    def suspects_loss(self) -> bool:
        """Say whether the last look missed the marker: the next one should come soon."""
        return self._looks_in_vain > 0

    def run_once(self) -> RedispatchCounts:
        """Give overdue ready runs another hint, or more time where nothing is missing or nobody could run them.

        Errors: DatabaseUnavailableError.
        """
        hinted = postponed = 0
        for _ in range(BATCHES):
            overdue = self._overdue()
            try:
                again, later = self._divide(overdue)
            except BrokerUnavailableError as error:
                logger.debug("the broker does not tell its depth: %s", error)
                return RedispatchCounts(hinted, postponed, unavailable=True)
            new, more = self._write(again, later) if overdue else (0, 0)
            hinted, postponed = hinted + new, postponed + more
            if len(overdue) < BATCH or not new + more:
                break
        telemetry.count(telemetry.Counter.REDISPATCH, hinted)
        telemetry.count(telemetry.Counter.REDISPATCH_POSTPONED, postponed)
        return RedispatchCounts(hinted, postponed)

    def _overdue(self) -> list[_Overdue]:
        found = self._database.do(lambda conn: runs.overdue_ready(conn, limit=BATCH), seconds=RETRY_SECONDS)
        failpoints.point("redispatch.select.a")
        return [_Overdue(*row) for row in found]

    def _divide(self, overdue: Sequence[_Overdue]) -> tuple[list[int], list[int]]:
        """Divide overdue runs into those whose hints are missing and those that only need more time."""
        for task, number in Tally(one.task for one in overdue if not one.live).items():
            telemetry.count(telemetry.Counter.BLOCKED_RUN, number, task=task)
        again: list[int] = []
        later: list[int] = []
        queues: _Queues | None = None
        for one in overdue:
            if not one.live:
                later.append(one.run)
            elif one.dropped:
                # Whatever else is in its queue, its hint is not: it was dropped while no live worker had the code.
                again.append(one.run)
            else:
                queues = queues or self._look_at_queues()
                (again if self._is_missing(one, queues) else later).append(one.run)
        return again, later

    def _look_at_queues(self) -> _Queues:
        if self._broker is None or not self._settings.strict_queues:
            return _Queues({}, {})

        def read(conn: Connection) -> _Queues:
            ready: Tally[str | None] = Tally()
            for queue, task, number in runs.count_ready(conn):
                ready[queue or self._default_queue(task)] += number
            return _Queues(ready, workers.reserved(conn))

        return self._database.do(read, seconds=RETRY_SECONDS)

    def _is_missing(self, one: _Overdue, queues: _Queues) -> bool:
        name = one.queue or self._default_queue(one.task)
        if name not in queues.missing:
            queues.missing[name] = self._lacks_hints(name, queues)
        return queues.missing[name]

    def _lacks_hints(self, queue: str | None, queues: _Queues) -> bool:
        """Say whether a queue holds fewer hints than it should. Unknown counts as missing: then the doubling bounds it.

        What is reserved counts only for live workers. The broker's own count of unacknowledged messages does not tell
        theirs from those of a dead worker, which stay there up to the visibility timeout.
        """
        if self._broker is None or not self._settings.strict_queues or queue is None:
            return True
        depth = self._broker.depth(queue)
        if depth is None:
            return True
        return depth + queues.reserved.get(queue, 0) < FULL_ENOUGH * queues.ready.get(queue, 0)

    def _write(self, again: Sequence[int], later: Sequence[int]) -> tuple[int, int]:
        deliver = self._settings.deliver_seconds

        def work(conn: Connection) -> tuple[int, int]:
            return (
                runs.redispatch(conn, again, deliver_seconds=deliver) if again else 0,
                runs.postpone(conn, later, deliver_seconds=deliver) if later else 0,
            )

        return commit(self._database, "redispatch", work)

    # -- the loss marker --------------------------------------------------------------------------------------------

    def watch_broker(self) -> RedispatchCounts:
        """Look whether the broker still is the one it was; where not, go on giving all ready runs fresh hints.

        Shape: the recorded incarnation is `ID`, or `ID/N` while the runs up to number N have got their fresh hint, so
        that any process goes on after any other.
        Errors: DatabaseUnavailableError.
        """
        if self._broker is None:
            return RedispatchCounts()
        known = self._database.do(lambda conn: markers.read(conn, self._name), seconds=RETRY_SECONDS)
        try:
            if known is None:
                self._introduce(self._broker)
                return RedispatchCounts()
            if not self._is_there(self._broker, known):
                known = self._declare_loss(self._broker, known)
        except BrokerUnavailableError as error:
            logger.debug("the broker cannot be asked for its marker: %s", error)
            return RedispatchCounts(unavailable=True)
        self.refilling = known is not None and "/" in known
        return RedispatchCounts(self._refill(known) if known is not None and self.refilling else 0)

    def _introduce(self, broker: Broker) -> None:
        value = uuid4().hex
        failpoints.point("relay.marker.b")
        broker.mark(value)
        failpoints.point("relay.marker.a")
        self._database.do(lambda conn: markers.write(conn, self._name, value), seconds=RETRY_SECONDS)

    def _is_there(self, broker: Broker, known: str) -> bool:
        """Say whether the marker is there; one look in vain is a moment's trouble, two are a loss."""
        value = known.split("/")[0]
        seen = broker.incarnation(value)
        if seen == value:
            self._looks_in_vain = 0
            return True
        self._looks_in_vain += 1 if seen is None else LOOKS_BEFORE_LOSS
        return self._looks_in_vain < LOOKS_BEFORE_LOSS

    def _declare_loss(self, broker: Broker, known: str) -> str | None:
        """Record a new incarnation, here and on the broker; None when another process was first."""
        value = uuid4().hex
        self._looks_in_vain = 0
        lost = f"{value}/0"
        swapped = self._database.do(
            lambda conn: markers.swap(conn, self._name, expected=known, incarnation=lost), seconds=RETRY_SECONDS
        )
        if not swapped:
            return None
        failpoints.point("relay.marker.b")
        broker.mark(value)
        failpoints.point("relay.marker.a")
        telemetry.count(telemetry.Counter.BROKER_LOSS)
        logger.warning("the broker lost its data: every ready run gets a fresh hint")
        return lost

    def _refill(self, known: str) -> int:
        """Give the next ready runs fresh hints and record how far that is."""
        value, _, after = known.partition("/")

        def work(conn: Connection) -> int | None:
            hinted = runs.rehint_ready(
                conn, after=int(after), limit=REFILL_BATCH, deliver_seconds=self._settings.deliver_seconds
            )
            reached = f"{value}/{hinted[-1]}" if hinted else value
            if not markers.swap(conn, self._name, expected=known, incarnation=reached):
                raise _OvertakenError  # rolls the hints back: the other process wrote them
            return len(hinted)

        try:
            hinted = commit(self._database, "redispatch", work) or 0
        except _OvertakenError:
            return 0
        self.refilling = hinted > 0
        telemetry.count(telemetry.Counter.REDISPATCH, hinted)
        return hinted


class _OvertakenError(Exception):
    """Another process goes on with the same refill."""
