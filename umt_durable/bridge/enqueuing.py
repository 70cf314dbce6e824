"""The way in: Celery's own publishing, led into the database for durable tasks.

`delay`, `apply_async`, canvas, beat and `send_task` all meet in `app.send_task`, then in `app.amqp.send_task_message`.
For a durable task the first gives a stand-in for the producer, so that no broker is touched, and the second commits the
run. A hint leaves by the relay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

from celery import current_task
from celery.backends.rpc import RPCBackend
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from umt_durable import tracing
from umt_durable.bridge import options as options_of_calls
from umt_durable.bridge import sending
from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.message import TaskMessage, parse_publish
from umt_durable.bridge.publishing import Publishing, is_watched
from umt_durable.engine.context import current_context, has_context
from umt_durable.engine.passing import LONGEST
from umt_durable.errors import DefinitionError
from umt_durable.records import Enqueued, NewRun

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable

logger = get_logger(__name__)

_current: ContextVar[Enqueuing | None] = ContextVar("umt_durable.enqueuing", default=None)

OURS = ("conn", "idempotency_key", "idempotency_ttl", "idempotency_policy", "ref", "attributes", "version")
POLICIES = ("attach", "reject")
LARGE_INPUT_BYTES = 64 * 1024
"""The encoded size of arguments from which on a log line asks for ids instead, once per task and process."""

_told: set[str] = set()


@dataclass(slots=True)
class Enqueuing:
    """What one call says beyond what Celery's publishing carries, and what became of it."""

    conn: object = None
    idempotency_key: str | None = None
    idempotency_ttl: float | None = None
    idempotency_policy: str | None = None
    ref: str | None = None
    attributes: Mapping[str, Any] | None = None
    version: int | None = None
    countdown: float | None = None
    eta: datetime | None = None
    expires_in: float | None = None
    ignore_result: bool | None = None
    done: Enqueued | None = None
    captured: list[NewRun] | None = None


@contextmanager
def enqueuing(options: dict[str, Any]) -> Iterator[Enqueuing]:
    """Take our own options out of a call's options, for the publishing inside.

    Errors: DefinitionError for attributes that are no JSON object, an empty key, a lifetime that is none, a policy
    or lifetime without a key, or a version that is no whole number.
    """
    ours = {name: options.pop(name, None) for name in OURS}
    key = ours["idempotency_key"]
    if key is not None and (not isinstance(key, str) or not key or "\0" in key):
        raise DefinitionError(f"idempotency_key must be text that is not empty, not {key!r}")
    ours["idempotency_ttl"] = _lifetime(key, ours["idempotency_ttl"])
    _check_policy(key, ours["idempotency_policy"])
    version = ours["version"]
    if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
        raise DefinitionError(f"a version is a whole number, not {version!r}")
    before = _current.get()
    mine = Enqueuing(**ours, captured=None if before is None else before.captured)
    token = _current.set(mine)
    try:
        yield mine
    finally:
        _current.reset(token)


def _lifetime(key: str | None, given: object) -> float | None:
    """Return how long a key is kept, in seconds; None is for ever."""
    if given is None:
        return None
    if key is None:
        raise DefinitionError("idempotency_ttl is the lifetime of an idempotency_key; there is none")
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST.total_seconds():
        raise DefinitionError(
            f"idempotency_ttl must be a timedelta or seconds, from more than zero to {LONGEST.days} days, not {given!r}"
        )
    return float(seconds)


