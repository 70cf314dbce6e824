"""Hints are made and requests are filled from the row of a run."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from tests.unit.message_kit import GOOD, Shop, delivery, publish
from umt_durable.bridge.message import (
    HEADER,
    Envelope,
    hint,
    is_hint,
    parse_delivery,
    parse_publish,
    request_context,
    restore_request,
)


@pytest.fixture
def shop() -> Shop:
    return Shop()


def make_hint(app: Celery, envelope: Envelope | None = None, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "key": uuid.UUID(int=1),
        "run_id": "run-1",
        "nesting": 0,
        "task": "shop.fulfil",
        "queue": "orders",
        "priority": None,
        "gen": 4,
        "envelope": envelope.to_bytes() if envelope else None,
        **changes,
    }
    return hint(app, **values)


def test_only_our_own_messages_are_hints(shop: Shop) -> None:
    assert is_hint(make_hint(shop.app).headers)
    assert not any(is_hint(headers) for headers in ({}, None, {HEADER: None}, {HEADER: "1"}, {"id": "x"}, 7))


def test_a_hint_of_a_plain_run_says_only_that_it_may_be_ready(shop: Shop) -> None:
    made = make_hint(shop.app, nesting=2, priority=3)

    assert json.loads(made.body) == [[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    assert (made.exchange, made.routing_key, made.queue) == ("", "orders", "orders")
    assert made.properties == {"correlation_id": "run-1", "reply_to": "", "delivery_mode": 2, "priority": 3}
    expected = {
        "id": "run-1",
        "task": "shop.fulfil",
        "root_id": "run-1",
        "parent_id": None,
        "eta": None,
        "expires": None,
        "retries": 0,
        "replaced_task_nesting": 2,
        "argsrepr": "(...)",
        "lang": "py",
        "timelimit": [None, None],
        HEADER: {"v": 1, "gen": 4},
    }
    assert {name: made.headers[name] for name in expected} == expected


def test_a_hint_shows_what_celery_knows_of_the_run_but_nothing_that_is_in_the_row(shop: Shop) -> None:
    signature = {"task": "next", "args": ["SECRET"]}
    envelope = Envelope(
        root_id="root",
        parent_id="parent",
        group="g",
        group_index=0,
        timelimit=(5, None),
        shadow="shown",
        argsrepr="***",
        stamped_headers=["t"],
        stamps={"t": 1},
        headers={"traceparent": "00"},
        eta="2026-11-29T12:00:00+00:00",
        expires="2026-11-29T12:00:00+00:00",
        retries=3,
        reply_to="answers",
        correlation_id="other",
        delivery_mode=1,
        callbacks=[signature],
        chord=signature,
        exchange="shop",
        routing_key="order.new",
    )

    made = make_hint(shop.app, envelope)

    assert (made.exchange, made.routing_key) == ("shop", "order.new")
    assert made.properties == {"correlation_id": "other", "reply_to": "answers", "delivery_mode": 1}
    expected = {
        "root_id": "root",
        "parent_id": "parent",
        "group": "g",
        "group_index": 0,
        "timelimit": [5, None],
        "shadow": "shown",
        "argsrepr": "***",
        "stamped_headers": ["t"],
        "stamps": {"t": 1},
        "traceparent": "00",
        "eta": None,
        "expires": None,
        "retries": 0,
    }
    assert {name: made.headers[name] for name in expected} == expected
    assert "SECRET" not in repr(made)


def test_a_foreign_message_goes_on_with_the_headers_of_a_hint(shop: Shop) -> None:
    foreign = parse_delivery(delivery({**GOOD, "x-death": [], "eta": "2026-11-29T12:00:00Z", "mine": 1}))

    assert is_hint(foreign.headers)
    assert (foreign.headers["eta"], foreign.headers["mine"], foreign.headers["id"]) == (None, 1, "run-1")
    assert "x-death" not in foreign.headers


def test_nothing_of_a_forged_message_is_left_but_its_id_and_nesting() -> None:
    signature = {"task": "shop.evil", "args": []}
    forged = {
        "id": "run-1",
        "task": "shop.fulfil",
        "replaced_task_nesting": 1,
        "lang": "js",
        "retries": 99,
        "root_id": "evil",
        "parent_id": "evil",
        "group": "evil",
        "group_index": 9,
        "shadow": "evil",
        "chord": signature,
        "chain": [signature],
        "callbacks": [signature],
        "errbacks": [signature],
        "reply_to": "evil",
        "correlation_id": "evil",
        "properties": {"reply_to": "evil"},
        "origin": "evil",
        "timelimit": [1, 1],
        "ignore_result": True,
        "stamps": {"evil": 1},
        "stamped_headers": ["evil"],
        "is_eager": True,
        "eta": "evil",
        "expires": "evil",
        "argsrepr": "evil",
        "kwargsrepr": "evil",
        "evil": "evil",
        "headers": {"evil": 1},
        "taskset": "evil",
        HEADER: {"v": 1, "gen": 1},
    }
    of_the_worker = {"hostname": "w@h", "delivery_info": {"routing_key": "orders"}, "umt_claim": "c0ffee"}
    request = Context({**forged, **of_the_worker}, args=["evil"], kwargs={"evil": 1}, called_directly=False)

    restore_request(request, Envelope(parent_id="parent", headers={"mine": 1}), (1,), {"b": 2})

    assert "evil" not in repr(vars(request))
    assert (request.id, request.replaced_task_nesting, request.task) == ("run-1", 1, "shop.fulfil")
    assert (request.args, request.kwargs, request.parent_id, request.root_id) == ([1], {"b": 2}, "parent", "run-1")
    assert (request.hostname, request.called_directly, request.delivery_info) == (
        "w@h",
        False,
        {"routing_key": "orders"},
    )
    assert (request.get("umt_claim"), request.headers, request.get("mine")) == ("c0ffee", {"mine": 1}, 1)
    assert not request.is_eager
    assert request.get(HEADER) is None


def test_a_restored_request_has_what_the_caller_sent(shop: Shop) -> None:
    shop.fulfil.apply_async(
        (1,),
        task_id="run-1",
        link=shop.fulfil.s(),
        link_error=shop.fulfil.s(),
        chain=[shop.fulfil.s()],
        chord=shop.fulfil.s(),
        group_id="g",
        group_index=0,
        time_limit=5,
        soft_time_limit=3,
        eta=datetime(2026, 11, 29, tzinfo=UTC),
    )
    stored = Envelope.from_bytes(shop.parsed().envelope.to_bytes())
    request = Context({"id": "run-1", "task": "shop.fulfil"})

    restore_request(request, stored, [1], {})

    assert [item["task"] for item in (*request.callbacks, *request.errbacks, *request.chain, request.chord)] == [
        "shop.fulfil"
    ] * 4
    assert (request.group, request.group_index, request.time_limit, request.soft_time_limit) == ("g", 0, 5, 3)
    assert request.eta == "2026-11-29T00:00:00+00:00"
    assert request.as_execution_options()["task_id"] == "run-1"


def test_i13_a_backend_can_end_a_run_by_a_request_made_from_its_row(shop: Shop) -> None:
    @shop.app.task(name="shop.oops", shared=False)
    def oops(run: str) -> None: ...

    errback = oops.s().set(task_id="errback")
    envelope = Envelope.from_bytes(Envelope(errbacks=[dict(errback)], group="g", stamps={"t": 1}).to_bytes())
    values: dict[str, Any] = {
        "run_id": "run-1",
        "nesting": 0,
        "task": "shop.fulfil",
        "queue": "orders",
        "args": [1],
        "kwargs": {},
        "envelope": envelope,
    }
    backend = shop.app.backend

    backend.mark_as_done("run-1", 42, request=request_context(**values))
    backend.mark_as_failure("run-2", ValueError("no"), request=request_context(**{**values, "run_id": "run-2"}))
    backend.mark_as_revoked("run-3", "cancelled", request=request_context(**{**values, "run_id": "run-3"}))

    states = [shop.app.AsyncResult(run).state for run in ("run-1", "run-2", "run-3")]
    assert states == ["SUCCESS", "FAILURE", "REVOKED"]
    assert shop.app.AsyncResult("run-1").result == 42
    name, message, _ = shop.sent[-1]
    assert (name, message.headers["id"], message.headers["parent_id"]) == ("shop.oops", "errback", "run-2")


def test_a_request_from_a_row_reaches_the_callers_reply_queue() -> None:
    request = request_context(
        run_id="run-1",
        nesting=0,
        task="t",
        queue="orders",
        args=[],
        kwargs={},
        envelope=Envelope(reply_to="answers", correlation_id="c"),
    )
    app = Celery("rpc", broker="memory://", backend="rpc://", set_as_current=False)

    assert app.backend.destination_for("run-1", request) == ("answers", "c")


def test_the_reply_queue_is_remembered_where_results_use_it() -> None:
    shop = Shop()
    rpc = Celery("rpc", broker="memory://", backend="rpc://", set_as_current=False)
    _, message, options = publish(shop)
    message = message._replace(properties={**message.properties, "reply_to": rpc.thread_oid})

    assert parse_publish(rpc, "shop.fulfil", message, options).envelope.reply_to == rpc.thread_oid
