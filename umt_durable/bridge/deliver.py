"""One delivery, between Celery's tracer and the engine: what each outcome means to Celery."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from billiard.einfo import ExceptionInfo
from billiard.process import current_process
from celery import signals
from celery.app.task import Context
from celery.exceptions import Ignore, Retry
from celery.utils.log import get_logger
from kombu.utils import json as kombu_json

from umt_durable import codec
from umt_durable.bridge import callbacks, chords, ordinary
from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.reporter import CeleryReporter
from umt_durable.bridge.revoke import announce_revoked
from umt_durable.bridge.runtime import CLAIM_KEY
from umt_durable.bridge.storing import OUTCOME
from umt_durable.engine import failures
from umt_durable.engine.failures import Failure
from umt_durable.engine.outcomes import Continued, Delivery, Dropped, Finished, Outcome, Parked, Superseded
from umt_durable.engine.registry import TaskDefinition
from umt_durable.engine.retry import RetryAfter
from umt_durable.errors import UnknownTaskError
from umt_durable.failpoints import point
from umt_durable.payloads import plain as opened
from umt_durable.records import FinishedRun, event_id
from umt_durable.states import OutboxType, RunState

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable
    from umt_durable.bridge.task import DurableTask

logger = get_logger(__name__)

SAID = "umt_durable_said"
"""The attribute of a request that says what became of its delivery."""

_SETTLED = "umt_durable_settled"
_dumps: Callable[[Any], str] = kombu_json.dumps
_SIMPLE = (str, int, float, bool, type(None))


def delivery_of(task: DurableTask, request: Context) -> Delivery:
    """Return what is believed of a message: the run it is about, and the claim id our Request gave it."""
    claim = request.__dict__.pop(CLAIM_KEY, None)
    return Delivery(
        run_id=str(request.id),
        nesting=int(request.replaced_task_nesting or 0),
        task=str(task.name),
        claim=UUID(hex=claim) if claim else uuid4(),
    )


def settle(durable: Durable, task: DurableTask, request: Context, reporter: CeleryReporter, outcome: Outcome) -> Any:
    """Tell Celery what became of a delivery: return the result, raise the error, or raise Ignore.

    Keeps: I13. The tracer stores the result and reports chord parts; callbacks are published here, from the rows that
    the finish wrote, errbacks once the tracer has stored the failure; the rows are forgotten after that.
    """
    setattr(request, _SETTLED, True)
    match outcome:
        case Finished(state=RunState.CANCELLED):
            _revoked(durable, task, request, reporter, outcome)
            raise ignored(request, "cancelled")
        case Finished():
            return _finish(durable, task, request, reporter, outcome)
        case Superseded():
            _replaced(durable, request, outcome)
            raise ignored(request, "replaced by another task")
        case Parked(state=state, until=until):
            _announce(task, request, f"{state} {until}")
            if outcome.error is not None:
                _retried(task, request, outcome.error, outcome.retry_seconds)
            raise ignored(request, f"parked: {state}, {until}")
        case Continued(generation=generation):
            _announce(task, request, f"continued as generation {generation}")
            raise ignored(request, f"continued as new: generation {generation}")
        case Dropped(reason=reason):
            raise ignored(request, f"dropped: {reason}")


def ignored(request: Context, said: str) -> Ignore:
    """Return what a delivery raises that is neither an outcome nor an error for Celery; `said` goes into the log."""
    setattr(request, SAID, said)
    return Ignore(said)


def broken_off(request: Context, error: BaseException) -> Ignore:
    """Return what a delivery raises whose body was left by what is neither outcome nor suspension.

    The grant was given up, so the run is taken over; the crash budget bounds how often.
    Errors: SystemExit in a child of a prefork pool, which ends by it: the pool hears of that, and puts another in its
    place. A child that swallowed it would stay, and lose what later bodies raise.
    """
    if isinstance(error, SystemExit):
        # The pool ends a child with minus a number (`billiard.common`); where a body was at that moment tells nothing.
        trace = None if isinstance(error.code, int) and error.code < 0 else error
        logger.warning("a delivery of %s was left by SystemExit(%r)", request.id, error.code, exc_info=trace)
        if current_process()._identity:
            raise error
    else:
        logger.error("a delivery of %s ended without an outcome", request.id, exc_info=error)
    return ignored(request, f"dropped: {type(error).__name__} left the body")


def is_settled(request: Context) -> bool:
    """Say whether a delivery is over: an errback that calls the task it belongs to is no second delivery."""
    return bool(getattr(request, _SETTLED, False))


def _revoked(
    durable: Durable, task: DurableTask, request: Context, reporter: CeleryReporter, outcome: Finished
) -> None:
    try:
        ordinary.revoke_unanswered(durable, outcome.token.run)
        callbacks.revoke(task.backend, request, "cancelled", store_result=reporter.stores)
        announce_revoked(durable.app, str(task.name), request, "cancelled")
    except Exception as error:  # noqa: BLE001 - each backend raises its own; the relay finds the row and tries again
        logger.warning("the cancel of %s is reported by the relay: %s", request.id, type(error).__name__)
    else:
        durable.process_lease.forget(outcome.token.claim, outcome.events)


def _replaced(durable: Durable, request: Context, outcome: Superseded) -> None:
    """Publish what takes the run's place, if that is no run of ours and so in the database already."""
    if outcome.message is None:
        return
    point("finish.callback.b")
    try:
        callbacks.dispatch_stored(durable.app, request, outcome.message)
    except Exception as error:  # noqa: BLE001 - whatever it was, the relay finds the row and tries again
        logger.warning("the replacement of %s is left to the relay: %s", request.id, type(error).__name__)
    else:
        point("finish.callback.a")
        durable.process_lease.forget(outcome.token.claim, outcome.events)


