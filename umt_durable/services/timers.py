"""Timers: what is due by the database's clock goes on. Sleeps, retries, the time-outs of waits, and start deadlines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from umt_durable import failpoints, telemetry
from umt_durable.database import Connection, Database
from umt_durable.services.rows import each
from umt_durable.services.transactions import RETRY_SECONDS, commit
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import runs, waits

logger = logging.getLogger(__name__)

BATCH: Final = 100
BATCHES: Final = 10
"""How many full batches one look takes before the other duties have their turn."""


@dataclass(frozen=True, slots=True)
class TimerCounts:
    """What one look did, in runs, and in waits for `timed_out`."""

    woken: int = 0
    timed_out: int = 0
    expired: int = 0
    failed: int = 0

    @property
    def hints(self) -> int:
        """Return how many rows the outbox got."""
        return self.woken + self.expired

    @property
    def work(self) -> int:
        """Return how many runs were dealt with."""
        return self.woken + self.expired


class Timers:
    """Wakes runs whose time has come.

    Keeps: I9 (the run's lock decides between a time-out and a fact), I10 (nothing before its time by that clock), RG-10
    (a run is due at the earliest of all it waits for).
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    def run_once(self) -> TimerCounts:
        """Wake what is due and end what expired.

        Errors: DatabaseUnavailableError.
        """
        slept = self._wake_sleepers()
        overdue = self._list(lambda conn: runs.overdue_waiting(conn, limit=BATCH * BATCHES))
        timed_out, failed_waits = each("timers", overdue, self._end_wait)
        over = self._list(lambda conn: runs.expired(conn, limit=BATCH * BATCHES))
        expired, failed_ends = each("timers", over, self._expire)
        woken = slept + sum(count is not None for count in timed_out)
        telemetry.count(telemetry.Counter.WOKEN_RUN, woken)
        return TimerCounts(woken, sum(count or 0 for count in timed_out), sum(expired), failed_waits + failed_ends)

    def _list(self, read: Callable[[Connection], list[int]]) -> Iterable[int]:
        found = self._database.do(read, seconds=RETRY_SECONDS)
        failpoints.point("timer.select.a")
        return found

    def _wake_sleepers(self) -> int:
        woken = 0
        for _ in range(BATCHES):
            batch = commit(
                self._database,
                "timer",
                lambda conn: runs.wake_due(conn, limit=BATCH, deliver_seconds=self._settings.deliver_seconds),
            )
            woken += batch
            if batch < BATCH:
                break
        return woken

    def _end_wait(self, run: int) -> int | None:
        """Time out the overdue waits of one run and wake it; None when it was not to be woken any more."""

        def work(conn: Connection) -> int | None:
            locked = runs.lock(conn, run)
            if locked is None or locked.state is not RunState.WAITING or not locked.due:
                return None
            over = waits.time_out(conn, run)
            runs.wake(conn, run, deliver_seconds=self._settings.deliver_seconds)
            return len(over)

        return commit(self._database, "timer", work, limited=True)

    def _expire(self, run: int) -> bool:
        """End a run that was never started and may not start any more."""

        def work(conn: Connection) -> bool:
            locked = runs.lock(conn, run)
            if locked is None or locked.state not in (RunState.READY, RunState.SLEEPING) or not locked.expired:
                return False
            repair = 2 * self._settings.lease_seconds
            return runs.cancel_parked(conn, run, reason="expired", repair_seconds=repair)

        return commit(self._database, "timer", work, limited=True)
