"""How a pass through a body ends early. These are no errors: they derive from `BaseException`, so that a task's own
`except Exception` cannot swallow them, and a pass that raised one raises it again at every further call of its context.
"""

from __future__ import annotations

from collections.abc import Sequence

from umt_durable.codec import Encoded
from umt_durable.errors import DurableError
from umt_durable.records import NewRun
from umt_durable.states import RunState


class Exit(BaseException):
    """Leave the body; raised by the context, caught by the executor, seen by nobody else."""


class Suspended(Exit):
    """The run is parked: the database has it, the worker is free."""

    def __init__(self, state: RunState, until: str) -> None:
        self.state = state
        self.until = until
        super().__init__(f"{state} {until}")


class Undecided(Exit):
    """Only a person, or an answer that still comes, can say how a step ended; no branch goes on meanwhile."""

    def __init__(self, error: DurableError, waits: Sequence[str]) -> None:
        self.error = error
        self.waits = waits
        super().__init__(str(error))


class Canceled(Exit):
    """A cancel is pending; no further body is entered."""


class Abandoned(Exit):
    """This process may not go on with the run.

    Shape: `fenced` says that the database refused the grant; otherwise the process gives it up by itself.
    """

    def __init__(self, reason: str, *, fenced: bool) -> None:
        self.reason = reason
        self.fenced = fenced
        super().__init__(reason)


class Released(Exit):
    """This process shuts down, or the run is paused, between two steps: it goes to whoever takes it next."""


class ContinuedAsNew(Exit):
    """The run begins anew under its id, with other arguments and an empty journal; `version` None is the one it has."""

    def __init__(self, arguments: Encoded, version: int | None) -> None:
        self.arguments = arguments
        self.version = version
        super().__init__("continued as new")


class Replaced(Exit):
    """Another task takes this run's place, under the same id.

    Shape: at most one is set: `run` is inserted by the transaction that ends this one; `message` is kept in the outbox
    by it, for what has to be published instead. With neither the run ends without a result, and nothing follows it.
    """

    def __init__(self, *, run: NewRun | None = None, message: bytes | None = None) -> None:
        self.run = run
        self.message = message
        super().__init__("replaced")
