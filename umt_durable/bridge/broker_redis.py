"""Publish through Redis or Valkey, many messages a round trip.

kombu 5.7 turns a message into the Redis commands that deliver it when it is given something to collect them
(`Channel.basic_publish(..., _publish_batch=collector)`; its own `Producer.batch` stands on that). Its batch, though,
has one outcome for all commands; here each reply settles its own message.
Pinned by tests/integration/test_publisher_redis.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol
from uuid import UUID

import redis
from redis import exceptions

from umt_durable.bridge.outgoing import MOST_URGENT, Outgoing, Tally, reason, windows
from umt_durable.bridge.routes import Routes
from umt_durable.errors import BrokerUnavailableError

if TYPE_CHECKING:
    from celery import Celery

# Enough to hide the cost of a round trip; few enough that one lost reply leaves few messages in doubt.
PER_ROUND_TRIP = 200

# Replies that speak of the server, not of the message: an outage, which costs no row an attempt.
SERVER_TROUBLE = (
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
SERVER_TROUBLE_CODES = ("MISCONF", "NOREPLICAS", "OOM", "READONLY", "MASTERDOWN", "BUSY", "UNKILLABLE", "NOAUTH")


class RedisChannel(Protocol):
    """What is used of kombu's channel on Redis."""

    pool: redis.ConnectionPool
    global_keyprefix: str

    def prepare_message(
        self,
        body: bytes,
        *,
        priority: int | None,
        content_type: str,
        content_encoding: str,
        headers: Mapping[str, object],
        properties: Mapping[str, object],
    ) -> object: ...

    def basic_publish(
        self, message: object, exchange: str, routing_key: str, *, _publish_batch: Commands
    ) -> object: ...

    def _create_client(self) -> redis.Redis: ...

    def _size(self, queue: str) -> int: ...


@dataclass(slots=True)
class Commands:
    """The Redis commands that deliver one message; kombu adds them while it routes it."""

    key: UUID
    found: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)

    def add(self, name: str, *args: object) -> None:
        """Take one command."""
        self.found.append((name, args))


class RedisBroker:
    """A connection to Redis, Valkey or a set of them led by Sentinel.

    The reply of the push is the confirmation. What was never answered stays unsettled: it may have arrived or not.
    """

    lost: ClassVar[tuple[type[BaseException], ...]] = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)

    def __init__(self, app: Celery, channel: RedisChannel) -> None:
        self._channel = channel
        self._routes = Routes(app, channel, lost=self.lost, is_outage=speaks_of_the_server)

    def alive(self) -> bool:
        """Say yes: redis-py opens a fresh socket by itself when the old one was closed between two calls."""
        return True

    def publish(self, batch: Sequence[Outgoing], tally: Tally) -> None:
        """Send the batch in round trips of PER_ROUND_TRIP messages."""
        self._routes.begin_batch()
        for rows in windows(batch, PER_ROUND_TRIP):
            self._push([routed for row in rows for routed in self._route(row, tally)], tally, once=rows[0].once)

    def _route(self, row: Outgoing, tally: Tally) -> Iterator[Commands]:
        """Give the commands of one message, or refuse it and give none."""
        problem = self._routes.problem(row)
        if problem is not None:
            tally.refuse(row.key, problem)
            return
        commands = Commands(row.key)
        try:
            self._channel.basic_publish(self._message(row), row.exchange, row.routing_key, _publish_batch=commands)
        except self.lost:
            raise
        except Exception as error:
            if speaks_of_the_server(error):
                raise BrokerUnavailableError(reason(error)) from error
            tally.refuse(row.key, f"cannot be sent: {reason(error)}")
            return
        if commands.found:
            yield commands
        else:
            tally.refuse(row.key, f"unroutable: no queue is bound to {row.exchange!r} for {row.routing_key!r}")

    def _message(self, row: Outgoing) -> object:
        """Build kombu's message. Redis pops the lists of a queue in the order 0, 3, 6, 9: our order is turned round."""
        priority = None if row.priority is None else MOST_URGENT - row.priority
        return self._channel.prepare_message(
            row.body,
            priority=priority,
            content_type=row.content_type,
            content_encoding=row.content_encoding,
            headers=dict(row.headers),
            properties=row.basic_properties(),
        )

    def _push(self, messages: Sequence[Commands], tally: Tally, *, once: bool) -> None:
        """Send the commands of these messages in one round trip, and settle each by its own replies."""
        if not messages:
            return
        with self._channel._create_client().pipeline(transaction=False) as pipeline:
            if once:
                # On the connection that will be used: a server that is away is then found before anything is in doubt.
                pipeline.immediate_execute_command("PING")  # type: ignore[no-untyped-call]  # redis-py has no types here
            for message in messages:
                tally.begin(message.key)
                for name, args in message.found:
                    getattr(pipeline, name)(*args)
            replies = iter(pipeline.execute(raise_on_error=False))
        trouble: str | None = None
        for message in messages:
            errors = [reply for _, reply in zip(message.found, replies, strict=False) if isinstance(reply, Exception)]
            if not errors:
                tally.confirm(message.key)
            elif any(speaks_of_the_server(error) for error in errors):
                trouble = reason(errors[0])
                if len(errors) == len(message.found):
                    tally.take_back(message.key)
            else:
                tally.refuse(message.key, f"refused by the broker: {reason(errors[0])}")
        if trouble is not None:
            raise BrokerUnavailableError(trouble)

    def depth(self, queue: str) -> int | None:
        """Count the messages in all priority lists of the queue; one that was never used has none."""
        try:
            return self._channel._size(queue)
        except exceptions.ResponseError as error:
            if speaks_of_the_server(error):
                raise BrokerUnavailableError(reason(error)) from error
            return None  # the key holds something else than a list

    def holds(self, marker: str) -> bool:
        """Say whether the marker's key exists."""
        with self._marker(marker) as (client, key):
            return bool(client.exists(key))

    def put(self, marker: str) -> None:
        """Set the marker's key, without a time to live."""
        with self._marker(marker) as (client, key):
            client.set(key, "1", nx=True)

    @contextmanager
    def _marker(self, marker: str) -> Iterator[tuple[redis.Redis, str]]:
        """Give the marker's whole key, and a client that adds no prefix: kombu's own leaves some commands out."""
        try:
            yield redis.Redis(connection_pool=self._channel.pool), self._channel.global_keyprefix + marker
        except exceptions.ResponseError as error:
            raise BrokerUnavailableError(reason(error)) from error


def speaks_of_the_server(error: Exception) -> bool:
    """Say whether an error reply means that the server takes no messages now, whoever sends them."""
    return isinstance(error, SERVER_TROUBLE) or str(error).startswith(SERVER_TROUBLE_CODES)
