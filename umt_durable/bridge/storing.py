"""The result backend under Celery's tracer: what a durable run ended in is stored as that, or by the relay.

Whatever is raised while the tracer stores an outcome, it takes for a failure of the task, and stores that once the
backend is back. For a run the outcome is in Postgres already, with a row of the outbox for the result: the tracer is
told that all went well, the row stays, and a relay stores the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final, Protocol

from celery.app.task import Context

from umt_durable.states import RunState

OUTCOME: Final = "umt_durable_outcome"
"""The attribute of a request that says what its run ended in; ordinary tasks and runs under way have none."""

_OURS: Final = "umt_durable_stock"


class Ended(Protocol):
    """A run that has ended in Postgres, until its result is stored."""

    @property
    def state(self) -> RunState:
        """What it ended in."""

    def take(self) -> bool:
        """Say, to the first who asks, that the outcome is his to store."""

    def leave(self, error: Exception) -> None:
        """Leave the outcome to the relay."""


def guarded(backend: Any) -> Any:
    """Have a result backend keep the outcomes of runs as they are, and return it. Doing it twice changes nothing."""
    for name, state in (("mark_as_done", RunState.SUCCEEDED), ("mark_as_failure", RunState.FAILED)):
        stock = getattr(backend, name)
        if not hasattr(stock, _OURS):
            setattr(backend, name, _as_it_ended(stock, state))
    return backend


def _as_it_ended(stock: Callable[..., None], state: RunState) -> Callable[..., None]:
    @wraps(stock)
    def mark(task_id: str, outcome: Any, *rest: Any, **options: Any) -> None:
        request = options.get("request") or next((one for one in rest if isinstance(one, Context)), None)
        ended: Ended | None = getattr(request, OUTCOME, None)
        if ended is None:
            stock(task_id, outcome, *rest, **options)
        elif ended.state is state and ended.take():
            try:
                stock(task_id, outcome, *rest, **options)
            except Exception as error:  # noqa: BLE001 - each backend raises its own; raised, it would be the outcome
                ended.leave(error)

    setattr(mark, _OURS, stock)
    return mark
