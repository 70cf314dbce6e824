"""Exceptions in the journal: what is kept of them, and how they are raised again.

Only classes that the code registered are rebuilt; nothing is imported or looked up by a name that was stored (I27).
"""

from __future__ import annotations

import builtins
import json
import traceback
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from umt_durable import errors as own_errors
from umt_durable.errors import StepFailedError
from umt_durable.redaction import redact_text

MAX_TEXT, MAX_TRACEBACK = 4_000, 16_000
_LARGEST = 2**63


@dataclass(frozen=True, slots=True)
class Failure:
    """What is kept of an exception. All texts are redacted.

    Shape: `args` are the exception's arguments when they are plain values, else its text alone.
    """

    type: str
    module: str
    message: str
    args: tuple[Any, ...]
    traceback: str
    step: str | None = None

    def to_bytes(self) -> bytes:
        """Return the failure as JSON."""
        return json.dumps(asdict(self), ensure_ascii=True).encode()

    @property
    def summary(self) -> str:
        """Return one line for lists and logs."""
        return f"{self.type}: {self.message}".splitlines()[0][:500] if self.message else self.type


def from_bytes(data: bytes) -> Failure:
    """Read a stored failure."""
    fields = json.loads(data)
    return Failure(**{**fields, "args": tuple(fields["args"])})


def capture(error: BaseException, *, step: str | None = None) -> Failure:
    """Keep what can be kept of an exception."""
    message = _clean(_text(error))[:MAX_TEXT]
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    args = error.args if all(_is_plain(arg) for arg in error.args) else (message,)
    return Failure(
        type=_clean(type(error).__name__),
        module=_clean(type(error).__module__),
        message=message,
        args=tuple(_clean(arg)[:MAX_TEXT] if isinstance(arg, str) else arg for arg in args),
        traceback=_clean("".join(lines))[-MAX_TRACEBACK:],
        step=step,
    )


class ExceptionRegistry:
    """The exception classes that a stored failure may be raised as: builtins, ours, and those the code named."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, str], type[Exception]] = {}
        for namespace in (builtins, own_errors):
            for value in vars(namespace).values():
                if isinstance(value, type) and issubclass(value, Exception):
                    self.add(value)

    def add(self, *classes: type[BaseException]) -> None:
        """Allow classes to be raised again from the journal."""
        for cls in classes:
            if issubclass(cls, Exception):
                self._classes[cls.__module__, cls.__qualname__.rpartition(".")[2]] = cls

    def rebuild(self, failure: Failure) -> Exception:
        """Return the exception a failure is raised as: its own type if registered, else StepFailedError.

        Keeps: the first pass and every replay raise the same, since both come through here.
        """
        cls = self._classes.get((failure.module, failure.type))
        error: Exception | None = None
        if cls is not None:
            try:
                error = cls(*failure.args)
            except Exception:  # noqa: BLE001 - a constructor with other parameters; the class still matters to `except`
                error = _bare(cls, failure)
        if error is None:
            error = StepFailedError(failure.step or "the step", failure.type, failure.message)
        return mark_recorded(error)


E = TypeVar("E", bound=Exception)


def mark_recorded(error: E) -> E:
    """Note on an exception that it stands in the journal, for `is_recorded`."""
    # Past the class's own __setattr__: that of a frozen dataclass refuses.
    BaseException.__setattr__(error, "__umt_recorded__", True)
    return error


def is_recorded(error: BaseException | None) -> bool:
    """Say whether an exception comes from a failed step of the journal, directly or as a cause.

    Running the body again would meet the same record, so such an error is final for the run.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if getattr(error, "__umt_recorded__", False):
            return True
        seen.add(id(error))
        # Not the context: an error raised while a recorded one was being handled is new, and may be tried again.
        error = error.__cause__
    return False


def _bare(cls: type[Exception], failure: Failure) -> Exception | None:
    try:
        error = cls.__new__(cls)
        BaseException.__setattr__(error, "args", failure.args)
    except TypeError:
        return None
    return error


def _clean(text: str) -> str:
    """Return a text without secrets, in a form that any column and any JSON can hold."""
    return redact_text(text).replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _is_plain(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return -_LARGEST <= value < _LARGEST
    return value is None or isinstance(value, str | bool | float)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a foreign __str__ may raise anything; its failure must still be recorded
        return f"<{type(error).__name__} without a readable text>"
