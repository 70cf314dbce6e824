"""Durable tasks called eagerly: the run is stored, then executed in the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from umt_durable.bridge import deliver, enqueuing
from umt_durable.bridge.envelope import EMPTY
from umt_durable.bridge.message import TaskMessage
from umt_durable.bridge.offspring import ChildTasks
from umt_durable.bridge.ordinary import CeleryTasks
from umt_durable.database import Connection
from umt_durable.engine.outcomes import Continued, Delivery, Finished, Parked
from umt_durable.errors import DefinitionError, DurableError
from umt_durable.records import FinishedRun, Grant
from umt_durable.services.intake import take_in
from umt_durable.states import RunState
from umt_durable.store import runs

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable
    from umt_durable.bridge.task import DurableTask


class EagerReporter:
    """Reports to nobody: Celery's tracer in the caller has the request, and dispatches and stores what follows."""

    reports = False
    wrote = False
    trace_id = None

    def __init__(self, durable: Durable, task: DurableTask) -> None:
        self.ordinary = CeleryTasks(durable)
        self.durable_tasks = ChildTasks(durable, task.name)

    def claimed(self, grant: Grant) -> None:
        """Leave the request as the caller made it."""
        self.durable_tasks.claimed(grant.version)

    def callbacks(self, state: RunState) -> int:
        """Return none: the tracer calls them."""
        return 0

    def started(self) -> None:
        """Store nothing."""

    def suspending(self, state: RunState, until: str, cause: Exception | None = None) -> None:
        """Store nothing."""

    def check_sleep(self, seconds: float) -> None:
        """Allow any: the run will be parked, which the caller hears of."""


def perform_eagerly(
    durable: Durable, task: DurableTask, delivery: Delivery, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Execute a run in the caller and return its result.

    The run is stored without a hint, so that no worker takes it first. Under the id of a run that has ended already,
    as of a chain that is applied once more, its outcome is returned.
    Errors: what the body raises; DefinitionError for what only a worker can do; DurableError when the run is parked
    instead: it lives on, and a worker ends it.
    """
    said = enqueuing.current()
    if said.conn is not None or said.idempotency_key is not None:
        raise DefinitionError(
            f"{task.name} was called eagerly, which neither waits for a caller's commit nor looks for an earlier run: "
            "conn= and idempotency_key= need a worker"
        )
    message = TaskMessage(
        id=delivery.run_id,
        nesting=delivery.nesting,
        task=task.name,
        args=args,
        kwargs=kwargs,
        queue=durable.queue_of(task.name),
        priority=None,
        eta=None,
        expires=None,
        retries=0,
        ignore_result=None,
        envelope=EMPTY,
    )
    said = enqueuing.Enqueuing(ref=said.ref, attributes=said.attributes)
    take_in(durable.database, durable.settings, [enqueuing.new_run(durable, message, said)])
    with enqueuing.enqueuing({}):
        outcome = durable.executor().execute(delivery, EagerReporter(durable, task))
    if isinstance(outcome, Finished) and outcome.error is not None:
        raise outcome.error
    if isinstance(outcome, Finished) and outcome.state is RunState.SUCCEEDED:
        return deliver.plain(outcome.value, outcome.data, durable.tasks.get(task.name))
    if isinstance(outcome, Parked):
        raise DurableError(
            f"{task.name} was called eagerly, but its run is parked ({outcome.state} {outcome.until}); "
            "a worker will go on with it"
        )
    if isinstance(outcome, Continued):
        raise DurableError(
            f"{task.name} was called eagerly, but its run continues as new (generation {outcome.generation}); "
            "a worker will go on with it"
        )
    run = _ended(durable, delivery)
    if run is None:
        raise DurableError(f"{task.name} was called eagerly, but its run did not end here: {outcome}")
    value, error = deliver.outcome_of(durable, run)
    if error is not None:
        raise error
    return value


def _ended(durable: Durable, delivery: Delivery) -> FinishedRun | None:
    """Return the run of an earlier call under the same id, if it has a result or an error."""

    def look(conn: Connection) -> FinishedRun | None:
        found = [runs.for_report(conn, no) for no, _ in runs.of_id(conn, delivery.run_id)]
        ended = (RunState.SUCCEEDED, RunState.FAILED)
        return next((run for run in found if run and run.nesting == delivery.nesting and run.state in ended), None)

    return durable.database.do(look)
