"""Guarding a worker against what is no message at all.

Anybody may push anything into a list of Redis. kombu reads it with the code that reads its own messages, and an error
there ends the worker. Such an item is dropped here: it is off the list already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from umt_durable import texts
from umt_durable.bridge.fields import is_name
from umt_durable.bridge.intake import refuse
from umt_durable.errors import MessageRefusedError

_READING_ERRORS: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class RawGuard:
    """Stands before one channel of a transport that kombu reads itself (Redis), and drops what is no message.

    Seams, private to kombu and tested: the transport's `_deliver(raw, queue)`, the channel's `handlers["BRPOP"]`.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._deliver = channel.connection._deliver
        self._read = channel.handlers["BRPOP"]
        self._delivering = False
        channel.connection._deliver = self.deliver
        channel.handlers["BRPOP"] = self.read

    @classmethod
    def place(cls, channel: Any) -> None:
        """Guard a channel, once, if its transport reads raw items."""
        has_seams = hasattr(channel.connection, "_deliver") and "BRPOP" in getattr(channel, "handlers", {})
        if has_seams and not isinstance(getattr(channel.handlers["BRPOP"], "__self__", None), cls):
            cls(channel)

    def read(self, **options: Any) -> Any:
        """Read one item and deliver it; drop it if it is no JSON."""
        self._delivering = False
        try:
            return self._read(**options)
        except _READING_ERRORS as error:
            if self._delivering:
                raise
            _drop(f"an item of the queue is no JSON: {type(error).__name__}")
            return True

    def deliver(self, raw: Any, queue: str) -> None:
        """Deliver a message that has the parts of one."""
        self._delivering = True
        if self._is_message(raw):
            self._deliver(raw, queue)
        else:
            _drop(f"an item of queue {queue} is no message")

    def _is_message(self, raw: object) -> bool:
        if not isinstance(raw, Mapping) or not isinstance(raw.get("headers") or {}, Mapping):
            return False
        properties = raw.get("properties")
        # kombu writes the tag back at once, and the other two when the message is to come again: encoded, outside of
        # all its guards.
        if not isinstance(properties, Mapping) or not is_name(properties.get("delivery_tag")):
            return False
        way = properties.get("delivery_info")
        if not isinstance(way, Mapping) or not all(_is_route(way.get(name)) for name in ("exchange", "routing_key")):
            return False
        try:
            self._channel.decode_body(raw.get("body") or "", properties.get("body_encoding"))
        except _READING_ERRORS:
            return False
        return True


def _is_route(value: object) -> bool:
    return isinstance(value, str) and texts.is_storable(value)


def _drop(reason: str) -> None:
    refuse(None, None, MessageRefusedError(reason))
