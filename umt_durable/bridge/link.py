"""Connect to the broker an app publishes to, whichever kind it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kombu.exceptions import KombuError

from umt_durable.bridge.broker_plain import PlainBroker
from umt_durable.bridge.broker_rabbit import RabbitBroker
from umt_durable.bridge.broker_redis import RedisBroker
from umt_durable.bridge.outgoing import Broker, reason
from umt_durable.errors import BrokerUnavailableError
from umt_durable.redaction import DEFAULT as REDACTOR

if TYPE_CHECKING:
    from celery import Celery


class Closable(Protocol):
    """What is used of a kombu connection once it stands."""

    def release(self) -> None: ...

    def collect(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of our own with the broker behind it; `name` is its URL without secrets."""

    name: str
    broker: Broker
    connection: Closable

    def close(self) -> None:
        """Say good-bye to the broker, or just close the socket when it does not answer."""
        try:
            self.connection.release()
        except self.broker.lost:
            self.connection.collect()

    def abandon(self) -> None:
        """Close the socket without a word."""
        self.connection.collect()


def connect(app: Celery, *, timeout_seconds: float) -> Link:
    """Connect once to each host of the app's broker until one answers.

    Errors: BrokerUnavailableError.
    """
    connection = app.connection_for_write()
    transport = connection.get_transport_cls()
    is_redis = transport.driver_type == "redis"
    is_rabbit = transport.driver_name == "py-amqp"
    if is_redis:
        connection.transport_options.update(
            socket_timeout=timeout_seconds, socket_connect_timeout=timeout_seconds, retry_on_timeout=False
        )
    if is_rabbit:
        connection.transport_options.update(confirm_publish=False)  # kombu's own would await each message by itself
    name = REDACTOR.redact_url(connection.as_uri())
    try:
        connection.ensure_connection(
            max_retries=len(connection.alt[1:]), interval_start=0, interval_step=0, interval_max=0
        )
        broker: Broker
        if is_redis:
            broker = RedisBroker(app, connection.channel())
        elif is_rabbit:
            broker = RabbitBroker(app, connection.connection, timeout_seconds=timeout_seconds)
        else:
            broker = PlainBroker(app, connection.channel(), lost=connection.connection_errors)
    except (KombuError, *connection.connection_errors, *connection.channel_errors) as error:
        connection.collect()
        raise BrokerUnavailableError(f"{name}: {reason(error)}") from error
    return Link(name, broker, connection)
