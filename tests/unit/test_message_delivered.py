"""A message that arrives from elsewhere is read, or refused."""

from __future__ import annotations

import importlib.util
import pickle
import zlib
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import skips
from tests.unit.message_kit import GOOD, delivery, json_values
from umt_durable.bridge.message import (
    Envelope,
    parse_delivery,
)
from umt_durable.errors import MessageRefusedError


def test_i3_a_foreign_message_of_protocol_2_is_read() -> None:
    signature = {"task": "next", "args": [], "kwargs": {}, "options": {"task_id": "n"}}
    headers = {
        "id": "run-1",
        "task": "shop.fulfil",
        "lang": "py",
        "root_id": "run-1",
        "parent_id": None,
        "retries": 1,
        "group": "g",
        "group_index": 3,
        "argsrepr": "[1]",
        "kwargsrepr": "hidden",
        "origin": "gen7@there",
        "timelimit": [None, 4.5],
        "eta": "2026-11-29T12:00:00+01:00",
        "expires": None,
        "ignore_result": False,
        "replaced_task_nesting": 1,
        "stamped_headers": ["t"],
        "stamps": {"t": 1},
        "sentry-trace": "s",
        "x-death": [{"count": 1}],
        "x-first-death-reason": "expired",
        "redelivered": True,
        "compression": None,
    }
    properties = {"correlation_id": "run-1", "reply_to": "answers", "priority": 4, "delivery_mode": 2}

    message = parse_delivery(delivery(headers, [[1], {"b": 2}, {"callbacks": [signature]}], properties=properties))

    assert (message.id, message.nesting, message.retries) == ("run-1", 1, 1)
    assert (message.args, message.kwargs, message.queue, message.priority) == ([1], {"b": 2}, "orders", 4)
    assert message.eta == datetime(2026, 11, 29, 11, tzinfo=UTC)
    assert message.envelope == Envelope(
        group="g",
        group_index=3,
        kwargsrepr="hidden",
        origin="gen7@there",
        retries=1,
        ignore_result=False,
        timelimit=(None, 4.5),
        eta="2026-11-29T12:00:00+01:00",
        stamped_headers=["t"],
        stamps={"t": 1},
        headers={"sentry-trace": "s"},
        reply_to="answers",
        callbacks=[signature],
        errbacks=[],
        chain=[],
    )


def test_i3_a_foreign_message_of_protocol_1_is_read() -> None:
    body = {
        "id": "run-1",
        "task": "shop.fulfil",
        "args": [1],
        "kwargs": {"b": 2},
        "retries": 0,
        "eta": None,
        "expires": "2026-11-29T12:00:00",
        "utc": True,
        "callbacks": None,
        "errbacks": [{"task": "oops"}],
        "timelimit": [5, None],
        "taskset": "g",
        "chord": {"task": "body"},
    }

    message = parse_delivery(delivery({}, body, properties={"correlation_id": "run-1"}))

    assert (message.id, message.task, message.args, message.kwargs) == ("run-1", "shop.fulfil", [1], {"b": 2})
    assert message.expires == datetime(2026, 11, 29, 12, tzinfo=UTC)
    assert (message.envelope.group, message.envelope.chord, message.envelope.errbacks) == (
        *("g", {"task": "body"}),
        [{"task": "oops"}],
    )


def test_a_hybrid_of_both_protocols_is_read() -> None:
    body = {"args": [1], "kwargs": {}, "callbacks": [{"task": "next"}]}

    message = parse_delivery(delivery({"id": "run-1", "task": "shop.fulfil", "group": "g"}, body))

    assert (message.args, message.envelope.group, len(message.envelope.callbacks)) == ([1], "g", 1)


def test_a_default_priority_is_no_wish_and_redis_counts_down() -> None:
    assert parse_delivery(delivery(properties={"priority": 0}, driver="redis")).priority is None
    assert parse_delivery(delivery(properties={"priority": 6}, driver="redis")).priority == 3
    assert parse_delivery(delivery(properties={"priority": 6}, driver="memory")).priority == 6


def test_i27_a_header_cannot_pass_for_something_of_the_request_itself() -> None:
    headers = {**GOOD, "is_eager": True, "called_directly": True, "hostname": "evil", "get": 1, "update": 1, "mine": 2}

    assert parse_delivery(delivery(headers)).envelope.headers == {"mine": 2}


def test_a_compressed_message_is_read_and_not_compressed_again() -> None:
    raw = zlib.compress(b"[[1], {}, null]")
    message = delivery({"id": "run-1", "task": "t", "compression": "application/x-gzip"}, raw=raw)

    parsed = parse_delivery(message)

    assert (parsed.args, parsed.envelope.headers) == ([1], {})


