"""What happened in this process: counters, and hooks that see each count as it is made.

Counting takes no lock. A lock held by another thread at the moment of a fork would stay locked in the child, and the
thread that renews the lease would then hang on the first thing it counts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import count as _ticks
from itertools import repeat
from types import MappingProxyType
from typing import Final

logger = logging.getLogger(__name__)


class Counter(StrEnum):
    """What is counted. `MEANINGS` says for each what one count stands for."""

    ENQUEUED_RUN = "enqueued_run"
    FOREIGN_INTAKE = "foreign_intake"
    DUPLICATE_DELIVERY = "duplicate_delivery"
    REFUSED_HINT = "refused_hint"
    MESSAGE_REFUSED = "message_refused"
    CLAIMED_RUN = "claimed_run"
    FINISHED_RUN = "finished_run"
    SUSPENDED_RUN = "suspended_run"
    HANDED_OVER_RUN = "handed_over_run"
    CONTINUED_RUN = "continued_run"
    QUARANTINED_RUN = "quarantined_run"
    EXECUTED_STEP = "executed_step"
    REPLAYED_STEP = "replayed_step"
    STEP_RETRY = "step_retry"
    SENT_TASK = "sent_task"
    RESENT_TASK = "resent_task"
    ANSWER_REFUSED = "answer_refused"
    RUN_RETRY = "run_retry"
    BUSY_OP = "busy_op"
    RESUMED_OP = "resumed_op"
    UNCERTAIN_OP = "uncertain_op"
    RESOLVED_OP = "resolved_op"
    FENCED_WRITE = "fenced_write"
    LOST_REPLY = "lost_reply"
    SYSTEM_RETRY = "system_retry"
    LEASE_LOST = "lease_lost"
    TAKE_OVER = "take_over"
    REDISPATCH = "redispatch"
    REDISPATCH_POSTPONED = "redispatch_postponed"
    BLOCKED_RUN = "blocked_run"
    BROKER_LOSS = "broker_loss"
    PUBLISHED = "published"
    PUBLISH_REFUSED = "publish_refused"
    PUBLISH_OUTAGE = "publish_outage"
    DEAD_EVENT = "dead_event"
    DOUBTFUL_MESSAGE = "doubtful_message"
    DISPATCHED_EVENT = "dispatched_event"
    ROUTED_FACT = "routed_fact"
    RESCAN_HIT = "rescan_hit"
    CONTRADICTING_FACT = "contradicting_fact"
    WOKEN_RUN = "woken_run"
    NONDETERMINISM = "nondeterminism"
    ORPHAN_STEP = "orphan_step"
    DUTY_FAILED = "duty_failed"
    HOOK_FAILED = "hook_failed"


MEANINGS: Final[Mapping[Counter, str]] = MappingProxyType(
    {
        Counter.ENQUEUED_RUN: "a run was committed by this process",
        Counter.FOREIGN_INTAKE: "a message of a producer without this package became a run",
        Counter.DUPLICATE_DELIVERY: "a hint found nothing to claim: its run was claimed, parked or finished before",
        Counter.REFUSED_HINT: "a hint came to a process without the code of its run; it comes back for one that has it",
        Counter.MESSAGE_REFUSED: "a malformed message, or one in a refused codec, was dropped",
        Counter.CLAIMED_RUN: "this process was granted a run",
        Counter.FINISHED_RUN: "a run of this process became terminal",
        Counter.SUSPENDED_RUN: "a run of this process was parked for time, a fact or a retry",
        Counter.HANDED_OVER_RUN: "a run of this process was made ready for another, as this one shuts down",
        Counter.CONTINUED_RUN: "a run of this process began anew, with an empty journal",
        Counter.QUARANTINED_RUN: "a run was parked for a person",
        Counter.EXECUTED_STEP: "a step's body was entered",
        Counter.REPLAYED_STEP: "a step gave back its recorded outcome",
        Counter.STEP_RETRY: "a step failed and will be tried again",
        Counter.SENT_TASK: "an ordinary task was sent as a step",
        Counter.RESENT_TASK: "the message of such a task counted as lost, and was sent again",
        Counter.ANSWER_REFUSED: "an answer came for a step that awaits none, or without its token",
        Counter.RUN_RETRY: "an attempt failed and the run will be tried again",
        Counter.BUSY_OP: "a run was parked for a while, because another one is executing the same effect",
        Counter.RESUMED_OP: "an effect was found begun without an answer",
        Counter.UNCERTAIN_OP: "an effect was left to a person: nobody can say whether it was applied",
        Counter.RESOLVED_OP: "a person said what became of an effect",
        Counter.FENCED_WRITE: "the database refused a write because its grant had ended",
        Counter.LOST_REPLY: "a connection broke before the reply to a write; the outcome was looked up or repeated",
        Counter.SYSTEM_RETRY: "a deadlock or serialisation failure of a system transaction; each is a defect",
        Counter.LEASE_LOST: "this process could not renew its lease in time",
        Counter.TAKE_OVER: "a run was taken from a worker that lost its lease or died",
        Counter.REDISPATCH: "a ready run past its delivery deadline got another hint",
        Counter.REDISPATCH_POSTPONED: "such a run got none, because its queue is just deep",
        Counter.BLOCKED_RUN: "a ready run was passed over at such a look: no live worker has its version",
        Counter.BROKER_LOSS: "the broker was found to have lost its data",
        Counter.PUBLISHED: "a message was confirmed by the broker",
        Counter.PUBLISH_REFUSED: "one message was refused by the broker, or cannot be sent",
        Counter.PUBLISH_OUTAGE: "the broker took no messages",
        Counter.DEAD_EVENT: "an outbox row was given up, with its reason",
        Counter.DOUBTFUL_MESSAGE: "the message of an awaited task was put aside: it may have left, and may not twice",
        Counter.DISPATCHED_EVENT: "the run of a user's event was committed together with its dispatch",
        Counter.ROUTED_FACT: "a fact was matched to the waits of its address",
        Counter.RESCAN_HIT: "a wait and its fact were found unmatched by the re-scan; each is a defect",
        Counter.CONTRADICTING_FACT: "a second fact with another payload came where a wait had taken the first",
        Counter.WOKEN_RUN: "a parked run became ready",
        Counter.NONDETERMINISM: "a replay asked for another step than was recorded",
        Counter.ORPHAN_STEP: "a recorded step was not asked for by the pass that finished the run",
        Counter.DUTY_FAILED: "a duty of relay or maintenance raised, or left one row for later because that row raised",
        Counter.HOOK_FAILED: "a subscriber raised",
    }
)

Subscriber = Callable[[str, Mapping[str, object]], None]

_counts: dict[str, _ticks[int]] = {}
_subscribers: tuple[Subscriber, ...] = ()


def count(name: Counter | str, amount: int = 1, /, **fields: object) -> None:
    """Add to a counter and tell the subscribers; zero changes nothing.

    Shape: `fields` use the glossary (`run`, `attempt`, `fence`, `step`, `queue`); subscribers get them with `amount`.
    Errors: KeyError for a name that is not a `Counter`; never one of a subscriber.
    """
    ticks = _counts[name]
    if amount == 0:
        return
    # next() on itertools.count is one C call, so no count is lost between threads.
    if amount == 1:
        next(ticks)
    else:
        for _ in repeat(None, amount):
            next(ticks)
    if _subscribers:
        _tell(str(name), {"amount": amount, **fields})


def snapshot() -> dict[str, int]:
    """Give the counts of this process since it started (or was forked), by name, zeros included."""
    # The text of itertools.count is its only way to be read without advancing it: "count(12)".
    return {name: int(repr(ticks)[6:-1]) for name, ticks in _counts.items()}


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Call `subscriber(name, fields)` at each count from now on; the function returned ends that.

    The subscriber runs in the thread that counted and must be quick. An exception of it is logged and goes no further.
    """
    global _subscribers
    _subscribers = (*_subscribers, subscriber)

    def unsubscribe() -> None:
        global _subscribers
        _subscribers = tuple(other for other in _subscribers if other is not subscriber)

    return unsubscribe


def reset() -> None:
    """Set all counters to zero; subscribers stay."""
    for counter in Counter:
        _counts[counter.value] = _ticks()


def _tell(name: str, fields: Mapping[str, object]) -> None:
    for subscriber in _subscribers:
        try:
            subscriber(name, fields)
        except Exception:
            # The narrowest class that holds: a hook is foreign code, and a count sits next to writes that must go on.
            next(_counts[Counter.HOOK_FAILED])
            logger.exception("a telemetry subscriber failed", extra={"event": name})


reset()
# A child starts from zero: the sum over processes would count the parent's past once for each of them.
os.register_at_fork(after_in_child=reset)