@dataclass(slots=True)
class _End:
    """A finished delivery until its result is stored: `published` are the outbox rows that need no relay any more.

    Shape: `result` is the row of the result, if there is one; `taken` says that the tracer has set about storing it,
    `left` that the relay has to.
    """

    run_id: str
    outcome: Finished
    envelope: Envelope
    result: UUID | None
    published: list[UUID] = field(default_factory=list)
    taken: bool = False
    left: bool = False

    @property
    def state(self) -> RunState:
        """What the run ended in."""
        return self.outcome.state

    def take(self) -> bool:
        """Say, the first time, that the outcome is to be stored: what the tracer makes of a later error is none."""
        first, self.taken = not self.taken, True
        return first

    def leave(self, error: Exception) -> None:
        """Leave the result to the relay."""
        self.left = True
        logger.warning("the result of %s is left to the relay: %s", self.run_id, type(error).__name__)

    def call_back(self, durable: Durable, request: Context, value: Any = None) -> None:
        """Publish the callbacks of the run; a row whose publishing failed stays."""
        token, error = self.outcome.token, self.outcome.error
        for ordinal in range(callbacks.count(self.envelope, self.outcome.state)):
            point("finish.callback.b")
            try:
                callbacks.dispatch(durable.app, request, self.envelope, ordinal, value=value, error=error)
            except Exception as failure:  # noqa: BLE001 - whatever it was, the relay finds the row and tries again
                logger.warning("a callback of %s is left to the relay: %s", request.id, type(failure).__name__)
            else:
                self.published.append(event_id(token.run, token.fence + 1, OutboxType.CALLBACK, ordinal))
                point("finish.callback.a")


def _finish(durable: Durable, task: DurableTask, request: Context, reporter: CeleryReporter, outcome: Finished) -> Any:
    token = outcome.token
    row = event_id(token.run, token.fence + 1, OutboxType.RESULT, 0) if reporter.reports else None
    end = _End(str(request.id), outcome, reporter.envelope, row)
    value = plain(outcome.value, outcome.data, durable.tasks.get(task.name, outcome.version))
    if outcome.error is None:
        end.call_back(durable, request, value)
    if reporter.reports and request.chord:
        _check_chord(task, request, reporter)
    point("finish.result.b")
    # The tracer re-reads these from the request and dispatches what is left: nothing, but the failing of later chain
    # members, which is its business.
    request.callbacks = request.errbacks = None
    setattr(request, OUTCOME, end)
    if outcome.error is not None:
        raise outcome.error
    request.chain = None
    return value


def _check_chord(task: DurableTask, request: Context, reporter: CeleryReporter) -> None:
    try:
        chords.fail_if_forgotten(task.backend, request, reporter.age_seconds)
    except Exception as error:  # noqa: BLE001 - each backend raises its own; reporting the part will meet it again
        logger.warning("the chord of %s could not be looked at: %s", request.id, type(error).__name__)


