"""What the worker bridge needs of the `Durable` instance of an app, and the records that pass between the two."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast
from uuid import UUID

from umt_durable.clock import boottime
from umt_durable.errors import ConfigurationError
from umt_durable.states import RunState

if TYPE_CHECKING:
    from umt_durable.bridge.message import TaskMessage
    from umt_durable.settings import Settings

NODE_VARIABLE = "UMT_DURABLE_NODE"
"""The environment variable by which the pool children of a worker learn its node id (32 hex digits)."""

VERSIONS_VARIABLE = "UMT_DURABLE_VERSIONS"
"""The environment variable by which spawned pool children learn which versions their worker takes."""

CLAIM_KEY = "umt_claim"
"""The request key of a delivery's claim id (32 hex digits). The child drops it before it copies request headers."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a run to a pool: the claim id given to it, and the run as the message names it."""

    claim: UUID
    run: str
    nesting: int


@dataclass(frozen=True, slots=True)
class ChildLost:
    """A pool child is known to have ended; no delay protects its runs.

    Units: `status` is an exit status, or minus the number of the signal that ended the child; None when unknown. `seen`
    is the `boottime` of this object: a worker that begins later under that pid is another process.
    """

    pid: int
    status: int | None
    delivery: Delivery | None
    seen: float = field(default_factory=boottime, compare=False)


@dataclass(frozen=True, slots=True)
class DeliveryEnded:
    """A delivery is over without a word from its body, whose process may still be unwinding unless `known_dead`.

    Shape: `again` asks for another delivery at once, should the run still be ready; without it that waits until the
    hint counts as lost, for what went wrong here before the claim would go wrong again. `crashed` says that it counts
    against the run's crash budget: not where a shutdown ended it.
    """

    delivery: Delivery
    known_dead: bool
    reason: str
    again: bool = True
    crashed: bool = True


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """A control command asks that runs be cancelled: those with these ids, and those with one of these stamps.

    Shape: `found` says, once `done` is set, where each of them stands that is a durable run.
    """

    reason: str
    ids: tuple[str, ...] = ()
    stamps: Mapping[str, object] = field(default_factory=dict)
    found: dict[str, RunState] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class HintRefused:
    """A hint came to this worker, which has not the task of its run."""

    run: str
    nesting: int


Incident = ChildLost | DeliveryEnded | CancelAsked | HintRefused


class Incidents(Protocol):
    """Takes what the main process sees happen to its children and deliveries, and what it is told of runs.

    All of it returns at once and is safe in a signal handler: it queues, and nothing else.
    """

    def child_lost(self, *, pid: int, status: int | None, delivery: Delivery | None) -> None:
        """Queue that a pool child has ended. `delivery` is what it was executing, when that is known."""

    def delivery_ended(
        self, delivery: Delivery, *, known_dead: bool, reason: str, again: bool = True, crashed: bool = True
    ) -> None:
        """Queue that a delivery is over: a time limit, a terminated or cancelled request, an exit of the body."""

    def cancel_asked(self, asked: CancelAsked) -> None:
        """Queue that runs are to be cancelled."""

    def hint_refused(self, run: str, nesting: int) -> None:
        """Queue that a hint came here whose run's task only others have; behind no incident, and before none."""

    def start(self) -> None:
        """Start to act on what is queued. Called once, in the main process, after the pool has started."""

    def stop(self) -> None:
        """Act on everything queued so far, within a few seconds, and end."""


class Service(Protocol):
    """Something that runs beside the pool in a worker's main process."""

    def start(self) -> None:
        """Start it; the caller does not wait for it."""

    def stop(self) -> None:
        """End it within a few seconds."""


class DurableRuntime(Protocol):
    """The `Durable` instance of an app, as far as a worker's main process uses it; found as `app.umt_durable`."""

    node: UUID
    """The id of this main process; set here when a worker starts, and in the environment for its children."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""

    @property
    def incidents(self) -> Incidents:
        """Where incidents go."""

    @property
    def lease(self) -> Service:
        """The lease of the main process."""

    @property
    def pulse(self) -> Service:
        """Relay and maintenance of this worker."""

    def take_in(self, batch: Sequence[TaskMessage]) -> None:
        """Commit the runs of foreign messages, once per (id, nesting), in one transaction.

        Errors: any of psycopg or of this package; the caller decides which refuse a message and which are an outage.
        """

    def cancel_runs(self, ids: Sequence[str], reason: str) -> Mapping[str, RunState]:
        """Commit that runs are to end as cancelled; return where each of them stands that exists.

        Errors: DatabaseUnavailableError; repeating it is safe.
        """

    def has_run(self, run_id: str) -> bool:
        """Say whether a run row with this id exists, in the database."""

    def arguments_of(self, delivery: Delivery) -> tuple[Sequence[object], Mapping[str, object]] | None:
        """Read what a run was called with, for people; None when it has no row or cannot be read.

        Errors: DatabaseUnavailableError.
        """

    def take_versions(self, text: str) -> None:
        """Have this worker take some versions of its tasks only.

        Errors: UnknownTaskError, DefinitionError.
        """

    def check_tasks(self) -> None:
        """Return if each task names its retry policy, or need not.

        Errors: DefinitionError names those that do not.
        """

    def check_schema(self) -> None:
        """Return if the schema fits this code. Leaves no connection open: the pool forks afterwards.

        Errors: SchemaError with the command to run; DatabaseUnavailableError after a bounded time.
        """

    def banner(self) -> str:
        """Say in one line what runs where, without secrets."""


def runtime_of(app: Any) -> DurableRuntime:
    """Return the `Durable` instance of an app.

    Errors: ConfigurationError when the app has none.
    """
    runtime = getattr(app, "umt_durable", None)
    if runtime is None:
        raise ConfigurationError(f"the Celery app {app.main!r} has durable tasks but no Durable(app)")
    return cast("DurableRuntime", runtime)
