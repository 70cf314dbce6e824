"""Waiting for something to become true, and saying what was awaited when it does not.

Tests never sleep: they wait for a row, a file, a log line or a process through `until`. Time-outs here are limits of
patience, not assertions of speed; `UMT_TEST_TIMEOUT_FACTOR` multiplies all of them on a slow or loaded machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.05
_never = Event()


def patience(seconds: float) -> float:
    """Return a time-out multiplied by the factor of this machine."""
    return seconds * float(os.environ.get("UMT_TEST_TIMEOUT_FACTOR", "1"))


def until(
    condition: Callable[[], T],
    *,
    timeout: float = 10.0,
    what: str,
    diagnose: Callable[[], str] | None = None,
) -> T:
    """Return the first truthy value of a condition.

    Units: `timeout` is in seconds, before the factor of this machine.
    Errors: AssertionError naming `what`, the last value seen, and the text of `diagnose`, when the time is over.
    An error raised by the condition is the test's own and is passed on at once.
    """
    limit = patience(timeout)
    started = time.monotonic()
    pause = _FIRST_PAUSE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() - started >= limit:
            raise AssertionError(_report(what, limit, value, diagnose))
        _never.wait(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _report(what: str, limit: float, value: object, diagnose: Callable[[], str] | None) -> str:
    lines = [f"waited {limit:.1f} s for {what}; the last value was {value!r}"]
    if diagnose is not None:
        lines.append(diagnose())
    return "\n".join(lines)


def wait_for_row(
    conn: psycopg.Connection[Any],
    query: str,
    params: Sequence[object] | dict[str, object] | None = None,
    *,
    timeout: float = 10.0,
    what: str | None = None,
    diagnose: Callable[[], str] | None = None,
) -> tuple[Any, ...]:
    """Return the first row that a query gives, asking again until there is one.

    The connection must be in autocommit: inside one REPEATABLE READ transaction nothing ever changes.
    """

    def look() -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = conn.execute(query.encode(), params).fetchone()
        return row

    row = until(look, timeout=timeout, what=what or f"a row of {query!r} with {params!r}", diagnose=diagnose)
    assert row is not None
    return row


def wait_for_value(
    conn: psycopg.Connection[Any],
    query: str,
    expected: object,
    params: Sequence[object] | dict[str, object] | None = None,
    *,
    timeout: float = 10.0,
    diagnose: Callable[[], str] | None = None,
) -> None:
    """Return once the first column of a query's first row equals a value; the error shows the last one seen."""
    seen: list[object] = []

    def look() -> bool:
        row = conn.execute(query.encode(), params).fetchone()
        seen[:] = [row[0] if row else None]
        return bool(seen[0] == expected)

    def explain() -> str:
        more = diagnose() if diagnose is not None else ""
        return f"last seen: {seen[0]!r}\n{more}"

    until(look, timeout=timeout, what=f"{query!r} to give {expected!r}", diagnose=explain)