def test_i3_msgpack_is_read() -> None:
    if importlib.util.find_spec("msgpack") is None:
        skips.missing("msgpack is not installed")
    msgpack = importlib.import_module("msgpack")
    raw = msgpack.packb([[1], {"b": 2}, None])

    message = parse_delivery(delivery(raw=raw, content_type="application/x-msgpack"))

    assert (message.args, message.kwargs) == ([1], {"b": 2})
    assert message.envelope.content_type == "application/x-msgpack"


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("the pickle was loaded",))


@pytest.mark.parametrize("protocol", [1, 2])
def test_i27_a_pickle_is_never_loaded(protocol: int) -> None:
    headers = {"id": "run-1", "task": "shop.fulfil"} if protocol == 2 else {}
    raw = pickle.dumps(_Bomb())

    message = delivery(headers, raw=raw, content_type="application/x-python-serialize")
    message.accept = {"application/x-python-serialize", "application/json"}

    with pytest.raises(MessageRefusedError):
        parse_delivery(message)


@pytest.mark.parametrize(
    "message",
    [
        *(delivery(raw=raw) for raw in (b"", b"{", b"\xff\xfe", b"null", b"3", b"[]", b"[[],{}]", b'"x"')),
        delivery(raw=b"[" * 100_000),
        delivery(raw=b'[[], {"__type__": "nonsense", "__value__": "SECRET"}, null]'),
        *(delivery(content_type=kind) for kind in ("application/x-yaml", "application/data", "text/plain", "")),
        delivery({**GOOD, "compression": "application/x-gzip"}, raw=b"SECRET is not compressed"),
        *(
            delivery(raw=raw)
            for raw in (b"[{}, {}, null]", b"[[], [], null]", b"[[], {}, []]", b'["SECRET", {}, null]')
        ),
        *(delivery({**GOOD, "id": value}) for value in (None, "", "x" * 256, "a\0b", 7, ["SECRET"], "\ud800")),
        *(delivery({**GOOD, "task": value}) for value in ("x" * 256, 7, ["SECRET"], "a\0b", "\ud800")),
        *(delivery(routing_key=value) for value in ("", "x" * 256, "a\0b", "x\ud800")),
        *(delivery(exchange="news", routing_key=value) for value in ("x" * 256, "a\0b", "x\ud800")),
        *(delivery(exchange=value, routing_key="orders") for value in ("x" * 256, "a\0b", "x\ud800")),
        *(delivery({**GOOD, "eta": value}) for value in ("SECRET", 7, ["x"], "2026-13-01", "9" * 400)),
        *(delivery({**GOOD, "expires": value}) for value in ("SECRET", {"a": 1})),
        *(delivery({**GOOD, "timelimit": value}) for value in (7, [1], [1, 2, 3], ["SECRET", None], [-1, None])),
        *(delivery({**GOOD, "replaced_task_nesting": value}) for value in (-1, "1", True, 2**40, 0.5)),
        *(delivery({**GOOD, name: ["SECRET"]}) for name in ("root_id", "parent_id", "group", "shadow", "origin")),
        *(delivery({**GOOD, name: "SECRET"}) for name in ("group_index", "retries", "ignore_result", "stamps")),
        delivery({**GOOD, "stamped_headers": [1]}),
        *(
            delivery(body=[[], {}, {name: value}])
            for name in ("callbacks", "errbacks", "chain")
            for value in ("SECRET", {"task": "t"}, [1], [{"no": "task"}], [{"task": 1}])
        ),
        *(delivery(body=[[], {}, {"chord": value}]) for value in ("SECRET", [{"task": "t"}], {"no": "task"})),
        delivery(properties={"reply_to": ["SECRET"]}),
        delivery({}),
        delivery({}, {"id": "run-1", "args": [], "kwargs": {}}),
        delivery({}, {"id": "run-1", "task": "t", "args": 1, "kwargs": {}}),
    ],
)
def test_a_malformed_message_is_refused_in_few_words_and_without_its_content(message: Any) -> None:
    with pytest.raises(MessageRefusedError) as refused:
        parse_delivery(message)

    assert "SECRET" not in str(refused.value)
    assert len(str(refused.value)) < 400


@given(
    headers=st.dictionaries(
        st.sampled_from(["id", "task", "eta", "expires", "timelimit", "group", "stamps", "retries", "x", "root_id"]),
        json_values,
    ),
    body=json_values,
)
def test_no_message_raises_anything_but_a_refusal(headers: dict[str, Any], body: Any) -> None:
    try:
        parsed = parse_delivery(delivery({**GOOD, **headers}, body))
    except MessageRefusedError:
        return
    assert Envelope.from_bytes(parsed.envelope.to_bytes()) is not None
