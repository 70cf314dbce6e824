"""Where a message of a queue goes, which queue a message was for, and what its priority means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from umt_durable.bridge.outgoing import MOST_URGENT
from umt_durable.errors import MessageRefusedError

if TYPE_CHECKING:
    from celery import Celery

# With quorum queues Celery sends a countdown through 28 exchanges, and puts its 28 bits before the routing key.
_DELAY_EXCHANGE: Final = re.compile(r"(?:.+_)?celery_delayed_(?:[0-9]+|delivery)")
_DELAY_BITS: Final = 28

_counts_down: dict[tuple[str, str], bool] = {}


@dataclass(frozen=True, slots=True)
class Way:
    """How a message reaches a queue.

    Shape: `exchange` and `routing_key` are set only where it is not the plain way of that queue.
    """

    queue: str
    exchange: str | None = None
    routing_key: str | None = None


def published_way(app: Celery, options: Mapping[str, Any]) -> Way:
    """Give the way on which `app.amqp.send_task_message(…, **options)` sends a message.

    Errors: MessageRefusedError when the options lead nowhere; KeyError for an unknown queue that may not be created.
    """
    queue, exchange, routing_key = options.get("queue"), name_of(options.get("exchange")), options.get("routing_key")
    if queue is None and exchange is None:
        queue = app.conf.task_default_queue
    declared = app.amqp.queues[queue] if isinstance(queue, str) else queue
    if declared is None:
        if not exchange or not routing_key:
            raise MessageRefusedError("an exchange without a routing key names no queue")
        return _way(app, *undelayed(exchange, routing_key))
    kind = options.get("exchange_type") or getattr(declared.exchange, "type", "direct")
    if (not exchange or not routing_key) and kind == "direct":
        return Way(declared.name)
    if exchange is None:
        exchange = declared.exchange.name or app.conf.task_default_exchange
        routing_key = routing_key or declared.routing_key or app.conf.task_default_routing_key
    return _unless_plain(app, declared.name, exchange, routing_key or "")


def delivered_way(app: Celery | None, delivery_info: Mapping[str, Any]) -> Way:
    """Give the way on which a delivered message came, with the native delay undone; without the app only its route."""
    exchange, routing_key = delivery_info.get("exchange") or "", delivery_info.get("routing_key") or ""
    before, key = undelayed(str(exchange), str(routing_key))
    if app is not None:
        return _way(app, before, key)
    return Way(key) if not before else Way(key, before, key)


def _way(app: Celery, exchange: str | None, routing_key: str) -> Way:
    queue = queue_behind(app, exchange, routing_key)
    if exchange is None:
        return Way(queue or routing_key)
    if queue is None:
        return Way(app.conf.task_default_queue, exchange, routing_key)
    return _unless_plain(app, queue, exchange, routing_key)


def _unless_plain(app: Celery, queue: str, exchange: str, routing_key: str) -> Way:
    plain = plain_way(app, queue) == (exchange, routing_key) or (exchange == "" and routing_key == queue)
    return Way(queue) if plain else Way(queue, exchange, routing_key)


def plain_way(app: Celery, queue: str) -> tuple[str, str]:
    """Give the (exchange, routing key) by which Celery reaches a queue when nobody asks for another way.

    A queue that the app does not know, and may not create, is reached by its name.
    """
    try:
        found = app.amqp.queues[queue]
    except KeyError:
        return "", queue
    exchange = found.exchange
    if exchange is None or not exchange.name or exchange.type == "direct":
        return "", found.name
    return exchange.name, found.routing_key or app.conf.task_default_routing_key


def undelayed(exchange: str, routing_key: str) -> tuple[str | None, str]:
    """Give a message's route from before Celery's native delay took it; the exchange is then unknown (None)."""
    bits = routing_key.split(".", _DELAY_BITS)
    if _DELAY_EXCHANGE.fullmatch(exchange) and len(bits) > _DELAY_BITS:
        return None, bits[_DELAY_BITS]
    return exchange, routing_key


def queue_behind(app: Celery, exchange: str | None, routing_key: str) -> str | None:
    """Give the app's queue to which an exchange (any, when None) brings a routing key; None when the app knows none."""
    if exchange == "":
        return routing_key
    for queue in dict(app.amqp.queues).values():
        bound = queue.exchange
        if bound is None or exchange not in (None, bound.name):
            continue
        if queue.routing_key == routing_key or (bound.type == "fanout" and exchange is not None):
            return str(queue.name)
        if bound.type == "topic" and _topic(queue.routing_key or "").fullmatch(routing_key):
            return str(queue.name)
    return None


def _topic(pattern: str) -> re.Pattern[str]:
    """Give the AMQP topic pattern as a regular expression: `*` is one word, `#` any number of words."""
    words = [{"*": r"[^.]+", "#": r".*"}.get(word, re.escape(word)) for word in pattern.split(".")]
    return re.compile(r"\.".join(words).replace(r"\..*", r"(?:\..*)?").replace(r".*\.", r"(?:.*\.)?"))


def counts_priority_down(app: Celery) -> bool:
    """Say whether 0 is the most urgent priority on the app's broker, as it is on Redis, and not 9."""
    key = (str(app.conf.broker_write_url), str(app.conf.broker_transport))
    if key not in _counts_down:
        _counts_down[key] = app.connection_for_write().get_transport_cls().driver_type == "redis"
    return _counts_down[key]


def our_priority(priority: object, *, counts_down: bool) -> int | None:
    """Give a Celery message's priority as ours: 0 to 9, higher is sooner; None when it has none."""
    if not isinstance(priority, int):
        return None
    within = max(0, min(MOST_URGENT, priority))
    return MOST_URGENT - within if counts_down else within


def name_of(entity: Any) -> str | None:
    """Give the name of a queue or exchange that may be given as an object or by name; None when it is not given."""
    if entity is None:
        return None
    return entity if isinstance(entity, str) else str(entity.name)
