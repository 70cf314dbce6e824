"""What the tests of the publisher share: rows to send, and plain kombu consumers to read them with."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from umt_durable.bridge.message import hint
from umt_durable.bridge.publisher import Outgoing, Publisher

BODY = b'[["argument"], {}, {}]'


def app_for(url: str, **conf: Any) -> Celery:
    """Return an app that publishes to a broker, and nothing else."""
    app = Celery("publisher", broker=url, set_as_current=False)
    app.conf.update(broker_connection_timeout=2, **conf)
    return app


@contextmanager
def publishing(app: Celery, **options: Any) -> Iterator[Publisher]:
    """Give a publisher that is closed afterwards."""
    publisher = Publisher(app, **{"timeout_seconds": 5.0, **options})
    try:
        yield publisher
    finally:
        publisher.close()


def row(to: str, number: int = 0, **changes: Any) -> Outgoing:
    """Return a message to a queue; `changes` replace its parts, a change to `properties` or `headers` adds to them."""
    parts: dict[str, Any] = {
        "key": uuid.uuid4(),
        "exchange": "",
        "routing_key": to,
        "queue": to,
        "body": BODY,
        "content_type": "application/json",
        "content_encoding": "utf-8",
    }
    headers = {"id": str(number), "task": "shop.fulfil", "lang": "py", **changes.pop("headers", {})}
    properties = {"correlation_id": str(number), "reply_to": "", **changes.pop("properties", {})}
    return Outgoing(**{**parts, "headers": headers, "properties": properties, **changes})


def rows(to: str, count: int, **changes: Any) -> list[Outgoing]:
    """Return so many messages to a queue, numbered from 0 in their id."""
    return [row(to, number, **dict(changes)) for number in range(count)]


def drain(app: Celery, queue: str, *, limit: int = 100_000) -> list[Any]:
    """Return the messages that wait in a queue, as a plain kombu consumer gets them, each acked."""
    found: list[Any] = []
    with app.connection_for_read() as connection:
        channel = connection.channel()
        while len(found) < limit and (message := channel.basic_get(queue, no_ack=False)) is not None:
            message = channel.message_to_python(message)
            message.ack()
            found.append(message)
    return found


def ids(messages: list[Any]) -> list[str]:
    """Return the task ids of delivered messages."""
    return [str(message.headers["id"]) for message in messages]


def hints(app: Celery, queue: str, count: int) -> list[Outgoing]:
    """Return so many hints, as the relay makes them."""
    return [
        hint(
            app,
            key=uuid.uuid4(),
            run_id=f"run-{number}",
            nesting=0,
            task="shop.fulfil",
            queue=queue,
            priority=0,
            gen=1,
            envelope=None,
        )
        for number in range(count)
    ]
