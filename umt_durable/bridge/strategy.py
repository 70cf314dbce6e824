"""What a worker's main process does with a message of a durable task before a pool sees it.

A hint is handed on. A foreign message, from a producer without this package, is first taken into the database and is a
hint from then on: unacked until a pool child accepts it, so that the broker's prefetch bounds what one worker holds and
a message that no child has begun goes back to the queue when this worker ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from celery.concurrency.solo import TaskPool as SoloPool
from celery.utils.log import get_logger
from celery.worker.strategy import default
from kombu import common

from umt_durable import failpoints
from umt_durable.bridge.fields import Fields
from umt_durable.bridge.hint import EMPTY_BODY, VERSION
from umt_durable.bridge.intake import ConsumerSide, refuse
from umt_durable.bridge.leaving import is_leaving
from umt_durable.bridge.message import HEADER, is_hint, parse_delivery
from umt_durable.bridge.revoke import REVOKED, is_revoked
from umt_durable.bridge.runtime import CancelAsked, runtime_of
from umt_durable.errors import MessageRefusedError

logger = get_logger(__name__)

STRATEGY: Final = "umt_durable.bridge.strategy:durable_strategy"

EMPTY_PAYLOAD: Final = [[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]

# What Celery's main process reads without looking, by the type it takes for granted. Of another type, it is left out.
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "shadow": str,
    "argsrepr": str,
    "kwargsrepr": str,
    "root_id": str,
    "parent_id": str,
    "group": str,
    "group_index": int,
    "retries": int,
    "ignore_result": bool,
    "stamped_headers": (list, tuple),
    "stamps": dict,
}

Act = Callable[..., Any]

_ignored: Callable[..., AbstractContextManager[None]] = common.ignore_errors


def durable_strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Act:
    """Return the handler of messages for a durable task; Celery makes one per task type and broker connection.

    Errors: ConfigurationError when the worker runs without the bootsteps of this package.
    """
    return _Reception(task, app, consumer).receive


def is_durable(task: Any) -> bool:
    """Say whether messages for a task come through here."""
    return getattr(task, "Strategy", None) in (STRATEGY, durable_strategy)


class _Reception:
    """The messages for one task type on one broker connection."""

    def __init__(self, task: Any, app: Any, consumer: Any) -> None:
        self._app = app
        self._task = task.name
        self._consumer = consumer
        self._side = ConsumerSide(consumer)
        self._pass_on = default(task, app, consumer)
        # A solo pool blocks the loop, and with it an ack that waits for the loop's next turn.
        self._acks_at_once = isinstance(consumer.pool, SoloPool)

    def receive(self, message: Any, body: Any, ack: Act, reject: Act, callbacks: Any, **options: Any) -> None:
        """Hand a hint to the pool, have a foreign message taken in, or drop a message that is neither."""

        if is_leaving():
            self._leave_to_others(reject)
            return

        def drop(error: Exception) -> None:
            refuse(self._task, run_id_of(message), error)
            reject(logger, self._consumer.connection_errors, requeue=False)

        def finish(taken_in: bool) -> None:
            if taken_in:
                failpoints.point("intake.ack.b")
                self._hand_on(message, safe_headers(foreign.headers, self._task), ack, reject, callbacks)
            else:
                reject(logger, self._consumer.connection_errors, requeue=False)

        try:
            if is_hint(message.headers):
                headers = safe_headers(message.headers, self._task)
                if is_revoked(headers["id"], headers.get("stamps")):
                    self._cancel(headers["id"], ack)
                else:
                    self._hand_on(message, headers, ack, reject, callbacks)
                return
            foreign = parse_delivery(message, app=self._app)
        except MessageRefusedError as error:
            drop(error)
        else:
            self._side.take_in(foreign, finish)

    def _leave_to_others(self, reject: Act) -> None:
        """Requeue a message, and take no more: this worker shuts down, but its loop has not come to that yet."""
        with _ignored(self._consumer):  # a connection that has just broken
            self._consumer.task_consumer.cancel()
        reject(logger, self._consumer.connection_errors, requeue=True)

    def _cancel(self, run_id: str, ack: Act) -> None:
        """Cancel a run whose id or stamps were revoked before it was there. No child gets this hint."""
        runtime_of(self._app).incidents.cancel_asked(CancelAsked(REVOKED, (run_id,)))
        ack(logger, self._consumer.connection_errors)

    def _hand_on(self, message: Any, headers: dict[str, Any], ack: Act, reject: Act, callbacks: Any) -> None:
        """Give a message to Celery's own strategy as a hint: nothing of its body is used, or even decoded."""
        message.headers = headers
        message.body, message.content_type, message.content_encoding = EMPTY_BODY, "application/json", "utf-8"
        message._decoded_cache = EMPTY_PAYLOAD
        if self._acks_at_once:
            ack = message.ack_log_error
        self._pass_on(message, None, ack, reject, callbacks)


def safe_headers(headers: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the headers of a message as those of a hint, so that nothing in them can hurt the main process.

    Shape: the id, the nesting, and what Celery shows or passes to the pool, each of the type that is expected of it.
    Errors: MessageRefusedError when id or nesting make no sense.
    """
    fields = Fields(task, headers)
    kept = {name: value for name, value in headers.items() if isinstance(value, _TYPES.get(name, object))}
    return kept | {
        "task": task,
        "id": fields.run_id(),
        "replaced_task_nesting": fields.number("replaced_task_nesting") or 0,
        "timelimit": _time_limits(headers.get("timelimit")),
        HEADER: headers.get(HEADER) or {"v": VERSION, "gen": 0},
    }


def run_id_of(message: Any) -> object:
    """Return what a message gives as its id, whatever that is; None when it gives none."""
    headers = message.headers
    return headers.get("id") if isinstance(headers, Mapping) else None


def _time_limits(value: object) -> list[float | None]:
    """Return the (hard, soft) limits of a message in seconds; those that are no positive numbers are none."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return [None, None]
    return [limit if isinstance(limit, int | float) and limit > 0 else None for limit in value]
