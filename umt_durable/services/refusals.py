"""Hints that came to a process which cannot take their runs.

It has not the code, and shares the queue with workers that have it; or the run's task or queue is paused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Database
from umt_durable.settings import Settings
from umt_durable.store import runs

A_SECOND: Final = 50
"""How many refused hints of one process come back in a second, however many it gets to see."""


class Refusals:
    """Has the hints come back that this process refuses; one for each process, used by any of its threads.

    Keeps: I1 (a refused hint is no lost one), I19 (none comes back at once, nor many together).
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._next = 0.0  # two threads that meet here cost a hint its place in the row, no more

    def refuse(
        self,
        run_id: str,
        nesting: int,
        *,
        task: str | None = None,
        versions: Sequence[int] = (),
        takes_new: bool = True,
    ) -> str | None:
        """Have the hint of a run come back a little later, if a live worker can use it, and say why it was refused.

        Shape: `task` and `versions` are what this process takes of the run's task, nothing for one it does not know;
        `takes_new` whether it takes runs without a version. None: it was not refused, for the run is not ready, or this
        process can execute it.
        Errors: DatabaseUnavailableError; repeating it is safe.
        """
        now = boottime()
        place = max(now, self._next)
        found = self._database.do(
            lambda conn: runs.refuse_hint(
                conn,
                run_id,
                nesting,
                task=task,
                versions=versions,
                takes_new=takes_new,
                spread_seconds=place - now,
                deliver_seconds=self._settings.deliver_seconds,
            )
        )
        if found is None:
            return None
        again, paused = found
        if again:
            self._next = place + 1 / A_SECOND
        if paused:
            return "its task or queue is paused"
        telemetry.count(telemetry.Counter.REFUSED_HINT)
        return "this worker has not the run's version"
