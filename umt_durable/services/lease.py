"""The lease of one OS process: its worker id, and the attempts it answers for.

Two daemon threads belong to it. The *keeper* (`keeper.py`) talks to the database. The *fence* never does any I/O: at
the moment up to which the lease may be relied on it aborts what is held, even while the keeper hangs in a network that
swallows packets.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID, uuid4

from umt_durable import native, telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database, after_fork
from umt_durable.errors import DatabaseUnavailableError
from umt_durable.records import Token
from umt_durable.services.keeper import Keeper, abort, counted_since
from umt_durable.services.notes import Notes
from umt_durable.settings import Settings
from umt_durable.store import journal, outbox, runs, workers

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 60.0
BRING_BATCH: Final = 1000
"""How many ready runs are looked at in one go for a worker that brings their versions."""
STOP_SECONDS: Final = 5.0
_FENCE_LOOKS_SECONDS: Final = 1.0

Parcel = tuple[UUID, tuple[UUID, ...]]
"""Published outbox rows of a claim."""


class Held(Protocol):
    """An attempt in flight, as far as the lease answers for it."""

    @property
    def token(self) -> Token:
        """The fencing token of its grant."""

    def abort(self, reason: str) -> None:
        """Ask its body to stop: `cancel`, `lease_lost` or `shutdown`; or, after the step in flight, `pause`.

        Called from other threads; must not block.
        """

    def bodies(self) -> Sequence[tuple[journal.Entry, float]]:
        """Return the steps whose bodies are being executed and the `boottime` each began at."""


@dataclass(slots=True)
class Term:
    """The lease of one worker id.

    Units: boottime; `sent` is from just before the last statement that confirmed the lease, `until` how far it may be
    relied on. Shape: `base` holds the counts that older ids of this process have written; `bring` is the ready run from
    which on those of its versions are still to be made due.
    """

    id: UUID
    sent: float
    until: float
    base: Mapping[str, int]
    bring: runs.ReadyPlace | None = None


class Lease:
    """The right of this process to work, under a worker id that is never used twice.

    Keeps: nothing of it crosses a fork; the child begins a lease of its own when it first needs one. A lease that could
    not be renewed in time is lost for good: what is held is aborted, and the next `ensure` begins another.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        node: UUID,
        versions: Sequence[str] = (),
        queues: Mapping[str, str] | None = None,
        reserved: Callable[[], Mapping[str, int]] | None = None,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Prepare the lease of this process.

        Shape: `versions` are what a main process declares (`task`, `task@version`); a process that declares none lets
        its lease go after `idle_seconds` without work. `queues` are those of the declared tasks, by
        name, for runs that were started without one. `reserved` gives the hints in hand by queue.
        """
        self.database = database
        self.seconds = settings.lease_seconds
        self.versions = tuple(versions)
        self.queues = dict(queues or {})
        self.reserved = reserved
        self.notes = Notes(database)
        """What the attempts under it say of how far they are."""
        self._node = node
        self._idle_seconds = idle_seconds
        self._begin_anew()
        after_fork(self._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = native.lock()  # guards what follows; never held over I/O
        self._registering = threading.Lock()
        self._fence_wake = native.event()
        self._threads: tuple[native.Thread, ...] = ()
        self._held: dict[UUID, Held] = {}
        self._touched = boottime()
        self.wake = native.event()
        self.stopping = False
        self.term: Term | None = None
        self.ended: list[UUID] = []
        self.parcels: list[Parcel] = []
        self.claimed = False
        self.stored: Mapping[str, int] = {}

    # -- for those who work under it ------------------------------------------------------------------------------

    def start(self) -> None:
        """Have the lease begun and kept from now on, without waiting for it."""
        with self._lock:
            if any(thread.is_alive() for thread in self._threads):
                return
            self.stopping = False
            self._threads = (
                native.daemon(Keeper(self).run, name="umt-durable-lease"),
                native.daemon(self._fence, name="umt-durable-fence"),
            )
            for thread in self._threads:
                thread.start()
        self.wake.set()

    def ensure(self) -> UUID:
        """Return a worker id whose lease is live.

        Errors: DatabaseUnavailableError when none could be begun.
        """
        while True:
            with self._lock:  # or `let_go` ends the lease between the look at it and the note that it is needed
                self._touched = boottime()
                term = self.term
            if term is not None and self._touched < term.until:
                return term.id
            with self._registering:
                if self.term is term:
                    self.end_term(term)
                    self.start()
                    self._install(self.database.do(self._register))

    def alive(self) -> bool:
        """Say whether the lease may be relied on at this moment."""
        term = self.term
        return term is not None and boottime() < term.until

    def remaining(self) -> float:
        """Return for how many seconds the lease may be relied on, if nothing renews it; zero when it is lost."""
        term = self.term
        return 0.0 if term is None else max(0.0, term.until - boottime())

    def hold(self, held: Held, worker: UUID | None = None) -> None:
        """Answer for an attempt from now on; one granted to a worker id that is lost already is aborted at once."""
        with self._lock:
            term = self.term
            is_ours = term is not None and worker in (None, term.id)
            if is_ours:
                self._held[held.token.claim] = held
            self.claimed, self._touched = True, boottime()
        if not is_ours:
            abort(held, "lease_lost")

    def release(self, held: Held) -> None:
        """Answer for an attempt no longer; repeating it changes nothing."""
        with self._lock:
            self._held.pop(held.token.claim, None)
            self._touched = boottime()

    def forget(self, claim: UUID, ids: Sequence[UUID]) -> None:
        """Have outbox rows deleted that the attempt of this claim has published itself, within about a second."""
        if ids:
            with self._lock:
                self.parcels.append((claim, tuple(ids)))

    def flush(self) -> None:
        """Delete now what `forget` was given. Before a normal exit: rows left behind are published a second time."""
        try:
            self.database.do(self.delete_parcels, seconds=STOP_SECONDS)
        except DatabaseUnavailableError:
            logger.warning("published rows could not be deleted; a relay will publish them again")

    def lose(self) -> None:
        """Give the worker id up, with everything held under it; whoever needs one next begins another."""
        self.end_term(self.term)

    def stop(self) -> None:
        """Delete what is to be forgotten, end the lease and its threads. `ensure` or `start` begins again."""
        with self._lock:
            self.stopping = True
            threads, self._threads = self._threads, ()
        self.wake.set()
        self._fence_wake.set()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(STOP_SECONDS)
        if self.parcels:
            self.flush()
        term, held = self._take(self.term)
        for one in held:
            abort(one, "shutdown")
        if term is not None:
            try:
                self.database.do(lambda conn: self.write_end(conn, term), seconds=STOP_SECONDS)
            except DatabaseUnavailableError:
                logger.warning("the lease could not be ended; it runs out by itself")

    # -- for the keeper ---------------------------------------------------------------------------------------------

    def begin(self, conn: Connection) -> None:
        """Begin a lease on the keeper's connection, unless `ensure` is about to, or has."""
        if self._registering.acquire(blocking=False):
            try:
                if self.term is None:
                    self._install(self._register(conn))
            finally:
                self._registering.release()

    def prolong(self, term: Term, sent: float, counters: Mapping[str, int]) -> None:
        """Rely on a lease from the moment before its confirmation was asked for."""
        with self._lock:
            term.sent, term.until = sent, self._relied_until(sent)
            self.stored = counters

    def end_term(self, term: Term | None) -> None:
        """Abort everything held under a lease that is lost, unless that has happened."""
        lost, held = self._take(term)
        if lost is None:
            return
        self.ended.append(lost.id)
        telemetry.count(telemetry.Counter.LEASE_LOST, worker=str(lost.id), attempts=len(held))
        logger.warning("the lease was lost; attempts that are aborted: %d", len(held), extra={"worker": str(lost.id)})
        for one in held:
            abort(one, "lease_lost")
        self.wake.set()

    def attempts(self) -> list[Held]:
        """Return what is held at this moment."""
        with self._lock:
            return list(self._held.values())

    def let_go(self) -> Term | None:
        """Give the lease up, and return it, if a process that declares nothing has not needed it for long."""
        with self._lock:
            is_used = self.versions or self._held or self.parcels or boottime() <= self._touched + self._idle_seconds
            if is_used or self.term is None:
                return None
            term, self.term = self.term, None
            return term

    def write_end(self, conn: Connection, term: Term) -> None:
        """End a lease in the database, with the last counts of this process."""
        counters = telemetry.snapshot()
        workers.end(conn, term.id, counters=counted_since(term.base, counters))
        self.stored = counters

    def delete_parcels(self, conn: Connection) -> None:
        """Delete the rows that finished attempts published themselves."""
        with self._lock:
            parcels = list(self.parcels)
        if parcels:
            outbox.delete_claimed(conn, [id for _, ids in parcels for id in ids], [claim for claim, _ in parcels])
            with self._lock:
                self.parcels = [parcel for parcel in self.parcels if parcel not in parcels]

    # -- the lease itself -------------------------------------------------------------------------------------------

    def _register(self, conn: Connection) -> Term:
        """Begin a lease under a fresh id, and begin to make runs due that waited for a worker with these versions."""
        # A repeat after a lost reply takes another id: the first one's lease may have begun any time ago.
        id, sent = uuid4(), boottime()
        workers.register(
            conn,
            id=id,
            node=self._node,
            pid=os.getpid(),
            host=socket.gethostname(),
            lease_seconds=self.seconds,
            versions=self.versions,
            queues=self.queues,
            boottime=sent,
        )
        term = Term(id, sent, self._relied_until(sent), self.stored, runs.FIRST_READY if self.versions else None)
        self.bring(conn, term)
        return term

    def bring(self, conn: Connection, term: Term) -> None:
        """Make the next runs due that waited for a worker with these versions; the keeper goes on with what is left.

        Found by their state: what a process leaves undone the next one with these versions does.
        """
        if term.bring is not None:
            _, term.bring = runs.bring_versions(conn, self.versions, after=term.bring, limit=BRING_BATCH)

    def _relied_until(self, sent: float) -> float:
        return sent + self.seconds * 2 / 3

    def _install(self, term: Term) -> None:
        with self._lock:
            self.term = term
        self.wake.set()
        self._fence_wake.set()

    def _take(self, term: Term | None) -> tuple[Term | None, list[Held]]:
        """Leave a term, if it is the current one, with what is held under it."""
        with self._lock:
            if term is None or self.term is not term:
                return None, []
            self.term = None
            held = list(self._held.values())
            self._held.clear()
            return term, held

    def _fence(self) -> None:
        """Abort what is held at the very moment the lease may be relied on no longer."""
        while not self.stopping:
            term = self.term
            left = None if term is None else term.until - boottime()
            if left is not None and left <= 0:
                self.end_term(term)
                continue
            # At most a second: the wait's clock stands still while the machine is suspended, boottime does not.
            self._fence_wake.wait(None if left is None else min(left, _FENCE_LOOKS_SECONDS))
            self._fence_wake.clear()
