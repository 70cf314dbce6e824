from __future__ import annotations

import hashlib
import json
import sys
import typing
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field, SecretStr

from tests.support.values import (
    BERLIN,
    DECIMALS,
    NAMES,
    PLAIN,
    SCALARS,
    TAGGED,
    TEXT,
    ZONES,
    Box,
    Cached,
    Colour,
    Hidden,
    Left,
    Level,
    Line,
    Money,
    Order,
    OrderId,
    Pair,
    Point,
    Right,
    Row,
    Strict,
    T,
    Unreadable,
    Word,
    loop,
    nested,
)
from umt_durable import codec
from umt_durable.codec import EMPTY
from umt_durable.codec.same import check_same
from umt_durable.errors import DecodingError, DefinitionError, EncodingError


def assert_kept(value: Any, annotation: Any = EMPTY) -> None:
    """Fail unless a value comes back the same, at the first pass and at every later one."""
    encoded, first = codec.round_trip(value, annotation, where="step 'x'")
    again = codec.decode(encoded.data, annotation, encoded.codec)

    check_same(value, first)
    check_same(value, again)
    assert encoded.digest == hashlib.sha256(encoded.data).digest()
    json.loads(encoded.data)


def refused(value: Any, annotation: Any = EMPTY) -> EncodingError:
    with pytest.raises(EncodingError) as caught:
        codec.encode(value, annotation, where="step 'x'")
    assert caught.value.where == "step 'x'"
    assert str(caught.value).startswith(f"step 'x': {caught.value.path} cannot be stored: ")
    return caught.value


@given(PLAIN)
@example({"$umt.date": "2026-11-29"})
@example({"$umt.map": {"$umt.map": {"$umt.date": 1}}})
@example({"$umt.date": 1, "other": 2})
@example(-0.0)
@example(5e-324)
@example("U+0000: \x00")
@example(2**63)
@example(datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1))
@example(datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN))
@example(datetime(2026, 10, 25, 2, 30, fold=1))  # noqa: DTZ001 - naive on purpose
@example(time(2, 30, tzinfo=BERLIN))
@example(timedelta.min)
@example(timedelta.max)
@example(Decimal("-0.00"))
@example(Decimal("1E+400"))
def test_i26_a_plain_value_comes_back_the_same(value: Any) -> None:
    assert_kept(value)


@given(PLAIN)
def test_a_plain_value_comes_back_the_same_where_anything_is_allowed(value: Any) -> None:
    assert_kept(value, Any)
    assert_kept({"it": value}, dict[str, Any])


TYPED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (None, st.none()),
    (int, st.integers()),
    (bool, st.booleans()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (str, TEXT),
    (bytes, st.binary()),
    (datetime, st.datetimes(timezones=ZONES)),
    (date, st.dates()),
    (time, st.times(timezones=ZONES)),
    (timedelta, st.timedeltas()),
    (UUID, st.uuids()),
    (Decimal, DECIMALS),
    (Colour, st.sampled_from(Colour)),
    (Level, st.sampled_from(Level)),
    (Word, st.sampled_from(Word)),
    (OrderId, st.integers()),
    (tuple[int, str], st.tuples(st.integers(), TEXT)),
    (tuple[int, ...], st.lists(st.integers(), max_size=4).map(tuple)),
    (set[str], st.sets(TEXT, max_size=4)),
    (frozenset[UUID], st.frozensets(st.uuids(), max_size=3)),
    (dict[int, list[bytes]], st.dictionaries(st.integers(), st.lists(st.binary(), max_size=2), max_size=3)),
    (dict[date, Decimal], st.dictionaries(st.dates(), DECIMALS, max_size=3)),
    (Point, st.builds(Point, st.integers(), st.integers())),
    (Row, st.fixed_dictionaries({"at": st.datetimes(timezones=ZONES), "pair": st.tuples(st.integers(), TEXT)})),
    (Line, st.builds(Line, TEXT, DECIMALS, st.sets(TEXT, max_size=3))),
    (Pair[int], st.builds(Pair, st.integers(), st.integers())),
    (Money, st.builds(Money, amount=DECIMALS, currency=st.sampled_from(["EUR", "USD"]))),
    (Box[bytes], st.builds(Box[bytes], content=st.binary())),
    (list[Money | None], st.lists(st.none() | st.builds(Money, amount=DECIMALS), max_size=3)),
    (date | datetime, st.dates() | st.datetimes()),
    (UUID | str, st.uuids() | TEXT | st.uuids().map(str)),
    (int | bool | str, st.integers() | st.booleans() | TEXT | st.integers().map(str)),
    (bytes | str | None, st.binary() | TEXT | st.none()),
    (Sequence[int], st.lists(st.integers(), max_size=3) | st.lists(st.integers(), max_size=3).map(tuple)),
    (Annotated[int, Field(ge=0)], st.integers(min_value=0)),
    (T, PLAIN),
    (Pair[date | str], st.builds(Pair, st.dates() | TEXT, st.dates() | st.dates().map(str))),
    (
        Order,
        st.builds(
            Order,
            id=st.uuids(),
            at=st.datetimes(timezones=ZONES) | st.dates(),
            lines=st.lists(st.builds(Line, TEXT, DECIMALS), max_size=2),
            total=st.none() | st.builds(Money, amount=DECIMALS),
            raw=st.binary(),
            path=st.lists(st.integers(), max_size=2).map(tuple),
            more=st.dictionaries(NAMES, SCALARS | TAGGED, max_size=2),
        ),
    ),
]


