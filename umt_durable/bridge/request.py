"""What a worker's main process does with one delivery of a durable task.

The run row is the truth, so the main process must never end a run on its own: Celery's answer to a lost child, a time
limit, a terminated or a cancelled request is to store FAILURE, run errbacks and fail the chord, while here the run goes
on in another process. These become incidents. What a child reports as the outcome of the body stays Celery's business.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import wraps
from threading import Thread
from typing import Any, Final
from uuid import uuid4

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.exceptions import Ignore, Reject, Retry
from celery.local import Proxy
from celery.utils.log import get_logger
from celery.utils.saferepr import saferepr
from celery.worker import state as worker_state
from celery.worker.request import Request

from umt_durable.bridge.message import is_hint
from umt_durable.bridge.runtime import CLAIM_KEY, Delivery, runtime_of

logger = get_logger(__name__)

_STATUS = re.compile(r"(signal|exitcode) (-?\d+)")


SHOWN_SECONDS: Final = 1.0
"""How long `inspect` waits for the arguments of one delivery."""


class EarlyTask(Proxy):
    """A task as a message that is acked on acceptance sees it: everything is the task's own but `acks_late`.

    Celery asks the task, not the message, whether an ack is late, and lets an acked request of a late task run to its
    end on a cold shutdown, with no bound. A `Proxy`, because Celery's signals take one for the object behind it.
    """

    acks_late = False


def _early(task: Any) -> EarlyTask:
    return EarlyTask(lambda: task)


class DurableRequest(Request):
    """One delivery of a durable task, from the strategy to its end.

    Keeps: a hint is acked when a pool child accepts it, never later; no outcome is stored for a body that did not
    report one; at most one incident per delivery.
    """

    _already_revoked: bool = False
    _already_cancelled: bool = False
    _over = False
    _returned = False
    _handed_over = False
    _future: Future[Any] | None = None

    def __init__(self, message: Any, *, headers: Mapping[str, Any] | None = None, **options: Any) -> None:
        # Both are in the run row. Here `eta` would hold the message for hours and `expires` would revoke the run's id.
        blanked = {**(message.headers if headers is None else headers), "eta": None, "expires": None}
        super().__init__(message, headers=blanked, **options)
        claim = uuid4()
        self._request_dict[CLAIM_KEY] = claim.hex
        self.delivery = Delivery(claim, self.id, self.replaced_task_nesting or 0)
        self._received = time.monotonic()
        self._incidents = runtime_of(self._app).incidents
        self._facade = _early(self._task) if is_hint(blanked) else self._task

    def __init_subclass__(cls, **options: Any) -> None:
        """Guard the two methods that Celery redefines on a subclass of its own for each task type."""
        super().__init_subclass__(**options)
        own = cls.__dict__
        if "on_success" in own:
            cls.on_success = _guard_success(own["on_success"])
        if "execute_using_pool" in own:
            cls.execute_using_pool = _keep_future(own["execute_using_pool"])

    @property
    def task(self) -> Any:
        """Return the task, with `acks_late` as it is for this message."""
        return self._facade

    @property
    def age(self) -> float:
        """Return for how many seconds the message has been here."""
        return time.monotonic() - self._received

    def revoked(self) -> bool:
        """Say whether the message went back to the broker. A revoke is a cancel in Postgres, not a list in memory."""
        return self._returned

    def info(self, safe: bool = False) -> dict[str, Any]:
        """Describe the delivery for `inspect`. What a hint's run was called with stands in its row."""
        said: dict[str, Any] = super().info(safe=safe)
        found = self._ask_arguments() if self._facade is not self._task else None
        if found is not None:
            args, kwargs = list(found[0]), dict(found[1])
            said.update(args=saferepr(args) if safe else args, kwargs=saferepr(kwargs) if safe else kwargs)
        return said

    def _ask_arguments(self) -> tuple[Sequence[object], Mapping[str, object]] | None:
        """Read the arguments in a thread: the loop of the worker never waits long for the database."""
        asked: Future[tuple[Sequence[object], Mapping[str, object]] | None] = Future()

        def ask() -> None:
            try:
                asked.set_result(runtime_of(self._app).arguments_of(self.delivery))
            except Exception as error:  # noqa: BLE001 - it is told to who waits, if anyone still does
                asked.set_exception(error)

        Thread(target=ask, name="umt-durable-inspect", daemon=True).start()
        try:
            return asked.result(SHOWN_SECONDS)
        except Exception as error:  # noqa: BLE001 - an answer without arguments is better than none
            logger.warning("The arguments of %s[%s] cannot be read: %s", self.name, self.id, type(error).__name__)
            return None

    def give_back(self) -> bool:
        """Requeue the message, if no child can have it yet, so that another worker may take it.

        Returns whether it was requeued; no child ever gets this request then. A prefork child may be reading what was
        handed to its pool, so that is left; a thread pool gives back what no thread has begun.
        """
        if self._over or self._returned or self.acknowledged or self.time_start is not None:
            return False
        if self._handed_over and not (self._future is not None and self._future.cancel()):
            return False
        self._returned = True
        self.reject(requeue=True)
        worker_state.task_ready(self)
        return True

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Handle the end of a delivery in an exception: an outcome if the child reported it, else an incident."""
        error = _raised(exc_info)
        if return_ok or isinstance(error, Ignore | Reject | Retry):
            return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        if isinstance(error, WorkerLostError):
            self._child_lost(error)
        else:
            expected = _is_expected(error)
            self._end(_reason(error), details=None if expected else exc_info, again=expected)
        return None

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Handle a time limit: a soft one is the body's, a hard one ends the delivery."""
        if soft:
            super().on_timeout(soft, timeout)
        else:
            self._end(f"hard time limit of {timeout} s")

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Interrupt the body where the pool can; elsewhere it ends at its next call of the context."""
        try:
            super().terminate(pool, signal)
        except NotImplementedError:
            logger.info("Task %s[%s] cannot be interrupted in this pool; it ends at its next step", self.name, self.id)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """End a terminated delivery. The cancel that goes with it is a fact: who applies it tells of the outcome."""
        if self._already_revoked or self._already_cancelled:
            return
        self._already_revoked = True
        self._end(f"{reason} by signal {signum}")

    def _announce_cancelled(self, emit_retry: bool = True) -> None:
        """End a delivery that a shutting-down worker cancels.

        Runs inside a signal handler, so it queues and takes no lock: not even for an ack or a line in the log.
        """
        if self._already_cancelled:
            return
        self._already_cancelled = True
        if self._begin_end():
            self._incidents.delivery_ended(
                self.delivery, known_dead=False, reason="cancelled by the worker's shutdown", crashed=False
            )
        self.send_event("task-cancelled")

    def _child_lost(self, error: WorkerLostError) -> None:
        if self._begin_end():
            self.acknowledge()
            self._warn(str(error))
            self._incidents.child_lost(pid=self.worker_pid, status=exit_status(error), delivery=self.delivery)

    def _end(self, reason: str, *, details: Any = None, again: bool = True) -> None:
        if self._begin_end():
            self.acknowledge()
            self._warn(reason, details)
            self._incidents.delivery_ended(self.delivery, known_dead=False, reason=reason, again=again)

    def _begin_end(self) -> bool:
        """Forget the request and say whether this is the first end of the delivery."""
        worker_state.task_ready(self)
        if self._over:
            return False
        self._over = True
        return True

    def _warn(self, reason: str, details: Any = None) -> None:
        trace = None if details is None else details.exc_info
        logger.warning("Task %s[%s] ended without an outcome: %s", self.name, self.id, reason, exc_info=trace)


def _raised(exc_info: Any) -> BaseException:
    """Return what was raised, out of the wrapper in which a pool carries the traceback."""
    error: BaseException = exc_info.exception
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def exit_status(error: BaseException) -> int | None:
    """Return how a lost child ended: minus the signal, or its exit status; None when the pool does not say.

    Source: the text of `billiard.common.human_status`, the only place where the pool passes it on.
    """
    found = _STATUS.search(str(error))
    if found is None:
        return None
    return -int(found[2]) if found[1] == "signal" else int(found[2])


def _is_expected(error: BaseException) -> bool:
    return isinstance(error, SystemExit | KeyboardInterrupt | Terminated | TimeLimitExceeded)


def _reason(error: BaseException) -> str:
    match error:
        case SystemExit():
            return f"the body left with SystemExit({error.code!r})"
        case Terminated():
            return f"terminated by signal {error}"
        case TimeLimitExceeded():
            return f"hard time limit of {error.args[0]} s"
        case _:
            return f"the pool reported {type(error).__name__}"


def _guard_success(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `on_success` for what threads and greenlets pass to it when a body left with a BaseException."""

    @wraps(inner)
    def on_success(self: DurableRequest, outcome: Any, **options: Any) -> Any:
        if isinstance(outcome, ExceptionInfo):
            self._end(f"the body left with {_raised(outcome)}")
        elif outcome[0] is False:
            # A killed greenlet: its pool makes up (False, None, None). The tracer says 0 or 1.
            self._end("its greenlet was killed")
        else:
            return inner(self, outcome, **options)
        return None

    return on_success


def _keep_future(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `execute_using_pool` to keep a thread pool's job, the one kind that can be taken back; Celery drops it."""

    @wraps(inner)
    def execute_using_pool(self: DurableRequest, pool: Any, **options: Any) -> Any:
        job = inner(self, pool, **options)
        self._handed_over = True
        self._future = getattr(job, "f", None)
        return job

    return execute_using_pool
