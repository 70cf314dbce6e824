"""Take-over: the grants of processes that are gone are ended, and their runs go on elsewhere.

The sweeper finds them by their leases, never by their age. Where a process is known to have ended, its parent does the
same at once.
"""

from __future__ import annotations

import logging
import signal as signals
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final
from uuid import UUID

from umt_durable import failpoints, telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.engine.failures import Failure
from umt_durable.services.rows import each
from umt_durable.services.transactions import RETRY_SECONDS, commit
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import runs, workers
from umt_durable.store import settings as schema_settings
from umt_durable.store.runs import Candidate

logger = logging.getLogger(__name__)

BATCH: Final = 100
PROOF_DELAY_SECONDS: Final = 0.2
"""How long a run stays unclaimable after a take-over from a process that may still hold a proof of 100 ms (I7)."""
CLOCK_JUMP_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class SweepCounts:
    """What one sweep did, in runs. `held_off`: nothing, since the server or its clock has just been disturbed."""

    taken: int = 0
    quarantined: int = 0
    cancelled: int = 0
    failed: int = 0
    held_off: bool = False

    @property
    def hints(self) -> int:
        """Return how many rows the outbox got, at least."""
        return self.taken + self.cancelled

    @property
    def work(self) -> int:
        """Return how many runs were dealt with."""
        return self.taken + self.quarantined + self.cancelled

    def plus(self, end: RunState | None) -> SweepCounts:
        """Count one more take-over by the state its run is in now; None: there was none."""
        match end:
            case None:
                return self
            case RunState.CANCELLED:
                return replace(self, cancelled=self.cancelled + 1)
            case RunState.QUARANTINED:
                return replace(self, quarantined=self.quarantined + 1)
            case _:
                return replace(self, taken=self.taken + 1)


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why a grant is ended.

    Shape: `only_dead`: it must be lost at that moment; `waits`: a lock on its run is waited for; `crashed`: it uses up
    one of the crashes that the run may have.
    """

    text: str
    only_dead: bool
    delay_seconds: float
    waits: bool
    crashed: bool = True


class Sweeper:
    """Takes over the runs of workers without a valid lease, and those past their attempt's own deadline.

    Any number run side by side, without a leader. Keeps: I5, RG-1 (state and fence are compared again under the run's
    lock), RG-2 (a sweep goes through all that is lost), RG-3, RG-6.
    """

    def __init__(self, database: Database, settings: Settings, *, clock: Callable[[], float] = boottime) -> None:
        """Prepare a sweeper; `clock` is what the database's clock is compared with, in seconds."""
        self._database = database
        self._settings = settings
        self._clock = clock
        self._seen: tuple[datetime, float] | None = None  # when the server started, its clock minus ours
        self._hold_until = 0.0

    def run_once(self) -> SweepCounts:
        """Take over what is lost.

        Errors: DatabaseUnavailableError.
        """
        if self.disturbed():
            return SweepCounts(held_off=True)
        counts, after = SweepCounts(), 0
        while True:
            batch = self._lost(after)
            failpoints.point("sweep.select.a")
            ends, failed = each("sweeper", batch, self._take_over)
            for end in ends:
                counts = counts.plus(end)
            counts = replace(counts, failed=counts.failed + failed)
            if len(batch) < BATCH:
                return counts
            after = batch[-1][0]

    def next_end(self) -> float | None:
        """Return in how many seconds the first lease that holds a run ends; look at the server at the same time."""

        def look(conn: Connection) -> tuple[tuple[datetime, float], float | None]:
            return schema_settings.server(conn), workers.next_end(conn)

        server, seconds = self._database.atomically(look, seconds=RETRY_SECONDS)
        self._compare(*server)
        return seconds

    def disturbed(self) -> bool:
        """Say whether the server was restarted, or its clock jumped, less than a lease ago; nothing is taken over then.

        Workers that were cut off for that time can so renew before anything is taken from them.
        """
        now = self._compare(*self._database.do(schema_settings.server, seconds=RETRY_SECONDS))
        return now < self._hold_until

    def _compare(self, started: datetime, seconds: float) -> float:
        now = self._clock()
        seen, self._seen = self._seen, (started, seconds - now)
        if seen is not None and (seen[0] != started or abs(seen[1] - self._seen[1]) > CLOCK_JUMP_SECONDS):
            self._hold_until = now + self._settings.lease_seconds
            logger.warning("the database was restarted or its clock jumped: no take-over for one lease period")
        return now

    def _lost(self, after: int) -> list[Candidate]:
        return self._database.do(lambda conn: runs.lost(conn, limit=BATCH, after=after), seconds=RETRY_SECONDS)

    def _take_over(self, candidate: Candidate) -> RunState | None:
        cause = _Cause("its lease has ended", only_dead=True, delay_seconds=PROOF_DELAY_SECONDS, waits=False)
        return _take_over(self._database, self._settings, candidate, cause)