@pytest.mark.parametrize(("annotation", "values"), TYPED, ids=[str(annotation) for annotation, _ in TYPED])
def test_i26_an_annotated_value_comes_back_the_same(annotation: Any, values: st.SearchStrategy[Any]) -> None:
    @given(values)
    def check(value: Any) -> None:
        assert_kept(value, annotation)

    check()


def test_a_strict_model_comes_back_the_same() -> None:
    assert_kept(Strict(at=datetime(2026, 1, 1, tzinfo=UTC), colour=Colour.RED, pair=(1, 2)), Strict)


def test_what_others_wrote_as_plain_json_is_read_by_its_annotation() -> None:
    data = b'{"id":"00000000-0000-0000-0000-000000000001","at":"2026-11-29T10:00:00+01:00","more":{"a":1},"path":[1]}'

    order = codec.decode(data, Order)

    assert isinstance(order, Order)
    assert (order.id, order.extra, order.path) == (UUID(int=1), {"a": 1}, (1,))


def test_an_annotation_that_is_added_later_reads_what_was_stored_without_it() -> None:
    encoded = codec.encode({"at": datetime(2026, 1, 1, tzinfo=BERLIN), "id": UUID(int=1)}, where="step 'x'")

    order = codec.decode(encoded.data, Order)

    assert isinstance(order, Order)
    assert order.at == datetime(2026, 1, 1, tzinfo=BERLIN)


def test_the_order_of_keys_is_kept() -> None:
    _, back = codec.round_trip({"b": 1, "a": {"d": 1, "c": 2}}, where="step 'x'")

    assert repr(back) == "{'b': 1, 'a': {'d': 1, 'c': 2}}"


def test_the_first_pass_gets_a_value_of_its_own() -> None:
    value: dict[str, list[int]] = {"a": []}

    _, back = codec.round_trip(value, where="step 'x'")

    assert back == value
    assert back is not value


def test_the_stored_form_is_json_that_people_and_other_languages_read() -> None:
    value = {"text": "é\x00", "n": 10**20, "f": -0.0, "none": None, "date": date(2026, 11, 29), "raw": b"\xff"}

    assert codec.encode(value, where="step 'x'").data.decode() == (
        '{"text":"é\\u0000","n":100000000000000000000,"f":-0.0,"none":null,'
        '"date":{"$umt.date":"2026-11-29"},"raw":{"$umt.bytes":"/w=="}}'
    )


