"""Reading the Celery message that begins a run: where it is published, or where it arrives from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from celery.app.task import X_DEATH_HEADERS, Context
from celery.backends.rpc import RPCBackend
from celery.utils.nodenames import anon_nodename
from celery.utils.saferepr import saferepr
from kombu import serialization
from kombu.transport.redis import Channel as RedisChannel

from umt_durable.bridge.destination import Way, counts_priority_down, delivered_way, our_priority, published_way
from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.fields import MAX_ID, Fields, is_name
from umt_durable.bridge.hint import HEADER, hint_headers
from umt_durable.bridge.runtime import CLAIM_KEY
from umt_durable.errors import MessageRefusedError
from umt_durable.tracing import NESTED

if TYPE_CHECKING:
    from celery import Celery

CONTENT_TYPES: Final[Mapping[str, str]] = {"json": "application/json", "msgpack": "application/x-msgpack"}
TRANSIENT: Final = 1

# Set by brokers and by this package on the way; a run that comes back must not look like a redelivery.
_NOISE: Final = {
    *X_DEATH_HEADERS,
    "x-delivery-count",
    "x-acquired-count",
    "redelivered",
    "compression",
    HEADER,
    CLAIM_KEY,
}
_CELERYS_OWN: Final = {
    *("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries", "timelimit", "root_id"),
    *("parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result", "replaced_task_nesting", "stamped_headers"),
    *("stamps", "meth", "utc", "taskset", "callbacks", "errbacks", "chord", "chain", "args", "kwargs"),
}
# Nor can a header of that name be told from what the request itself has under it.
_NOT_CUSTOM: Final = _NOISE | _CELERYS_OWN | Context.__dict__.keys()

_OF_THE_SENDER: Final = ("app_id", "cluster_id", "message_id", "type", "user_id")

_decode: Final[Callable[..., object]] = serialization.loads


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMessage:
    """A Celery message for a task, whatever its protocol, as what a run is made of.

    Units: `priority` is ours (0 to 9, higher is sooner), None when none is asked for; `eta` and `expires` are aware.
    """

    id: str
    nesting: int
    task: str
    args: Sequence[object]
    kwargs: Mapping[str, object]
    queue: str
    priority: int | None
    eta: datetime | None
    expires: datetime | None
    retries: int
    ignore_result: bool | None
    envelope: Envelope

    @property
    def headers(self) -> dict[str, object]:
        """Give the headers with which the message goes on as a hint of its new run."""
        return hint_headers(self.id, self.nesting, self.task, 0, self.envelope)


def parse_publish(app: Celery, name: str, message: Any, options: Mapping[str, Any]) -> TaskMessage:
    """Read what Celery hands to `app.amqp.send_task_message(producer, name, message, **options)`; nothing is changed.

    `args` and `kwargs` are the caller's own objects. What Celery always writes by itself (a reply queue where results
    do not use one, the repr of arguments, the task's own limits) is not remembered.
    Errors: MessageRefusedError for a serializer that is never read, and for a call that leads to no queue.
    """
    sent, properties, body, _ = message
    sent = {**sent, **(options.get("headers") or {})}
    args, kwargs, embed, sent = _protocol_2(body, sent)
    fields = Fields(name, sent)
    serializer = options.get("serializer") or app.conf.task_serializer
    if serializer not in CONTENT_TYPES:
        raise fields.refusal(f"serializer {serializer!r} is not read for durable tasks, only json and msgpack are")
    try:
        way = published_way(app, options)
    except MessageRefusedError as error:
        raise fields.refusal(str(error)) from error
    task, wish = app.tasks.get(name), options.get("priority")
    plain_reply = properties.get("reply_to") == app.thread_oid and not isinstance(app.backend, RPCBackend)
    defaults = _Defaults(
        origin=anon_nodename(),
        reply_to=properties.get("reply_to") if plain_reply else None,
        timelimit=(getattr(task, "time_limit", None), getattr(task, "soft_time_limit", None)),
        ignore_result=getattr(task, "ignore_result", None),
        argsrepr=None if "argsrepr" in options else fields.text("argsrepr"),
        kwargsrepr=None if "kwargsrepr" in options else fields.text("kwargsrepr"),
    )
    return _read(
        fields,
        (args, kwargs, embed),
        properties={
            **properties,
            **{name: options[name] for name in _OF_THE_SENDER if name in options},
            "delivery_mode": _delivery_mode(app, options),
        },
        way=way,
        priority=None if wish is None else our_priority(wish, counts_down=counts_priority_down(app)),
        content_type=CONTENT_TYPES[serializer],
        defaults=defaults,
    )


def parse_delivery(message: Any, *, app: Celery | None = None) -> TaskMessage:
    """Read a foreign message in the main process of a worker, protocol 1 or 2; kombu has decompressed it.

    The app is needed to name the queue of a message that came through a named exchange.
    Errors: MessageRefusedError, without a word of its content, when it is malformed or in a codec that is never read.
    """
    sent = message.headers if isinstance(message.headers, Mapping) else {}
    task = sent.get("task")
    body = _decoded(message, task)
    args, kwargs, embed, sent = _protocol_2(body, sent)
    fields = Fields(sent.get("task"), sent)
    defaults = _Defaults(
        argsrepr=_default_repr(fields, "argsrepr", args), kwargsrepr=_default_repr(fields, "kwargsrepr", kwargs)
    )
    properties = message.properties if isinstance(message.properties, Mapping) else {}
    # kombu writes a 0 where the sender asked for nothing.
    counts_down = isinstance(message.channel, RedisChannel)
    priority = our_priority(properties.get("priority") or None, counts_down=counts_down)
    return _read(
        fields,
        (args, kwargs, embed),
        properties=properties,
        way=delivered_way(app, message.delivery_info or {}),
        priority=priority,
        content_type=message.content_type,
        defaults=defaults,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """What counts as nothing said, besides None."""

    origin: object = None
    reply_to: object = None
    timelimit: tuple[object, object] = (None, None)
    ignore_result: object = None
    argsrepr: object = None
    kwargsrepr: object = None


def _read(
    fields: Fields,
    body: tuple[object, object, object],
    *,
    properties: Mapping[str, object],
    way: Way,
    priority: int | None,
    content_type: str,
    defaults: _Defaults,
) -> TaskMessage:
    """Check all parts of a message and put them together."""
    args, kwargs, embed = body
    if not isinstance(args, list | tuple):
        raise fields.refusal("its arguments are no list")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise fields.refusal("its keyword arguments are no object")
    run_id = fields.run_id()
    if not is_name(way.queue):
        raise fields.refusal(f"the name of its queue is no text of 1 to {MAX_ID} characters")
    if not all(part is None or part == "" or is_name(part) for part in (way.exchange, way.routing_key)):
        raise fields.refusal(f"its exchange or routing key has more than {MAX_ID} characters or cannot be stored")
    envelope = _envelope(
        fields, run_id, embed, properties=properties, way=way, content_type=content_type, defaults=defaults
    )
    return TaskMessage(
        id=run_id,
        nesting=fields.number("replaced_task_nesting") or 0,
        task=fields.task,
        args=args,
        kwargs=kwargs,
        queue=way.queue,
        priority=priority,
        eta=fields.moment("eta"),
        expires=fields.moment("expires"),
        retries=envelope.retries,
        ignore_result=envelope.ignore_result,
        envelope=envelope,
    )


def _envelope(
    fields: Fields,
    run_id: str,
    embed: object,
    *,
    properties: Mapping[str, object],
    way: Way,
    content_type: str,
    defaults: _Defaults,
) -> Envelope:
    embedded = Fields(fields.task, embed if isinstance(embed, Mapping) else {})
    posted = Fields(fields.task, properties)
    if embed is not None and not isinstance(embed, Mapping):
        raise fields.refusal("its third part is no object")

    def unless(value: object, default: object) -> Any:
        return None if value == default else value

    return Envelope(
        root_id=unless(fields.text("root_id"), run_id),
        parent_id=fields.text("parent_id"),
        group=fields.text("group"),
        group_index=fields.number("group_index"),
        shadow=fields.text("shadow"),
        origin=unless(fields.text("origin"), defaults.origin),
        argsrepr=unless(fields.text("argsrepr"), defaults.argsrepr),
        kwargsrepr=unless(fields.text("kwargsrepr"), defaults.kwargsrepr),
        retries=fields.number("retries") or 0,
        ignore_result=unless(fields.flag("ignore_result"), defaults.ignore_result),
        timelimit=unless(unless(fields.limits("timelimit"), defaults.timelimit), (None, None)),
        eta=_iso(fields, "eta"),
        expires=_iso(fields, "expires"),
        stamped_headers=fields.texts("stamped_headers"),
        stamps=fields.mapping("stamps"),
        headers=custom_headers(fields.values),
        properties={name: said for name in _OF_THE_SENDER if is_name(said := properties.get(name))},
        reply_to=unless(posted.text("reply_to") or None, defaults.reply_to),
        correlation_id=unless(posted.text("correlation_id") or None, run_id),
        delivery_mode=TRANSIENT if properties.get("delivery_mode") == TRANSIENT else None,
        content_type=unless(content_type, CONTENT_TYPES["json"]),
        exchange=way.exchange,
        routing_key=way.routing_key,
        callbacks=embedded.signatures("callbacks"),
        errbacks=embedded.signatures("errbacks"),
        chain=embedded.signatures("chain"),
        chord=embedded.signature("chord"),
    )


def custom_headers(headers: Mapping[str, object]) -> dict[str, object]:
    """Return the headers of a message that are not Celery's own.

    One that holds headers is kept too: from it Celery makes `request.headers`, and tracers look there.
    """
    kept = {name: value for name, value in headers.items() if name not in _NOT_CUSTOM}
    nested = headers.get(NESTED)
    return {**kept, NESTED: dict(nested)} if isinstance(nested, Mapping) and nested else kept


def _iso(fields: Fields, name: str) -> str | None:
    """Give a time as the sender wrote it: a task may look at it."""
    found = fields.values.get(name)
    return (
        found if isinstance(found, str) and found else (moment.isoformat() if (moment := fields.moment(name)) else None)
    )


def _protocol_2(body: object, sent: Mapping[str, Any]) -> tuple[object, object, object, Mapping[str, Any]]:
    """Give args, kwargs, embedded signatures and headers of a message of either protocol."""
    if isinstance(body, Mapping):
        embed = {name: body.get(name) for name in ("callbacks", "errbacks", "chord")}
        said = {name: value for name, value in body.items() if name in _CELERYS_OWN}
        group = body.get("group") or body.get("taskset")
        return body.get("args", ()), body.get("kwargs", {}), embed, {**said, "group": group, **sent}
    if isinstance(body, list | tuple) and len(body) == 3:
        args, kwargs, embed = body
        return args, kwargs, embed, sent
    raise Fields(sent.get("task"), sent).refusal("its body is neither of protocol 2 nor of protocol 1")


def _decoded(message: Any, task: object) -> object:
    """Decode the body in a codec that is always safe, whatever this worker accepts otherwise."""
    where = f"message for {task} refused" if isinstance(task, str) else "message refused"
    if message.errors:
        raise MessageRefusedError(f"{where}: its body cannot be decompressed")
    if message.content_type not in CONTENT_TYPES.values():
        raise MessageRefusedError(f"{where}: only json and msgpack are read, its content type is another")
    try:
        return _decode(message.body, message.content_type, message.content_encoding, accept=set(CONTENT_TYPES.values()))
    except Exception as error:
        raise MessageRefusedError(f"{where}: its body cannot be decoded") from error


def _default_repr(fields: Fields, name: str, value: object) -> str | None:
    """Give the sender's repr of arguments if it is just that: what hides nothing need not be kept."""
    said = fields.text(name)
    forms = (value, tuple(value)) if isinstance(value, list) else (value,)
    return said if said in [saferepr(form) for form in forms] else None


def _delivery_mode(app: Celery, options: Mapping[str, Any]) -> object:
    mode = options.get("delivery_mode")
    if mode is None:
        queue = options.get("queue")
        mode = getattr(getattr(queue, "exchange", None), "delivery_mode", None) or app.conf.task_default_delivery_mode
    return TRANSIENT if mode in (TRANSIENT, "transient") else None
