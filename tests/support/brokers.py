"""The two brokers behind one face: what a test needs to lose, stop and look into, whichever of them it is."""

from __future__ import annotations

import json
from typing import Protocol

import amqp
from kombu.transport.redis import PRIORITY_STEPS, Channel

from tests.support.proxy import Proxy
from tests.support.rabbit import Rabbit, connect
from tests.support.valkey import Valkey
from tests.support.wait import until

NAMES = ("redis", "rabbitmq")


class Broker(Protocol):
    """A broker of this test process, with nothing of anybody else in it."""

    name: str

    @property
    def url(self) -> str:
        """Return the URL for `broker_url`; it stays the same while the broker is stopped, started and wiped."""

    def wipe(self) -> None:
        """Lose all queues and messages, as a broker does that comes back with an empty disk."""

    def stop(self) -> None:
        """Be unreachable until `start`: connections break, new ones are refused, messages stay."""

    def start(self) -> None:
        """Be reachable again; return once the broker answers."""

    def depth(self, queue: str) -> int:
        """Return how many messages wait in a queue, those already handed to a consumer not counted."""

    def held(self, queue: str) -> int:
        """Return how many messages of a queue the broker holds, those handed out and not yet acked counted."""


class RedisBroker:
    """Valkey as a broker: database 0 of a private server; results are in another database and survive `wipe`."""

    name = "redis"

    def __init__(self, server: Valkey) -> None:
        self.server = server
        self.client = server.client()

    @property
    def url(self) -> str:
        return self.server.url

    def wipe(self) -> None:
        self.client.flushdb()

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server.start()

    def depth(self, queue: str) -> int:
        keys = [f"{queue}{Channel.sep}{step}" if step else queue for step in PRIORITY_STEPS]
        return sum(int(self.client.llen(key)) for key in keys)

    def held(self, queue: str) -> int:
        unacked = self.client.hvals(Channel.unacked_key)
        return self.depth(queue) + len([value for value in unacked if json.loads(value)[2] == queue])

    def close(self) -> None:
        """Close the connections of this object; the server goes on."""
        self.client.close()


class RabbitBroker:
    """RabbitMQ as a broker: a virtual host of its own, reached through a proxy that can cut it off."""

    name = "rabbitmq"

    def __init__(self, server: Rabbit) -> None:
        self.server = server
        self.vhost = server.take_vhost()
        self.proxy = Proxy("127.0.0.1", server.port).start()

    @property
    def url(self) -> str:
        return self.server.url(self.vhost, self.proxy.port)

    def wipe(self) -> None:
        self.server.delete_vhost(self.vhost)
        self.server.add_vhosts([self.vhost])

    def stop(self) -> None:
        self.proxy.down()

    def start(self) -> None:
        self.proxy.heal()

    def depth(self, queue: str) -> int:
        with connect(self.server.port, self.vhost) as connection:
            channel = connection.channel()
            try:
                return int(channel.queue_declare(queue, passive=True).message_count)
            except amqp.NotFound:
                return 0

    def held(self, queue: str) -> int:
        listed = self.server.control("list_queues", "-p", self.vhost, "name", "messages", "--formatter", "json")
        return sum(int(row["messages"]) for row in json.loads(listed) if row["name"] == queue)

    def close(self) -> None:
        """Remove the virtual host and the proxy; the server goes on."""
        self.proxy.close()
        self.server.give_back_vhost(self.vhost)


def wait_until_empty(broker: Broker, queue: str, *, timeout: float = 20.0) -> None:
    """Return once a broker holds no message of a queue, waiting or handed out."""
    until(
        lambda: broker.depth(queue) == 0 and broker.held(queue) == 0,
        timeout=timeout,
        what=f"queue {queue} of {broker.name} to be empty",
    )
