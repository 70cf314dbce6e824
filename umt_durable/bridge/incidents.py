"""The threads that act on what the main process saw happen to its children and deliveries, and on what it was told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue

import psycopg
from celery.utils.log import get_logger

from umt_durable.bridge.intake import pause
from umt_durable.bridge.runtime import CancelAsked, ChildLost, Delivery, DeliveryEnded, HintRefused, Incident
from umt_durable.errors import DatabaseUnavailableError

logger = get_logger(__name__)

STOP_SECONDS = 5.0


class IncidentThread:
    """Hands incidents, one after the other, to a function that may query and block.

    Keeps: reporting is one put into a queue that is re-entrant, so it is safe in a signal handler. An incident is tried
    again while the database is away; anything else that goes wrong leaves it to the sweeper, which finds the same run
    by its lease. Refused hints have a thread of their own: of these a whole backlog may come, and runs of a lost child
    must not wait behind them.
    """

    def __init__(self, handle: Callable[[Incident], object]) -> None:
        self._incidents = _Lane("umt-durable-incidents", handle)
        self._refusals = _Lane("umt-durable-refusals", handle)

    def child_lost(self, *, pid: int, status: int | None, delivery: Delivery | None) -> None:
        """Queue that a pool child has ended."""
        self._incidents.put(ChildLost(pid, status, delivery))

    def delivery_ended(
        self, delivery: Delivery, *, known_dead: bool, reason: str, again: bool = True, crashed: bool = True
    ) -> None:
        """Queue that a delivery is over."""
        self._incidents.put(DeliveryEnded(delivery, known_dead, reason, again, crashed))

    def cancel_asked(self, asked: CancelAsked) -> None:
        """Queue that runs are to be cancelled."""
        self._incidents.put(asked)

    def hint_refused(self, run: str, nesting: int) -> None:
        """Queue that a hint came here whose run's task only others have."""
        self._refusals.put(HintRefused(run, nesting))

    def start(self) -> None:
        """Start to act on what is queued."""
        self._incidents.start()
        self._refusals.start()

    def stop(self) -> None:
        """Handle what is queued, each incident once more at most, and end; leave it to the sweeper after 5 seconds.

        Refused hints are left at once: they count as lost in a while.
        """
        self._refusals.abandon()
        self._incidents.stop()


class _Lane:
    """One queue of incidents and the thread that handles them."""

    def __init__(self, name: str, handle: Callable[[Incident], object]) -> None:
        self._name = name
        self._handle = handle
        self._queue: SimpleQueue[Incident | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def put(self, incident: Incident) -> None:
        self._queue.put(incident)

    def start(self) -> None:
        self._abandoned = False
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """End after the incident in hand."""
        self._abandoned = True
        self._stopping.set()
        self._queue.put(None)

    def stop(self) -> None:
        self._stopping.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while (incident := self._queue.get()) is not None and not self._abandoned:
            for failures in count(1):
                if self._handled(incident) or self._stopping.wait(pause(failures)):
                    break

    def _handled(self, incident: Incident) -> bool:
        try:
            self._handle(incident)
        except (psycopg.OperationalError, psycopg.InterfaceError, DatabaseUnavailableError) as error:
            logger.warning("The database is away; an incident waits: %s", type(error).__name__)
            return False
        except Exception:
            logger.exception("An incident could not be handled; the sweeper will find its run: %r", incident)
        return True
