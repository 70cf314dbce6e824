"""`map`, `starmap` and `chunks` of durable tasks: Celery calls the task in a loop, where none could be parked.

Each item becomes a run of its own instead; the values come back in the order of the items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from celery.backends.base import DisabledBackend
from celery.canvas import group, signature

if TYPE_CHECKING:
    from celery import Celery

    from umt_durable.bridge.durable import Durable

_NAMES: Final = {"celery.map": False, "celery.starmap": True}


def take_over_maps(durable: Durable, app: Celery) -> None:
    """Have the app's own tasks behind `map` and `starmap` (and so `chunks`) start runs for durable tasks."""
    for name, spreads in _NAMES.items():
        task = app._tasks[name]
        task.run = partial(_run, durable, task, task.run, spreads)


def _run(durable: Durable, own: Any, original: Callable[..., Any], spreads: bool, task: Any, it: Iterable[Any]) -> Any:
    target = signature(task, app=own.app)
    if not durable.has_task(target.task):
        return original(task, it)
    items = [tuple(item) if spreads else (item,) for item in it]
    if not items:
        return []
    members = group([target.type.s(*item) for item in items], app=own.app)
    if isinstance(own.backend, DisabledBackend):
        return members.apply_async().id  # nobody can ask for the values
    return own.replace(members)
