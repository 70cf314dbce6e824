"""Where the broker library turns an outage into the end of a worker."""

from __future__ import annotations

from functools import wraps
from typing import Any

from kombu.transport import redis as kombu_redis
from redis.exceptions import ConnectionError as RedisConnectionError

_REPAIRED = "_umt_durable_repaired"


def repair_redis_channel() -> None:
    """Make a late use of a broken Redis connection a connection error, which a worker survives.

    Once a connection is collected its transport has no client any more, and kombu 5.7 asks that client for its host
    name: the AttributeError of a late ack, or of closing the channel again, ends the worker's main process. Doing it
    twice changes nothing.
    Source: `kombu.transport.redis.Channel._connparams` and `kombu.connection.Connection.collect`.
    """
    channel: Any = kombu_redis.Channel
    original = channel._connparams
    if getattr(original, _REPAIRED, False):
        return

    @wraps(original)
    def connparams(self: Any, *args: Any, **options: Any) -> Any:
        if getattr(self.connection, "client", None) is None:
            raise RedisConnectionError("the connection of this channel is gone")
        return original(self, *args, **options)

    setattr(connparams, _REPAIRED, True)
    channel._connparams = connparams
