"""Ordinary Celery tasks through the outbox: signatures as they are kept, and the messages they become.

A signature is kept with every part of it named, and is turned into messages when a relay takes it: Celery does that as
it always does, with a producer of ours that keeps what it is given. The relay then publishes with confirms. A repeat
makes the same messages again, under the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid5

from celery.canvas import Signature
from celery.result import GroupResult
from kombu import compression as kombu_compression
from kombu import serialization
from vine import barrier

from umt_durable import codec
from umt_durable.bridge import options as options_of_calls
from umt_durable.bridge import signatures
from umt_durable.bridge.destination import counts_priority_down, name_of, our_priority
from umt_durable.bridge.outgoing import Outgoing
from umt_durable.engine.ids import NAMESPACE
from umt_durable.errors import EncodingError

if TYPE_CHECKING:
    from celery import Celery

_serialize: Final[Callable[..., tuple[str, str, bytes | str]]] = serialization.dumps
_compress: Final[Callable[[bytes | str, str], tuple[bytes, str]]] = kombu_compression.compress

_sink: ContextVar[Sink | None] = ContextVar("umt_durable.sink", default=None)
_ignoring: ContextVar[bool | None] = ContextVar("umt_durable.ignoring", default=None)
_unsubscribed: ContextVar[bool] = ContextVar("umt_durable.unsubscribed", default=False)


@dataclass(frozen=True, slots=True)
class Kept:
    """A signature as the outbox keeps it.

    Shape: `payload` goes into the row; `signature` has the ids, and gives the result by `freeze`. `due` and `delay` are
    the call's eta and countdown: the row waits, and no message in the broker does.
    """

    payload: bytes
    signature: Signature
    due: datetime | None = None
    delay: timedelta | None = None


def pack(app: Celery, signature: Signature, id: UUID, *, task_id: str | None = None) -> Kept:
    """Give a signature as the outbox row `id` keeps it, each part with an id that stays.

    Shape: `task_id` is that of the task itself, or of the last one of a chain, the body of a chord, the group.
    Errors: EncodingError, naming the path, for what JSON cannot hold, or is too large; DefinitionError for an option
    that no call can have.
    """
    where = f"the signature of {signature.task}"
    copy: dict[str, Any] = signatures.copied(signature, where)
    if task_id is not None:
        _outermost(copy).setdefault("options", {})["task_id"] = task_id
    signatures.name_parts(copy, ["send", str(id)])
    for index, link in enumerate(signatures.links(copy)):
        signatures.name_parts(link, ["send", str(id), "link", index])
    for part in [*signatures.parts(copy), *signatures.links(copy)]:
        options_of_calls.check(str(part.get("task")), part.get("options") or {}, app)
    options = copy["options"]
    delay, due = None, None
    if _is_single(copy):
        countdown, eta = options.pop("countdown", None), options.pop("eta", None)
        delay = timedelta(seconds=float(countdown)) if countdown else None
        due = None if eta is None else options_of_calls.moment(signature.task, "eta", eta, app)
    if any(part.get("subtask_type") == "chord" for part in signatures.parts(copy)):
        app.backend.ensure_chords_allowed()  # told at the call, and not to the relay
    root, parent = _family(app)
    if parent is not None:
        options.setdefault("parent_id", parent)
    for part in signatures.parts(copy):
        part["options"].setdefault("reply_to", app.thread_oid)  # the relay's own would be made up for it otherwise
        if root is not None:
            part["options"].setdefault("root_id", root)
    payload = signatures.stored(copy, where)
    if len(payload) > codec.MAX_BYTES:
        raise EncodingError(where, "$", f"it takes {len(payload)} bytes, more than the {codec.MAX_BYTES} allowed")
    return Kept(payload, signatures.of(app, copy), due, delay)


def messages(app: Celery, id: UUID, payload: bytes, *, age_seconds: float, once: bool = False) -> list[Outgoing]:
    """Give the messages of a signature that row `id` keeps. Runs of durable tasks in it are committed on the way.

    Shape: `once` goes into each of them.
    Units: `age_seconds` is how long ago it was sent, which shortens the time until it expires.
    Errors: DecodingError for a payload that is no signature; whatever Celery raises.
    """
    signature = signatures.read(app, payload)
    expires = signature.options.get("expires")
    if isinstance(expires, int | float) and not isinstance(expires, bool):
        signature.options["expires"] = max(0.0, expires - age_seconds)
    with collecting(app, id) as found, without_subscriptions(app):
        signature.apply_async(add_to_parent=False)
    return [replace(message, once=True) for message in found] if once else found


def result_of(app: Celery, kept: Kept) -> Any:
    """Return the result of what was kept, without a word to the result backend, which may be away."""
    with without_subscriptions(app):
        found = kept.signature.freeze()
    return _SentGroup.like(found) if isinstance(found, GroupResult) else found


@contextmanager
def collecting(app: Celery, id: UUID) -> Iterator[list[Outgoing]]:
    """Keep what is published inside from the broker, and give it as messages whose keys are derived from `id`."""
    mine = Sink(app, id)
    token = _sink.set(mine)
    try:
        yield mine.found
    finally:
        _sink.reset(token)


def sink() -> Sink | None:
    """Return what takes the place of Celery's producer in this context, if something does."""
    return _sink.get()


