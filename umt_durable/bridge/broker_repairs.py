"""Where the broker library turns an outage into the end of a worker, or leaves messages behind."""

from __future__ import annotations

from collections import deque
from functools import wraps
from typing import Any, Final

from celery import bootsteps
from celery.utils.log import get_logger
from kombu.transport import redis as kombu_redis
from redis.exceptions import ConnectionError as RedisConnectionError

from umt_durable.bridge.message import is_hint

logger = get_logger(__name__)

_REPAIRED = "_umt_durable_repaired"

MOST_LEFT: Final = 10_000
"""How many hints are kept over an outage. Of what is beyond that redispatch writes new ones."""

_unrestored: deque[str] = deque(maxlen=MOST_LEFT)
"""Tags of hints in the hash of unacked messages that no child had accepted and kombu could not restore."""
_unsaved: deque[Any] = deque(maxlen=MOST_LEFT)
"""Hints that were taken off their queue, and perhaps not put into that hash."""


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


def repair_redis_delivery() -> None:
    """Keep the hints that a broken Redis connection would leave behind: see `RestoreHints`.

    RabbitMQ gives out again at once what a broken connection had not acked. kombu's Redis channel restores that as it
    closes, once, over the server that has just gone, so it stays in the hash of unacked messages for the visibility
    time-out, an hour. A message that was popped from its queue, but could not be put into that hash, is nowhere. Doing
    this twice changes nothing.
    Source: `kombu.transport.redis.QoS` and `kombu.transport.virtual.QoS.restore_unacked_once`.
    """
    qos: Any = kombu_redis.QoS
    append, restore = qos.append, qos.restore_unacked
    if getattr(restore, _REPAIRED, False):
        return

    # Of ordinary tasks nothing is kept: one that acks late may still be running here.
    @wraps(append)
    def append_or_keep(self: Any, message: Any, delivery_tag: str) -> Any:
        try:
            return append(self, message, delivery_tag)
        except Exception:
            if is_hint(message.headers):
                _unsaved.append(message)
            raise

    @wraps(restore)
    def restore_or_keep(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return restore(self, *args, **options)
        except Exception:
            _unrestored.extend(tag for tag, message in self._delivered.items() if is_hint(message.headers))
            raise

    setattr(restore_or_keep, _REPAIRED, True)
    qos.append, qos.restore_unacked = append_or_keep, restore_or_keep


class RestoreHints(bootsteps.StartStopStep):
    """Puts back into their queues, over a new connection, the hints that the last one left; a step of the consumer.

    Keeps: a hint that was acked or given out again meanwhile is left alone, each is moved in one transaction, and a
    connection that breaks again leaves the rest to the next one.
    """

    requires = ("celery.worker.consumer.connection:Connection",)

    def start(self, consumer: Any) -> None:
        """Restore what was left, if anything was."""
        count = len(_unrestored) + len(_unsaved)
        if not count:
            return
        channel = consumer.connection.default_channel
        while _unrestored:
            channel.qos.restore_by_tag(_unrestored[0], leftmost=True)
            _unrestored.popleft()
        while _unsaved:
            _put_back(channel, _unsaved[0])
            _unsaved.popleft()
        logger.info("%d hints that the lost connection had are back in their queues", count)


def _put_back(channel: Any, message: Any) -> None:
    """Put a message that was popped at the front of its queue again, and nowhere else."""
    way = message.delivery_info
    with channel.conn_or_acquire() as client, client.pipeline() as pipe:
        channel.qos._remove_from_indices(message.delivery_tag, pipe)
        channel._do_restore_message(message._raw, way["exchange"], way["routing_key"], pipe, leftmost=True)
        pipe.execute()
