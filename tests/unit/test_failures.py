"""Exceptions in the journal: what is kept, and that the same is raised on the first pass and at every replay."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from umt_durable import errors
from umt_durable.engine import failures
from umt_durable.engine.failures import ExceptionRegistry
from umt_durable.errors import StepFailedError


class DeclinedError(Exception):
    """Makes its text out of its arguments, which it keeps for nobody."""

    def __init__(self, order: int, *, reason: str) -> None:
        self.order, self.reason = order, reason
        super().__init__(f"order {order} is declined: {reason}")


class TextFromTextError(Exception):
    """Takes one text and makes another one: called with what it made, it would make it twice."""

    def __init__(self, card: str) -> None:
        self.card = card
        super().__init__(f"card {card} is declined")


@dataclass(frozen=True)
class FrozenError(Exception):
    """A frozen dataclass, which refuses to be changed."""

    code: int


class StubbornError(Exception):
    """Can only be made with an argument that nobody knows any more, even past its constructor."""

    def __new__(cls, *args: object, key: object) -> StubbornError:
        return super().__new__(cls, *args)

    def __init__(self, *, key: object) -> None:
        super().__init__("stubborn")


class Outer:
    """Holds a class of the same name as another one."""

    class DeclinedError(Exception):
        """Not the other one."""


MINE = (DeclinedError, TextFromTextError, FrozenError, StubbornError, Outer.DeclinedError)


def raised(error: Exception) -> Exception:
    """Return an exception that was raised, with its traceback."""
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 - what is being tested
        return caught


def again(error: Exception, *known: type[Exception]) -> Exception:
    """Return an exception as the journal gives it back."""
    registry = ExceptionRegistry()
    registry.add(*(known or MINE))
    return registry.rebuild(failures.from_bytes(failures.capture(raised(error), step="charge").to_bytes()))


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (DeclinedError(7, reason="no money"), {"order": 7, "reason": "no money"}),
        (TextFromTextError("4711"), {"card": "4711"}),
        (FrozenError(3), {"code": 3}),
        (OSError(2, "No such file", "/tmp/x"), {"errno": 2, "strerror": "No such file"}),
        (KeyError("k"), {}),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), {}),
        (errors.IdempotencyConflictError("t", "k", "run-1"), {"task": "t", "key": "k", "run": "run-1"}),
        (errors.EncodingError("step", "$.a", "bad"), {"where": "step", "path": "$.a", "reason": "bad"}),
        (errors.OpConflictError("op", None, "a", "b"), {"op_key": "op", "expected": "a", "found": "b"}),
        (Outer.DeclinedError("x"), {}),
    ],
)
def test_a_registered_exception_comes_back_as_it_was_whatever_its_constructor(
    error: Exception, attributes: dict[str, object]
) -> None:
    found = again(error)

    assert type(found) is type(error)
    assert str(found) == str(error)
    assert {name: getattr(found, name) for name in attributes} == attributes


def test_an_exception_that_cannot_be_made_or_is_not_registered_comes_as_step_failed_with_its_traceback() -> None:
    for error, known in ((StubbornError(key=1), MINE), (DeclinedError(7, reason="no"), (ValueError,))):
        found = again(error, *known)

        assert isinstance(found, StepFailedError)
        assert (found.step, found.type_name, found.message) == ("charge", type(error).__name__, str(error))
        assert "raise error" in found.traceback


def test_a_step_failed_error_that_is_recorded_itself_keeps_what_it_says() -> None:
    found = again(StepFailedError("charge", "DeclinedError", "no", "line 1"))

    assert isinstance(found, StepFailedError)
    assert (found.step, found.type_name, found.message, found.traceback) == ("charge", "DeclinedError", "no", "line 1")


def test_causes_come_back_in_their_order_and_a_chain_without_end_is_cut() -> None:
    first = ValueError("first")
    second = TextFromTextError("4711")
    second.__cause__ = first
    third = DeclinedError(7, reason="no")
    third.__cause__ = second
    ring = ValueError("ring")
    ring.__cause__ = ring

    found = again(third)

    assert isinstance(found.__cause__, TextFromTextError)
    assert isinstance(found.__cause__.__cause__, ValueError)
    assert str(found.__cause__.__cause__) == "first"
    assert found.__cause__.__cause__.__cause__ is None
    assert isinstance(again(ring), ValueError)


def test_an_exception_group_comes_back_with_its_members() -> None:
    inner = ExceptionGroup("inner", [DeclinedError(7, reason="no")])
    found = again(ExceptionGroup("outer", [ValueError("a"), inner]))

    caught: list[str] = []
    try:
        raise found
    except* ValueError as group:
        caught += [str(error) for error in group.exceptions]
    except* DeclinedError as group:
        [nested] = group.exceptions
        assert isinstance(nested, ExceptionGroup)
        caught += [str(error) for error in nested.exceptions]
    assert caught == ["a", "order 7 is declined: no"]


def test_notes_come_back_and_secrets_do_not() -> None:
    error = ValueError("api_key=tiger-4711")
    error.add_note("while charging")
    error.url = "https://ann:hunter2@example.org/?token=abc"  # type: ignore[attr-defined]  # as libraries do

    kept = failures.capture(raised(error)).to_bytes()
    found = again(error)

    assert found.__notes__ == ["while charging"]
    for secret in (b"tiger-4711", b"hunter2", b"abc"):
        assert secret not in kept


def test_the_traceback_of_the_first_time_is_kept_through_replays() -> None:
    found = again(ValueError("x"))
    kept = failures.capture(found)

    assert "raise error" in kept.traceback