REFUSED: list[tuple[Any, Any, str, str]] = [
    (float("nan"), EMPTY, "$", "nan is not a number"),
    ([1, {"a": float("-inf")}], EMPTY, "$[1].a", "-inf is not a number"),
    (float("nan"), float, "$", "nan is not a number"),
    (Box[float](content=float("inf")), Box[float], "$.content", "inf is not a number"),
    (Decimal("NaN"), EMPTY, "$", "does not equal itself"),
    (Decimal("Infinity"), Decimal, "$", "does not equal itself"),
    ("\ud800", EMPTY, "$", "lone surrogate at position 0"),
    ({"a": ["x", "y\udfff"]}, EMPTY, "$.a[1]", "lone surrogate at position 1"),
    ({"\ud800": 1}, EMPTY, '$["\\ud800"]', "lone surrogate"),
    (["\ud800"], list[str], "$[0]", "lone surrogate"),
    ({1: 2}, EMPTY, "$", "a key is of type int, not str; annotate"),
    ({"a": {None: 2}}, EMPTY, "$.a", "a key is of type NoneType"),
    (loop(), EMPTY, "$[0].again", "contains itself"),
    (nested(101), EMPTY, "$" + "[0]" * 20 + "…", "more than 100 levels"),
    (nested(101), list[Any], "$" + "[0]" * 20 + "…", "more than 100 levels"),
    (nested(10_000), EMPTY, "$" + "[0]" * 20 + "…", "more than 100 levels"),
    (10**4300, EMPTY, "$", "more than 4300 digits"),
    ({"n": -(10**4300)}, EMPTY, "$.n", "more than 4300 digits"),
    (10**4300, int, "$", "more than 4300 digits"),
    ("x" * 16 * 2**20, EMPTY, "$", "more than the 16777216 allowed"),
    ("x" * 16 * 2**20, str, "$", "more than the 16777216 allowed"),
    ((1, 2), EMPTY, "$", "tuple would come back as a list; annotate the return type"),
    ({"a b": [(1,)]}, EMPTY, '$["a b"][0]', "a tuple would come back as a list"),
    ({1}, EMPTY, "$", "a set would come back as a list; annotate the return type"),
    (frozenset(), EMPTY, "$", "a frozenset would come back as a list"),
    (Point(1, 2), EMPTY, "$", "Point would come back as tuple; annotate"),
    (Colour.RED, EMPTY, "$", "Colour comes back only where the type is declared"),
    (Level.LOW, EMPTY, "$", "Level comes back only where the type is declared"),
    (Word.YES, EMPTY, "$", "Word comes back only where the type is declared"),
    (Line("a", Decimal(1)), EMPTY, "$", "Line comes back only where the type is declared"),
    (Money(amount=Decimal(1)), EMPTY, "$", "Money comes back only where the type is declared"),
    (typing.OrderedDict(a=1), EMPTY, "$", "OrderedDict would come back as dict"),
    (sys.stdin, EMPTY, "$", "have no stored form"),
    ([print, 1], EMPTY, "$[0]", "objects of type builtin_function_or_method have no stored form"),
    (lambda: 1, Any, "$", "objects of type function have no stored form"),
    (bytearray(b"x"), EMPTY, "$", "objects of type bytearray have no stored form"),
    (Unreadable(), EMPTY, "$", "Unreadable have no stored form"),
    (Unreadable(), Unreadable, "$", "Unable to generate pydantic-core schema"),
    ([Unreadable()], list[Any], "$[0]", "Unreadable have no stored form"),
    ("5", int, "$", "str would come back as int"),
    (True, int, "$", "bool would come back as int"),
    (2**53 + 1, float, "$", "int would come back as float"),
    (5, None, "$", "does not fit its annotation"),
    ("abc", int, "$", "does not fit its annotation: Input should be a valid integer"),
    ({"lines": [1, "x"]}, dict[str, list[int]], "$.lines[1]", "does not fit its annotation"),
    ([1, 2], tuple[int, int], "$", "list would come back as tuple"),
    ((1, 2), list[int], "$", "tuple would come back as list"),
    ({"a": Colour.RED}, dict[str, Any], "$.a", "Colour would come back as str"),
    ([Money(amount=Decimal(1))], list[Any], "$[0]", "Money would come back as dict"),
    (Box[str].model_construct(content=5), Box[str], "$.content", "does not fit"),
    (Box[int](content=5), Money, "$.amount", "does not fit"),
    (Hidden(shown=1, hidden=2), Hidden, "$.hidden", "another value"),
    (SecretStr("x"), SecretStr, "$", "SecretStr have no stored form"),
    (iter([1]), typing.Iterator[int], "$", "list_iterator have no stored form"),
]


