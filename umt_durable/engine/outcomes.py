"""What is believed of a message, and what became of its delivery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import UUID

from umt_durable.engine.failures import Failure
from umt_durable.records import Token
from umt_durable.states import RunState


@dataclass(frozen=True, slots=True)
class Delivery:
    """What is believed of a message: which run it is about. `claim` is made by whoever received it."""

    run_id: str
    nesting: int
    task: str
    claim: UUID


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is terminal; what has to leave is in the outbox, claimed by this delivery.

    Shape: `version` is the one that ran, `value` the result as read back, `data` its stored bytes; `error` what the
    body raised, and `failure` what is kept of it; `events` are the ids of the outbox rows to forget once they have
    been published.
    """

    state: RunState
    token: Token
    version: int
    value: Any = None
    data: bytes | None = None
    error: Exception | None = None
    failure: Failure | None = None
    events: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Parked:
    """The run waits for time, a fact, a retry or a person; this worker is free.

    Shape: `error` is what an attempt of the run failed with, if it will be tried again in `retry_seconds`.
    """

    state: RunState
    until: str
    error: Exception | None = None
    retry_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Superseded:
    """The run is terminal without a result or callbacks of its own: another task has its id, and its callers.

    Shape: `message` is what has to be published for that task, if anything; `events` are the outbox rows that hold it.
    """

    token: Token
    message: bytes | None
    events: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Continued:
    """The run is ready for its next generation, which some worker will take; this one is free."""

    generation: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nothing was done: the run was claimed, parked or finished before, or this process may not go on with it."""

    reason: str


Outcome: TypeAlias = Finished | Superseded | Parked | Continued | Dropped
