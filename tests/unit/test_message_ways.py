"""Messages find their queue, and queues their messages."""

from __future__ import annotations

import pytest

from tests.unit.message_kit import Exchange, Queue, Shop, delivery, publish
from umt_durable.bridge.destination import plain_way, queue_behind, undelayed
from umt_durable.bridge.message import (
    parse_delivery,
    parse_publish,
)
from umt_durable.errors import MessageRefusedError


@pytest.fixture
def shop() -> Shop:
    return Shop()


def topics() -> Shop:
    exchange = Exchange("shop", type="topic")
    return Shop(
        task_default_queue="orders",
        task_queues=[Queue("orders", exchange, "order.#"), Queue("stock", exchange, "stock.*")],
    )


def test_a_direct_queue_is_reached_by_its_name(shop: Shop) -> None:
    assert plain_way(shop.app, "orders") == ("", "orders")
    shop.fulfil.apply_async(queue="orders", routing_key="whatever")
    assert (shop.parsed().queue, shop.parsed().envelope.exchange) == ("orders", None)


def test_a_route_of_its_own_is_remembered() -> None:
    shop = topics()
    assert plain_way(shop.app, "stock") == ("shop", "stock.*")

    shop.fulfil.apply_async(queue="orders", routing_key="order.new")

    message = shop.parsed()
    assert (message.queue, message.envelope.exchange, message.envelope.routing_key) == ("orders", "shop", "order.new")


def test_an_exchange_alone_leads_to_the_queue_behind_it() -> None:
    shop = topics()
    _, message, options = publish(shop)

    parsed = parse_publish(
        shop.app, "shop.fulfil", message, {**options, "queue": None, "exchange": "shop", "routing_key": "stock.low"}
    )

    assert (parsed.queue, parsed.envelope.exchange, parsed.envelope.routing_key) == ("stock", "shop", "stock.low")


def test_an_exchange_without_a_key_is_refused() -> None:
    shop = topics()
    _, message, options = publish(shop)

    with pytest.raises(MessageRefusedError, match=r"shop\.fulfil"):
        parse_publish(shop.app, "shop.fulfil", message, {**options, "queue": None, "exchange": "shop"})


def test_native_delayed_delivery_is_undone() -> None:
    bits = ".".join("0" * 26 + "11")
    exchange = Exchange("jobs", type="topic")
    shop = Shop(task_queues=[Queue("slow", exchange, "slow.jobs")], task_default_queue="slow")
    _, message, options = publish(shop)

    published = parse_publish(
        shop.app,
        "shop.fulfil",
        message,
        {**options, "queue": None, "exchange": Exchange("celery_delayed_27"), "routing_key": f"{bits}.slow.jobs"},
    )
    delivered = parse_delivery(
        delivery(exchange="celery_delayed_delivery", routing_key=f"{bits}.slow.jobs"), app=shop.app
    )

    assert undelayed("celery_delayed_27", f"{bits}.slow.jobs") == (None, "slow.jobs")
    for parsed in (published, delivered):
        assert (parsed.queue, parsed.envelope.exchange, parsed.envelope.routing_key) == ("slow", None, None)


def test_a_message_on_a_named_exchange_finds_its_queue() -> None:
    app = topics().app

    known = parse_delivery(delivery(exchange="shop", routing_key="stock.low"), app=app)
    unknown = parse_delivery(delivery(exchange="elsewhere", routing_key="k"), app=app)

    assert (known.queue, known.envelope.exchange, known.envelope.routing_key) == ("stock", "shop", "stock.low")
    assert (unknown.queue, unknown.envelope.exchange, unknown.envelope.routing_key) == ("orders", "elsewhere", "k")


def test_a_routing_key_with_many_dots_is_not_taken_for_a_delay() -> None:
    assert undelayed("shop", "a.b.c") == ("shop", "a.b.c")


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        *(("stock.*", "stock.low", True), ("stock.*", "stock.low.now", False), ("stock.*", "stock", False)),
        *(("order.#", "order", True), ("order.#", "order.a.b", True), ("order.#", "orders", False)),
        *(("#.new", "new", True), ("#.new", "a.b.new", True), ("a.#.z", "a.z", True), ("a.#.z", "a.b.z", True)),
        *(("#", "", True), ("#", "a.b", True), ("a+b", "aab", False), ("a+b", "a+b", True)),
    ],
)
def test_topic_patterns(pattern: str, key: str, fits: bool) -> None:
    shop = Shop(task_queues=[Queue("q", Exchange("x", type="topic"), pattern)])

    assert (queue_behind(shop.app, "x", key) == "q") is fits
