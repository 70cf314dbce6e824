"""Durable tasks called eagerly: enqueued as always, then executed in the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from umt_durable.bridge import deliver, enqueuing
from umt_durable.bridge.message import TaskMessage
from umt_durable.bridge.reporter import CeleryReporter
from umt_durable.engine.executor import Delivery, Finished, Parked
from umt_durable.errors import DurableError

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable
    from umt_durable.bridge.task import DurableTask


def perform_eagerly(
    durable: Durable,
    task: DurableTask,
    delivery: Delivery,
    reporter: CeleryReporter,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Execute a run in the caller and return its result.

    Errors: what the body raises; DurableError when the run is parked instead: it lives on, and a worker ends it.
    """
    message = TaskMessage(
        id=delivery.run_id,
        nesting=0,
        task=task.name,
        args=args,
        kwargs=kwargs,
        queue=durable.queue_of(task.name),
        priority=None,
        eta=None,
        expires=None,
        retries=0,
        ignore_result=None,
        envelope=reporter.envelope,
    )
    durable.client.enqueue(enqueuing.new_run(durable, message, enqueuing.Enqueuing()))
    outcome = durable.executor().execute(delivery, reporter)
    if isinstance(outcome, Finished) and outcome.error is not None:
        raise outcome.error
    if isinstance(outcome, Finished):
        return deliver.plain(outcome.value, outcome.data, durable.tasks.get(task.name))
    reason = f"is parked ({outcome.state} {outcome.until})" if isinstance(outcome, Parked) else outcome.reason
    raise DurableError(f"{task.name} was called eagerly, but its run {reason}; a worker will go on with it")
