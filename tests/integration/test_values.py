"""Every type that a step may return comes back from Postgres as it was; what would not is refused, with its path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NewType
from uuid import UUID

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine
from tests.support.sealing import BOTH
from tests.support.values import (
    BERLIN,
    Box,
    Colour,
    Level,
    Line,
    Money,
    Order,
    OrderId,
    Pair,
    Point,
    Row,
    Word,
    loop,
    nested,
)
from umt_durable.codec import MAX_BYTES
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.payloads import Vault
from umt_durable.settings import Settings
from umt_durable.states import RunState

ID = UUID("9f0e7a52-3d1c-4b6a-8f2e-1c5d7b9a0e3f")
TWICE = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1)
Names = NewType("Names", list[str])

KEPT: list[tuple[str, Any, Any]] = [
    ("model", Order, Order(id=ID, at=TWICE, lines=[Line("a", Decimal("1.50"), {"x"})], raw=b"\0\xff", more={"n": 1})),
    ("frozen model", Money, Money(amount=Decimal("9.90"))),
    ("dataclass", Line, Line("a", Decimal("0.10"), {"red", "blue"})),
    ("TypedDict", Row, {"at": TWICE, "pair": (1, "a")}),
    ("NamedTuple", Point, Point(1, 2)),
    ("generic dataclass", Pair[date], Pair(date(2026, 1, 1), date(2026, 1, 2))),
    ("generic model", Box[Decimal], Box[Decimal](content=Decimal("1E+2"))),
    ("datetime with zone and fold", datetime, TWICE),
    ("datetime with zone and fold, no annotation", None, TWICE),
    ("datetime in UTC, no annotation", None, datetime(2026, 1, 1, tzinfo=UTC)),
    ("datetime without zone", datetime, datetime(2026, 1, 1, 1, 2, 3, 4)),  # noqa: DTZ001 - users have such
    ("date", None, date(2026, 1, 1)),
    ("time", None, time(23, 59, 59, 999999)),
    ("timedelta", None, timedelta(days=-1, microseconds=1)),
    ("UUID", None, ID),
    ("Decimal", None, Decimal("1.10")),
    ("bytes", None, bytes(range(256))),
    ("Enum", Colour, Colour.BLUE),
    ("IntEnum", Level, Level.LOW),
    ("StrEnum", Word, Word.YES),
    ("tuple", tuple[int, str], (1, "a")),
    ("tuple of any length", tuple[int, ...], (1, 2, 3)),
    ("set", set[int], {1, 2}),
    ("frozenset", frozenset[str], frozenset("ab")),
    ("NewType", OrderId, OrderId(7)),
    ("NewType of a generic", Names, ["a"]),
    ("dict with other keys", dict[int, list[date]], {1: [date(2026, 1, 1)]}),
    ("union", int | str | None, "1"),
    ("None", None, None),
    ("None, annotated", type(None), None),
    ("NUL in text", None, "a\0b"),
    ("-0.0 and a large integer", None, [-0.0, 10**4000]),
    ("text of 8 MB", str, "ü" * 4_000_000),
    ("100 levels", None, nested(100)),
]
REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("NaN", lambda: {"a": [float("nan")]}, "$.a[0]"),
    ("infinity", lambda: [float("-inf")], "$[0]"),
    ("lone surrogate", lambda: {"a": "\ud800"}, "$.a"),
    ("lone surrogate in a name", lambda: {"\ud800": 1}, '$["\\ud800"]'),
    ("keys that are no text", lambda: {"a": {1: 2}}, "$.a"),
    ("itself", lambda: {"a": loop()}, "$.a[0].again"),
    ("101 levels", lambda: nested(101), "$" + "[0]" * 20 + "…"),
    ("more than 16 MiB", lambda: "x" * MAX_BYTES, "$"),
    ("a tuple without an annotation", lambda: {"a": (1,)}, "$.a"),
    ("a set without an annotation", lambda: [{1}], "$[0]"),
    ("a member of an enum without an annotation", lambda: [Level.LOW], "$[0]"),
    ("an object", lambda: {"a": object()}, "$.a"),
]


@pytest.fixture(params=["plain", "sealed"])
def engine(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Engine]:
    database = Database(settings, Vault(BOTH if request.param == "sealed" else None))
    engine = Engine(database, settings)
    yield engine
    engine.close()
    database.close()


def test_i26_every_type_comes_back_from_a_step_the_first_time_and_on_replay(engine: Engine, clock: Clock) -> None:
    seen: list[list[Any]] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        found = []
        for name, annotation, value in KEPT:

            def give(value: Any = value) -> Any:
                return value

            if annotation is not None:
                give.__annotations__["return"] = annotation
            found.append(ctx.step.run(name, give))
        seen.append(found)
        ctx.step.sleep("nap", timedelta(minutes=1))

    run_id, _ = engine.run("t")
    clock.advance(seconds=61)
    engine.timers()
    engine.process().deliver(run_id, "t")

    assert engine.state(run_id) is RunState.SUCCEEDED
    assert len(seen) == 2
    for found in seen:
        for (name, _, value), back in zip(KEPT, found, strict=True):
            assert back == value, name
            assert type(back) is type(value), name
            assert value is None or isinstance(value, (str, bytes, int)) or repr(back) == repr(value) or name in SETS, (
                name
            )
            assert getattr(back, "fold", 0) == getattr(value, "fold", 0), name


SETS = ("model", "dataclass", "set", "frozenset")
"""Where the text depends on the order of a set."""


@pytest.mark.parametrize(("make", "path"), [entry[1:] for entry in REFUSED], ids=[entry[0] for entry in REFUSED])
def test_i26_what_would_come_back_different_fails_the_step_and_names_it_and_the_path(
    engine: Engine, make: Callable[[], Any], path: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("make", make)

    run_id, _ = engine.run("t")

    run = engine.client.get(run_id)
    failure = engine.client.failure(run)
    assert run.state is RunState.FAILED
    assert failure is not None
    assert failure.type == "EncodingError"
    assert failure.message.startswith(f"step 'make': {path} cannot be stored: ")
