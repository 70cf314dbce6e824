"""Publish through any other transport of kombu, one message at a time.

What can be promised here is what the transport promises, and that is less: kombu returns once it has handed the
message over, most transports drop an unroutable message without a word, and there is no marker to notice lost data by.
Redispatch still finds every run whose message was lost. Meant for `memory://` in tests and for trying things out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from umt_durable.bridge.outgoing import Outgoing, Tally, reason
from umt_durable.bridge.routes import Routes

if TYPE_CHECKING:
    from celery import Celery


class PlainChannel(Protocol):
    """What is used of a kombu channel."""

    def _size(self, queue: str) -> int: ...


class PlainBroker:
    """A connection through a transport without batches or confirms."""

    def __init__(self, app: Celery, channel: PlainChannel, *, lost: tuple[type[BaseException], ...]) -> None:
        # Some transports count KeyError as a lost connection; here it means a queue that may not be created.
        self.lost = tuple(error for error in lost if not issubclass(error, LookupError))
        self._channel = channel
        self._producer = app.amqp.Producer(channel, auto_declare=False)
        self._routes = Routes(app, channel, lost=self.lost)

    def alive(self) -> bool:
        """Say yes: nothing is known of a connection between two calls."""
        return True

    def publish(self, batch: Sequence[Outgoing], tally: Tally) -> None:
        """Hand over each message; one that was handed over counts as confirmed."""
        self._routes.begin_batch()
        for row in batch:
            problem = self._routes.problem(row)
            if problem is None:
                tally.begin(row.key)
                problem = self._hand_over(row)
            if problem is None:
                tally.confirm(row.key)
            else:
                tally.refuse(row.key, problem)

    def _hand_over(self, row: Outgoing) -> str | None:
        properties = row.basic_properties()
        expiration = properties.pop("expiration", None)
        try:
            self._producer.publish(
                row.body,
                exchange=row.exchange,
                routing_key=row.routing_key,
                content_type=row.content_type,
                content_encoding=row.content_encoding,
                headers=dict(row.headers),
                priority=row.priority,
                expiration=None if expiration is None else int(str(expiration)) / 1000,
                **properties,
            )
        except self.lost:
            raise
        except Exception as error:  # noqa: BLE001 - each transport refuses in its own way; the reason goes to the row
            return f"cannot be sent: {reason(error)}"
        return None

    def depth(self, queue: str) -> int | None:
        """Count the messages in the queue, or give None when this transport cannot."""
        try:
            return self._channel._size(queue)
        except NotImplementedError:
            return None

    def holds(self, marker: str) -> bool:
        """Say yes: there are no markers here, and so no loss is ever reported."""
        return True

    def put(self, marker: str) -> None:
        """Do nothing: there are no markers here."""
