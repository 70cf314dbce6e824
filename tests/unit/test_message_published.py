"""A message that is published here is read before it leaves."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from celery import chord

from tests.unit.message_kit import Queue, Shop, publish
from umt_durable.bridge.destination import our_priority
from umt_durable.bridge.message import (
    Envelope,
    parse_publish,
)
from umt_durable.errors import MessageRefusedError


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_a_plain_delay_leaves_nothing_to_remember(shop: Shop) -> None:
    result = shop.fulfil.delay(1, order="o-1")

    message = shop.parsed()

    assert (message.id, message.nesting, message.task) == (result.id, 0, "shop.fulfil")
    assert (tuple(message.args), message.kwargs) == ((1,), {"order": "o-1"})
    assert (message.queue, message.priority, message.eta, message.expires) == ("celery", None, None, None)
    assert message.envelope.to_bytes() is None


def test_what_the_caller_said_is_remembered(shop: Shop) -> None:
    other = shop.fulfil.si("then").set(task_id="next")
    expires = datetime.now(UTC) + timedelta(hours=1)
    shop.fulfil.apply_async(
        (1,),
        task_id="run-1",
        argsrepr="***",
        shadow="shown",
        headers={"traceparent": "00-ab"},
        link=other,
        link_error=[other, other],
        group_id="g",
        group_index=0,
        root_id="root",
        parent_id="parent",
        soft_time_limit=3,
        time_limit=5,
        expires=expires,
        delivery_mode=1,
        reply_to="mine",
        ignore_result=True,
        priority=7,
        queue="orders",
    )

    message = shop.parsed()

    assert (message.queue, message.priority, message.ignore_result, message.expires) == ("orders", 7, True, expires)
    back = Envelope.from_bytes(message.envelope.to_bytes())
    assert (back.argsrepr, back.kwargsrepr, back.shadow, back.headers) == (
        *("***", None, "shown"),
        {"traceparent": "00-ab"},
    )
    assert [item["options"] for item in back.callbacks] == [{"task_id": "next"}]
    assert len(back.errbacks) == 2
    assert (back.group, back.group_index, back.root_id, back.parent_id) == ("g", 0, "root", "parent")
    assert (back.timelimit, back.delivery_mode, back.reply_to) == ([5, 3], 1, "mine")


def test_a_countdown_becomes_a_time_and_stays_readable(shop: Shop) -> None:
    before = shop.app.now()
    shop.fulfil.apply_async(countdown=60)

    message = shop.parsed()

    assert message.eta is not None
    assert timedelta(seconds=59) < message.eta - before < timedelta(seconds=70)
    assert message.envelope.eta is not None
    assert datetime.fromisoformat(message.envelope.eta) == message.eta


def test_the_rest_of_a_chain_and_the_body_of_a_chord_are_remembered(shop: Shop) -> None:
    (shop.fulfil.s(1) | shop.fulfil.s(2) | shop.fulfil.s(3)).delay()
    message = shop.parsed()
    assert len(message.envelope.chain) == 2

    chord([shop.fulfil.s(1), shop.fulfil.s(2)], shop.fulfil.s(3)).delay()
    members = [parse_publish(shop.app, *caught) for caught in shop.sent[1:3]]
    assert [member.envelope.group_index for member in members] == [0, 1]
    assert all(member.envelope.chord and member.envelope.group for member in members)


def test_a_replacement_keeps_its_nesting(shop: Shop) -> None:
    shop.fulfil.apply_async(task_id="run-1", replaced_task_nesting=2)

    assert (shop.parsed().id, shop.parsed().nesting) == ("run-1", 2)


def test_stamps_are_kept_apart_from_headers(shop: Shop) -> None:
    shop.fulfil.apply_async(stamped_headers=["tenant"], tenant="t-1")

    envelope = shop.parsed().envelope

    assert (envelope.stamped_headers, envelope.stamps, envelope.headers) == (["tenant"], {"tenant": "t-1"}, {})


def test_limits_that_the_task_declares_are_not_the_messages(shop: Shop) -> None:
    @shop.app.task(name="shop.limited", shared=False, time_limit=9, ignore_result=True)
    def limited() -> None: ...

    limited.delay()

    assert shop.parsed().envelope.to_bytes() is None


@pytest.mark.parametrize("serializer", ["pickle", "yaml", "auth"])
def test_i27_a_serializer_that_is_never_read_is_refused_by_name(shop: Shop, serializer: str) -> None:
    shop.app.conf.accept_content = ["pickle", "yaml", "json"]
    shop.fulfil.apply_async(("secret-argument",), serializer=serializer)

    with pytest.raises(MessageRefusedError, match=rf"shop\.fulfil.*{serializer}") as refused:
        shop.parsed()

    assert "secret-argument" not in str(refused.value)


@pytest.mark.parametrize("queue", ["x" * 256, "a\0b", "x\ud800"])
def test_i26_a_queue_whose_name_cannot_be_stored_is_refused_at_the_call(shop: Shop, queue: str) -> None:
    shop.fulfil.apply_async(queue=Queue(queue))

    with pytest.raises(MessageRefusedError, match=r"shop\.fulfil.*queue"):
        shop.parsed()


def test_msgpack_is_remembered(shop: Shop) -> None:
    shop.fulfil.apply_async(serializer="msgpack")

    assert shop.parsed().envelope.content_type == "application/x-msgpack"


def test_protocol_1_is_read_when_published() -> None:
    shop = Shop(task_protocol=1)
    shop.fulfil.apply_async((1,), {"b": 2}, task_id="run-1", link=shop.fulfil.s(), time_limit=4, countdown=5)

    message = shop.parsed()

    assert (message.id, message.task, list(message.args), message.kwargs) == ("run-1", "shop.fulfil", [1], {"b": 2})
    assert message.eta is not None
    assert (len(message.envelope.callbacks), message.envelope.timelimit) == (1, (4, None))


def test_reading_a_message_changes_nothing_in_it(shop: Shop) -> None:
    shop.fulfil.apply_async((1,), headers={"x": 1}, priority=3)
    _, message, options = shop.sent[-1]
    before = json.dumps([message.headers, message.properties, message.body, str(options)], default=str)

    shop.parsed()

    assert json.dumps([message.headers, message.properties, message.body, str(options)], default=str) == before


def test_priority_means_the_same_on_each_broker() -> None:
    urgent_on_redis, urgent_on_rabbit = Shop("redis://localhost/0"), Shop("amqp://localhost//")
    urgent_on_redis.sent = [("shop.fulfil", *publish(Shop())[1:])]
    urgent_on_rabbit.sent = list(urgent_on_redis.sent)
    urgent_on_redis.sent[0][2]["priority"] = 0

    assert urgent_on_redis.parsed().priority == 9
    urgent_on_rabbit.sent[0][2]["priority"] = 9
    assert urgent_on_rabbit.parsed().priority == 9


@pytest.mark.parametrize(
    ("given", "counts_down", "ours"),
    [
        (None, True, None),
        (0, True, 9),
        (9, True, 0),
        (3, False, 3),
        (255, False, 9),
        (-1, False, 0),
        ("5", False, None),
    ],
)
def test_priorities_stay_inside_their_range(given: object, counts_down: bool, ours: int | None) -> None:
    assert our_priority(given, counts_down=counts_down) == ours
