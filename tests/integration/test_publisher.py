"""Every message of a batch has a known outcome, on both brokers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery
from kombu import entity

from tests.integration.publisher_kit import app_for, drain, hints, ids, publishing, row, rows
from tests.support.brokers import Broker
from tests.support.guard import ROOT
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from umt_durable.bridge.publisher import Publisher
from umt_durable.errors import BrokerUnavailableError

Exchange: Any = entity.Exchange
Queue: Any = entity.Queue


@pytest.fixture
def queue() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def app(broker: Broker) -> Celery:
    return app_for(broker.url)


@pytest.fixture
def publisher(app: Celery) -> Iterator[Publisher]:
    with publishing(app) as publisher:
        yield publisher


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_five_thousand_hints_arrive_and_a_plain_consumer_reads_them(
    app: Celery, publisher: Publisher, queue: str
) -> None:
    batch = hints(app, queue, 5_000)

    report = publisher.publish(batch)

    assert report.confirmed == {item.key for item in batch}
    assert not report.refused
    messages = drain(app, queue)
    assert sorted(ids(messages)) == sorted(f"run-{number}" for number in range(5_000))
    assert messages[0].payload == [[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    assert messages[0].headers["umt_durable"] == {"v": 1, "gen": 1}


def test_a_message_arrives_as_it_was_given(app: Celery, publisher: Publisher, queue: str) -> None:
    headers = {"stamps": {"tenant": "t-1"}, "timelimit": [None, 4.5], "group_index": 0, "note": "ü"}
    properties = {"reply_to": "answers", "correlation_id": "c", "expiration": 3600, "message_id": "mine"}

    publisher.publish([row(queue, 7, headers=headers, properties=properties)])

    (message,) = drain(app, queue)
    assert message.payload == [["argument"], {}, {}]
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")
    assert {name: message.headers[name] for name in headers} == headers
    expected = {**properties, "expiration": "3600000", "delivery_mode": 2}
    assert {name: message.properties[name] for name in expected} == expected


def test_an_empty_batch_is_no_work(publisher: Publisher) -> None:
    report = publisher.publish([])

    assert (report.confirmed, report.refused) == (frozenset(), {})


def test_higher_priority_is_sooner(broker: Broker, queue: str) -> None:
    app = app_for(broker.url, task_queue_max_priority=9)
    wishes = [0, 9, 5, 3, 99, -1]

    with publishing(app) as publisher:
        publisher.publish([row(queue, wish, properties={"priority": wish}) for wish in wishes])

        assert publisher.depth(queue) == len(wishes)
    arrived = [int(number) for number in ids(drain(app, queue))]
    assert {*arrived[:2]} == {9, 99}
    assert arrived[2:4] == [5, 3]
    assert {*arrived[4:]} == {0, -1}


def test_depth_counts_what_is_ready(publisher: Publisher, app: Celery, queue: str, broker: Broker) -> None:
    absent = publisher.depth(queue)
    publisher.publish(rows(queue, 7))

    assert absent == (0 if broker.name == "redis" else None)
    assert publisher.depth(queue) == 7
    drain(app, queue, limit=3)
    assert publisher.depth(queue) == 4


# -- one bad row -------------------------------------------------------------------------------------------------------


def test_i26_a_row_that_cannot_be_sent_stops_no_other(app: Celery, publisher: Publisher, queue: str) -> None:
    class Hostile:
        def __json__(self) -> object:
            raise RuntimeError("amqp://user:canary@host")

    good = rows(queue, 4)
    bad = [
        row(queue, headers={"what": object()}),
        row(queue, headers={"what": Hostile()}),
        row(queue, properties={"reply_to": object()}),
    ]

    report = publisher.publish([good[0], bad[0], good[1], bad[1], good[2], bad[2], good[3]])

    assert report.confirmed == {item.key for item in good}
    assert report.refused.keys() == {item.key for item in bad}
    assert "canary" not in repr(report.refused)
    assert ids(drain(app, queue)) == ["0", "1", "2", "3"]


def test_i26_an_undeclarable_queue_refuses_only_its_rows(broker: Broker, queue: str) -> None:
    app = app_for(broker.url, task_create_missing_queues=False, task_queues=[Queue(queue, Exchange(queue), queue)])
    good, bad = rows(queue, 2), rows("never-declared", 2)

    with publishing(app) as publisher:
        report = publisher.publish([bad[0], good[0], bad[1], good[1]])

    assert report.confirmed == {item.key for item in good}
    assert [*report.refused] == [item.key for item in bad]
    assert all("never-declared" in text for text in report.refused.values())
    assert len(drain(app, queue)) == 2


def test_i26_an_unroutable_row_is_refused_and_not_lost_in_silence(broker: Broker, queue: str) -> None:
    exchange = Exchange(f"x-{queue}", type="topic")
    app = app_for(broker.url, task_queues=[Queue(queue, exchange, "order.*")])
    good = row(queue, 1, exchange=exchange.name, routing_key="order.new")
    bad = row(queue, 2, exchange=exchange.name, routing_key="stock.low")

    with publishing(app) as publisher:
        report = publisher.publish([bad, good])

    assert report.confirmed == {good.key}
    assert report.refused.keys() == {bad.key}
    assert "unroutable" in report.refused[bad.key]
    assert ids(drain(app, queue)) == ["1"]


# -- outages -----------------------------------------------------------------------------------------------------------


def test_an_outage_of_the_broker_is_one_error_and_passes(
    app: Celery, publisher: Publisher, queue: str, broker: Broker
) -> None:
    batch = rows(queue, 3)
    publisher.publish(rows(queue, 1))

    broker.stop()
    for _ in range(2):
        with pytest.raises(BrokerUnavailableError) as outage:
            publisher.publish(batch)
        assert outage.value.confirmed == frozenset()
    broker.start()

    assert publisher.publish(batch).confirmed == {item.key for item in batch}
    assert ids(drain(app, queue))[-3:] == ["0", "1", "2"]


def test_a_connection_that_was_cut_between_two_batches_costs_nothing(
    publisher: Publisher, queue: str, broker: Broker
) -> None:
    publisher.publish(rows(queue, 1))
    broker.stop()
    broker.start()

    batch = rows(queue, 3)

    assert publisher.publish(batch).confirmed == {item.key for item in batch}
    assert publisher.depth(queue) == 4


class StopsTheBroker(Mapping[str, object]):
    """Headers during whose encoding the broker goes away."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def __getitem__(self, name: str) -> object:
        return "shop.fulfil"

    def __iter__(self) -> Iterator[str]:
        self._broker.stop()
        return iter(["task"])

    def __len__(self) -> int:
        return 1


