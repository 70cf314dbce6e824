"""The thread that keeps a lease: renews it, and looks after the attempts that are held under it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from uuid import UUID

import psycopg
from psycopg import errors as pg

from umt_durable import failpoints, telemetry
from umt_durable.clock import boottime
from umt_durable.database import TRANSIENT, Connection
from umt_durable.errors import DatabaseUnavailableError
from umt_durable.services.outage import Outage
from umt_durable.store import journal, runs, workers
from umt_durable.store import settings as schema_settings
from umt_durable.store.guard import Guard

if TYPE_CHECKING:
    from umt_durable.services.lease import Held, Lease, Term

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
LONG_BODY_SECONDS: Final = 1.0
MARK_LOCK_WAIT_MS: Final = 200
SHORTEST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0


class Keeper:
    """Talks to the database for one lease, on a connection of its own.

    Once a third of the lease it renews it. Once a second while attempts are held it reads which were asked to stop,
    shows bodies that run for long, and deletes rows that finished attempts published themselves.
    Keeps: it outlives any outage and any defect; without it the process loses every run it holds.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._ticked = boottime()
        self._told: set[tuple[UUID, str]] = set()
        self._marked: set[tuple[UUID, str, float]] = set()

    def run(self) -> None:
        """Keep the lease until it is stopped."""
        lease, conn = self._lease, None
        outage, pause = Outage("the database, for the lease,", logger), 0.0
        while not lease.stopping:
            lease.wake.wait(pause or self._idle_time())
            lease.wake.clear()
            if lease.stopping or not self._has_work():
                continue
            try:
                conn = conn or self._connect()
                self._beat(conn)
                outage.worked()
                pause = 0.0
                if not self._has_work():
                    conn = close(conn)
                continue
            except (*TRANSIENT, DatabaseUnavailableError) as error:
                outage.failed(error)
            except Exception:
                logger.exception("the lease thread failed and goes on")
            conn, pause = close(conn), min(LONGEST_PAUSE, max(SHORTEST_PAUSE, pause * 2))
        close(conn)

    def _connect(self) -> Connection:
        patience = max(1.0, self._lease.seconds / 6)
        return self._lease.database.connect(application="umt_durable lease", patience_seconds=patience)

    def _has_work(self) -> bool:
        lease = self._lease
        return lease.term is not None or bool(lease.versions or lease.parcels or lease.ended)

    def _idle_time(self) -> float | None:
        """Return for how long nothing can be due, in seconds; None: until woken."""
        if not self._has_work():
            return None
        term, now = self._lease.term, boottime()
        if term is None:
            return SHORTEST_PAUSE
        if term.bring is not None:
            return 0.0
        return max(0.0, min(self._renewal_due(term), now + TICK_SECONDS) - now)

    def _renewal_due(self, term: Term) -> float:
        return term.sent + self._lease.seconds / 3

    def _beat(self, conn: Connection) -> None:
        """Do what is due now."""
        lease, now = self._lease, boottime()
        while lease.ended:
            workers.end(conn, lease.ended[0])
            del lease.ended[0]
        term = lease.term
        if term is None and lease.versions:
            lease.begin(conn)
        elif term is not None and now >= self._renewal_due(term):
            self._renew(conn, term)
        if term is not None:
            lease.bring(conn, term)
        if now >= self._ticked + TICK_SECONDS * 0.9:
            self._ticked = now
            self._tick(conn)
        gone = lease.let_go()
        if gone is not None:
            lease.write_end(conn, gone)

    def _renew(self, conn: Connection, term: Term) -> None:
        lease, counters = self._lease, telemetry.snapshot()
        claimed, lease.claimed = lease.claimed, False
        sent = boottime()  # before the send: the reply may take any time, and proves nothing later than this
        failpoints.point("hb.send.b")
        kept = workers.renew(
            conn,
            term.id,
            lease_seconds=lease.seconds,
            reserved=self._hints_in_hand(),
            counters=counted_since(term.base, counters),
            claimed=claimed,
        )
        failpoints.point("hb.reply.r")
        if kept:
            lease.prolong(term, sent, counters)
        else:
            lease.end_term(term)

    def _hints_in_hand(self) -> Mapping[str, int]:
        try:
            return {} if self._lease.reserved is None else dict(self._lease.reserved())
        except Exception:
            # A number for the depth gate is not worth a lease.
            logger.exception("the hints in hand could not be counted")
            return {}

    def _tick(self, conn: Connection) -> None:
        lease = self._lease
        lease.delete_parcels(conn)
        term, held = lease.term, {one.token.claim: one for one in lease.attempts()}
        if term is None or not held:
            return
        self._told = {told for told in self._told if told[0] in held}
        for claim, _, why in runs.asked_claims(conn, term.id):
            if claim in held and (claim, why) not in self._told:
                self._told.add((claim, why))
                abort(held[claim], why)
        self._marked = {mark for mark in self._marked if mark[0] in held}
        for one in held.values():
            for entry, began in one.bodies():
                self._mark_long(conn, one, entry, began)

    def _mark_long(self, conn: Connection, held: Held, entry: journal.Entry, began: float) -> None:
        """Show a body that has been running for a while, once, unless its row is locked at this moment."""
        age, mark = boottime() - began, (held.token.claim, entry.key, began)
        if age < LONG_BODY_SECONDS or mark in self._marked:
            return
        try:
            with conn.transaction():
                schema_settings.limit_lock_wait(conn, milliseconds=MARK_LOCK_WAIT_MS)
                journal.mark_started(Guard(conn, held.token), entry, age_seconds=age)
        except (pg.LockNotAvailable, pg.QueryCanceled):
            telemetry.count(telemetry.Counter.DUTY_FAILED, duty="mark_started", run=held.token.run)
        else:
            self._marked.add(mark)


def counted_since(base: Mapping[str, int], counters: Mapping[str, int]) -> dict[str, int]:
    """Return what was counted under one worker id, zeros left out: the sum over all ids then counts nothing twice."""
    return {name: count - base.get(name, 0) for name, count in counters.items() if count != base.get(name, 0)}


def abort(held: Held, reason: str) -> None:
    """Tell an attempt to stop, whatever it makes of that."""
    try:
        held.abort(reason)
    except Exception:
        # Foreign code; the others must be told all the same.
        logger.exception("an attempt could not be told to stop", extra={"run": held.token.run})


def close(conn: Connection | None) -> Connection | None:
    """Close a connection, in whatever state it is, and return none."""
    if conn is not None:
        try:
            conn.close()
        except psycopg.Error as error:
            logger.debug("closing a connection failed: %s", error)
    return None
