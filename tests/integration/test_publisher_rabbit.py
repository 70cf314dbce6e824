"""What is particular to publishing through RabbitMQ."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from kombu import entity

from tests.integration.publisher_kit import app_for, drain, ids, publishing, row, rows
from tests.support.brokers import RabbitBroker
from umt_durable.bridge.publisher import Publisher
from umt_durable.errors import BrokerUnavailableError

pytestmark = pytest.mark.rabbitmq

Exchange: Any = entity.Exchange
Queue: Any = entity.Queue


@pytest.fixture
def queue() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def app(rabbit_url: str) -> Celery:
    return app_for(rabbit_url)


@pytest.fixture
def publisher(app: Celery) -> Iterator[Publisher]:
    with publishing(app) as publisher:
        yield publisher


@contextmanager
def talking(app: Celery) -> Iterator[Any]:
    """Give a channel of another client."""
    with app.connection_for_write() as connection:
        yield connection.channel()


def test_a_nack_refuses_its_own_message(rabbit_url: str, queue: str) -> None:
    full = {"x-max-length": 2, "x-overflow": "reject-publish"}
    app = app_for(
        rabbit_url,
        task_queues=[
            Queue(queue, Exchange(queue), queue),
            Queue("full", Exchange("full"), "full", queue_arguments=full),
        ],
    )
    tight, roomy = rows("full", 5), rows(queue, 3)

    with publishing(app) as publisher:
        report = publisher.publish([*tight[:3], *roomy, *tight[3:]])

    assert report.confirmed == {item.key for item in (*tight[:2], *roomy)}
    assert report.refused.keys() == {item.key for item in tight[2:]}
    assert all("nack" in text for text in report.refused.values())


def test_rg15_a_message_without_a_queue_is_refused_although_the_broker_confirms_it(
    app: Celery, publisher: Publisher, queue: str
) -> None:
    publisher.publish(rows(queue, 1))
    lost, kept = row("nowhere", queue=None), row(queue)

    report = publisher.publish([lost, kept])

    assert report.confirmed == {kept.key}
    assert "unroutable" in report.refused[lost.key]


def test_a_queue_that_vanished_is_declared_again_at_the_next_try(app: Celery, publisher: Publisher, queue: str) -> None:
    publisher.publish(rows(queue, 1))
    with talking(app) as channel:
        channel.queue_delete(queue)
    batch = rows(queue, 2)

    first = publisher.publish(batch)
    second = publisher.publish(batch)

    assert first.refused.keys() == second.confirmed == {item.key for item in batch}


def test_i26_an_unknown_exchange_refuses_only_its_rows(app: Celery, publisher: Publisher, queue: str) -> None:
    good, bad = rows(queue, 3), [row(queue, exchange="no-such-exchange") for _ in range(2)]

    report = publisher.publish([bad[0], good[0], good[1], bad[1], good[2]])

    assert report.confirmed == {item.key for item in good}
    assert all("no-such-exchange" in report.refused[item.key] for item in bad)
    assert ids(drain(app, queue)) == ["0", "1", "2"]


def test_i26_a_channel_that_closes_in_the_middle_costs_only_the_row_that_closed_it(rabbit_url: str, queue: str) -> None:
    exchange = Exchange("short-lived", type="topic", durable=False)
    app = app_for(rabbit_url, task_queues=[Queue(queue, Exchange(queue), queue)])

    with talking(app) as channel, publishing(app) as publisher:
        exchange(channel).declare()
        Queue("bound", exchange, "k", durable=False)(channel).declare()
        bad = [row(queue, exchange="short-lived", routing_key="k") for _ in range(2)]
        assert len(publisher.publish([bad[0]]).confirmed) == 1
        channel.exchange_delete("short-lived")
        good = rows(queue, 40)

        report = publisher.publish([*good[:20], *bad, *good[20:]])

        assert report.confirmed == {item.key for item in good}
        assert report.refused.keys() == {item.key for item in bad}
        assert {*ids(drain(app, queue))} == {str(number) for number in range(40)}
        assert len(publisher.publish(rows(queue, 3)).confirmed) == 3


def test_i26_a_right_that_is_missing_refuses_only_its_rows(rabbit_broker: RabbitBroker, queue: str) -> None:
    control = rabbit_broker.server.control
    app = app_for(rabbit_broker.url, task_queues=[Queue(queue, Exchange(queue), queue)])

    with publishing(app) as publisher:
        publisher.publish(rows(queue, 1))
        write = r"^(orders-.*|amq\.default|)$"
        control("set_permissions", "-p", rabbit_broker.vhost, "guest", "^orders-.*", write, ".*")
        good, bad = rows(queue, 2), row(queue, exchange="amq.topic", routing_key="k")
        report = publisher.publish([good[0], bad, good[1]])

    assert report.confirmed == {item.key for item in good}
    assert report.refused.keys() == {bad.key}


def test_i26_what_amqp_cannot_express_is_refused_before_it_is_sent(
    app: Celery, publisher: Publisher, queue: str
) -> None:
    good = rows(queue, 10)
    changes: list[dict[str, Any]] = [
        {"properties": {"correlation_id": "é" * 200}},
        {"properties": {"correlation_id": "x" * 256}},
        {"routing_key": "x" * 256},
        {"exchange": "x" * 256},
        {"queue": "x" * 256},
        {"headers": {"x" * 256: 1}},
        {"headers": {"big": "x" * 140_000}},
        {"headers": {"what": {1, 2}}},
        {"properties": {"delivery_mode": 500}},
        {"properties": {"content_type": "twice"}},
    ]
    bad = [row(queue, **change) for change in changes]
    publisher.publish(rows(queue, 1))
    link = publisher._link

    report = publisher.publish([item for pair in zip(good, bad, strict=True) for item in pair])

    assert report.confirmed == {item.key for item in good}
    assert report.refused.keys() == {item.key for item in bad}
    assert publisher._link is link


def test_a_header_frame_of_the_largest_size_is_sent(app: Celery, publisher: Publisher, queue: str) -> None:
    sizes = range(130_600, 131_000, 20)

    report = publisher.publish([row(queue, headers={"big": "x" * size}) for size in sizes])

    assert report.confirmed
    assert report.refused
    assert len(drain(app, queue)) == len(report.confirmed)


def test_a_broker_that_freezes_within_a_frame_is_left_after_the_time_allowed(
    rabbit_broker: RabbitBroker, queue: str
) -> None:
    with publishing(app_for(rabbit_broker.url), timeout_seconds=0.5) as publisher:
        rabbit_broker.proxy.slice(5)
        publisher.publish(rows(queue, 20))
        rabbit_broker.proxy.latency(0.2)

        with pytest.raises(BrokerUnavailableError):
            publisher.publish(rows(queue, 20))

        rabbit_broker.proxy.heal()
        assert len(publisher.publish(rows(queue, 20)).confirmed) == 20


def test_a_large_body_arrives(app: Celery, publisher: Publisher, queue: str) -> None:
    big = row(queue, 1, body=b'"' + b"x" * 1_000_000 + b'"')

    report = publisher.publish([big, row(queue, 2)])

    assert len(report.confirmed) == 2
    assert ids(drain(app, queue)) == ["1", "2"]


def test_i26_a_queue_that_exists_otherwise_refuses_only_its_rows(rabbit_url: str, queue: str) -> None:
    app = app_for(rabbit_url)
    with talking(app) as channel:
        Queue("mine", Exchange("mine"), "mine", queue_arguments={"x-max-length": 5})(channel).declare()
    good, bad = rows(queue, 2), rows("mine", 2)

    with publishing(app) as publisher:
        report = publisher.publish([bad[0], good[0], bad[1], good[1]])
        again = publisher.publish([bad[0], good[0]])

    assert report.confirmed == {item.key for item in good}
    assert all("mine" in report.refused[item.key] for item in bad)
    assert again.confirmed == {good[0].key}
    assert again.refused.keys() == {bad[0].key}


def test_quorum_queues_and_topic_exchanges_are_declared_as_the_app_says(
    rabbit_broker: RabbitBroker, queue: str
) -> None:
    app = app_for(
        rabbit_broker.url,
        task_default_queue=queue,
        task_default_queue_type="quorum",
        task_default_exchange_type="topic",
        task_default_exchange=f"x-{queue}",
        task_default_routing_key="job.one",
    )

    with publishing(app) as publisher:
        report = publisher.publish([row(queue, exchange=f"x-{queue}", routing_key="job.one") for _ in range(3)])
        publisher.mark("one")
        held = publisher.incarnation("one")

    assert (len(report.confirmed), held) == (3, "one")
    listed = rabbit_broker.server.control("list_queues", "-p", rabbit_broker.vhost, "name", "type")
    assert sorted(line.split()[-1] for line in listed.splitlines() if queue in line or "marker" in line) == [
        "quorum",
        "quorum",
    ]


def test_a_marker_whose_queue_was_emptied_is_missing(app: Celery, publisher: Publisher) -> None:
    publisher.mark("one")
    with talking(app) as channel:
        channel.queue_purge("umt_durable.marker.one")

        assert publisher.incarnation("one") is None
        publisher.mark("one")
        publisher.mark("one")

        assert channel.queue_declare("umt_durable.marker.one", passive=True).message_count == 1


def test_a_reader_that_takes_the_marker_in_hand_hides_it_only_while_it_holds_it(
    app: Celery, publisher: Publisher
) -> None:
    publisher.mark("one")

    with talking(app) as channel:
        assert channel.basic_get("umt_durable.marker.one", no_ack=False) is not None

    assert publisher.incarnation("one") == "one"


def test_confirms_of_kombu_that_the_app_asks_for_are_not_used_twice(rabbit_url: str, queue: str) -> None:
    app = app_for(rabbit_url, broker_transport_options={"confirm_publish": True})

    with publishing(app) as publisher:
        assert len(publisher.publish(rows(queue, 100)).confirmed) == 100


# -- messages that may leave once --------------------------------------------------------------------------------------


def test_a_channel_that_closes_sends_nothing_twice_that_may_leave_once(rabbit_url: str, queue: str) -> None:
    exchange = Exchange("short-lived-once", type="topic", durable=False)
    app = app_for(rabbit_url, task_queues=[Queue(queue, Exchange(queue), queue)])

    with talking(app) as channel, publishing(app) as publisher:
        exchange(channel).declare()
        Queue("bound-once", exchange, "k", durable=False)(channel).declare()
        bad = row(queue, exchange="short-lived-once", routing_key="k", once=True)
        assert len(publisher.publish([row(queue, exchange="short-lived-once", routing_key="k")]).confirmed) == 1
        channel.exchange_delete("short-lived-once")
        good = rows(queue, 40, once=True)

        report = publisher.publish([*good[:20], bad, *good[20:]])

        assert report.confirmed == {item.key for item in good}
        assert report.refused.keys() == {bad.key}
        assert report.doubtful == frozenset()
        assert ids(drain(app, queue)) == [str(number) for number in range(40)]


def test_no_message_is_in_doubt_while_the_broker_reads_none_for_lack_of_memory(
    rabbit_broker: RabbitBroker, queue: str
) -> None:
    app = app_for(rabbit_broker.url, task_queues=[Queue(queue, Exchange(queue), queue)])
    control = rabbit_broker.server.control
    batch = rows(queue, 3, once=True)

    with publishing(app, timeout_seconds=1.0) as publisher:
        publisher.publish(rows(queue, 1))
        control("set_vm_memory_high_watermark", "absolute", "1")
        try:
            with pytest.raises(BrokerUnavailableError) as alarm:
                publisher.publish(batch)
        finally:
            control("set_vm_memory_high_watermark", "0.6")

    assert (alarm.value.confirmed, alarm.value.doubtful) == (frozenset(), frozenset())
    with publishing(app) as publisher:
        assert publisher.publish(batch).confirmed == {item.key for item in batch}
    assert ids(drain(app, queue)) == ["0", "0", "1", "2"]
