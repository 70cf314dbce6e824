"""Publish through RabbitMQ with awaited confirms, `mandatory`, and one bad message at a time.

Three facts about RabbitMQ and py-amqp shape this file:

* An unroutable message is *confirmed*, unless it is `mandatory`: then it comes back first and is confirmed afterwards.
* An unknown exchange, a missing right or a message over the size limit closes the channel: everything unanswered on it
  is in doubt, and tags begin at 1 again on the next one. What is in doubt is then sent one by one.
* A header frame larger than `frame_max` closes the whole connection, so it is measured before it is sent.

Source: RabbitMQ manual, "Consumer Acknowledgements and Publisher Confirms".
Pinned by tests/integration/test_publisher_rabbit.py.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol
from uuid import uuid4

import amqp
from amqp.exceptions import ChannelError, NotFound
from amqp.serialization import dumps

from umt_durable.bridge.outgoing import Outgoing, Tally, reason, windows
from umt_durable.bridge.routes import Routes
from umt_durable.errors import BrokerUnavailableError

if TYPE_CHECKING:
    from celery import Celery

# Answers are awaited after so many messages: more is hardly faster, and leaves more in doubt when the channel closes.
WINDOW = 500

# Bytes of a header frame beside the properties: frame header and end, class, weight, body size.
FRAME_OVERHEAD = 22


class Declared(Protocol):
    """The broker's answer to a declaration."""

    message_count: int


class AmqpChannel(Protocol):
    """What is used of py-amqp's channel under kombu."""

    events: Mapping[str, set[Callable[..., None]]]

    def basic_publish(self, msg: ReadyMessage, *, exchange: str, routing_key: str, mandatory: bool) -> object: ...

    def queue_declare(
        self,
        queue: str,
        *,
        passive: bool = False,
        durable: bool = False,
        auto_delete: bool = True,
        arguments: Mapping[str, object] | None = None,
    ) -> Declared: ...

    def exchange_declare(self, exchange: str, type: str, *, passive: bool) -> object: ...

    def confirm_select(self) -> object: ...

    def close(self) -> object: ...


class Socket(Protocol):
    """What is used of a socket."""

    def settimeout(self, value: float) -> None: ...

    def fileno(self) -> int: ...


class AmqpConnection(Protocol):
    """What is used of py-amqp's connection."""

    connected: bool
    frame_max: int
    sock: Socket
    client_properties: dict[str, dict[str, bool]]

    def channel(self) -> AmqpChannel: ...

    def drain_events(self, timeout: float | None) -> object: ...


class ReadyMessage(amqp.Message):
    """A message whose header frame is made at once: what AMQP cannot express fails then, and not while it is sent."""

    properties: Mapping[str, object]

    def __init__(self, row: Outgoing) -> None:
        properties = row.basic_properties()
        properties.setdefault("message_id", str(row.key))
        super().__init__(
            row.body,
            priority=row.priority or 0,  # as Celery's own messages have it: bodies and `inspect` read it
            content_type=row.content_type,
            content_encoding=row.content_encoding,
            application_headers=row.headers,
            **properties,
        )
        dumps("ss", (row.exchange, row.routing_key))
        self._header: bytes = super()._serialize_properties()

    def _serialize_properties(self) -> bytes:
        return self._header

    @property
    def header_bytes(self) -> int:
        """Give the size of the frame that carries the properties."""
        return len(self._header) + FRAME_OVERHEAD


