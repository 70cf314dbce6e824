"""Runs parked for an op that a person has decided about: each is made ready, and goes by that decision."""

from __future__ import annotations

from dataclasses import dataclass

from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.services.rows import each
from umt_durable.services.transactions import RETRY_SECONDS, commit
from umt_durable.settings import Settings
from umt_durable.states import Reason
from umt_durable.store import ledger, runs
from umt_durable.store.ledger import OpName

BATCH = 100


@dataclass(frozen=True, slots=True)
class ReleaseCounts:
    """What releasing did: ops dealt with, runs made ready."""

    ops: int = 0
    woken: int = 0
    failed: int = 0

    @property
    def hints(self) -> int:
        """Return how many rows the outbox got."""
        return self.woken

    @property
    def work(self) -> int:
        """Return how many ops were dealt with."""
        return self.ops


class Releaser:
    """Releases the runs of ops that somebody decided about, and did not live to release. Any number side by side."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    def run_once(self) -> ReleaseCounts:
        """Release what waits for nothing any more.

        Errors: DatabaseUnavailableError.
        """
        found = self._database.do(lambda conn: ledger.released(conn, limit=BATCH), seconds=RETRY_SECONDS)
        done, failed = each("release", found, lambda op: release(self._database, self._settings, op))
        return ReleaseCounts(len(done), sum(done), failed)


def release(database: Database, settings: Settings, op: OpName) -> int:
    """Make the runs ready that are parked for an op, if it is not uncertain any more; return how many.

    The decision was committed before: a run that parks meanwhile has either seen it, or is in the list.
    Errors: DatabaseUnavailableError.
    """

    def work(conn: Connection) -> int:
        found = ledger.waiting(conn, op)
        woken = 0
        for run in found:
            if runs.lock(conn, run) is not None:
                woken += runs.release(conn, run, reason=Reason.UNCERTAIN_OP, deliver_seconds=settings.deliver_seconds)
        if found:
            ledger.forget_waiting(conn, op, found)
        return woken

    woken = commit(database, "release", work, limited=True)
    telemetry.count(telemetry.Counter.WOKEN_RUN, woken)
    return woken
