"""What `durable doctor` looks for in the tasks of an app: whether they still are what makes them durable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from celery.app.annotations import resolve_all

from umt_durable.bridge.findings import Finding, Findings, counted, fail, many, ok
from umt_durable.bridge.request import DurableRequest
from umt_durable.bridge.strategy import is_durable
from umt_durable.bridge.task import DurableTask
from umt_durable.errors import DefinitionError
from umt_durable.states import OWN

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable

PINNED: Final = {
    "acks_late": DurableTask.acks_late,
    "reject_on_worker_lost": DurableTask.reject_on_worker_lost,
    "retry_on_worker_lost": DurableTask.retry_on_worker_lost,
}
COST: Final = (
    "what Celery does with a message whose worker dies then depends on this setting, beside what the run's row says"
)


def acks(app: Any) -> Findings:
    """Look whether each durable task has the class attributes by which its row, and not a message, decides.

    Whether a hint is acked after a failure or a time limit is not looked at: hints are acked before the body begins.
    """
    found = (task for task in app.tasks.values() if isinstance(task, DurableTask) and not task.is_ordinary)
    tasks = [task for task in found if not task.name.startswith(OWN)]  # what holds for the users' holds for ours
    bad = [*_overridden(app, tasks), *_replaced(tasks)]
    yield from bad
    if not bad:
        yield ok(
            "acks",
            f"{counted(len(tasks), 'durable task pins its', 'durable tasks pin their')} acks;"
            " task_acks_late, task_acks_on_failure_or_timeout and"
            " task_reject_on_worker_lost hold for plain tasks only: a hint is acked when a child accepts it, and the"
            " run's row, not the message, is what a lost worker leaves",
        )


def retries(durable: Durable) -> Findings:
    """Look whether each task names its retry policy, where it has to."""
    if not durable.settings.strict_retry:
        return
    try:
        durable.check_tasks()
    except DefinitionError as error:
        yield fail("retries", str(error), "name the policy of each, or take strict_retry out of the settings")
    else:
        yield ok("retries", "every durable task names its retry policy")


def _overridden(app: Any, tasks: list[DurableTask]) -> Iterator[Finding]:
    for name, pinned in PINNED.items():
        others = [task for task in tasks if bool(getattr(task, name)) is not pinned]
        noted = [task.name for task in others if _is_annotated(app, task, name)]
        own = [task.name for task in others if task.name not in noted]
        for found, where in ((noted, "by task_annotations"), (own, "by its class or decorator")):
            if found:
                yield fail(
                    "acks",
                    f"{name} of {many(found)} is made {not pinned} {where}: {COST}",
                    f"take {name} out of {'task_annotations' if found is noted else 'the task'}: for durable tasks it"
                    f" stays {pinned}",
                )


def _replaced(tasks: list[DurableTask]) -> Iterator[Finding]:
    """Yield the tasks whose deliveries this package does not see: Celery would end their runs by itself."""
    for task in tasks:
        request: object = task.Request  # Celery takes a name too
        is_ours = issubclass(request, DurableRequest) if isinstance(request, type) else request == DurableTask.Request
        if not (is_ours and is_durable(task)):
            yield fail(
                "acks",
                f"{task.name} has another Request or Strategy: Celery stores an outcome for a worker that died",
                "take Request and Strategy out of the task's class and of task_annotations",
            )


def _is_annotated(app: Any, task: DurableTask, name: str) -> bool:
    return any(name in each for each in resolve_all(app.annotations, type(task)))
