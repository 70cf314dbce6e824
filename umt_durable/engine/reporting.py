"""What the engine asks of the task queue in front of it."""

from __future__ import annotations

from typing import Protocol

from umt_durable.records import Grant
from umt_durable.states import RunState


class Reporter(Protocol):
    """Stores interim states and knows what has to leave at the end of a run."""

    @property
    def reports(self) -> bool:
        """Whether anyone can ask the result backend for this run."""

    @property
    def wrote(self) -> bool:
        """Whether an interim state was stored in this delivery."""

    @property
    def trace_id(self) -> str | None:
        """The trace that the run's message belongs to, 32 hex digits; None when it belongs to none."""

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
