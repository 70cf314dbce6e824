"""What the engine asks of the task queue in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol
from uuid import UUID

from umt_durable.engine.answers import Answer, Place
from umt_durable.records import Grant, NewRun
from umt_durable.states import RunState


@dataclass(frozen=True, slots=True)
class Described:
    """An ordinary task to be awaited: its name, what identifies the call on replay, and what its class says of it."""

    task: str
    identity: tuple[Any, ...]
    idempotent: bool


@dataclass(frozen=True, slots=True)
class Message:
    """A message as the outbox keeps it, and when it may leave; at once without either."""

    payload: bytes
    due: datetime | None = None
    delay: timedelta | None = None


class OrdinaryTasks(Protocol):
    """The tasks of the queue in front of the engine that are not durable."""

    def describe(self, signature: Any, step: str) -> Described:
        """Say what a signature asks for.

        Errors: DefinitionError for what cannot be awaited as a step.
        """

    def check(self, signature: Any, step: str) -> None:
        """Refuse a signature whose arguments a task that is registered here does not take.

        Errors: InputError naming the step, the task and the argument.
        """

    def pack(self, signature: Any, place: Place, token: UUID, queue: str | None) -> Message:
        """Make the message whose task brings its answer, with the token, to a step; over the run's own queue.

        Errors: EncodingError for arguments that JSON cannot hold.
        """

    def look(self, task_id: str) -> Answer | None:
        """Ask the result backend once how a task ended; None when it does not know, or cannot be asked."""


class DurableTasks(Protocol):
    """The durable tasks of the process, as children of a run."""

    def plan(self, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], id: str, step: str) -> NewRun:
        """Make the run of a call, without starting it, under the given id; a signature brings arguments of its own.

        Errors: DefinitionError for what is no durable task, or is to begin later; InputError; EncodingError.
        """

    def name(self, task: Any, step: str) -> str:
        """Return the name of a durable task.

        Errors: DefinitionError for what is none.
        """

    def annotation(self, task: Any) -> Any:
        """Return what a durable task's result is typed by."""


class Reporter(Protocol):
    """Stores interim states and knows what has to leave at the end of a run."""

    @property
    def ordinary(self) -> OrdinaryTasks:
        """The ordinary tasks that a step can await."""

    @property
    def reports(self) -> bool:
        """Whether anyone can ask the result backend for this run."""

    @property
    def wrote(self) -> bool:
        """Whether an interim state was stored in this delivery."""

    @property
    def trace_id(self) -> str | None:
        """The trace that the run's message belongs to, 32 hex digits; None when it belongs to none."""

    @property
    def durable_tasks(self) -> DurableTasks:
        """The durable tasks that can be children."""

    def claimed(self, grant: Grant) -> None:
        """Take in what the run's row says of its message. Called once, right after the claim."""

    def callbacks(self, state: RunState) -> int:
        """Return how many callbacks leave when the run ends in a state."""

    def started(self) -> None:
        """Store that the run is being executed, if its task tracks that. Called on a fresh proof."""

    def suspending(self, state: RunState, until: str, cause: Exception | None = None) -> None:
        """Store that the run is about to be parked, after a failure with its cause. Called on a fresh proof."""

    def check_sleep(self, seconds: float) -> None:
        """Refuse a sleep that what waits for this run would not outlive. Called before the sleep is recorded.

        Errors: DefinitionError.
        """
