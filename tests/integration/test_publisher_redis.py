"""What is particular to publishing through Redis and Valkey."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kombu import entity

from tests.integration.publisher_kit import app_for, drain, ids, publishing, row, rows
from tests.support.brokers import RedisBroker
from umt_durable.errors import BrokerUnavailableError

Exchange: Any = entity.Exchange
Queue: Any = entity.Queue


@pytest.fixture
def queue() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


def client_of(broker: RedisBroker) -> Any:
    """Return a client of the server; redis-py gives the replies of its two clients one type."""
    return broker.client


@contextmanager
def configured(broker: RedisBroker, name: str, value: str) -> Iterator[None]:
    """Change a setting of the private server for a while."""
    before = client_of(broker).config_get(name)
    client_of(broker).config_set(name, value)
    try:
        yield
    finally:
        client_of(broker).config_set(name, before[name])


def test_each_reply_settles_its_own_message(redis_broker: RedisBroker, queue: str) -> None:
    client_of(redis_broker).set("spoilt", "no list")
    app = app_for(redis_broker.url)
    good, bad = rows(queue, 3), row("spoilt")

    with publishing(app) as publisher:
        report = publisher.publish([good[0], bad, good[1], good[2]])

    assert report.confirmed == {item.key for item in good}
    assert "WRONGTYPE" in report.refused[bad.key]
    assert ids(drain(app, queue)) == ["0", "1", "2"]


def test_a_full_server_is_an_outage_and_costs_no_row_an_attempt(redis_broker: RedisBroker, queue: str) -> None:
    batch = rows(queue, 3)

    with publishing(app_for(redis_broker.url)) as publisher:
        publisher.publish(rows(queue, 1))
        with configured(redis_broker, "maxmemory", "1"):
            for _ in range(2):
                with pytest.raises(BrokerUnavailableError) as outage:
                    publisher.publish(batch)
                assert outage.value.confirmed == frozenset()

        assert publisher.publish(batch).confirmed == {item.key for item in batch}


def test_i26_a_message_that_makes_the_server_hang_up_holds_no_other_back(redis_broker: RedisBroker, queue: str) -> None:
    app = app_for(redis_broker.url)
    good, bad = rows(queue, 3), row(queue, body=b"x" * 2_000_000)
    batch = [good[0], bad, good[1], good[2]]

    with configured(redis_broker, "client-query-buffer-limit", str(1024 * 1024)), publishing(app) as publisher:
        with pytest.raises(BrokerUnavailableError):
            publisher.publish(batch)
        report = publisher.publish(batch)

        assert report.confirmed == {item.key for item in good}
        assert report.refused.keys() == {bad.key}
        assert len(publisher.publish(good).confirmed) == 3


def test_messages_that_were_under_way_in_an_outage_are_sent_again(redis_broker: RedisBroker, queue: str) -> None:
    app = app_for(redis_broker.url)
    batch = rows(queue, 3)

    with publishing(app) as publisher:
        publisher.publish(rows(queue, 1))
        with configured(redis_broker, "client-query-buffer-limit", str(1024 * 1024)):
            with pytest.raises(BrokerUnavailableError):
                publisher.publish([*batch, row(queue, body=b"x" * 2_000_000)])
            report = publisher.publish(batch)

    assert report.confirmed == {item.key for item in batch}
    assert not report.refused


def test_a_key_prefix_is_kept_for_messages_and_the_marker(redis_broker: RedisBroker, queue: str) -> None:
    app = app_for(redis_broker.url, broker_transport_options={"global_keyprefix": "shop."})

    with publishing(app) as publisher:
        publisher.publish(rows(queue, 2))
        publisher.mark("one")

        assert publisher.incarnation("one") == "one"
        assert publisher.depth(queue) == 2
    keys = {str(key, "utf-8") for key in client_of(redis_broker).scan_iter()}
    assert keys >= {f"shop.{queue}", "shop.umt_durable.marker.one"}


def test_a_queue_that_expires_keeps_its_time_to_live(redis_broker: RedisBroker, queue: str) -> None:
    app = app_for(
        redis_broker.url, task_queues=[Queue(queue, Exchange(queue), queue, queue_arguments={"x-expires": 60_000})]
    )

    with publishing(app) as publisher:
        publisher.publish(rows(queue, 2))

    assert 0 < int(client_of(redis_broker).pttl(queue)) <= 60_000


def test_a_marker_outlives_a_restart_of_the_server(redis_broker: RedisBroker) -> None:
    with publishing(app_for(redis_broker.url)) as publisher:
        publisher.mark("one")

        redis_broker.stop()
        redis_broker.start()

        assert publisher.incarnation("one") == "one"


def test_priorities_use_the_lists_that_kombu_reads(redis_broker: RedisBroker, queue: str) -> None:
    app = app_for(redis_broker.url)

    with publishing(app) as publisher:
        publisher.publish([row(queue), *(row(queue, properties={"priority": wish}) for wish in (9, 6, 5, 0))])

    lists = {
        step: int(client_of(redis_broker).llen(f"{queue}\x06\x16{step}" if step else queue)) for step in (0, 3, 6, 9)
    }
    assert lists == {0: 2, 3: 2, 6: 0, 9: 1}


# -- messages that may leave once --------------------------------------------------------------------------------------


def test_of_messages_that_may_leave_once_one_alone_is_in_doubt_when_the_server_hangs_up(
    redis_broker: RedisBroker, queue: str
) -> None:
    app = app_for(redis_broker.url)
    good, bad = rows(queue, 3, once=True), row(queue, body=b"x" * 2_000_000, once=True)

    with publishing(app) as publisher:
        publisher.publish(rows(queue, 1))
        tight = configured(redis_broker, "client-query-buffer-limit", str(1024 * 1024))
        with tight, pytest.raises(BrokerUnavailableError) as outage:
            publisher.publish([good[0], bad, good[1], good[2]])

    assert outage.value.confirmed == {good[0].key}
    assert outage.value.doubtful == {bad.key}
    assert ids(drain(app, queue)) == ["0", "0"]


def test_no_message_is_in_doubt_when_the_server_is_away_or_says_that_it_takes_none(
    redis_broker: RedisBroker, queue: str
) -> None:
    batch = rows(queue, 3, once=True)

    with publishing(app_for(redis_broker.url)) as publisher:
        publisher.publish(rows(queue, 1))
        with configured(redis_broker, "maxmemory", "1"), pytest.raises(BrokerUnavailableError) as full:
            publisher.publish(batch)
        redis_broker.stop()
        with pytest.raises(BrokerUnavailableError) as away:
            publisher.publish(batch)
        redis_broker.start()

        assert full.value.doubtful == away.value.doubtful == frozenset()
        assert publisher.publish(batch).confirmed == {item.key for item in batch}
