"""Values without an annotation: JSON, and a tagged form for what JSON has no word for.

    "2026-11-29"                     text
    {"$umt.date": "2026-11-29"}      a date
    {"$umt.value": …}                a value that is to be read as if it had no JSON form
    {"$umt.map": {"$umt.date": 1}}   a dict of the user's that would read as a tag: its own keys are taken literally

A tag is an object with exactly one member whose name begins with `$umt.`. Text, numbers, lists and other dicts stand
for themselves, so that other languages can read and write them.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Final, cast
from uuid import UUID
from zoneinfo import ZoneInfo

from umt_durable.codec.refusal import MAX_DEPTH, MAX_DIGITS, Refusal, name_of, too_deep
from umt_durable.codec.same import check_same, zone_of
from umt_durable.errors import DecodingError

TAG: Final = "$umt."
MARK: Final = b'"$umt.'

_MARK_TEXT: Final = MARK.decode()
_LARGEST: Final = 10**MAX_DIGITS
_MICROSECOND: Final = timedelta(microseconds=1)

_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False)
_sorted_encoder = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False, sort_keys=True
)

dumps: Final[Callable[[object], str]] = _encoder.encode
"""Write JSON in the order of the dicts; raises TypeError, ValueError or RecursionError."""

dumps_sorted: Final[Callable[[object], str]] = _sorted_encoder.encode
"""Write JSON with sorted keys: equal values give equal text, whatever order their dicts were built in."""


def loads(data: bytes) -> object:
    """Read JSON, tags left as they are.

    Errors: DecodingError for anything that is not strict JSON in UTF-8.
    """
    try:
        value = _decoder.decode(data.decode())
        if b"\\u" in data:
            dumps(value).encode()  # refuses the escape of a lone surrogate, which only others could have written
    except (ValueError, RecursionError) as error:
        raise DecodingError(f"the stored value is not JSON: {type(error).__name__}") from error
    return cast("object", value)


def read(data: bytes) -> object:
    """Read a value that was written without an annotation."""
    value = loads(data)
    return unpack(value)[0] if MARK in data else value


def round_trip(value: object) -> tuple[bytes, object]:
    """Write a value and read it again.

    Errors: Refusal when it would not come back the same.
    """
    try:
        text = dumps(value)
        if _MARK_TEXT not in text:
            back = _decoder.decode(text)
            check_same(value, back)
            return text.encode(), back
    except (TypeError, ValueError, RecursionError, Refusal):
        pass  # Values that need a tag, and those that are refused: the slow way tells them apart, with a path.
    data = write_packed(Packer().pack(value))
    back = read(data)
    check_same(value, back)
    return data, back


def write_packed(packed: object) -> bytes:
    """Write what a packer gave."""
    try:
        return dumps(packed).encode()
    except ValueError as error:
        raise Refusal(f"it cannot be written as JSON here ({error})") from error


class Packer:
    """Turns a value into JSON types and tags, taking only what comes back as it is from the stored form alone."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def pack(self, value: object, depth: int = 0) -> object:
        """Give the JSON form of a value that lies below `depth` containers.

        Errors: Refusal with the path from here.
        """
        kind = type(value)
        if value is None or kind is bool:
            return value
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            return scalar(value)
        if depth >= MAX_DEPTH:
            raise too_deep()
        if id(value) in self._open:
            raise Refusal("it contains itself")
        self._open.add(id(value))
        try:
            if type(value) is list:
                return self._items(value, depth + 1)
            if type(value) is dict:
                return self._dict(value, depth + 1)
            return self._other(value, depth)
        finally:
            self._open.discard(id(value))

    def _items(self, value: Iterable[object], depth: int) -> list[object]:
        packed = []
        for index, item in enumerate(value):
            try:
                packed.append(self.pack(item, depth))
            except Refusal as refusal:
                raise refusal.under(index) from None
        return packed

    def _dict(self, value: dict[object, object], depth: int) -> object:
        packed: dict[str, object] = {}
        for key, item in value.items():
            if type(key) is not str:
                return self._pairs(value, depth)
            try:
                packed[_text(key)] = self.pack(item, depth)
            except Refusal as refusal:
                raise refusal.under(key) from None
        if len(packed) == 1 and next(iter(packed)).startswith(TAG):
            return {f"{TAG}map": packed}
        return packed

    def _pairs(self, value: dict[object, object], depth: int) -> object:
        kind = next(type(key) for key in value if type(key) is not str)
        raise Refusal(
            f"a key is of type {name_of(kind)}, not str; annotate the return type (for example dict[int, str])"
        )

    def _other(self, value: object, depth: int) -> object:
        raise Refusal(_advice(value))