@contextmanager
def without_subscriptions(app: Celery) -> Iterator[None]:
    """Have the result backend subscribe to no result inside: Celery does so for each group that it freezes."""
    backend = app.backend
    if not isinstance(backend.__dict__.get("add_pending_result"), _Subscribing):
        backend.add_pending_result = _Subscribing(backend.add_pending_result)
    token = _unsubscribed.set(True)
    try:
        yield
    finally:
        _unsubscribed.reset(token)


class _Subscribing:
    """A backend's `add_pending_result`, which does nothing where no subscription is wanted."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, result: Any, *args: Any, **options: Any) -> Any:
        return result if _unsubscribed.get() else self._original(result, *args, **options)


class _SentGroup(GroupResult):
    """The result of a group that was sent through the outbox: it subscribes when it is first waited for."""

    @classmethod
    def like(cls, found: GroupResult) -> _SentGroup:
        """Return the same result as one of this class."""
        make: Callable[..., _SentGroup] = cls
        return make(found.id, found.results, parent=found.parent, app=found.app, ready_barrier=barrier())

    def iter_native(self, *args: Any, **options: Any) -> Any:
        """Wait for the results as they come."""
        self._set_ready_barrier(barrier(self.results))
        return super().iter_native(*args, **options)


class _Connection:
    """What Celery asks of a producer's connection: nothing that reaches a broker."""

    @staticmethod
    def _reraise_as_library_errors() -> nullcontext[None]:
        return nullcontext()


class _NoEvents:
    """Stands in for Celery's event dispatcher: `task-sent` would go past the outbox."""

    def publish(self, *args: object, **kwargs: object) -> None:
        """Publish nothing."""


@dataclass(slots=True)
class Sink:
    """A producer of Celery's that keeps what it is to publish."""

    app: Celery
    id: UUID
    found: list[Outgoing] = field(default_factory=list)
    connection: Any = _Connection
    channel: Any = None
    serializer: str | None = None

    def send_task(self, original: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
        """Do what `app.send_task` does, without a broker and without preparing the backend for the reply."""
        stores = options.get("ignore_result")
        token = _ignoring.set(stores)
        try:
            return original(name, *args, **{**options, "producer": self, "ignore_result": True})
        finally:
            _ignoring.reset(token)

    def send_message(self, original: Callable[..., Any], name: str, message: Any, **options: Any) -> Any:
        """Do what `app.amqp.send_task_message` does, Celery's signals included, but keep the message."""
        if "ignore_result" in message.headers:
            message.headers["ignore_result"] = _ignoring.get()
        options["event_dispatcher"] = _NoEvents()
        return original(self, name, message, **options)

    def publish(
        self,
        body: Any,
        *,
        exchange: Any = "",
        routing_key: str | None = None,
        serializer: str | None = None,
        compression: str | None = None,
        headers: Mapping[str, object] | None = None,
        declare: Any = None,
        delivery_mode: Any = None,
        **properties: Any,
    ) -> None:
        """Keep one message, serialised as kombu's producer does it."""
        for unused in ("retry", "retry_policy", "timeout", "confirm_timeout"):
            properties.pop(unused, None)
        content_type, encoding, data = _serialize(body, serializer=serializer)
        sent = dict(headers or {})
        if compression:
            data, sent["compression"] = _compress(data, compression)
        if delivery_mode is not None:
            properties["delivery_mode"] = 1 if delivery_mode in (1, "transient") else 2
        priority = our_priority(properties.pop("priority", None), counts_down=counts_priority_down(self.app))
        if priority is not None:
            properties["priority"] = priority
        key = uuid5(self.id, str(len(self.found)))
        self.found.append(
            Outgoing(
                key=key,
                exchange=name_of(exchange) or "",
                routing_key=routing_key or "",
                queue=name_of(declare[0]) if declare else None,
                body=data if isinstance(data, bytes) else data.encode(),
                content_type=content_type,
                content_encoding=encoding,
                headers=sent,
                properties=properties,
            )
        )


def derive(id: UUID) -> str:
    """Return the id of what an outbox row starts: the same however often the row is taken."""
    return str(uuid5(NAMESPACE, f"outbox:{id}"))


def _is_single(signature: Mapping[str, Any]) -> bool:
    return not signature.get("subtask_type")


def _outermost(signature: dict[str, Any]) -> dict[str, Any]:
    """Return the part that has the id of the whole: the last member of a chain, the body of a chord."""
    kwargs = signature.get("kwargs") or {}
    match signature.get("subtask_type"):
        case "chain" if kwargs.get("tasks"):
            return _outermost(kwargs["tasks"][-1])
        case "chord" if isinstance(kwargs.get("body"), dict):
            return _outermost(kwargs["body"])
    return signature


def _family(app: Celery) -> tuple[str | None, str | None]:
    """Return the root's and the own id of the task that is being executed, as Celery passes them on."""
    task = app.current_worker_task
    return (task.request.root_id or task.request.id, task.request.id) if task else (None, None)