@pytest.mark.parametrize(
    ("value", "annotation", "path", "reason"), REFUSED, ids=[f"{path}: {reason}" for _, _, path, reason in REFUSED]
)
def test_i26_what_would_come_back_different_is_refused_with_its_path(
    value: Any, annotation: Any, path: str, reason: str
) -> None:
    error = refused(value, annotation)

    assert error.path == path
    assert reason in error.reason


def test_values_at_the_limits_are_kept() -> None:
    assert_kept(nested(100))
    assert_kept(nested(100), list[Any])
    assert_kept(10**4300 - 1)
    assert_kept(-(10**4300) + 1, int)
    assert_kept("x" * (16 * 2**20 - 2))
    assert_kept("x" * 8 * 2**20, str)


def test_private_attributes_that_would_be_lost_are_refused() -> None:
    value = Cached(value=1)
    assert_kept(value, Cached)
    value._seen.append(1)

    assert "private attributes" in refused(value, Cached).reason


def test_an_int_comes_back_as_the_float_that_its_annotation_says() -> None:
    _, back = codec.round_trip([3, 2.5], list[float], where="step 'x'")

    assert repr(back) == "[3.0, 2.5]"


def test_a_refusal_does_not_show_the_value() -> None:
    for value, annotation in [("c4n4ry", int), (["c4n4ry"], list[int]), ({"a": "c4n4ry\ud800"}, EMPTY)]:
        assert "c4n4ry" not in str(refused(value, annotation))


def test_a_digit_limit_of_the_host_is_an_encoding_error_too() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert "written as JSON" in refused(10**700).reason
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"NaN",
        b"[Infinity]",
        b"\xff",
        b'"\\ud800"',
        b"[" * 100_000,
        b'{"$umt.unknown":1}',
        b'{"$umt.date":1}',
        b'{"$umt.date":"yesterday"}',
        b'{"$umt.datetime":["2026-01-01T00:00:00","Nowhere/Land",0]}',
        b'{"$umt.datetime":["2026-01-01T00:00:00",null,2]}',
        b'{"$umt.bytes":"*"}',
        b'{"$umt.decimal":"x"}',
        b'{"$umt.timedelta":1e300}',
        b'{"$umt.map":[]}',
        b'{"$umt.items":[[[],1]]}',
        b'{"$umt.items":[1]}',
        b'{"$umt.set":[[]]}',
    ],
)
def test_bytes_that_are_no_stored_value_are_refused(data: bytes) -> None:
    with pytest.raises(DecodingError):
        codec.decode(data)
    with pytest.raises(DecodingError):
        codec.decode(data, Order)


def test_a_codec_that_is_not_known_is_refused() -> None:
    with pytest.raises(DecodingError, match="codec 9"):
        codec.decode(b"1", codec=9)


def test_a_stored_value_that_no_longer_fits_names_the_place_and_not_the_value() -> None:
    with pytest.raises(DecodingError, match=r"\$\[1\]\.amount: ") as caught:
        codec.decode(b'[{"amount":"1"},{"amount":"c4n4ry"}]', list[Money])

    assert "c4n4ry" not in str(caught.value)


def test_an_annotation_that_names_nothing_is_said() -> None:
    assert "'Nowhere', which is not defined" in refused([1], list["Nowhere"]).reason  # type: ignore[name-defined]  # noqa: F821
    with pytest.raises(DefinitionError):
        codec.decode(b"[1]", list["Nowhere"])  # type: ignore[name-defined]  # noqa: F821


def test_equal_unions_of_another_order_are_not_mixed_up() -> None:
    one, other = Left | Right, Right | Left
    assert one == other

    assert codec.decode(b"{}", one) == Left()
    assert codec.decode(b"{}", other) == Right()


def test_importing_the_codec_does_not_import_pydantic() -> None:
    import subprocess

    source = "import sys, umt_durable.codec as c; c.encode({'a': 1}, where='x'); print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=Path(codec.__file__).parents[2], capture_output=True, text=True, timeout=60
    )

    assert done.stdout == "False\n", done.stderr
