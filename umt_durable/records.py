"""What the store reads and writes: frozen records, one per table or statement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NewType
from uuid import UUID

from umt_durable.states import AttemptOutcome, CompletionOutcome, OpState, OutboxStatus, RunState, StepState, WaitState

RunNo = NewType("RunNo", int)


@dataclass(frozen=True, slots=True)
class Token:
    """The fencing token of one grant: the run, the number that grows with each grant, and the random id of this one."""

    run: RunNo
    fence: int
    claim: UUID


@dataclass(frozen=True, slots=True)
class Grant:
    """What a claim gives: the token, and the run as the attempt needs it.

    Shape: `compensates`: it is for the undos alone. `generation` counts how often the run was continued as new;
    `age_seconds` is the time since the run was made, `generation_seconds` that since it was last continued.
    """

    token: Token
    cancel: bool
    failures: int
    crashes: int
    version: int
    priority: int | None
    args: bytes
    codec: int
    digest: bytes | None
    envelope: bytes | None
    age_seconds: float
    queue: str | None = None
    generation: int = 0
    generation_seconds: float = 0.0
    compensates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to be inserted. Times are either absolute (`wake_at`) or from now (`delay_seconds`)."""

    id: str
    task: str
    nesting: int = 0
    version: int | None = None
    queue: str | None = None
    priority: int | None = None
    args: bytes = b""
    codec: int = 1
    digest: bytes | None = None
    envelope: bytes | None = None
    wake_at: datetime | None = None
    delay_seconds: float | None = None
    expires_at: datetime | None = None
    expires_seconds: float | None = None
    ref: str | None = None
    attributes: str | None = None  # a JSON object
    key: str | None = None
    key_hash: bytes | None = None
    key_ttl_seconds: float | None = None
    attach: bool = True  # to the run that has the key already; else that is an error


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What became of an enqueue: `created`, `existing` (the key or id was there), or `conflict` (with other input)."""

    id: str
    no: int | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Completed:
    """What became of a completion, and the fact that counts; None where there is none."""

    fact: UUID | None
    outcome: CompletionOutcome


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One journal entry.

    Shape: `failures` counts the failed tries; `due` says that its wake_at has passed by the database clock;
    `age_seconds` is the time from the beginning of its first try to the read. A large result may be left out: `size` is
    its length in bytes as it is stored, None where there is none.
    """

    key: str
    seq: int
    kind: str
    state: StepState
    fingerprint: bytes | None
    failures: int
    fence: int
    result: bytes | None
    digest: bytes | None
    error: bytes | None
    wake_at: datetime | None
    due: bool
    started_at: datetime | None = None
    finished_at: datetime | None = None
    age_seconds: float | None = None
    size: int | None = None
    undo: str | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One external effect in the op ledger.

    Shape: `run` and `fence` are of the attempt that began or took it last, `busy` says that this one is still the
    current grant of a running run; `run_id` and `run_state` are those of that run, None when it was removed.
    `is_clear`: nothing was applied so far; `commit_due`: it is a person's answer, and no run has committed what belongs
    to it yet. `waiting` counts the runs that are parked for a person's decision.
    """

    namespace: str
    op_key: str
    state: OpState
    run: int
    fence: int
    token: UUID
    turn: int
    idempotency_key: UUID
    request_digest: bytes | None
    is_clear: bool
    commit_due: bool
    result: bytes | None
    digest: bytes | None
    error: bytes | None
    busy: bool
    run_id: str | None
    run_state: RunState | None
    actor: str | None
    comment: str | None
    began_at: datetime
    taken_at: datetime
    settled_at: datetime | None
    waiting: int

    @property
    def is_abandoned(self) -> bool:
        """Say whether it is open and its run has ended or was removed, so that this run will not settle it."""
        over = self.run_state is None or self.run_state.is_terminal
        return self.state is OpState.OPEN and over and not self.is_clear


@dataclass(frozen=True, slots=True)
class WaitEntry:
    """One wait of a run, with the payload that settled it.

    Shape: `due` says that its deadline has passed by the database clock, `age_seconds` is the time from its
    registration to the read. A group has `need`, the number of parts that settle it; each part names its group in
    `part_of`. `announced` is false while an address is still to be handed out. A large payload may be left out: `size`
    is its length in bytes as it is stored, None where there is none.
    """

    key: str
    seq: int
    name: str
    address: str
    mode: str
    deadline: datetime | None
    state: WaitState
    fact: UUID | None
    payload: bytes | None
    due: bool
    created_at: datetime | None = None
    settled_at: datetime | None = None
    part_of: str | None = None
    need: int | None = None
    announced: bool = True
    age_seconds: float = 0.0
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Awaited:
    """The wait for an answer that somebody outside brings, who has to know its token."""

    run: int
    key: str
    address: str
    state: WaitState
    token: UUID = field(repr=False)


@dataclass(frozen=True, slots=True)
class Child:
    """One child run of a step, as the step's outcome is made of it."""

    id: str
    task: str
    state: RunState
    reason: str | None
    result: bytes | None
    error: bytes | None
    codec: int


@dataclass(frozen=True, slots=True)
class FactRecord:
    """One fact, as a router needs it."""

    id: UUID
    address: str
    name: str
    payload: bytes | None
    actor: str | None


