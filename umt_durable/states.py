"""The states of runs, steps, waits and attempts, and which of them are terminal or parked."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final


class RunState(StrEnum):
    """Where a run stands. Only the database moves it, by conditional statements of `sql/run.sql`."""

    READY = "ready"  # waits for a worker
    RUNNING = "running"  # one attempt holds the grant
    SLEEPING = "sleeping"  # until wake_at
    WAITING = "waiting"  # for a fact, or until wake_at
    RETRYING = "retrying"  # after a failure, until wake_at
    QUARANTINED = "quarantined"  # parked for a person, with a reason
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Say whether the state is final (I12)."""
        return self in TERMINAL

    @property
    def is_parked(self) -> bool:
        """Say whether the run holds no worker and waits for time, a fact or a person."""
        return self in PARKED


class CompletionOutcome(StrEnum):
    """What became of the completion of a begun step; the SQL function `complete_step` says it."""

    DONE = "done"
    SAME = "same"  # said before, with the same payload
    USED = "used"  # said before, with another one
    ENDED = "ended"  # its run ended without it
    EXPIRED = "expired"
    STALE = "stale"  # the run is in another generation
    UNKNOWN = "unknown"  # there is no such run or step


PAUSED: Final = "paused"
"""What people call a run that stands still until it is resumed: a mark beside its state, until it has ended."""


class Scope(StrEnum):
    """What can be paused as a whole."""

    TASK = "task"
    QUEUE = "queue"


OWN: Final = "umt_durable."
"""How the names of this package's own durable tasks begin. Their runs are not shown unless they are asked for."""


def divide(names: Iterable[str]) -> tuple[list[RunState], bool]:
    """Divide what people ask for into states, and whether paused runs of any state are among it.

    Errors: ValueError for a name that is neither.
    """
    wanted = list(names)
    return [RunState(name) for name in wanted if name != PAUSED], PAUSED in wanted


TERMINAL = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED})
PARKED = frozenset({RunState.SLEEPING, RunState.WAITING, RunState.RETRYING, RunState.QUARANTINED})


class Reason(StrEnum):
    """Why a run is quarantined."""

    CRASH_BUDGET = "crash_budget"
    NONDETERMINISM = "nondeterminism"
    BAD_INPUT = "bad_input"
    JOURNAL_CORRUPT = "journal_corrupt"
    UNCERTAIN_OP = "uncertain_op"
    PAYLOAD_KEY = "payload_key"
    UNDO = "undo"


class AttemptOutcome(StrEnum):
    """How a grant ended. A null outcome is an open grant."""

    COMPLETED = "completed"
    FAILED = "failed"
    SUSPENDED = "suspended"
    LOST = "lost"
    CANCELLED = "cancelled"


class StepState(StrEnum):
    """Where a journal entry stands. `started` covers a body in flight, a sleep and a step between two tries."""

    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class StepKind(StrEnum):
    """What a journal entry records; part of a step's identity on replay."""

    RUN = "run"
    SLEEP = "sleep"
    TRANSACTION = "transaction"
    ITEM = "item"  # of a map
    BRANCH = "branch"  # of a parallel step
    VALUE = "value"  # now, uuid, random
    EFFECT = "effect"
    TASK = "task"  # an ordinary Celery task, awaited
    CALL = "call"  # child runs, awaited
    SPAWN = "spawn"  # a child run, not awaited
    UNDO = "undo"  # of another step, after a cancel that asked for it


class OpState(StrEnum):
    """Where an external effect stands in the op ledger (I15)."""

    OPEN = "open"  # begun; whether it was applied is known to nobody but, perhaps, whoever holds it
    DONE = "done"  # its answer is recorded
    FAILED = "failed"  # it was not applied, and will not be
    UNCERTAIN = "uncertain"  # a person has to say whether it was applied


class WaitState(StrEnum):
    """Where a wait stands; it leaves `pending` exactly once (I9)."""

    PENDING = "pending"
    SATISFIED = "satisfied"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class OutboxType(StrEnum):
    """What an outbox row is: four kinds of our own. Any other text is a user's event."""

    RUN = "run"  # a hint that a run is ready
    RESULT = "result"  # a terminal run's result for the Celery backend
    CALLBACK = "callback"  # one link, errback or next chain member
    CELERY = "celery"  # a signature of ordinary Celery tasks, to be published


class OutboxStatus(StrEnum):
    """Where an outbox row stands."""

    PENDING = "pending"
    DISPATCHED = "dispatched"
    DEAD = "dead"
