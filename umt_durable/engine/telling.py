"""What a body says of how far it is: for people who look, and for the next execution of the same step.

Saying it costs no round trip. It is kept in this process, and written by a thread for that, about once a second; what
is left then is written before the attempt gives the run up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from umt_durable import codec, native, texts
from umt_durable.errors import DefinitionError
from umt_durable.payloads import TEXT
from umt_durable.records import Note
from umt_durable.redaction import redact_text

RUN = ""
"""The key of what is said of the run itself."""


class Telling:
    """What the bodies of one attempt have said. Called from any thread; the lock is never held over anything slow."""

    def __init__(self, on_said: Callable[[], object] = lambda: None) -> None:
        """Keep what is said; `on_said` is called after each time."""
        self._on_said = on_said
        self._lock = native.lock()
        self._turn = 0
        self._said: dict[str, Note] = {}
        self._unwritten: set[str] = set()

    def say(self, key: str, **said: Any) -> None:
        """Keep what is said under the key of a step, or of the run, beside what was said there before."""
        with self._lock:
            self._turn += 1
            self._said[key] = replace(self._said.get(key) or Note(key, 0), turn=self._turn, **said)
            self._unwritten.add(key)
        self._on_said()

    def last(self, key: str) -> bytes | None:
        """Return what this attempt was given by its last heartbeat under a key."""
        said = self._said.get(key)
        return None if said is None else said.payload

    def unwritten(self) -> list[Note]:
        """Return what was said since it was written last."""
        with self._lock:
            return [self._said[key] for key in sorted(self._unwritten)]

    def wrote(self, notes: Sequence[Note]) -> None:
        """Take note that these were written; what was said meanwhile is not."""
        with self._lock:
            self._unwritten -= {note.key for note in notes if self._said.get(note.key) is note}

    def forget(self, *keys: str) -> None:
        """Drop what was said in steps whose outcomes are recorded now: nobody will go on from there."""
        with self._lock:
            for key in keys:
                self._said.pop(key, None)
                self._unwritten.discard(key)


def status_text(text: object) -> str:
    """Return a status as it is kept, without secrets; empty for none.

    Errors: DefinitionError for what is no text of at most 255 characters.
    """
    texts.check("status", text, least=0)
    kept = redact_text(str(text or ""))[: texts.LONGEST]
    return f" {kept}" if kept.startswith(TEXT) else kept  # or a reader would take it for a sealed one


def amounts(done: object, total: object) -> dict[str, float | None]:
    """Return how much is done, and of how much, as they are kept.

    Errors: DefinitionError for what is no number, or is below zero.
    """
    return {"done": _amount("done", done), "total": None if total is None else _amount("total", total)}


def _amount(field: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            amount = float(value)
        except OverflowError:
            amount = math.inf
        if 0 <= amount < math.inf:
            return amount
    raise DefinitionError(f"progress: {field} must be a number from 0 on, not {value!r:.100}")


def heartbeat_payload(progress: object) -> bytes:
    """Return what a heartbeat was given, as it is stored.

    Errors: EncodingError for a value that would come back different.
    """
    return codec.encode(progress, codec.EMPTY, where="the progress of a heartbeat").data
