"""The router: brings each fact to the waits of its address, and applies the facts of reserved names.

Whoever registers a wait looks for its fact under the address lock, and whoever routes a fact looks for waits under the
same lock, each in a statement of its own after the lock: whichever comes second finds the other (I8).
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, assert_never
from uuid import UUID

from psycopg.errors import LockNotAvailable

from umt_durable import failpoints, telemetry
from umt_durable.database import Connection, Database
from umt_durable.errors import DatabaseUnavailableError
from umt_durable.records import FactRecord
from umt_durable.services import acts
from umt_durable.services.acts import Effect
from umt_durable.services.rows import each
from umt_durable.services.transactions import RETRY_SECONDS, commit
from umt_durable.settings import Settings
from umt_durable.states import Reason, WaitState
from umt_durable.store import facts, runs, waits
from umt_durable.store.waits import Place

logger = logging.getLogger(__name__)

JOIN: Final = "umt.join"
OLDEST: Final = 200
"""Among how many of the oldest facts routers choose at random, so that they do not queue for one address."""
CHUNK: Final = 100
MOST_LOCKED: Final = 3
"""After how many runs locked by others a chunk is cut short: each is waited for with the address locked."""
RESCAN_CHUNK: Final = 5000
FOLLOWED: Final = 100
"""How many descendants of a cancelled run its canceller cancels too, before he goes on; a router has the others."""

_RESCAN = '["rescan"]'  # in the same lock space as the addresses, of which none has one element
_START: Final = (0, "")


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """What routing did: facts routed to the end, waits settled, runs made ready, cancelled or asked to stop."""

    routed: int = 0
    settled: int = 0
    woken: int = 0
    cancelled: int = 0
    asked: int = 0
    failed: int = 0

    @property
    def hints(self) -> int:
        """Return how many rows the outbox got, at least."""
        return self.woken + self.cancelled

    @property
    def work(self) -> int:
        """Return how many facts and waits were dealt with."""
        return self.routed + self.settled

    def plus(self, more: RouteCounts) -> RouteCounts:
        """Return the sum of two counts."""
        return RouteCounts(
            self.routed + more.routed,
            self.settled + more.settled,
            self.woken + more.woken,
            self.cancelled + more.cancelled,
            self.asked + more.asked,
            self.failed + more.failed,
        )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What one transaction did, and the wait to go on after; None when there are no more."""

    counts: RouteCounts
    after: tuple[int, str] | None = None
    skipped: int = 0