class Confirms:
    """The messages sent on one channel that the broker has not answered yet.

    Keeps: a message settles once; one that came back is refused, although the broker confirms it afterwards.
    """

    def __init__(self, channel: AmqpChannel) -> None:
        self.channel = channel
        self._tag = 0
        self._open: dict[int, tuple[Outgoing, str, Tally]] = {}
        self._returned: dict[str, str] = {}
        channel.events["basic_ack"].add(self._acked)
        channel.events["basic_nack"].add(self._nacked)
        channel.events["basic_return"].add(self._came_back)
        channel.confirm_select()

    def send(self, row: Outgoing, message: ReadyMessage, tally: Tally) -> None:
        """Send one message and await nothing; its outcome will be noted in the tally."""
        self._tag += 1
        self._open[self._tag] = (row, str(message.properties["message_id"]), tally)
        tally.begin(row.key)
        self.channel.basic_publish(message, exchange=row.exchange, routing_key=row.routing_key, mandatory=True)

    @property
    def waiting(self) -> int:
        """Count the messages without an answer."""
        return len(self._open)

    def _acked(self, tag: int, multiple: bool) -> None:
        for row, message_id, tally in self._settle(tag, multiple):
            problem = self._returned.pop(message_id, None)
            if problem is None:
                tally.confirm(row.key)
            else:
                tally.refuse(row.key, problem)

    def _nacked(self, tag: int, multiple: bool) -> None:
        for row, _, tally in self._settle(tag, multiple):
            tally.refuse(row.key, "refused by the broker (nack): the queue is full or not available")

    def _settle(self, tag: int, multiple: bool) -> list[tuple[Outgoing, str, Tally]]:
        tags = [sent for sent in self._open if sent <= tag] if multiple else [tag]
        return [self._open.pop(sent) for sent in tags if sent in self._open]

    def _came_back(self, _error: Exception, exchange: str, routing_key: str, message: amqp.Message) -> None:
        message_id = str(message.properties.get("message_id"))
        self._returned[message_id] = f"unroutable: no queue is bound to {exchange!r} for {routing_key!r}"


