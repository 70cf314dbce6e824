"""The relay's way to the broker: batches with a known outcome for every message, on a connection of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from redis.exceptions import TimeoutError as RedisTimeoutError

from umt_durable.bridge.link import Link, connect
from umt_durable.bridge.outgoing import Broker, Outgoing, Report, Tally, reason
from umt_durable.errors import BrokerUnavailableError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Outgoing", "Publisher", "Report"]

Answer = TypeVar("Answer")


class _HungUpError(BrokerUnavailableError):
    """The connection ended while the broker was spoken to, for which one of the messages may be the cause."""


class Publisher:
    """Publishes for one thread of one process.

    The connection is made at the first use, is not the one of the pool that user code shares, and is left alone in a
    forked child. Nothing is tried over and over, and each wait for the broker ends after `timeout_seconds`: whoever
    calls backs off by itself.

    The loss marker of incarnation `x` is named `<schema>.marker.x`: a Redis key, or on RabbitMQ a durable queue with
    one persistent message that nobody ever takes. There a passive declaration counts the message without touching it,
    so any number of processes look at the same time, and none can hide it from the others by freezing with it in hand,
    as with basic_get. The queue alone would prove little: imported definitions bring it back, empty. With the id in
    the name, two databases that share a broker have a marker each.
    """

    def __init__(self, app: Celery, *, schema: str = "umt_durable", timeout_seconds: float = 10.0) -> None:
        self._app = app
        self._schema = schema
        self._timeout_seconds = timeout_seconds
        self._pid = os.getpid()
        self._link: Link | None = None
        self._suspects: frozenset[UUID] = frozenset()

    def publish(self, batch: Sequence[Outgoing]) -> Report:
        """Send a batch and say what became of each message.

        A row that was under way when the broker hung up is sent alone, after the others, the next time it comes: if it
        is the one that makes the broker hang up then it is refused, and does not hold the others back for ever.
        Errors: BrokerUnavailableError when the broker, not a row, is the trouble; `confirmed` lists what had arrived,
        `doubtful` what perhaps had.
        Keeps: a row is confirmed only after the broker took it (RG-15); one bad row stops no other.
        """
        tally = Tally()
        try:
            self._ask(lambda broker: broker.publish([row for row in batch if row.key not in self._suspects], tally))
            for row in batch:
                if row.key in self._suspects:
                    self._publish_alone(row, tally)
        except BrokerUnavailableError as error:
            if isinstance(error, _HungUpError):
                self._suspects = frozenset(row.key for row in batch if not tally.is_settled(row.key))
            raise BrokerUnavailableError(str(error), tally.confirmed, tally.doubtful) from error
        self._suspects -= {row.key for row in batch}
        return tally.report()

    def depth(self, queue: str) -> int | None:
        """Count the messages ready in a queue, over all its priorities; None when it is absent or cannot be counted.

        Errors: BrokerUnavailableError.
        """
        return self._ask(lambda broker: broker.depth(queue))

    def incarnation(self, expected: str) -> str | None:
        """Give `expected` if the broker still holds that incarnation's loss marker, else None.

        A single None may be a moment's trouble; two in a row mean that the broker lost its data, or is another broker.
        Transports other than Redis and RabbitMQ have no marker and never report a loss.
        Errors: BrokerUnavailableError.
        """
        return expected if self._ask(lambda broker: broker.holds(self._marker(expected))) else None

    def mark(self, value: str) -> None:
        """Leave the loss marker of this incarnation on the broker; one that is there already stays as it is.

        Errors: BrokerUnavailableError.
        """
        self._ask(lambda broker: broker.put(self._marker(value)))

    def close(self) -> None:
        """Close the connection, if there is one; the next call makes a new one."""
        link, self._link = self._link, None
        if link is not None and self._pid == os.getpid():
            link.close()

    def _marker(self, incarnation: str) -> str:
        return f"{self._schema}.marker.{incarnation}"

    def _publish_alone(self, row: Outgoing, tally: Tally) -> None:
        try:
            self._ask(lambda broker: broker.publish([row], tally))
        except _HungUpError as error:
            self._connected()  # if this fails, then it was the broker and not the message
            if not row.once or row.key not in tally.begun:
                tally.refuse(row.key, f"the connection is lost when this message is sent: {error}")

    def _ask(self, question: Callable[[Broker], Answer]) -> Answer:
        """Put a question to the broker; a connection that failed is not used again."""
        link = self._connected()
        try:
            return question(link.broker)
        except BrokerUnavailableError as error:
            self._drop()
            raise BrokerUnavailableError(f"{link.name}: {error}") from error
        except link.broker.lost as error:
            self._drop()
            timed_out = isinstance(error, TimeoutError | RedisTimeoutError)
            raise (BrokerUnavailableError if timed_out else _HungUpError)(f"{link.name}: {reason(error)}") from error

    def _connected(self) -> Link:
        """Give a connection that stands, as far as can be seen, made anew if need be.

        Errors: BrokerUnavailableError.
        """
        if self._pid != os.getpid():
            # The socket is the parent's: closing it properly here would end the parent's session.
            self._link, self._pid = None, os.getpid()
        if self._link is not None and not self._link.broker.alive():
            self._drop()
        if self._link is None:
            self._link = connect(self._app, timeout_seconds=self._timeout_seconds)
        return self._link

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.abandon()
