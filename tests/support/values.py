"""Types and strategies for values that are stored: what users return from steps and pass to tasks."""

from __future__ import annotations

import dataclasses
import enum
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Generic, Literal, NamedTuple, NewType, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, computed_field
from typing_extensions import TypedDict

BERLIN = ZoneInfo("Europe/Berlin")
T = TypeVar("T")
OrderId = NewType("OrderId", int)


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Point(NamedTuple):
    x: int
    y: int


class Row(TypedDict):
    at: datetime
    pair: tuple[int, str]


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal
    tags: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Pair(Generic[T]):
    left: T
    right: T


class Money(BaseModel):
    model_config = ConfigDict(frozen=True)

    amount: Decimal
    currency: Literal["EUR", "USD"] = "EUR"


class Order(BaseModel):
    id: UUID
    at: datetime | date
    lines: list[Line] = []
    total: Money | None = None
    raw: bytes = b""
    path: tuple[int, ...] = ()
    extra: dict[str, Any] = Field(default_factory=dict, alias="more")

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own documented form
    @property
    def size(self) -> int:
        return len(self.lines)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    at: datetime
    colour: Colour
    pair: tuple[int, int]


class Box(BaseModel, Generic[T]):
    content: T


class Cached(BaseModel):
    value: int
    _seen: list[int] = PrivateAttr(default_factory=list)


class Left(BaseModel):
    x: int = 0


class Right(BaseModel):
    x: int = 0


class Hidden(BaseModel):
    shown: int
    hidden: int = Field(default=0, exclude=True)


class Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def nested(levels: int) -> list[Any]:
    """Return that many lists, one in the other."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def loop() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
# Offsets in whole seconds: Python 3.11 reads one of less than a second, as it writes it, as UTC.
OFFSETS = st.integers(-23 * 3600, 23 * 3600).map(lambda seconds: timezone(timedelta(seconds=seconds)))
ZONES = st.none() | st.just(UTC) | st.timezones() | OFFSETS
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["$umt.date", "$umt.map", "$umt.", '"$umt.x'])
)
TAGGED = (
    st.datetimes(timezones=ZONES)
    | st.dates()
    | st.times(timezones=ZONES)
    | st.timedeltas()
    | st.uuids()
    | DECIMALS
    | st.binary()
)
NAMES = TEXT | st.sampled_from(["$umt.date", "$umt.map", "$umt.value", "$umt.unknown", "$umt."])
PLAIN = st.recursive(
    SCALARS | TAGGED,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