class LoosePacker(Packer):
    """Takes tuples, sets, enum members, subclasses and dicts with any keys too, for a reader who knows the types."""

    def _pairs(self, value: dict[object, object], depth: int) -> object:
        pairs = []
        for key, item in value.items():
            try:
                pairs.append([self.pack(key, depth), self.pack(item, depth)])
            except Refusal as refusal:
                raise refusal.under(key) from None
        return {f"{TAG}items": pairs}

    def _other(self, value: object, depth: int) -> object:
        kind = type(value)
        if kind is tuple:
            return self._tuple(self._items(cast("tuple[object, ...]", value), depth + 1))
        if kind in (set, frozenset):
            items = self._items(cast("frozenset[object]", value), depth + 1)
            return {f"{TAG}{kind.__name__}": sorted(items, key=dumps_sorted)}
        if isinstance(value, Enum):
            return self.pack(value.value, depth)
        for base, plain in _BASES:
            if isinstance(value, base):
                return self.pack(plain(value), depth)
        return self._object(value, depth)

    def _tuple(self, items: list[object]) -> object:
        return {f"{TAG}tuple": items}

    def _object(self, value: object, depth: int) -> object:
        raise Refusal(_advice(value))


def unpack(value: object) -> tuple[object, bool]:
    """Turn tags back into values, and say whether there was one.

    Errors: DecodingError for a tag that is not known, or whose content does not fit it.
    """
    reader = _Unpacker()
    try:
        return reader.unpack(value), reader.tagged
    except (ValueError, TypeError, ArithmeticError, RecursionError, LookupError) as error:
        raise DecodingError(f"a tagged value does not fit its tag: {type(error).__name__}") from error


class _Unpacker:
    def __init__(self) -> None:
        self.tagged = False

    def unpack(self, value: object) -> object:
        if type(value) is list:
            return [self.unpack(item) for item in value]
        if type(value) is not dict:
            return value
        if len(value) == 1:
            [(name, content)] = value.items()
            if name.startswith(TAG):
                self.tagged = True
                return self._tag(name.removeprefix(TAG), content)
        return {name: self.unpack(item) for name, item in value.items()}

    def _tag(self, name: str, content: object) -> object:
        scalar = _READERS.get(name)
        if scalar is not None:
            return scalar(content)
        match name, content:
            case "value", _:
                return self.unpack(content)
            case "map", dict():
                return {key: self.unpack(item) for key, item in content.items()}
            case "items", list():
                return {self.unpack(key): self.unpack(item) for key, item in content}
            case "tuple", list():
                return tuple(self.unpack(item) for item in content)
            case "set", list():
                return {self.unpack(item) for item in content}
            case "frozenset", list():
                return frozenset(self.unpack(item) for item in content)
            case _:
                raise DecodingError(f"the tag {TAG}{name} is not known here, or holds a {type(content).__name__}")


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"the text has a lone surrogate at position {error.start}") from None
    return value


def _int(value: int) -> int:
    if not -_LARGEST < value < _LARGEST:
        raise Refusal(f"the integer has more than {MAX_DIGITS} digits")
    return value


def _float(value: float) -> float:
    if not math.isfinite(value):
        raise Refusal(f"{value!r} is not a number that JSON has")
    return value