def forget_published(state: RunState, sender: Any) -> None:
    """Forget the outbox rows of a run whose result the tracer has just stored, as what the run ended in.

    Errbacks leave only now, as Celery's own do: they may look at the failure they are called for. What could not be
    stored stays, and so do the errbacks: a relay stores the result, and publishes them after that.
    """
    request = sender.request if getattr(sender, "request_stack", None) else None
    end: _End | None = getattr(request, OUTCOME, None)
    durable = getattr(getattr(sender, "app", None), "umt_durable", None)
    if end is None or durable is None or end.state is not state:
        return
    point("finish.result.a")
    if not end.left:
        if end.outcome.error is not None:
            end.call_back(durable, request)
        if end.result is not None:
            end.published.append(end.result)
    durable.process_lease.forget(end.outcome.token.claim, tuple(end.published))


def _stored_success(sender: Any, **_: Any) -> None:
    forget_published(RunState.SUCCEEDED, sender)


def _stored_failure(sender: Any, **_: Any) -> None:
    forget_published(RunState.FAILED, sender)


def connect_signals() -> None:
    """Watch for stored results. Doing it twice changes nothing."""
    signals.task_success.connect(_stored_success, dispatch_uid="umt_durable.stored_success")
    signals.task_failure.connect(_stored_failure, dispatch_uid="umt_durable.stored_failure")


def plain(value: Any, data: bytes | None, definition: TaskDefinition) -> Any:
    """Return a result in a form every result backend can hold: as it is, or as its JSON where it is a typed object."""
    if data is None or isinstance(value, _SIMPLE) or definition.result is codec.EMPTY:
        return value
    try:
        _dumps(value)
    except Exception:  # noqa: BLE001 - whatever its types make of that: the stored JSON says the same
        return json.loads(opened(data))
    return value


def stored_error(durable: Durable, failure: Failure) -> Exception:
    """Return the exception of a stored failure, for a backend that is told by someone who did not raise it.

    Of a class that the code has not named, it is one of the same name and module: a backend stores no more than these,
    and the caller looks for that class among those it has itself. Nothing is imported here.
    """
    error = durable.tasks.exceptions.rebuild(failure)
    if type(error).__name__ == failure.type:
        return error
    stand_in: type[Exception] = type(failure.type, (Exception,), {"__module__": failure.module})
    return stand_in(*failure.args)


def outcome_of(durable: Durable, run: FinishedRun) -> tuple[Any, Exception | None]:
    """Return what a run ended in: its result in a form for result backends, or its error."""
    if run.state is RunState.FAILED:
        assert run.error is not None
        return None, stored_error(durable, failures.from_bytes(run.error))
    if run.state is not RunState.SUCCEEDED or run.result is None:
        return None, None
    try:
        definition = durable.tasks.get(run.task, run.version)
    except UnknownTaskError:  # a relay that does not load the tasks' code
        return codec.decode(run.result, codec.EMPTY, run.codec), None
    return plain(codec.decode(run.result, definition.result, run.codec), run.result, definition), None


def plain_arguments(data: bytes, number: int) -> tuple[Sequence[object], Mapping[str, object]]:
    """Read stored arguments without their types, for what only shows them."""
    args, kwargs = codec.decode_arguments(data, None, number)
    return list(args), kwargs


def _retried(task: DurableTask, request: Context, error: Exception, seconds: float | None) -> None:
    """Tell the task and signal handlers that the run will be tried again, as Celery's own retry does."""
    raised, trace = error, error.__traceback__
    if isinstance(error, RetryAfter) and isinstance(error.__cause__, Exception):
        raised = error.__cause__  # what the body gave to `self.retry(exc=…)`, which may never have been raised
    try:
        info = ExceptionInfo((type(raised), raised, raised.__traceback__ or trace))
        signals.task_retry.send(sender=task, request=request, reason=Retry(exc=raised, when=seconds), einfo=info)
        task.on_retry(raised, request.id, request.args, request.kwargs, info)
    except Exception:
        # The run is parked already: raised, this would make the tracer store FAILURE for a run that lives on.
        logger.exception("on_retry of %s raised", task.name)


def _announce(task: DurableTask, request: Context, text: str) -> None:
    """Show a parked run in Flower by a standard event with standard fields."""
    if not getattr(task, "send_events", False) or request.is_eager:
        return
    try:
        task.send_event(
            "task-retried", exception=text, traceback="", retries=request.retries, result=f"durable: {text}"
        )
    except Exception as error:  # noqa: BLE001 - raised, it would make the tracer store FAILURE for a run that lives on
        logger.warning("the event of a parked run could not be sent: %s", type(error).__name__)
