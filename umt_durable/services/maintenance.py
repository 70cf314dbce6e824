"""Maintenance: the duties that keep every run moving, in order, each with a guard of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Database
from umt_durable.errors import DatabaseBusyError, DatabaseUnavailableError
from umt_durable.services.redispatch import REFILL_SECONDS, Broker, Redispatch
from umt_durable.services.release import Releaser
from umt_durable.services.resuming import Resumer
from umt_durable.services.router import Router
from umt_durable.services.takeover import Sweeper
from umt_durable.services.timers import Timers
from umt_durable.services.transactions import RETRY_SECONDS
from umt_durable.settings import Settings
from umt_durable.store import outbox, runs, workers

logger = logging.getLogger(__name__)

REDISPATCH_SECONDS: Final = 1.0
RESCAN_SECONDS: Final = 15.0
MARKER_SECONDS: Final = 10.0
MARKER_AGAIN_SECONDS: Final = 1.0
BROKER_AWAY_SECONDS: Final = 2.0
LEASE_LOOK_SECONDS: Final = 5.0
AGEING_SECONDS: Final = 10.0
AGEING_BATCH: Final = 500
FORGET_SECONDS: Final = 3600.0
SHORTEST_BACK_OFF, LONGEST_BACK_OFF = 1.0, 60.0


class Due(NamedTuple):
    """Which scans would find something, as one query saw it."""

    outbox: bool
    timers: bool
    lost: bool
    facts: bool
    ready: bool
    expired: bool
    release: bool
    resumed: bool


class Counts(Protocol):
    """What a duty did."""

    @property
    def hints(self) -> int:
        """How many rows the outbox got: the relay has work then."""

    @property
    def work(self) -> int:
        """How many rows were dealt with: there may be more."""


@dataclass(slots=True)
class Duty:
    """One duty: when it is due and what it does.

    Units: `every` is the shortest time between two looks in seconds, `next_at` the boottime before which it rests.
    """

    name: str
    is_due: Callable[[Due], bool]
    act: Callable[[], Counts | None]
    every: float = 0.0
    next_at: float = 0.0
    failures: int = 0


class Maintenance:
    """The duties of one process, for one thread.

    Keeps: a duty that fails is logged once, counted, and rests longer each time; it never stops another.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        broker: Broker | None = None,
        broker_name: str = "default",
        default_queue: Callable[[str], str | None] = lambda task: None,
    ) -> None:
        """Prepare the duties; the last three go to `Redispatch`. Only the thread of `run_once` asks the broker."""
        self._database = database
        self.on_hints: Callable[[], None] = lambda: None
        """Called as soon as a duty has put something into the outbox."""
        self._sweeper = Sweeper(database, settings)
        self._router = Router(database, settings)
        self._redispatch = Redispatch(database, settings, broker, broker_name=broker_name, default_queue=default_queue)
        self._lease_end: float | None = None
        self._marker = Duty("loss marker", _always, self._watch_broker)
        self._hints = Duty("redispatch", lambda due: due.ready, self._write_hints)
        self._duties = [
            Duty("timers", lambda due: due.timers or due.expired, Timers(database, settings).run_once),
            Duty("lease ends", _always, self._look_at_leases, every=LEASE_LOOK_SECONDS),
            Duty("take-over", lambda due: due.lost, self._sweeper.run_once),
            Duty("router", lambda due: due.facts, self._router.run_once),
            Duty("release", lambda due: due.release, Releaser(database, settings).run_once),
            Duty("resume", lambda due: due.resumed, Resumer(database).run_once),
            Duty("re-scan", _always, self._router.rescan, every=RESCAN_SECONDS),
            self._marker,
            self._hints,
            Duty("ageing", lambda due: due.outbox, self._age_events, every=AGEING_SECONDS),
            Duty("old workers", _always, self._forget_workers, every=FORGET_SECONDS),
        ]

    def run_once(self, due: Due | None = None) -> int:
        """Do what is due, and return how many rows were dealt with; `due` saves the query that says so.

        Errors: DatabaseUnavailableError when the database does not answer; no other.
        """
        if due is None:
            due = Due(*self._database.do(runs.due_work, seconds=RETRY_SECONDS))
        return sum(self._perform(duty, due) for duty in self._duties)

    def rest_seconds(self, longest: float) -> float:
        """Return how long to wait, `longest` at most, until something may be due that only time brings about."""
        now = boottime()
        ends = [duty.next_at for duty in (self._marker,)]
        if self._lease_end is not None:
            ends.append(self._lease_end)
        return max(0.0, min([longest, *(end - now for end in ends if end > now)]))

    def look_at_broker(self) -> None:
        """Have the broker's marker looked at next: the connection to it was lost and is back."""
        self._marker.next_at = 0.0

    def _perform(self, duty: Duty, due: Due) -> int:
        if boottime() < duty.next_at or not duty.is_due(due):
            return 0
        duty.next_at = boottime() + duty.every
        try:
            counts = duty.act()
        except DatabaseBusyError as error:
            self._failed(duty, error)
            return 0
        except DatabaseUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - logged there, once for a series
            self._failed(duty, error)
            return 0
        if duty.failures:
            logger.info("%s works again", duty.name)
            duty.failures = 0
        if counts is None:
            return 0
        if counts.hints:
            self.on_hints()
        return counts.work

    def _failed(self, duty: Duty, error: Exception) -> None:
        duty.failures += 1
        duty.next_at = boottime() + min(LONGEST_BACK_OFF, SHORTEST_BACK_OFF * 2 ** min(duty.failures - 1, 10))
        telemetry.count(telemetry.Counter.DUTY_FAILED, duty=duty.name)
        if duty.failures == 1:
            logger.error("%s failed; the other duties go on", duty.name, exc_info=error)

    def _look_at_leases(self) -> None:
        seconds = self._sweeper.next_end()
        self._lease_end = None if seconds is None else boottime() + seconds

    def _watch_broker(self) -> Counts:
        counts = self._redispatch.watch_broker()
        seconds = MARKER_SECONDS
        if self._redispatch.refilling:
            seconds = REFILL_SECONDS
        elif self._redispatch.suspects_loss:
            seconds = MARKER_AGAIN_SECONDS
        self._marker.next_at = boottime() + seconds
        return counts

    def _write_hints(self) -> Counts:
        counts = self._redispatch.run_once()
        self._hints.next_at = boottime() + (BROKER_AWAY_SECONDS if counts.unavailable else REDISPATCH_SECONDS)
        return counts

    def _age_events(self) -> None:
        self._database.do(lambda conn: outbox.age(conn, limit=AGEING_BATCH), seconds=RETRY_SECONDS)

    def _forget_workers(self) -> None:
        self._database.do(workers.forget, seconds=RETRY_SECONDS)


def _always(_: Due) -> bool:
    return True
