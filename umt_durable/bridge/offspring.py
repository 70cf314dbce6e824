"""Durable tasks as children of a run: made as Celery's own calls make runs, and inserted by the parent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.canvas import Signature

from umt_durable.bridge import enqueuing
from umt_durable.errors import DefinitionError
from umt_durable.records import NewRun

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable


class ChildTasks:
    """The durable tasks of an app, as children of one run.

    Keeps: a child of its parent's own task takes the parent's version, unless its call names another one: the code that
    calls it was written for that one (F4). A child of another task takes the highest, as any new run.
    """

    def __init__(self, durable: Durable, parent: str) -> None:
        self._durable = durable
        self._parent = parent
        self._version: int | None = None

    def claimed(self, version: int) -> None:
        """Take in which version of its task the parent is executed by."""
        self._version = version

    def plan(self, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], id: str, step: str) -> NewRun:
        """Make the run of a call, without starting it.

        Errors: DefinitionError for what is no durable task, or is to begin later; InputError; EncodingError.
        """
        name = self.name(task, step)
        signature = task.clone() if isinstance(task, Signature) else self._durable.app.tasks[name].s(*args, **kwargs)
        signature.options["task_id"] = id
        if (version := self._version_of(name, task)) is not None:
            signature.options["version"] = version
        new = enqueuing.run_of(lambda: signature.apply_async(add_to_parent=False))
        if new is None:
            raise DefinitionError(f"step {step!r}: {name} is called in a way that starts no run")
        if new.wake_at is not None or new.delay_seconds is not None or new.expires_at or new.expires_seconds:
            raise DefinitionError(f"step {step!r}: a child begins at once; eta, countdown and expires are not for it")
        return new

    def name(self, task: Any, step: str) -> str:
        """Return the name of a durable task.

        Errors: DefinitionError for what is none.
        """
        name = task.task if isinstance(task, Signature) else getattr(task, "name", task)
        if isinstance(task, Signature) and task.get("subtask_type"):
            raise DefinitionError(f"step {step!r}: a child is one durable task, not a {task['subtask_type']}")
        if not isinstance(name, str) or not self._durable.has_task(name):
            hint = "; await an ordinary task with step.task" if isinstance(name, str) else ""
            raise DefinitionError(f"step {step!r}: {name or type(task).__name__} is no durable task{hint}")
        return name

    def annotation(self, task: Any) -> Any:
        """Return what a durable task's result is typed by, in the version that its child takes, if that is still here.

        What a child gave is read back long after its version was drained.
        """
        name = self.name(task, "")
        version = self._version_of(name, task)
        here = isinstance(version, int) and self._durable.tasks.has(name, version)
        return self._durable.tasks.get(name, version if here else None).result

    def _version_of(self, name: str, task: Any) -> Any:
        """Return the version that a call names, or that its task's caller has; None is the highest."""
        named = task.options.get("version") if isinstance(task, Signature) else None
        return self._version if named is None and name == self._parent else named
