"""Exceptions in the journal: what is kept of them, and how they are raised again.

Only classes that the code registered are rebuilt; nothing is imported or looked up by a name that was stored (I27).
"""

from __future__ import annotations

import builtins
import contextlib
import json
import traceback
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from umt_durable import errors as own_errors
from umt_durable.errors import StepFailedError
from umt_durable.payloads import plain
from umt_durable.redaction import redact_text

MAX_SUMMARY, MAX_TEXT, MAX_TRACEBACK = 1_000, 4_000, 16_000
MAX_DEPTH, MAX_MEMBERS = 5, 100
"""How many causes of causes are kept, and how many members of one exception group."""
_LARGEST = 2**63
_TRACEBACK = "__umt_traceback__"


@dataclass(frozen=True, slots=True)
class Failure:
    """What is kept of an exception. All texts are redacted.

    Shape: `args` are the exception's arguments when they are plain values, else its text alone; `state` holds those of
    its attributes that are plain values; `cause` is what it was raised from, `members` are those of an exception group.
    """

    type: str
    module: str
    message: str
    args: tuple[Any, ...]
    traceback: str
    step: str | None = None
    qualname: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cause: Failure | None = None
    members: tuple[Failure, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the failure as JSON."""
        return json.dumps(asdict(self), ensure_ascii=True, default=_bytes_to_json).encode()

    def of_step(self, step: str) -> Failure:
        """Return the same failure as that of a step."""
        return replace(self, step=step)

    @property
    def summary(self) -> str:
        """Return one line for lists and logs."""
        return f"{self.type}: {self.message}".splitlines()[0][:MAX_SUMMARY] if self.message else self.type


def from_bytes(data: bytes) -> Failure:
    """Read a stored failure.

    Errors: PayloadKeyError.
    """
    return _from_fields(json.loads(plain(data)))


def _from_fields(fields: dict[str, Any]) -> Failure:
    cause = fields.get("cause")
    return Failure(
        **{
            **fields,
            "args": tuple(_bytes_from_json(arg) for arg in fields["args"]),
            "notes": tuple(fields.get("notes", ())),
            "cause": None if cause is None else _from_fields(cause),
            "members": tuple(_from_fields(member) for member in fields.get("members", ())),
        }
    )


def decided(text: str) -> Failure:
    """Return the failure that a person says a step has."""
    said = _clean(text)[:MAX_TEXT]
    return Failure("Decision", "", said, (said,), "")


def capture(error: BaseException, *, step: str | None = None) -> Failure:
    """Keep what can be kept of an exception, of what it was raised from, and of the members of a group."""
    return _capture(error, step, MAX_DEPTH)


def _capture(error: BaseException, step: str | None, depth: int) -> Failure:
    message = _clean(_text(error))[:MAX_TEXT]
    given = _constructor_args(error)
    args = given if all(_is_plain(arg) or isinstance(arg, bytes) for arg in given) else (message,)
    members: list[BaseException] = []
    if isinstance(error, BaseExceptionGroup):
        args, members = (error.message,), list(error.exceptions[:MAX_MEMBERS]) if depth else []
    cause = error.__cause__ if depth else None
    return Failure(
        type=_clean(type(error).__name__),
        module=_clean(type(error).__module__),
        message=message,
        args=tuple(_storable(arg) for arg in args),
        traceback=_traceback(error)[-(MAX_TRACEBACK if depth == MAX_DEPTH else MAX_TEXT) :],
        step=step,
        qualname=_clean(type(error).__qualname__),
        state=_plain_state(error),
        notes=tuple(_storable(note) for note in _notes(error)),
        cause=None if cause is None else _capture(cause, None, depth - 1),
        members=tuple(_capture(member, None, depth - 1) for member in members),
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
                self._classes[cls.__module__, cls.__qualname__] = cls

    def rebuild(self, failure: Failure) -> Exception:
        """Return the exception a failure is raised as: its own type if registered, else StepFailedError.

        Keeps: the first pass and every replay raise the same, since both come through here.
        """
        cls = self._classes.get((failure.module, failure.qualname or failure.type))
        error = None if cls is None else self._of_class(cls, failure)
        if error is None:
            where = failure.step or "the step"
            error = StepFailedError(where, failure.type, failure.message, failure.traceback)
        if failure.notes:
            BaseException.__setattr__(error, "__notes__", list(failure.notes))
        if failure.cause is not None:
            BaseException.__setattr__(error, "__cause__", self.rebuild(failure.cause))
        BaseException.__setattr__(error, _TRACEBACK, failure.traceback)
        return mark_recorded(error)

    def _of_class(self, cls: type[Exception], failure: Failure) -> Exception | None:
        if issubclass(cls, ExceptionGroup):
            members = [self.rebuild(member) for member in failure.members]
            return _restored(ExceptionGroup.__new__(cls, failure.args[0], members), failure) if members else None
        try:
            error = cls(*failure.args)
        except Exception:  # noqa: BLE001 - a constructor with other parameters; the class still matters to `except`
            return _bare(cls, failure)
        # A constructor may take what is kept and make something else of it: a text out of a text that it made before.
        same = _constructor_args(error) == failure.args and _plain_state(error) == failure.state
        return error if same and _clean(_text(error))[:MAX_TEXT] == failure.message else _bare(cls, failure) or error


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
    """Make an exception without its constructor, which wants what is not known any more."""
    for arguments in (failure.args, ()):
        with contextlib.suppress(Exception):  # a foreign __new__ may raise anything; then it comes as StepFailedError
            error = cls.__new__(cls, *arguments)
            BaseException.__setattr__(error, "args", failure.args)
            return _restored(error, failure)
    return None


def _restored(error: Exception, failure: Failure) -> Exception:
    # Past the class's own __setattr__: that of a frozen dataclass refuses.
    for name, value in failure.state.items():
        BaseException.__setattr__(error, name, value)
    return error


def _constructor_args(error: BaseException) -> tuple[Any, ...]:
    """Return what an exception can be made of again; an OSError leaves the name of its file out of its `args`."""
    if isinstance(error, OSError) and error.filename is not None and len(error.args) == 2:
        return (*error.args, error.filename)
    return error.args


def _plain_state(error: BaseException) -> dict[str, Any]:
    """Return those attributes of an exception that are plain values, as they are stored."""
    found = getattr(error, "__dict__", {}).items()
    return {_clean(name): _storable(value) for name, value in found if not name.startswith("__") and _is_plain(value)}


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", [])
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _storable(value: Any) -> Any:
    if isinstance(value, bytes):
        return _clean(value.decode("latin-1"))[:MAX_TEXT].encode("latin-1", "replace")
    return _clean(value)[:MAX_TEXT] if isinstance(value, str) else value


def _bytes_to_json(value: object) -> object:
    assert isinstance(value, bytes)
    return {"latin-1": value.decode("latin-1")}


def _bytes_from_json(value: Any) -> Any:
    return value["latin-1"].encode("latin-1") if isinstance(value, dict) else value


def _traceback(error: BaseException) -> str:
    """Return where an exception was raised: of one from the journal, where it was raised first."""
    recorded = getattr(error, _TRACEBACK, None)
    if isinstance(recorded, str) and recorded:
        return recorded
    return _clean("".join(traceback.format_exception(type(error), error, error.__traceback__)))


def _clean(text: str) -> str:
    """Return a text without secrets, in a form that any column and any JSON can hold."""
    return redact_text(text).replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _is_plain(value: object) -> bool:
    if isinstance(value, Enum):  # also a str or an int, but not the one that would be read back
        return False
    if isinstance(value, int) and not isinstance(value, bool):
        return -_LARGEST <= value < _LARGEST
    return value is None or isinstance(value, str | bool | float)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a foreign __str__ may raise anything; its failure must still be recorded
        return f"<{type(error).__name__} without a readable text>"
