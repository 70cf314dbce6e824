from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.values import (
    NAMES,
    PLAIN,
    SCALARS,
    TEXT,
    Colour,
    Level,
    Line,
    Money,
    Order,
    Unreadable,
    loop,
    nested,
)
from umt_durable import codec
from umt_durable.codec import EMPTY, InputSchema, return_annotation
from umt_durable.codec.same import check_same
from umt_durable.errors import DecodingError, DefinitionError, EncodingError, InputError


@given(st.dictionaries(NAMES, PLAIN, max_size=3), st.lists(PLAIN, max_size=3))
def test_arguments_come_back_the_same(kwargs: dict[str, Any], args: list[Any]) -> None:
    encoded = codec.encode_arguments(tuple(args), kwargs)

    back_args, back_kwargs = codec.decode_arguments(encoded.data)

    check_same((tuple(args), kwargs), (back_args, back_kwargs))
    assert set(json.loads(encoded.data)) == {"args", "kwargs"}


def test_annotated_arguments_come_back_the_same() -> None:
    annotations = {"colour": Colour, "pair": tuple[int, int], "order": Order}
    order = Order(id=UUID(int=1), at=date(2026, 1, 1), raw=b"\xff")

    encoded = codec.encode_arguments((Colour.BLUE, (1, 2), order, "beyond"), {"order": order, "other": 1}, annotations)

    assert codec.decode_arguments(encoded.data, annotations) == (
        (Colour.BLUE, (1, 2), order, "beyond"),
        {"order": order, "other": 1},
    )
    with pytest.raises(EncodingError):
        codec.encode_arguments((Colour.BLUE,), {})


def test_a_refused_argument_is_named_by_its_path() -> None:
    with pytest.raises(EncodingError) as caught:
        codec.encode_arguments((1,), {"order": {"lines": [0, {"price": (1,)}]}}, where="the arguments of shop.fulfil")

    assert caught.value.where == "the arguments of shop.fulfil"
    assert caught.value.path == "$.kwargs.order.lines[1].price"


@pytest.mark.parametrize(
    "data", [b"[]", b'{"args":[]}', b'{"args":{},"kwargs":{}}', b'{"args":[],"kwargs":{},"x":1}', b"x"]
)
def test_bytes_that_hold_no_arguments_are_refused(data: bytes) -> None:
    with pytest.raises(DecodingError):
        codec.decode_arguments(data)


def test_a_fingerprint_is_sixteen_bytes_and_stays_what_it_was() -> None:
    # A change of these makes every stored journal disagree with its code.
    assert codec.fingerprint((), {}).hex() == "5eed25f9aa1c68139fe47d7ea93769c1"
    assert codec.fingerprint(("order-1", 3), {"a": 1.5, "b": None}).hex() == "904325d48dd4ddc2e2bb2a73c8b68467"
    assert codec.fingerprint((date(2026, 1, 1),), {"x": {"b", "a"}}).hex() == "2df0764ee2eba6d5bc4c6e1dba051e3b"


@given(st.dictionaries(TEXT, PLAIN, max_size=4))
def test_the_order_of_keys_does_not_change_a_fingerprint(kwargs: dict[str, Any]) -> None:
    turned = dict(reversed(kwargs.items()))

    assert codec.fingerprint((kwargs,), kwargs) == codec.fingerprint((turned,), turned)


@given(SCALARS, SCALARS)
def test_different_inputs_have_different_fingerprints(one: Any, other: Any) -> None:
    same = type(one) is type(other) and repr(one) == repr(other)

    assert (codec.fingerprint((one,), {}) == codec.fingerprint((other,), {})) == same


@dataclasses.dataclass
class LineRenamed:
    sku: str
    price: Decimal
    tags: set[str]


def test_a_fingerprint_is_of_the_content_not_of_the_class() -> None:
    line = Line("a", Decimal("1.50"), {"x", "y"})

    assert codec.fingerprint((line,), {}) == codec.fingerprint((LineRenamed("a", Decimal("1.50"), {"y", "x"}),), {})
    assert codec.fingerprint((line,), {}) != codec.fingerprint((Line("a", Decimal("1.5"), {"x", "y"}),), {})
    assert codec.fingerprint(((1, date.min),), {}) == codec.fingerprint(([1, date.min],), {})
    assert codec.fingerprint((Colour.RED,), {}) == codec.fingerprint(("red",), {})
    assert codec.fingerprint((Path("/a"),), {}) == codec.fingerprint(("/a",), {})
    assert codec.fingerprint((Money(amount=Decimal(1)),), {}) != codec.fingerprint((Money(amount=Decimal(2)),), {})
    assert codec.fingerprint(("\ud800",), {}) != codec.fingerprint(("\ud801",), {})


@pytest.mark.parametrize(
    "value", [sys.stdin, lambda: 1, Unreadable(), float("nan"), loop(), nested(100_000), iter([1]), int]
)
def test_an_input_without_a_stored_form_asks_for_a_key(value: Any) -> None:
    with pytest.raises(EncodingError, match=r"give the step a key= of its own$") as caught:
        codec.fingerprint((1, {"x": [value]}), {})

    assert caught.value.path.startswith("$.args[1].x[0]")


def test_an_input_hash_does_not_depend_on_the_order_of_keys() -> None:
    one = codec.encode_arguments((), {"a": 1, "b": {"c": 1, "d": 2}}).data
    other = codec.encode_arguments((), {"b": {"d": 2, "c": 1}, "a": 1}).data

    assert one != other
    assert LOOSE.input_hash(one) == LOOSE.input_hash(other)
    assert len(LOOSE.input_hash(one)) == 32