class RabbitBroker:
    """A connection to RabbitMQ, with one channel for messages and one for declarations and questions."""

    lost: ClassVar[tuple[type[BaseException], ...]] = amqp.Connection.connection_errors

    def __init__(self, app: Celery, connection: AmqpConnection, *, timeout_seconds: float) -> None:
        self._app = app
        self._connection = connection
        self._timeout_seconds = timeout_seconds
        # Every wait of py-amqp but those with a time-out of their own is for ever otherwise.
        connection.sock.settimeout(timeout_seconds)
        # With it py-amqp looks for a word of the broker before each message, and spins if it finds half a frame.
        connection.client_properties.get("capabilities", {})["connection.blocked"] = False
        self._asking = connection.channel()
        self._confirms: Confirms | None = None
        self._routes = Routes(app, self._asking, lost=self.lost, look=self._look_for_exchange)

    def alive(self) -> bool:
        """Say whether the connection still stands, after reading what the broker has said of its own accord."""
        try:
            while self._connection.connected and has_arrived(self._connection.sock):
                self._connection.drain_events(timeout=self._timeout_seconds)
        except (*self.lost, ChannelError):
            return False
        return self._connection.connected

    def publish(self, batch: Sequence[Outgoing], tally: Tally) -> None:
        """Send the batch in windows, each awaited; what is in doubt after a closed channel is sent one by one.

        A message that may leave once has a window of its own: the channel is then closed for it, or not at all.
        """
        self._routes.begin_batch()
        proven = False
        for window in windows(batch, WINDOW):
            rows = [row for row in window if self._has_route(row, tally)]
            if rows and rows[0].once and not proven:
                self._prove()
                proven = True
            try:
                self._send(rows, tally)
            except ChannelError:
                self._drop_channel()
                for row in rows:
                    if not tally.is_settled(row.key):
                        self._send_alone(row, tally)
            for row in rows:
                if row.key in tally.refused:
                    self._routes.forget(row)

    def _send(self, rows: Sequence[Outgoing], tally: Tally) -> None:
        """Send these rows and await the answer to each.

        Errors: ChannelError when the broker closed the channel; BrokerUnavailableError when it does not answer in time.
        """
        if self._confirms is None:
            self._confirms = Confirms(self._connection.channel())
        confirms = self._confirms
        for row in rows:
            message = self._message(row, tally)
            if message is not None:
                confirms.send(row, message, tally)
        give_up = time.monotonic() + self._timeout_seconds
        while confirms.waiting:
            left = give_up - time.monotonic()
            if left <= 0:
                raise BrokerUnavailableError(
                    f"messages not confirmed: {confirms.waiting}, in {self._timeout_seconds:g} s"
                )
            self._connection.drain_events(timeout=left)

    def _prove(self) -> None:
        """See that the broker takes messages: under a memory alarm it reads none, and all that are sent are in doubt.

        The messages for it lead to no queue, so they come back and leave nothing. There are two, since the first one
        after an alarm is still read.
        Errors: BrokerUnavailableError when it does not answer in time.
        """
        nowhere = f"umt.probe.{uuid4().hex}"
        probes = [Outgoing(uuid4(), "", nowhere, None, b"", "text/plain", "utf-8", {}, {}) for _ in range(2)]
        try:
            self._send(probes, Tally())
        except ChannelError:  # this user may not write to the default exchange
            self._drop_channel()

    def _send_alone(self, row: Outgoing, tally: Tally) -> None:
        try:
            self._send([row], tally)
        except ChannelError as error:
            self._drop_channel()
            tally.refuse(row.key, f"refused by the broker: {reason(error)}")

    def _drop_channel(self) -> None:
        """Use a new channel from now on. py-amqp has opened the closed one again, which would mix old and new tags."""
        if self._confirms is not None:
            self._confirms.channel.close()
            self._confirms = None

    def _has_route(self, row: Outgoing, tally: Tally) -> bool:
        problem = self._routes.problem(row)
        if problem is not None:
            tally.refuse(row.key, problem)
        return problem is None

    def _look_for_exchange(self, name: str) -> object:
        return self._asking.exchange_declare(name, "direct", passive=True)

    def _message(self, row: Outgoing, tally: Tally) -> ReadyMessage | None:
        """Build the message, or refuse a row that AMQP cannot express. Nothing is sent."""
        try:
            message = ReadyMessage(row)
        except Exception as error:  # noqa: BLE001 - a header fails as its own encoder likes; the reason goes to the row
            tally.refuse(row.key, f"cannot be sent: {reason(error)}")
            return None
        if message.header_bytes > self._connection.frame_max:
            tally.refuse(
                row.key, f"cannot be sent: its headers take {message.header_bytes} bytes, too many for a frame"
            )
            return None
        return message

    def depth(self, queue: str) -> int | None:
        """Count the messages ready in the queue, without those held unacked; None when there is no such queue."""
        try:
            return self._asking.queue_declare(queue, passive=True).message_count
        except ChannelError:  # not found, or another connection's own; py-amqp has opened the channel again
            return None

    def holds(self, marker: str) -> bool:
        """Say whether the marker's queue exists and still has its message.

        Errors: BrokerUnavailableError when it is not for us to know, which is not the same as a loss.
        """
        try:
            return self._asking.queue_declare(marker, passive=True).message_count > 0
        except NotFound:
            return False
        except ChannelError as error:
            raise BrokerUnavailableError(f"the loss marker cannot be looked at: {reason(error)}") from error

    def put(self, marker: str) -> None:
        """Declare the marker's queue and put its one message there.

        Errors: BrokerUnavailableError when the broker does not take it.
        """
        arguments: dict[str, object] = {"x-max-length": 1}
        if self._app.conf.task_default_queue_type == "quorum":
            arguments["x-queue-type"] = "quorum"
        try:
            found = self._asking.queue_declare(marker, durable=True, auto_delete=False, arguments=arguments)
        except ChannelError as error:
            raise BrokerUnavailableError(f"the loss marker cannot be declared: {reason(error)}") from error
        if found.message_count:
            return
        row = Outgoing(uuid4(), "", marker, None, b"", "text/plain", "utf-8", {}, {})
        tally = Tally()
        self.publish([row], tally)
        if row.key in tally.refused:
            raise BrokerUnavailableError(f"the loss marker is refused: {tally.refused[row.key]}")


def has_arrived(sock: Socket) -> bool:
    """Say whether there is something to read. A read without waiting would do, but py-amqp spins on half a frame."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