def test_what_was_confirmed_before_an_outage_is_told(publisher: Publisher, queue: str, broker: Broker) -> None:
    before = rows(queue, 501)
    last = replace(row(queue), headers=StopsTheBroker(broker))

    with pytest.raises(BrokerUnavailableError) as outage:
        publisher.publish([*before, last])
    broker.start()

    confirmed = outage.value.confirmed
    assert {item.key for item in before[:400]} <= confirmed <= {item.key for item in before}
    assert publisher.depth(queue) in range(len(confirmed), 502)


def test_a_broker_that_says_nothing_is_left_after_the_time_allowed(broker: Broker, queue: str) -> None:
    with Proxy("127.0.0.1", port_of(broker.url)) as proxy:
        app = app_for(broker.url.replace(f":{port_of(broker.url)}/", f":{proxy.port}/"))
        with publishing(app, timeout_seconds=0.5) as publisher:
            publisher.publish(rows(queue, 1))
            proxy.blackhole()
            before = proxy.accepted

            with pytest.raises(BrokerUnavailableError):
                publisher.publish(rows(queue, 3))
            with pytest.raises(BrokerUnavailableError):
                publisher.depth(queue)

            assert proxy.accepted - before <= 4, "it goes on trying"
            proxy.heal()
            assert len(publisher.publish(rows(queue, 3)).confirmed) == 3