@dataclass(frozen=True, slots=True)
class LockedRun:
    """Where a run stands, while the caller holds its row lock.

    Shape: `compensates`: a cancel has come that has what was done undone first.
    """

    no: RunNo
    id: str
    nesting: int
    state: RunState
    fence: int
    cancel: bool
    paused: bool
    due: bool
    expired: bool
    parent_no: int | None
    compensates: bool = False


@dataclass(frozen=True, slots=True)
class RunOwner:
    """Who holds a run, as far as its row is still there, and the step whose body was last seen to start, if any."""

    worker: UUID
    host: str | None
    pid: int | None
    step: str | None


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """One outbox row that a relay has claimed, with what it needs of the row's run.

    Shape: `live` says that a live process can take what it leads to: the run's version, or an event of its type.
    `trace` is the carrier of who wrote the row. `step` awaits the task of this message; `once`: the message must not
    leave twice; `doubtful`: a relay before this one had begun to publish such a message, and never said how that ended.
    Units: `age_seconds` is the time since the row was made, by the database's clock.
    """

    id: UUID
    type: str
    run: int | None
    ordinal: int
    payload: bytes | None
    attempts: int
    run_id: str | None
    nesting: int | None
    task: str | None
    queue: str | None
    priority: int | None
    fence: int | None
    state: RunState | None
    paused: bool | None
    envelope: bytes | None
    live: bool | None
    key: str | None = None
    age_seconds: float = 0.0
    trace: Mapping[str, str] | None = None
    step: str | None = None
    once: bool = False
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class StepMessage:
    """The message of a task that a step awaits, as the outbox keeps it for a relay.

    Shape: `step` is the step's key in the journal, `trace` the carrier of who wrote it; `once`: it must not leave
    twice. `due` or `delay` say when it may leave, at once without them.
    """

    id: UUID
    step: str
    payload: bytes
    once: bool
    due: datetime | None = None
    delay: timedelta | None = None
    trace: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class OutboxEvent:
    """A read-only view of one outbox row.

    Shape: `type` is the user's, or one of ours: run, result, callback, celery. `run` is the id of the run that the row
    belongs to, or that the event started. `reason` says why it was last refused.
    """

    id: UUID
    type: str
    status: OutboxStatus
    payload: bytes | None
    run: str | None
    attempts: int
    reason: str | None
    idempotency_key: str | None
    created_at: datetime
    next_attempt_at: datetime
    published_at: datetime | None


@dataclass(frozen=True, slots=True)
class Note:
    """What a body says of how far it is, to be written.

    Shape: `key` is that of a step, empty for the run itself; `turn` grows with each note of an attempt.
    """

    key: str
    turn: int
    status: str | None = None
    done: float | None = None
    total: float | None = None
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What a body said of how far it is, and when.

    Shape: `key` is that of a step, empty for the run itself, which alone has a `status`, and `done` of `total`.
    `payload` is what it gave its last heartbeat.
    """

    key: str
    status: str | None
    done: float | None
    total: float | None
    payload: bytes | None
    at: datetime


@dataclass(frozen=True, slots=True)
class Run:
    """A read-only view of one run."""

    no: RunNo
    id: str
    nesting: int
    task: str
    version: int | None
    queue: str | None
    priority: int | None
    state: RunState
    reason: str | None
    paused_at: datetime | None
    failures: int
    crashes: int
    wake_at: datetime | None
    cancel_at: datetime | None
    ref: str | None
    attributes: dict[str, Any] | None
    result: bytes | None
    error: bytes | None
    codec: int
    created_at: datetime
    finished_at: datetime | None
    retry_of: str | None = None
    fork_of: str | None = None
    generation: int = 0
    continued_at: datetime | None = None
    compensate_at: datetime | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class RetriedRun:
    """A run that somebody wants to be retried; of a `compensated` one what it had done was undone."""

    no: RunNo
    id: str
    nesting: int
    state: RunState
    envelope: bytes | None
    compensated: bool = False


@dataclass(frozen=True, slots=True)
class ForkedRun:
    """A run that somebody wants to be forked.

    Shape: `seq` is the place in its journal of the step from which on the fork goes its own way; None when it has no
    such step.
    """

    no: RunNo
    id: str
    nesting: int
    state: RunState
    envelope: bytes | None
    seq: int | None
    compensated: bool = False


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """What a person did to a run. `detail` is what it met or made."""

    act: str
    actor: str
    reason: str | None
    detail: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A terminal run as the result backend and the callbacks need it."""

    no: RunNo
    id: str
    nesting: int
    task: str
    version: int | None
    queue: str | None
    priority: int | None
    state: RunState
    reason: str | None
    result: bytes | None
    error: bytes | None
    codec: int
    args: bytes
    envelope: bytes | None


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One grant of a run in its history."""

    fence: int
    worker: UUID
    claimed_at: datetime
    ended_at: datetime | None
    outcome: AttemptOutcome | None
    error: str | None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One process with a lease."""

    id: UUID
    node: UUID
    pid: int
    host: str
    live: bool
    started_at: datetime
    versions: list[str]
    counters: dict[str, int]


def event_id(run: int, gen: int, kind: str, ordinal: int) -> UUID:
    """Return the id of an outbox row of ours; the SQL function `event_id` computes the same."""
    return UUID(bytes=hashlib.sha256(f"{run}/{gen}/{kind}/{ordinal}".encode()).digest()[:16])
