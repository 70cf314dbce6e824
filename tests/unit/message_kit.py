"""Celery messages for tests: published by an app that sends nothing, or as a worker gets them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from celery import Celery
from hypothesis import strategies as st
from kombu import entity
from kombu.transport.memory import Channel as MemoryChannel
from kombu.transport.redis import Channel as RedisChannel
from kombu.transport.virtual import base

from umt_durable.bridge.message import (
    TaskMessage,
    parse_publish,
)

Sent = tuple[str, Any, dict[str, Any]]

# kombu's classes are not annotated.
Exchange: Any = entity.Exchange
Queue: Any = entity.Queue
Message: Any = base.Message


class Shop:
    """An app whose messages are caught instead of sent."""

    def __init__(self, broker: str = "memory://", **conf: Any) -> None:
        self.app = Celery("shop", broker=broker, backend="cache+memory://", set_as_current=False)
        self.app.conf.update(conf)
        self.sent: list[Sent] = []
        self.app.amqp.send_task_message = self._catch

        @self.app.task(name="shop.fulfil", shared=False)
        def fulfil(*args: object, **kwargs: object) -> None: ...

        self.fulfil: Any = fulfil

    def _catch(self, _producer: object, name: str, message: Any, **options: Any) -> None:
        self.sent.append((name, message, options))

    def parsed(self) -> TaskMessage:
        """Read the last message that would have been sent."""
        name, message, options = self.sent[-1]
        return parse_publish(self.app, name, message, options)


def delivery(
    headers: Mapping[str, object] | None = None,
    body: object = None,
    *,
    raw: bytes | None = None,
    content_type: str = "application/json",
    properties: Mapping[str, object] | None = None,
    exchange: str = "",
    routing_key: str = "orders",
    driver: str = "memory",
) -> Any:
    """Build a message as kombu's virtual transports hand it to a worker."""
    encoded = json.dumps([[1], {"b": 2}, None] if body is None else body).encode() if raw is None else raw
    payload = {
        "body": base64.b64encode(encoded).decode(),
        "content-type": content_type,
        "content-encoding": "utf-8",
        "headers": {"id": "run-1", "task": "shop.fulfil"} if headers is None else headers,
        "properties": {
            "delivery_tag": "1",
            "delivery_info": {"exchange": exchange, "routing_key": routing_key},
            "body_encoding": "base64",
            **(properties or {}),
        },
    }
    kind = RedisChannel if driver == "redis" else MemoryChannel
    channel = kind.__new__(kind)  # it only decodes: nothing is connected
    return Message(payload, channel=channel)


def publish(shop: Shop) -> Sent:
    shop.fulfil.delay()
    return shop.sent[-1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
).filter(lambda value: not (isinstance(value, dict) and value.keys() == {"__type__", "__value__"}))

GOOD: Mapping[str, object] = {"id": "run-1", "task": "shop.fulfil"}