def _decimal(value: Decimal) -> object:
    if not value.is_finite():
        raise Refusal("a Decimal that is not finite does not equal itself")
    return {f"{TAG}decimal": str(value)}


def _clock_time(name: str, value: datetime | time) -> object:
    zone = zone_of(value)
    text = value.isoformat()
    # The offset in the text is what other readers need; zone and fold are what Python needs to give the same value.
    return {f"{TAG}{name}": [text, zone, value.fold] if zone is not None or value.fold else text}


_SCALARS: Final[dict[type, Callable[..., object]]] = {
    str: _text,
    int: _int,
    float: _float,
    Decimal: _decimal,
    datetime: functools.partial(_clock_time, "datetime"),
    time: functools.partial(_clock_time, "time"),
    date: lambda value: {f"{TAG}date": value.isoformat()},
    timedelta: lambda value: {f"{TAG}timedelta": value // _MICROSECOND},
    UUID: lambda value: {f"{TAG}uuid": str(value)},
    bytes: lambda value: {f"{TAG}bytes": base64.b64encode(value).decode()},
}

# How a subclass is lowered to what JSON would make of it; str() and int() could run code of the subclass.
_BASES: Final[tuple[tuple[type, Callable[..., object]], ...]] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    (dict, dict),
    (list, list),
    (tuple, tuple),
    (set, set),
    (frozenset, frozenset),
)


def _advice(value: object) -> str:
    """Say why a value is refused, and what would help. Never shows the value."""
    kind = type(value)
    name = name_of(kind)
    if kind is tuple:
        return "a tuple would come back as a list; annotate the return type (for example tuple[int, ...]) or use a list"
    if kind in (set, frozenset):
        return f"a {name} would come back as a list; annotate the return type (for example {name}[str]) or use a list"
    if isinstance(value, Enum) or dataclasses.is_dataclass(value) or hasattr(kind, "__pydantic_fields__"):
        return f"{name} comes back only where the type is declared; annotate the return type"
    for base, _ in _BASES:
        if isinstance(value, base):
            return f"{name} would come back as {name_of(base)}; annotate the return type or convert it"
    hint = "; did you forget to await it?" if inspect.isawaitable(value) else ""
    return f"objects of type {name} have no stored form{hint}"


def _read_datetime(content: object) -> datetime:
    text, zone, fold = _clock_parts(content)
    value = datetime.fromisoformat(text)
    return value.replace(tzinfo=ZoneInfo(zone), fold=fold) if zone is not None else value.replace(fold=fold)


def _read_time(content: object) -> time:
    text, zone, fold = _clock_parts(content)
    value = time.fromisoformat(text)
    return value.replace(tzinfo=ZoneInfo(zone), fold=fold) if zone is not None else value.replace(fold=fold)


def _clock_parts(content: object) -> tuple[str, str | None, int]:
    match content:
        case str():
            return content, None, 0
        case [str() as text, str() | None as zone, 0 | 1 as fold]:
            return text, zone, fold
        case _:
            raise ValueError("neither text nor [text, zone, fold]")


def _read_text(read: Callable[[str], object]) -> Callable[[object], object]:
    def reader(content: object) -> object:
        if not isinstance(content, str):
            raise TypeError("not text")
        return read(content)

    return reader


def _read_timedelta(content: object) -> timedelta:
    if type(content) is not int:
        raise TypeError("not a whole number")
    # Whole days apart: one large product of microseconds would pass through a float.
    days, microseconds = divmod(content, 86_400_000_000)
    return timedelta(days=days, microseconds=microseconds)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_READERS: Final[dict[str, Callable[[object], object]]] = {
    "datetime": _read_datetime,
    "time": _read_time,
    "timedelta": _read_timedelta,
    "date": _read_text(date.fromisoformat),
    "decimal": _read_text(Decimal),
    "uuid": _read_text(UUID),
    "bytes": _read_text(functools.partial(base64.b64decode, validate=True)),
}

_decoder = json.JSONDecoder(parse_constant=_no_constant)
