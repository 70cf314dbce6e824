"""Whether a value came back as it was."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime, time
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

from umt_durable.codec.refusal import MAX_DEPTH, MAX_DIGITS, Refusal, name_of, too_deep

_MODEL_FIELDS: Final = "__pydantic_fields__"
_OTHER_VALUE: Final = "it would come back with another value"
_DIGITS_BITS: Final = int(MAX_DIGITS * math.log2(10))


def check_same(value: object, back: object, depth: int = 0) -> None:
    """Return only if `back` equals `value`, of the same type, all the way down.

    Shape: order of keys does not count (a TypedDict comes back in its own order). An int may come back as an equal
    float: that happens only where the annotation says float, and the code gets the float on its first pass as well.
    Errors: Refusal with the path and the reason; it never shows a value.
    """
    kind = type(value)
    if kind is not type(back):
        if kind is int and type(back) is float and value == back:
            return
        raise Refusal(f"{name_of(kind)} would come back as {name_of(type(back))}")
    if kind in _ATOMS:
        if value != back:
            raise Refusal(_OTHER_VALUE)
        return
    check = _CHECKS.get(kind)
    if check is not None:
        check(value, back, depth)
    else:
        _check_other(value, back, depth)


def zone_of(value: datetime | time) -> str | None:
    """Give the name of the time zone, when it has one that can be looked up again."""
    return value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None


def _check_int(value: int, back: int, depth: int) -> None:
    if value != back:
        raise Refusal(_OTHER_VALUE)
    if value.bit_length() > _DIGITS_BITS and abs(value) >= 10**MAX_DIGITS:
        raise Refusal(f"the integer has more than {MAX_DIGITS} digits")


def _check_float(value: float, back: float, depth: int) -> None:
    if value != back or math.copysign(1, value) != math.copysign(1, back):
        raise Refusal(_OTHER_VALUE)


def _check_decimal(value: Decimal, back: Decimal, depth: int) -> None:
    if value.as_tuple() != back.as_tuple():
        raise Refusal(_OTHER_VALUE)


def _check_clock_time(value: datetime | time, back: datetime | time, depth: int) -> None:
    """Compare field by field: `==` takes ambiguous times of two zones for unequal, and all folds for equal."""
    if (
        value.replace(tzinfo=None) != back.replace(tzinfo=None)
        or value.fold != back.fold
        or value.utcoffset() != back.utcoffset()
        or (value.tzinfo is None) != (back.tzinfo is None)
        or zone_of(value) != zone_of(back)
    ):
        raise Refusal(_OTHER_VALUE)


def _check_items(value: Sequence[object], back: Sequence[object], depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise too_deep()
    if len(value) != len(back):
        raise Refusal("it would come back with another number of items")
    index = 0
    try:
        for item, other in zip(value, back, strict=True):
            if not (type(item) is str and type(other) is str and item == other):
                check_same(item, other, depth + 1)
            index += 1
    except Refusal as refusal:
        raise refusal.under(index) from None


def _check_set(value: Set[object], back: Set[object], depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise too_deep()
    if value != back:
        raise Refusal(_OTHER_VALUE)
    # Equal elements may differ in type (1 and True): compare each with the one that is really there.
    there = {item: item for item in back}
    for item in value:
        check_same(item, there[item], depth + 1)


def _check_mapping(value: Mapping[object, object], back: Mapping[object, object], depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise too_deep()
    there: dict[object, object] | None = None
    for key, item in value.items():
        if key not in back:
            raise Refusal("it would not come back").under(key)
        if type(key) is not str:
            there = there or {other: other for other in back}
            check_same(key, there[key], depth + 1)
        try:
            check_same(item, back[key], depth + 1)
        except Refusal as refusal:
            raise refusal.under(key) from None
    if len(value) != len(back):
        raise Refusal("it would come back with more members")


def _check_other(value: object, back: object, depth: int) -> None:
    """Find the check for a subclass, a model or a dataclass."""
    for base, check in _CHECKS.items():
        if isinstance(value, base):
            return check(value, back, depth)
    if isinstance(value, Mapping) and isinstance(back, Mapping):
        return _check_mapping(value, back, depth)
    return _check_object(value, back, depth)


def _check_object(value: object, back: object, depth: int) -> None:
    if hasattr(type(value), _MODEL_FIELDS) and not dataclasses.is_dataclass(value):
        _check_model(value, back, depth)
    elif dataclasses.is_dataclass(value):
        _check_fields([field.name for field in dataclasses.fields(value)], value, back, depth)
    elif not _equal(value, back):
        raise Refusal(f"{name_of(type(value))} would come back with another value, or cannot be compared")


def _check_model(value: object, back: object, depth: int) -> None:
    fields: Mapping[str, object] = getattr(type(value), _MODEL_FIELDS)
    _check_fields(list(fields), value, back, depth)
    extra = (getattr(value, "__pydantic_extra__", None) or {}, getattr(back, "__pydantic_extra__", None) or {})
    _check_mapping(*extra, depth)
    private = (getattr(value, "__pydantic_private__", None), getattr(back, "__pydantic_private__", None))
    if not _equal(*private):
        raise Refusal("its private attributes would come back with other values")


def _check_fields(names: list[str], value: object, back: object, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise too_deep()
    for name in names:
        try:
            check_same(getattr(value, name, None), getattr(back, name, None), depth + 1)
        except Refusal as refusal:
            raise refusal.under(name) from None


def _equal(value: object, back: object) -> bool:
    try:
        return (value == back) is True
    except Exception:  # noqa: BLE001 - a foreign __eq__ may raise anything; what cannot be compared is refused
        return False


_ATOMS: Final = frozenset({str, bool, type(None)})
_CHECKS: Final[dict[type, Callable[[Any, Any, int], None]]] = {
    int: _check_int,
    float: _check_float,
    list: _check_items,
    dict: _check_mapping,
    tuple: _check_items,
    set: _check_set,
    frozenset: _check_set,
    deque: _check_items,
    datetime: _check_clock_time,
    time: _check_clock_time,
    Decimal: _check_decimal,
}
