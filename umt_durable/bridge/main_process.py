"""What a worker's main process does for durable runs: it holds a lease, and acts on what happens to its children."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, assert_never

from celery.worker import state as worker_state

from umt_durable.bridge import revoke
from umt_durable.bridge.runtime import CancelAsked, ChildLost, DeliveryEnded, HintRefused, Incident
from umt_durable.services import takeover

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable


class MainLease:
    """The lease of a worker's main process, which declares the versions this worker has."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    def start(self) -> None:
        """Begin the lease."""
        self._durable.declare_versions().ensure()

    def stop(self) -> None:
        """Forget what was published and give the lease up."""
        self._durable.process_lease.stop()


def reserved_hints() -> dict[str, int]:
    """Count the messages in this worker's hands that no slot has begun, by queue."""
    waiting = worker_state.reserved_requests - worker_state.active_requests
    return dict(Counter(str(request.delivery_info.get("routing_key")) for request in waiting))


def handle_incident(durable: Durable, incident: Incident) -> None:
    """End the grants of a lost child or delivery and have its runs hinted again, or cancel runs, and wake the relay; or
    have a hint come back later for a worker that can use it.

    Errors: DatabaseUnavailableError; repeating it is safe.
    """
    match incident:
        case CancelAsked():
            _cancel(durable, incident)
        case ChildLost() | DeliveryEnded():
            _end(durable, incident)
        case HintRefused(run=run, nesting=nesting):
            durable.refusals.refuse(run, nesting)
            return
        case _:
            assert_never(incident)
    durable.pulse.wake()


def _end(durable: Durable, incident: ChildLost | DeliveryEnded) -> None:
    database, settings, delivery = durable.database, durable.settings, incident.delivery
    again = True
    if isinstance(incident, ChildLost):
        takeover.end_process(
            database,
            node=durable.node,
            pid=incident.pid,
            settings=settings,
            status=incident.status,
            seen=incident.seen,
        )
    else:
        again = incident.again
        takeover.end_delivery(
            database,
            claim=incident.delivery.claim,
            known_dead=incident.known_dead,
            reason=incident.reason,
            settings=settings,
            crashed=incident.crashed,
        )
    if delivery is not None and again:
        takeover.rehint(database, delivery.run, delivery.nesting)


def _cancel(durable: Durable, asked: CancelAsked) -> None:
    ids = dict.fromkeys(asked.ids)
    if asked.stamps:
        ids.update(dict.fromkeys(revoke.stamped(durable, asked.stamps)))
    asked.found.update(revoke.cancel_all(durable, ids, asked.reason))
    asked.done.set()