def test_g4_an_input_hash_does_not_depend_on_whether_an_argument_is_given_by_name_or_by_place() -> None:
    def hashed(*args: object, **kwargs: object) -> bytes:
        return SCHEMA.input_hash(codec.encode_arguments(args, kwargs).data)

    assert hashed(ORDER, 2) == hashed(ORDER, count=2)
    assert hashed(ORDER, 2, note="x") == hashed(ORDER, note="x", count=2)
    different = [
        *(hashed(), hashed(ORDER), hashed(2), hashed(order=ORDER), hashed(ORDER, 2), hashed(2, ORDER)),
        *(hashed(ORDER, 2, "2026-01-01"), hashed(ORDER, 2, rest="2026-01-01"), hashed(ORDER, "2026-01-01", 2)),
    ]
    assert len(set(different)) == len(different)


def place(ctx: object, order: Order, /, count: int, *rest: date, note: str | None = None, **other: UUID) -> None: ...


SCHEMA = InputSchema(place, task="shop.place", skip_context=True)
LOOSE = InputSchema(lambda **other: None, task="shop.loose")
ORDER = {"id": str(UUID(int=1)), "at": "2026-01-01T10:00:00Z"}


def test_arguments_are_bound_and_given_as_their_annotations_say() -> None:
    args, kwargs = SCHEMA.bind_and_validate((ORDER, "3", "2026-02-03"), {"note": None, "who": str(UUID(int=2))})

    assert args == (Order(id=UUID(int=1), at=datetime(2026, 1, 1, 10, tzinfo=UTC)), 3, date(2026, 2, 3))
    assert kwargs == {"note": None, "who": UUID(int=2)}
    assert SCHEMA.decode(SCHEMA.encode(args, kwargs).data) == (args, kwargs)
    assert SCHEMA.by_name(args, kwargs) == {"order": args[0], "count": 3, "rest": (date(2026, 2, 3),), **kwargs}


def test_defaults_stay_with_the_function() -> None:
    assert SCHEMA.bind_and_validate((ORDER,), {"count": 1})[1] == {"count": 1}


def test_c2_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        SCHEMA.bind_and_validate(({"id": 1, "at": "x"}, "many", "never"), {"count": 1, "note": 5, "who": "x"})

    fields = [field for field, _ in caught.value.problems]
    assert set(fields) >= {"order.id", "count", "rest[0]", "note", "who"}
    assert ("count", "is given twice") in caught.value.problems
    assert caught.value.task == "shop.place"


def test_missing_unknown_and_surplus_arguments_are_named() -> None:
    def plain(a: int, *, b: int) -> None: ...

    schema = InputSchema(plain, task="t")

    with pytest.raises(InputError) as caught:
        schema.bind_and_validate((), {"c": 1})
    assert caught.value.problems == (("c", "is not a parameter"), ("a", "is missing"), ("b", "is missing"))
    with pytest.raises(InputError, match="argument 2: takes 1 positional"):
        schema.bind_and_validate((1, 2), {"b": 1})


def test_a_wrong_input_is_named_without_its_value() -> None:
    with pytest.raises(InputError) as caught:
        SCHEMA.bind_and_validate((ORDER, "c4n4ry"), {})

    assert "c4n4ry" not in str(caught.value)


def test_d1_stored_arguments_that_no_longer_fit_are_named() -> None:
    with pytest.raises(InputError) as caught:
        SCHEMA.decode(b'{"args":[{"id":"x"}],"kwargs":{"count":"many"}}')

    assert {field for field, _ in caught.value.problems} == {"order.id", "order.at", "count"}


def test_a_function_without_a_parameter_for_the_context_is_refused() -> None:
    def no_context(*, order: int) -> None: ...

    with pytest.raises(DefinitionError, match="first parameter"):
        InputSchema(no_context, task="t", skip_context=True)
    assert InputSchema(lambda *args: None, task="t", skip_context=True).bind_and_validate((1,), {}) == ((1,), {})


def test_parameters_without_annotations_take_what_can_be_stored() -> None:
    schema = InputSchema(lambda a, b=None: None, task="t")

    assert schema.bind_and_validate(("x",), {"b": date.min}) == (("x",), {"b": date.min})
    with pytest.raises(EncodingError, match=r"the arguments of t: \$\.args\[0\]"):
        schema.encode(({1},), {})


def test_an_annotation_that_is_not_defined_is_named_at_first_use() -> None:
    def task(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    schema = InputSchema(task, task="shop.t")

    with pytest.raises(DefinitionError, match=r"parameter 'a' of shop\.t"):
        schema.bind_and_validate((1,), {})


def gives() -> list[Order]: ...  # type: ignore[empty-body]  # only its annotation counts


class Service:
    def method(self) -> Colour: ...  # type: ignore[empty-body]  # only its annotation counts

    def __call__(self) -> Level: ...  # type: ignore[empty-body]  # only its annotation counts


def wrapped() -> Callable[..., object]:
    import functools

    @functools.wraps(gives)
    def outer(*args: Any) -> Any: ...

    return functools.partial(outer, 1)


@pytest.mark.parametrize(
    ("function", "annotation"),
    [
        (gives, list[Order]),
        (wrapped(), list[Order]),
        (Service().method, Colour),
        (Service(), Level),
        (Line, Line),
        (len, EMPTY),
        (lambda: 1, EMPTY),
    ],
)
def test_the_return_annotation_is_found_under_every_wrapping(function: Callable[..., object], annotation: Any) -> None:
    assert return_annotation(function) == annotation
    assert return_annotation(function) == annotation


def test_a_return_annotation_that_is_not_defined_is_named() -> None:
    def step() -> Nowhere: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(DefinitionError, match=r"the return of .*step"):
        return_annotation(step)
