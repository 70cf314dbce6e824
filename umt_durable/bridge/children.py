"""Watching the children of a prefork pool.

Celery itself may notice a killed child only after five seconds: it is told when the child's pipe closes, a moment
before the child can be reaped, looks once, finds it alive and looks again when its timer comes round. A pidfd becomes
readable when the child can be reaped, so here the pool is made to look just then, and each child that is gone becomes
an incident. Where there is no pidfd, the pool is made to look four times a second.
"""

from __future__ import annotations

import os
from typing import Any, Final

from billiard.pool import EX_OK, EX_RECYCLE
from celery import bootsteps
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.utils.log import get_logger

from umt_durable.bridge.runtime import Incidents, runtime_of

logger = get_logger(__name__)

LOOK_SECONDS: Final = 0.25
CHILDREN: Final = "durable_children"


class Children:
    """The live children of one pool, each with its pidfd where there is one.

    Keeps: every child that was seen alive and has been reaped is reported once, whatever ended it.
    """

    def __init__(self, pool: Any, incidents: Incidents) -> None:
        self._pool = pool
        self._incidents = incidents
        self._seen: dict[int, Any] = {}
        self._pidfds: dict[int, int] = {}
        self._has_pidfd = hasattr(os, "pidfd_open")
        self._hub: Any = None
        self._timer: Any = None

    def attach(self, hub: Any) -> None:
        """Watch through an event loop; called again after each loss of the broker connection, which clears the loop."""
        self._hub = hub
        for pid, pidfd in self._pidfds.items():
            hub.add_reader(pidfd, self._on_exit, pid)
        if not self._has_pidfd:
            self._look_by_timer()
        hub.on_tick.add(self.look)

    def look(self) -> None:
        """Compare the pool with what was seen last: watch new children, report those that are gone."""
        if self._pool._pool is None:  # a cold shutdown has ended the pool in the middle of a turn of the loop
            return
        processes = self._pool._pool._pool
        if len(processes) == len(self._seen) and all(process.pid in self._seen for process in processes):
            return
        now = {process.pid: process for process in processes}
        gone = [(pid, process) for pid, process in self._seen.items() if pid not in now]
        new = [pid for pid in now if pid not in self._seen]
        self._seen = now
        for pid, process in gone:
            self._forget(pid)
            self._incidents.child_lost(pid=pid, status=process.exitcode, delivery=None)
        for pid in new:
            self._watch(pid)

    def report_rest(self) -> None:
        """Report the children that ended by a signal or an error since the watch ended, once the pool is joined.

        A delivery whose child dies before the pool has read that it was accepted has nobody else to report it then.
        """
        for pid, process in self._seen.items():
            if process.exitcode not in (None, EX_OK, EX_RECYCLE):
                self._incidents.child_lost(pid=pid, status=process.exitcode, delivery=None)
        self._seen = {}

    def detach(self) -> None:
        """Watch no more."""
        if self._hub is not None:
            self._hub.on_tick.discard(self.look)
        if self._timer is not None:
            self._timer.cancel()
        for pid in tuple(self._pidfds):
            self._forget(pid)

    def _watch(self, pid: int) -> None:
        if not self._has_pidfd:
            return
        try:
            self._pidfds[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError as error:
            logger.warning("This system gives no pidfd (%s); the pool looks for lost children by a timer", error)
            self._has_pidfd = False
            self._look_by_timer()
            return
        self._hub.add_reader(self._pidfds[pid], self._on_exit, pid)

    def _look_by_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._hub.call_repeatedly(LOOK_SECONDS, self._pool.maintain_pool)

    def _on_exit(self, pid: int) -> None:
        # It stays readable: a reader left in the loop would spin. The pool reaps, and the next look reports.
        self._forget(pid)
        self._pool.maintain_pool()

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            self._hub.remove(pidfd)
            os.close(pidfd)


class ChildWatch(bootsteps.StartStopStep):
    """Watches the children of a worker's prefork pool; a step of the worker blueprint."""

    label = "Durable child watch"
    requires = ("celery.worker.components:Pool",)

    def include_if(self, worker: Any) -> bool:
        """Say whether the pool has children and an event loop; a pool without a loop looks for itself every 0.8 s."""
        return worker.hub is not None and isinstance(worker.pool, PreforkPool)

    def create(self, worker: Any) -> None:
        """Make the watch; the pool has no children yet."""
        self.children = Children(worker.pool, runtime_of(worker.app).incidents)
        setattr(worker, CHILDREN, self.children)

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Watch through the worker's loop."""
        self.children.attach(hub)

    def stop(self, worker: Any) -> None:
        """Watch no more: from here on the pool looks for lost children itself, twice a second, until it is joined."""
        self.children.detach()

    terminate = stop


def children_of(worker: Any) -> Children | None:
    """Return what is watched of a worker's pool, if that has children and an event loop."""
    found: Children | None = getattr(worker, CHILDREN, None)
    return found