class Router:
    """Routes the facts that nobody has routed yet. Any number run side by side."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    def run_once(self) -> RouteCounts:
        """Route the oldest facts, in random order; those whose address is being routed are left to who does it.

        Errors: DatabaseUnavailableError.
        """
        found = self._database.do(lambda conn: facts.unrouted(conn, limit=OLDEST), seconds=RETRY_SECONDS)
        random.shuffle(found)
        done, failed = each("router", found, lambda fact: _route(self._database, self._settings, fact[0], fact[1]))
        total = RouteCounts(failed=failed)
        for counts in done:
            total = total.plus(counts)
        return total

    def rescan(self) -> RouteCounts:
        """Look for pending waits whose fact was routed without them, and settle them. Each is a defect, and counted.

        Errors: DatabaseUnavailableError.
        """
        missed = self._database.atomically(self._missed, seconds=RETRY_SECONDS)
        failpoints.point("rescan.select.a")
        done, failed = each("re-scan", missed, self._repair)
        total = RouteCounts(failed=failed)
        for counts in done:
            total = total.plus(counts)
        return total

    def _missed(self, conn: Connection) -> list[Place]:
        found: list[Place] = []
        if not waits.try_lock_address(conn, _RESCAN):
            return found  # another process is at it
        after: Place | None = waits.START
        while after is not None:
            more, after = waits.missed(conn, after=after, limit=RESCAN_CHUNK)
            found += more
        return found

    def _repair(self, place: Place) -> RouteCounts:
        address, run, key = place

        def work(conn: Connection) -> RouteCounts:
            waits.lock_address(conn, address)
            mode = next((wait.mode for wait in waits.of_run(conn, run) if wait.key == key), None)
            return RouteCounts() if mode is None else _settle(conn, self._settings, address, run, key, mode)

        counts = commit(self._database, "rescan", work, limited=True)
        if counts.settled:
            telemetry.count(telemetry.Counter.RESCAN_HIT, run=run)
            telemetry.count(telemetry.Counter.WOKEN_RUN, counts.woken)
            logger.error("the re-scan settled wait %r, which its fact had missed", key, extra={"run": run})
        return counts


def route(database: Database, settings: Settings, fact: UUID) -> RouteCounts:
    """Route one fact now, as far as nobody else does; a router finishes what stays.

    Of a cancel the descendants are cancelled with their parent here, up to FOLLOWED of them: where no router lives at
    that moment, workers that start later would begin children that nobody wants any more.
    Never fails because the database or a lock cannot be had: the fact is committed, so its sender has succeeded.
    """
    total, due = RouteCounts(), [fact]
    try:
        for one in due:  # which grows meanwhile
            found = database.do(partial(facts.get_unrouted, fact=one), seconds=RETRY_SECONDS)
            if found is None:
                continue
            total = total.plus(_route(database, settings, one, found.address))
            act = acts.act_of(found)
            if act is not None and act.kind is acts.Kind.CANCEL and len(due) <= FOLLOWED:
                more = partial(facts.cancels_of_children, run_id=act.run_id, limit=FOLLOWED + 1 - len(due))
                due += database.do(more, seconds=RETRY_SECONDS)
    except DatabaseUnavailableError as error:
        logger.debug("a router will route what is left of fact %s: %s", fact, error)
        return total.plus(RouteCounts(failed=1))
    return total


def _route(database: Database, settings: Settings, fact: UUID, address: str) -> RouteCounts:
    total, after, skipped = RouteCounts(), _START, 0
    while True:
        chunk = commit(database, "router", _chunk(settings, fact, address, after, is_last=not skipped), limited=True)
        total, skipped = total.plus(chunk.counts), skipped + chunk.skipped
        if chunk.after is None:
            break
        after = chunk.after
    telemetry.count(telemetry.Counter.ROUTED_FACT, total.routed)
    telemetry.count(telemetry.Counter.WOKEN_RUN, total.woken)
    return replace(total, failed=skipped)


def _chunk(
    settings: Settings, fact: UUID, address: str, after: tuple[int, str], *, is_last: bool
) -> Callable[[Connection], _Chunk]:
    """Return the work of one transaction: the next waits of a fact; `is_last` allows to call it routed at their end."""

    def work(conn: Connection) -> _Chunk:
        if not waits.try_lock_address(conn, address):
            return _Chunk(RouteCounts())
        failpoints.point("router.key_lock.a")
        found = facts.get_unrouted(conn, fact)  # only now: it may have been routed while the lock was not ours
        if found is None:
            return _Chunk(RouteCounts())
        act = acts.act_of(found)
        if found.name == JOIN:
            return _Chunk(_join(conn, settings, address))
        if act is not None:
            chunk = _Chunk(_counted(acts.apply(conn, settings, found, act)))
        else:
            chunk = _settle_next(conn, settings, found, after)
        if chunk.after is None and not chunk.skipped and is_last:
            _report_contradiction(conn, found)
            facts.mark_routed(conn, fact)
            return replace(chunk, counts=replace(chunk.counts, routed=1))
        return chunk

    return work


def _counted(effect: Effect) -> RouteCounts:
    match effect:
        case Effect.NONE:
            return RouteCounts()
        case Effect.ASKED:
            return RouteCounts(asked=1)
        case Effect.CANCELLED:
            return RouteCounts(cancelled=1)
        case Effect.WOKEN:
            return RouteCounts(woken=1)
        case _:
            assert_never(effect)


def _settle_next(conn: Connection, settings: Settings, fact: FactRecord, after: tuple[int, str]) -> _Chunk:
    """Settle the next waits of a fact, in the order of their runs. A run that somebody holds is skipped."""
    pending = waits.pending(conn, fact.id, after=after, limit=CHUNK)
    counts, skipped = RouteCounts(), 0
    for run, key, mode in pending:
        after = (run, key)
        alone: AbstractContextManager[object] = nullcontext() if len(pending) == 1 else conn.transaction()
        try:
            with alone:
                counts = counts.plus(_settle(conn, settings, fact.address, run, key, mode))
        except LockNotAvailable:
            if len(pending) == 1:
                raise
            skipped += 1
            if skipped == MOST_LOCKED:
                return _Chunk(counts, after, skipped)
    return _Chunk(counts, after if len(pending) == CHUNK else None, skipped)


def _settle(conn: Connection, settings: Settings, address: str, run: int, key: str, mode: str) -> RouteCounts:
    """Settle one wait under its run's lock. Only a parked run is made ready; a running one sees it when it parks.

    Which fact of the address the wait takes is asked as when a wait is registered: facts are routed in any order, and
    one wait of a queue takes one fact.
    """
    locked = runs.lock(conn, run)
    failpoints.point("router.run_lock.a")
    if locked is None or locked.state.is_terminal:
        return RouteCounts()
    fact = facts.look_for(conn, address, run=run, of_run=json.loads(address)[0] != "key", mode=mode)
    if fact is None:
        return RouteCounts()
    ends = waits.settle(conn, run, key, state=WaitState.SATISFIED, fact=fact)
    if ends is None:
        return RouteCounts()
    woken = (
        ends
        and locked.state.is_parked
        and (
            runs.wake(conn, run, deliver_seconds=settings.deliver_seconds)
            # Parked for a person because this answer had not come: here it is, from whomever.
            or runs.release(conn, run, reason=Reason.UNCERTAIN_OP, deliver_seconds=settings.deliver_seconds)
        )
    )
    return RouteCounts(settled=1, woken=int(woken))


def _report_contradiction(conn: Connection, fact: FactRecord) -> None:
    """Tell of a fact that says something else than the one a wait has taken as the first (once: it is routed now)."""
    kind, *rest = json.loads(fact.address)
    for run, key in waits.contradicted(conn, fact.id, rest[0]) if kind == "run" else ():
        telemetry.count(telemetry.Counter.CONTRADICTING_FACT, run=run)
        logger.warning("fact %r came with another payload than the one that settled wait %r", fact.name, key)


def _join(conn: Connection, settings: Settings, address: str) -> RouteCounts:
    """Deal with all facts of ended children at one address at once, and wake their parent if no child is live.

    The facts are listed before the children are looked at: whoever ends after that look has a fact that is not listed.
    """
    ended = facts.unrouted_at(conn, address)
    _, parent, step = json.loads(address)
    counts = RouteCounts()
    if runs.is_joined(conn, parent, step):
        waiting = waits.joining(conn, address)
        if waiting is not None:
            counts = _settle(conn, settings, address, *waiting, "join")
    return replace(counts, routed=facts.mark_all_routed(conn, ended))