def _check_policy(key: str | None, policy: object) -> None:
    if policy is None:
        return
    if policy not in POLICIES:
        raise DefinitionError(f"idempotency_policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    if key is None and policy != POLICIES[0]:
        raise DefinitionError("idempotency_policy says what an idempotency_key does; there is none")


def current() -> Enqueuing:
    """Return what the call that is being made says beyond Celery's options."""
    return _current.get() or Enqueuing()


def run_of(publish: Callable[[], object]) -> NewRun | None:
    """Return the run that a publishing would commit, without committing it; None when it commits none, or several."""
    captured: list[NewRun] = []
    token = _current.set(Enqueuing(captured=captured))
    try:
        publish()
    finally:
        _current.reset(token)
    return captured[0] if len(captured) == 1 else None


class _Connection:
    """What Celery asks of a producer's connection: nothing that reaches a broker."""

    @staticmethod
    def _reraise_as_library_errors() -> nullcontext[None]:
        return nullcontext()


class _NoProducer:
    """Stands in for a producer where nothing is published; `given` is the one that the caller gave, if any."""

    connection = _Connection()
    channel = None
    serializer = None

    def __init__(self, given: Any = None) -> None:
        self.given = given


def send_task(durable: Durable, original: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    """Do what `app.send_task` does; for a durable task commit its run instead of publishing.

    The times of the call are kept away from Celery: counted by the caller's wall clock, or waited for in the broker,
    they would not be the database's (I10, I25).
    """
    if not durable.has_task(name):
        sink = sending.sink()
        return original(name, *args, **options) if sink is None else sink.send_task(original, name, *args, **options)
    before = _current.get()
    mine = replace(before) if before is not None else Enqueuing()
    token = _current.set(mine)
    try:
        options_of_calls.check(name, options, durable.app)
        _take_times(name, mine, durable.app, options)
        mine.ignore_result = options.get("ignore_result")
        prepare_reply(durable.app, options)
        options["producer"] = _NoProducer(options.get("producer"))
        result = original(name, *args, **{**options, "ignore_result": True})
    finally:
        _current.reset(token)
    if mine.done is not None and mine.done.id != result.id:
        result = type(result)(mine.done.id, app=durable.app)
    result.ignored = bool(mine.ignore_result)
    return result


def send_task_message(
    durable: Durable, original: Callable[..., Any], producer: Any, name: str, message: Any, **options: Any
) -> Any:
    """Do what `app.amqp.send_task_message` does; for a durable task commit its run instead.

    Celery's signals around a publishing are sent around the commit, so that what they add to the headers is kept.
    """
    headers = {**message.headers, **(options.pop("headers", None) or {})}
    tracing.carry(headers)
    message = message._replace(headers=headers)
    if not durable.has_task(name):
        sink = sending.sink()
        if sink is not None:
            return sink.send_message(original, name, message, **options)
        return original(producer, name, message, **options)
    mine = _current.get() or Enqueuing()
    if isinstance(producer, _NoProducer):
        headers["ignore_result"] = mine.ignore_result
    parsed = parse_publish(durable.app, name, message, options)
    if has_context() and parsed.id == current_context().run_id and parsed.nesting == current_context().nesting:
        # Celery's `retry` sends the same task again: the run that is being executed will be retried.
        request = current_task.request
        if (list(parsed.args), dict(parsed.kwargs)) != (list(request.args or ()), dict(request.kwargs or {})):
            current_context()._pass.next_input = durable.tasks.get(name).encode_call(parsed.args, parsed.kwargs)
        return None
    new = new_run(durable, parsed, mine)  # what is refused is refused before anyone is told
    publishing = Publishing(durable.app, name, message, new) if is_watched() else None
    if publishing is not None:
        new = publishing.begin()
    if mine.captured is not None:
        mine.captured.append(new)
    else:
        mine.done = durable.client.enqueue(new, conn=mine.conn)
    if publishing is not None:
        publishing.end()
    if message.sent_event and mine.conn is None:
        _announce(durable.app, producer, new, message.sent_event)
    return None


def _announce(app: Any, producer: Any, new: NewRun, event: Mapping[str, Any]) -> None:
    """Publish the event that a task was sent, which an app has to ask for; Celery's dispatcher keeps what cannot leave.

    In a caller's transaction none is: it may roll back, and Flower would show a task that never was.
    """
    given = producer.given if isinstance(producer, _NoProducer) else producer
    envelope = Envelope.from_bytes(new.envelope)
    route = {"exchange": envelope.exchange or "", "routing_key": envelope.routing_key or new.queue}
    with app.producer_or_acquire(given) as publisher:
        app.amqp._event_dispatcher.publish(
            "task-sent",
            {**event, "queue": new.queue, **route},
            publisher,
            retry=app.conf.task_publish_retry,
            retry_policy=app.conf.task_publish_retry_policy,
        )


def new_run(durable: Durable, message: TaskMessage, mine: Enqueuing) -> NewRun:
    """Make the run of a call, its arguments validated against the version it asks for, by default the highest.

    Errors: InputError, EncodingError, UnknownTaskError; DefinitionError for a task that has to name its retry policy.
    """
    definition = durable.tasks.get(message.task, mine.version)
    if durable.settings.strict_retry and not definition.names_retry:
        durable.check_tasks()
    encoded = definition.encode_call(message.args, message.kwargs)
    _tell_large(definition.name, len(encoded.data))
    envelope = message.envelope
    if mine.eta is not None or mine.countdown is not None:
        due = mine.eta or durable.app.now() + timedelta(seconds=mine.countdown or 0)
        envelope = replace(envelope, eta=due.isoformat())  # for user code that reads request.eta; the row decides
    return NewRun(
        id=message.id,
        nesting=message.nesting,
        task=message.task,
        version=definition.version,
        queue=message.queue,
        priority=message.priority,
        args=encoded.data,
        codec=encoded.codec,
        digest=encoded.digest,
        envelope=envelope.to_bytes(),
        wake_at=mine.eta or message.eta,
        delay_seconds=mine.countdown,
        expires_at=message.expires,
        expires_seconds=mine.expires_in,
        ref=mine.ref,
        attributes=None if mine.attributes is None else _object(mine.attributes),
        key=mine.idempotency_key,
        key_hash=None if mine.idempotency_key is None else definition.schema.input_hash(encoded.data),
        key_ttl_seconds=mine.idempotency_ttl,
        attach=mine.idempotency_policy != "reject",
    )


def _tell_large(task: str, size: int) -> None:
    if size > LARGE_INPUT_BYTES and task not in _told:
        _told.add(task)
        logger.warning(
            "%s is started with %d KiB of arguments: give ids, and have a step read the rows", task, size // 1024
        )


def foreign_run(message: TaskMessage, encoded: Any) -> NewRun:
    """Make the run of a foreign message; its arguments are validated when it is claimed, its version pinned then."""
    return NewRun(
        id=message.id,
        nesting=message.nesting,
        task=message.task,
        queue=message.queue,
        priority=message.priority,
        args=encoded.data,
        codec=encoded.codec,
        digest=encoded.digest,
        envelope=message.envelope.to_bytes(),
        wake_at=message.eta,
        expires_at=message.expires,
    )


def _take_times(name: str, mine: Enqueuing, app: Any, options: dict[str, Any]) -> None:
    countdown, eta = options.pop("countdown", None), options.pop("eta", None)
    mine.countdown = float(countdown) if countdown else None
    if eta is not None:
        mine.eta = options_of_calls.moment(name, "eta", eta, app)
    expires = options.get("expires")
    if isinstance(expires, int | float):
        mine.expires_in = float(expires)
        options["expires"] = None  # given, so that Celery does not take the task's own
    elif expires is not None:
        options["expires"] = options_of_calls.moment(name, "expires", expires, app)


def prepare_reply(app: Any, options: Mapping[str, Any]) -> None:
    """Declare the reply queue of an RPC backend before the run can end; other backends need nothing before `get`."""
    if isinstance(app.backend, RPCBackend) and not options.get("ignore_result"):
        try:
            with app.producer_or_acquire() as producer:
                app.backend.on_task_call(producer, options.get("task_id"))
        except OperationalError as error:
            logger.warning(
                "the reply queue could not be declared; the run is enqueued all the same: %s", type(error).__name__
            )


def _object(attributes: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(attributes), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"attributes must be a JSON object: {error}") from error


def take_over(durable: Durable) -> None:
    """Lead the app's publishing of durable tasks into the database, on this app alone."""
    app = durable.app
    own = app.__dict__.get("send_task")
    stock = type(app).send_task

    def original(*args: Any, **options: Any) -> Any:
        # Looked up late: Sentry and others replace the class's, often after this.
        return own(*args, **options) if own is not None else type(app).send_task(app, *args, **options)

    @wraps(stock)
    def send(name: str, *args: Any, **options: Any) -> Any:
        return send_task(durable, original, name, *args, **options)

    app.send_task = send
    amqp = app.amqp
    sender = amqp.__dict__.get("send_task_message")  # set already only where something was published before

    def send_message(*args: Any, **options: Any) -> Any:
        nonlocal sender
        sender = sender or amqp._create_task_sender()  # made late: it reads the app's configuration
        return send_task_message(durable, sender, *args, **options)

    amqp.send_task_message = send_message