@pytest.mark.parametrize("scheme", ["amqp", "redis"])
def test_i27_no_password_in_the_error_of_a_broker_that_is_not_there(scheme: str) -> None:
    app = app_for(f"{scheme}://user:canary@127.0.0.1:{free_port()}/3")

    with publishing(app) as publisher, pytest.raises(BrokerUnavailableError) as outage:
        publisher.publish(rows("q", 1))

    assert "canary" not in str(outage.value)
    assert f"{scheme}://" in str(outage.value)


def test_i27_no_password_in_the_error_of_a_broker_that_knows_another(broker: Broker) -> None:
    app = app_for(f"{broker.url.split('://')[0]}://user:canary@127.0.0.1:{port_of(broker.url)}/0")

    with publishing(app) as publisher, pytest.raises(BrokerUnavailableError) as outage:
        publisher.publish(rows("q", 1))

    assert "canary" not in f"{outage.value!r} {outage.value.__cause__!r}"


# -- the life of a publisher -------------------------------------------------------------------------------------------


def test_closing_is_repeatable_and_the_next_call_connects_again(publisher: Publisher, queue: str) -> None:
    publisher.close()
    publisher.publish(rows(queue, 1))
    publisher.close()
    publisher.close()

    assert publisher.depth(queue) == 1


def test_a_forked_child_leaves_the_parents_connection_alone(broker: Broker, queue: str) -> None:
    script = f"""
        import os
        from tests.integration.publisher_kit import app_for, rows
        from umt_durable.bridge.publisher import Publisher

        publisher = Publisher(app_for({broker.url!r}))
        publisher.publish(rows({queue!r}, 1))
        child = os.fork()
        if child == 0:
            publisher.close()
            publisher.publish(rows({queue!r}, 2))
            publisher.close()
            del publisher
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        link = publisher._link
        publisher.publish(rows({queue!r}, 4))
        assert publisher._link is link, "the parent had to connect again"
    """

    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60, cwd=ROOT)

    assert len(drain(app_for(broker.url), queue)) == 7


# -- the loss marker ---------------------------------------------------------------------------------------------------


def test_a_marker_stays_until_the_broker_loses_its_data(publisher: Publisher, broker: Broker) -> None:
    before = publisher.incarnation("one")
    publisher.mark("one")
    publisher.mark("one")
    after = publisher.incarnation("one")

    broker.wipe()

    assert (before, after) == (None, "one")
    assert publisher_sees(publisher, "one") is None
    publisher.mark("one")
    assert publisher.incarnation("one") == "one"


def test_two_databases_on_one_broker_have_a_marker_each(app: Celery, publisher: Publisher) -> None:
    publisher.mark("one")

    with publishing(app, schema="other") as other:
        assert other.incarnation("one") is None
        assert publisher.incarnation("two") is None
        other.mark("one")
        publisher.mark("two")

    assert (publisher.incarnation("one"), publisher.incarnation("two")) == ("one", "two")


def test_many_readers_at_once_never_see_a_marker_missing(app: Celery, publisher: Publisher) -> None:
    publisher.mark("one")
    seen: list[str | None] = []

    def read() -> None:
        with publishing(app) as reader:
            seen.extend([reader.incarnation("one") for _ in range(100)])

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == ["one"] * 300


def publisher_sees(publisher: Publisher, incarnation: str) -> str | None:
    """Ask again after a wipe, which may have cost the connection."""
    try:
        return publisher.incarnation(incarnation)
    except BrokerUnavailableError:
        return publisher.incarnation(incarnation)


def port_of(url: str) -> int:
    return urlsplit(url).port or 0
