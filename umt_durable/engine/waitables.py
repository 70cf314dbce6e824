"""What a body can wait for, what it is given, and how often it looks."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias

import psycopg

from umt_durable import codec, texts
from umt_durable.engine.functions import check_function, is_coroutine_function
from umt_durable.engine.passing import LONGEST
from umt_durable.errors import DefinitionError
from umt_durable.store import waits

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

Check: TypeAlias = Callable[[], Any] | Callable[[psycopg.Connection[tuple[Any, ...]]], Any]
"""What a wait asks whether it is over: a function of nothing, or of a connection that may only read.

A coroutine function takes nothing: it would use that connection on the event loop, where nothing may wait.
"""

DEFAULT_POLL = timedelta(minutes=1)
MODES = ("first", "latest", "queue")
MOST_WAITS: Final = 64
"""How many waits one group may have: the addresses of all of them are locked at once."""
RESERVED = "umt."
MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """What settled a wait: its payload, and where it came from.

    Shape: `label` is the name, or the place in the list, that the wait has in `wait_any`, `wait_all` and `wait_quorum`.
    """

    payload: T
    source: Literal["fact", "check", "timer", "default"]
    label: str | int | None = None


@dataclass(frozen=True, slots=True)
class FactAddress:
    """Where a fact has to be said to settle a wait: to a run under a name, or under a name and key."""

    run_id: str
    name: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class PollPolicy:
    """How often a `check` is asked: after `initial`, then in steps that grow by `factor` up to `maximum`."""

    initial: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    maximum: timedelta = timedelta(minutes=5)

    def __post_init__(self) -> None:
        for label in ("initial", "maximum"):
            value = getattr(self, label)
            if not isinstance(value, timedelta) or not timedelta(0) < value <= LONGEST:
                raise DefinitionError(f"PollPolicy: {label} must be a timedelta over 0 and up to {LONGEST.days} days")
        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float) or not 1.0 <= self.factor <= 100.0:
            raise DefinitionError(f"PollPolicy: factor must be from 1 to 100, not {self.factor!r}")

    def next_after(self, age: timedelta) -> timedelta:
        """Return how long it is until the next look at a wait of an age. The looks are fixed by its registration."""
        at, step, longest = 0.0, self.initial.total_seconds(), self.maximum.total_seconds()
        step, passed = min(step, longest), age.total_seconds()
        while at + step <= passed and step < longest and self.factor > 1.0:
            at, step = at + step, min(step * self.factor, longest)
        left = step - max(0.0, passed - at) % step
        return timedelta(seconds=left)


@dataclass(frozen=True, slots=True)
class FactWait:
    """A wait for a fact, as a part of `wait_any`, `wait_all` or `wait_quorum`; its parameters are what `wait_for_fact`
    calls by the same names.

    Errors: DefinitionError for what can never work.
    """

    name: str
    key: str | None = None
    check: Check | None = None
    mode: str = "first"
    type: Any = codec.EMPTY

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.key is not None:
            check_key(self.name, self.key)
        codec.check_annotation(self.type, where=f"wait {self.name!r}: type")
        if self.mode not in MODES:
            raise DefinitionError(f"wait {self.name!r}: mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if self.check is not None:
            check_function(f"wait {self.name!r}", "check", self.check)
        if self.is_async and _needs(self.check):
            raise DefinitionError(f"wait {self.name!r}: a check that is a coroutine function takes nothing")
        if self.check is not None and _needs(self.check) > 1:
            raise DefinitionError(
                f"wait {self.name!r}: check takes nothing, or a connection to read with, and no more: {self.check!r}"
            )

    @property
    def is_async(self) -> bool:
        """Whether the check is a coroutine function."""
        return is_coroutine_function(self.check)

    @property
    def reads(self) -> bool:
        """Whether the check asks for a connection."""
        return self.check is not None and _needs(self.check) == 1

    def address(self, run_id: str) -> str:
        """Return where the fact is said."""
        return waits.run_address(run_id, self.name) if self.key is None else waits.key_address(self.name, self.key)


def _needs(function: Any) -> int:
    """Return how many arguments a function cannot be called without; 0 of one that does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    kinds = Counter(one.kind for one in parameters if one.default is one.empty)
    named = kinds[inspect.Parameter.KEYWORD_ONLY]
    if named:
        return named + 1  # no connection is given by name
    return kinds[inspect.Parameter.POSITIONAL_ONLY] + kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD]