def end_process(
    database: Database,
    *,
    node: UUID,
    pid: int,
    settings: Settings,
    status: int | None = None,
    seen: float | None = None,
) -> int:
    """End the leases of a process that is known to have ended, and take its runs over; return how many.

    Shape: `status` is its exit status, or minus the number of the signal that ended it; None when unknown.
    Units: `seen` is the `boottime` at which it was seen to have ended, now without it. The system may have given its
    number to another process since, whose lease this leaves alone: it lives, and its proofs hold (I7).
    Errors: DatabaseUnavailableError; repeating it is safe. A run whose row is locked is left to the sweeper.
    """
    at = boottime() if seen is None else seen
    ended = database.do(lambda conn: workers.end_process(conn, node=node, pid=pid, seen=at))
    if not ended:
        return 0
    held = database.do(lambda conn: runs.of_workers(conn, ended))
    cause = _Cause(f"its process {_how_it_ended(status)}", only_dead=False, delay_seconds=0.0, waits=True)
    ends, _ = each("take-over", held, lambda candidate: _take_over(database, settings, candidate, cause))
    return sum(end is not None for end in ends)


def end_delivery(
    database: Database, *, claim: UUID, known_dead: bool, reason: str, settings: Settings, crashed: bool = True
) -> bool:
    """End the grant that a claim holds, if there is one; say whether there was.

    Shape: `known_dead` says that the process of the delivery has ended; without it no proof of that process may be
    outrun, so the run is claimable only a moment later. An end that an operator asked for is not `crashed`.
    Errors: DatabaseUnavailableError; repeating it is safe.
    """
    candidate = database.do(lambda conn: runs.of_claim(conn, claim))
    if candidate is None:
        return False
    delay = 0.0 if known_dead else PROOF_DELAY_SECONDS
    cause = _Cause(reason, only_dead=False, delay_seconds=delay, waits=True, crashed=crashed)
    return _take_over(database, settings, candidate, cause) is not None


def rehint(database: Database, run_id: str, nesting: int) -> bool:
    """Put the hint of a ready run back into the outbox: the message in hand was lost. False when it is not ready."""
    return database.do(lambda conn: runs.rehint(conn, run_id, nesting))


def _take_over(database: Database, settings: Settings, candidate: Candidate, cause: _Cause) -> RunState | None:
    """End one grant in one transaction; return the state the run is in now, None when it was not lost any more."""

    def work(conn: Connection) -> RunState | None:
        # The statement itself passes over a locked row. Held by us it is not passed over, and its clock is read after.
        if cause.waits and runs.lock(conn, candidate[0]) is None:
            return None
        why, error = _describe(conn, candidate, cause.text)
        ended = runs.take_over(
            conn,
            candidate,
            only_dead=cause.only_dead,
            delay_seconds=cause.delay_seconds,
            deliver_seconds=settings.deliver_seconds,
            budget=settings.max_crashes,
            why=why,
            error=error,
            counts=cause.crashed,
        )
        failpoints.point("sweep.update.a")
        if ended is None:
            return None
        is_to_be_cancelled, state = ended
        if is_to_be_cancelled:
            # An owner that is not known to be dead may enter a body on a proof it has: the undos come after that.
            deliver, delay = settings.deliver_seconds, cause.delay_seconds
            if runs.compensate(conn, candidate[0], deliver_seconds=deliver, delay_seconds=delay):
                return RunState.READY
            runs.cancel_parked(conn, candidate[0], reason=None, repair_seconds=2 * settings.lease_seconds)
            return RunState.CANCELLED
        return state

    state = commit(database, "sweep", work)
    if state is not None:
        _tell(candidate, cause.text, state)
    return state


def _tell(candidate: Candidate, why: str, state: RunState) -> None:
    told = {"run": candidate[0], "fence": candidate[1]}
    telemetry.count(telemetry.Counter.TAKE_OVER, **told)
    if state is RunState.QUARANTINED:
        telemetry.count(telemetry.Counter.QUARANTINED_RUN, **told)
        logger.error("run no. %d is quarantined: its processes crash again and again", candidate[0], extra=told)
    else:
        logger.warning("run no. %d was taken over, since %s; it is %s now", candidate[0], why, state, extra=told)


def _describe(conn: Connection, candidate: Candidate, cause: str) -> tuple[str, bytes]:
    """Return one line that names worker and cause, and the stored error that names the step too."""
    owner = runs.owner(conn, candidate)
    if owner is None:
        return cause, b""
    who = f"worker {owner.worker}"
    if owner.pid is not None:
        who += f" (process {owner.pid} on {owner.host})"
    why = f"{who}: {cause}"
    where = "before any step was seen to start" if owner.step is None else f"in step {owner.step!r}"
    message = f"the crash budget is used up; the last grant ended {where}. {why}"
    failure = Failure("CrashBudgetExceeded", __name__, message, (message,), "", owner.step)
    return why, failure.to_bytes()


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "ended"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by signal {signals.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
