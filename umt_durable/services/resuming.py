"""Runs of a task or queue that was resumed: made due some at a time, so that redispatch has hints for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from umt_durable.database import Connection, Database
from umt_durable.services.transactions import RETRY_SECONDS
from umt_durable.store import pauses, runs
from umt_durable.store.pauses import Resumed

BATCH: Final = 500
BATCHES: Final = 5


@dataclass(frozen=True, slots=True)
class ResumeCounts:
    """What one look did: runs made due, and ready runs looked at."""

    brought: int = 0
    looked_at: int = 0
    hints: int = 0

    @property
    def work(self) -> int:
        """Return how many runs were dealt with."""
        return self.looked_at


class Resumer:
    """Finds the runs that waited for a pause to end. Their hints leave as redispatch and relay send any.

    Keeps: I1 (a pause that was resumed stays a row until all its runs were looked at), I22 (a run is made due once).
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._places: dict[Resumed, runs.ReadyPlace] = {}

    def run_once(self) -> ResumeCounts:
        """Make the next runs due of each pause that was ended.

        Errors: DatabaseUnavailableError; repeating it is safe.
        """
        found = self._database.do(pauses.resumed, seconds=RETRY_SECONDS)
        self._places = {one: self._places.get(one, runs.FIRST_READY) for one in found}
        brought = sum(self._bring(one) for one in found)
        return ResumeCounts(brought, len(found))

    def _bring(self, ended: Resumed) -> int:
        brought = 0
        for _ in range(BATCHES):
            more, place = self._database.do(lambda conn: self._next(conn, ended), seconds=RETRY_SECONDS)
            brought += more
            if place is None:
                self._database.do(lambda conn: pauses.forget(conn, ended), seconds=RETRY_SECONDS)
                break
            self._places[ended] = place
        return brought

    def _next(self, conn: Connection, ended: Resumed) -> tuple[int, runs.ReadyPlace | None]:
        return runs.bring_resumed(conn, ended.scope, ended.name, after=self._places[ended], limit=BATCH)