@dataclass(frozen=True, slots=True)
class Timer:
    """A time, as a part of `wait_any`, `wait_all` or `wait_quorum`: so long from now, or a moment with a zone."""

    due: timedelta | datetime

    def __post_init__(self) -> None:
        if isinstance(self.due, timedelta):
            check_limit("timer", "its duration", self.due)
        elif not isinstance(self.due, datetime) or self.due.tzinfo is None:
            raise DefinitionError(f"a timer is a timedelta or a datetime with a time zone, not {self.due!r}")


Waitable: TypeAlias = FactWait | Timer | str | timedelta | datetime
Waitables: TypeAlias = Mapping[str, Waitable] | Sequence[Waitable]


def read_waitables(verb: str, given: object) -> dict[str | int, FactWait | Timer]:
    """Return the parts of a group by their labels; a text is a fact's name, a duration or a moment a timer.

    Errors: DefinitionError naming what cannot be waited for.
    """
    if isinstance(given, Mapping):
        pairs: list[tuple[Any, Any]] = list(given.items())
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        pairs = list(enumerate(given))
    else:
        raise DefinitionError(f"step.{verb}: give a mapping of labels to waits or a list of waits, not {given!r}")
    if len(pairs) > MOST_WAITS:
        raise DefinitionError(f"step.{verb}: {len(pairs)} waits are more than the {MOST_WAITS} one group may have")
    return {_label(verb, label): _part(verb, label, one) for label, one in pairs}


def _label(verb: str, label: object) -> str | int:
    if isinstance(label, int) and not isinstance(label, bool):
        return label
    if not isinstance(label, str) or not label or len(label) > 200 or not texts.is_storable(label):
        raise DefinitionError(f"step.{verb}: the label of a wait is text of 1 to 200 characters, not {label!r}")
    return label


def _part(verb: str, label: object, one: object) -> FactWait | Timer:
    if isinstance(one, FactWait | Timer):
        return one
    if isinstance(one, str):
        return FactWait(one)
    if isinstance(one, timedelta | datetime):
        return Timer(one)
    raise DefinitionError(f"step.{verb}: {label!r} is no FactWait, Timer, name, timedelta or datetime: {one!r}")


def check_limit(wait: str, label: str, value: timedelta | None) -> None:
    """Refuse a duration that the database's calendar cannot add.

    Errors: DefinitionError.
    """
    if value is not None and (not isinstance(value, timedelta) or not timedelta(0) <= value <= LONGEST):
        raise DefinitionError(f"wait {wait!r}: {label} must be a timedelta from 0 to {LONGEST.days} days")


def check_poll(wait: str, poll: object) -> None:
    """Refuse what says no interval.

    Errors: DefinitionError.
    """
    if not isinstance(poll, PollPolicy | timedelta | None):
        raise DefinitionError(f"wait {wait!r}: poll must be a timedelta or a PollPolicy, not {poll!r}")
    if isinstance(poll, timedelta):
        check_limit(wait, "poll", poll)
        if not poll:
            raise DefinitionError(f"wait {wait!r}: poll must be a timedelta of more than 0, or nobody would rest")


def check_name(name: str) -> None:
    """Refuse a name no fact can have.

    Errors: DefinitionError.
    """
    if name is None:
        raise DefinitionError("the name of a fact is missing")
    texts.check("the name of a fact", name)
    if name.startswith(RESERVED):
        raise DefinitionError(f"{name!r}: names under {RESERVED!r} are reserved")


def check_key(name: str, key: object) -> None:
    """Refuse a key no fact can be emitted under.

    Errors: DefinitionError.
    """
    fits = isinstance(key, str) and 0 < len(key) <= 255 and "\0" not in key
    if not fits or any("\ud800" <= character <= "\udfff" for character in str(key)):
        raise DefinitionError(f"the key of fact {name!r} must be text of 1 to 255 characters, not {key!r}")
