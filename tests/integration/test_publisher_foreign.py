"""Messages of plain Celery producers are read as they come from real brokers."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery

from tests.integration.publisher_kit import app_for, drain, publishing, row
from tests.support.brokers import Broker
from umt_durable.bridge.message import TaskMessage, is_hint, parse_delivery, parse_publish


@pytest.fixture
def queue() -> str:
    return f"foreign-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def producer(broker: Broker) -> Celery:
    return app_for(broker.url, task_queue_max_priority=9)


def arrived(producer: Celery, queue: str) -> TaskMessage:
    """Read the one message that waits in a queue."""
    (message,) = drain(producer, queue)
    assert not is_hint(message.headers)
    return parse_delivery(message, app=producer)


@pytest.mark.parametrize("compression", [None, "zlib", "bzip2"])
def test_i3_a_message_of_a_plain_producer_is_read(producer: Celery, queue: str, compression: str | None) -> None:
    link = producer.signature("next", args=[datetime(2026, 11, 29, tzinfo=UTC)], task_id="next-1")
    producer.send_task(
        "shop.fulfil",
        ["ü", 1, {"id": uuid.UUID(int=7)}],
        {"order": None},
        task_id="run-1",
        queue=queue,
        compression=compression,
        link=link,
        priority=2,
        time_limit=60,
        headers={"traceparent": "00-ab"},
        eta=datetime(2999, 1, 1, tzinfo=UTC),
        shadow="shown",
    )

    message = arrived(producer, queue)

    assert (message.id, message.task, message.queue) == ("run-1", "shop.fulfil", queue)
    assert (message.args, message.kwargs) == (["ü", 1, {"id": uuid.UUID(int=7)}], {"order": None})
    assert message.eta == datetime(2999, 1, 1, tzinfo=UTC)
    envelope = message.envelope
    assert (envelope.timelimit, envelope.shadow, envelope.headers) == ((60, None), "shown", {"traceparent": "00-ab"})
    assert [item["options"] for item in envelope.callbacks] == [{"task_id": "next-1"}]
    assert (envelope.argsrepr, envelope.kwargsrepr, envelope.exchange) == (None, None, None)


def test_i3_protocol_1_is_read(broker: Broker, queue: str) -> None:
    producer = app_for(broker.url, task_protocol=1)
    producer.send_task("shop.fulfil", [1], {"b": 2}, task_id="run-1", queue=queue, group_id="g")

    message = arrived(producer, queue)

    assert (message.id, message.task, message.args, message.kwargs) == ("run-1", "shop.fulfil", [1], {"b": 2})
    assert (message.envelope.group, message.queue) == ("g", queue)


def test_a_priority_comes_back_to_the_broker_as_it_left_it(producer: Celery, broker: Broker, queue: str) -> None:
    producer.send_task("shop.fulfil", task_id="run-1", queue=queue, priority=3)
    (sent,) = drain(producer, queue)
    message = parse_delivery(sent, app=producer)

    assert message.priority == (6 if broker.name == "redis" else 3)
    with publishing(producer) as publisher:
        publisher.publish([row(queue, properties={"priority": message.priority})])
    (again,) = drain(producer, queue)
    assert again.properties["priority"] == sent.properties["priority"] == 3


def test_what_is_read_before_it_leaves_is_what_is_read_when_it_arrives(producer: Celery, queue: str) -> None:
    read: list[TaskMessage] = []
    send = producer.amqp.send_task_message

    def both(via: Any, name: str, message: Any, **options: Any) -> Any:
        read.append(parse_publish(producer, name, message, options))
        return send(via, name, message, **options)

    producer.amqp.send_task_message = both
    producer.send_task("shop.fulfil", [1], task_id="run-1", queue=queue, priority=4, stamped_headers=["t"], t=1)

    delivered = arrived(producer, queue)

    (published,) = read
    assert (delivered.id, delivered.task, delivered.queue, delivered.priority, delivered.args) == (
        *(published.id, published.task, published.queue, published.priority),
        published.args,
    )
    assert delivered.envelope.stamps == published.envelope.stamps == {"t": 1}
    assert published.envelope.origin is None
    assert delivered.envelope.origin is not None
