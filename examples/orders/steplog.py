"""A diary of step bodies, written by the processes that run them and read by the proof.

The journal in Postgres says which steps *completed*. This file says which bodies were *entered*: one line of JSON as a
body begins, on disk before its first instruction, and one as it ends. A body that was killed has a first line only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

VARIABLE: Final = "SHOP_STEP_LOG"

Event = Literal["enter", "leave", "fail"]


@dataclass(frozen=True)
class Entry:
    """One line. `key` is the step's idempotency key, `fence` numbers the grant under which the body was entered."""

    at: float
    event: Event
    run: str
    order: str
    step: str
    key: str
    fence: int
    pid: int

    @classmethod
    def parse(cls, line: bytes) -> Entry:
        """Read one line."""
        return cls(**json.loads(line))


def read(path: Path) -> list[Entry]:
    """Read a whole diary; it is empty where nothing was written yet."""
    return [Entry.parse(line) for line in Tail(path).lines()]


@contextmanager
def recorded(step: str, order: str, *, run: str, fence: int, key: str) -> Iterator[None]:
    """Put a line into the diary before the block and one after it; without a diary (no variable) do nothing."""
    path = os.environ.get(VARIABLE)
    if path is None:
        yield
        return

    def write(event: Event) -> None:
        append(Path(path), Entry(time.time(), event, run, order, step, key, fence, os.getpid()))

    write("enter")
    try:
        yield
    except Exception:
        write("fail")
        raise
    write("leave")


def append(path: Path, entry: Entry) -> None:
    """Add one line, on disk when this returns. Lines of several processes never mix: each is one write at the end."""
    line = json.dumps(asdict(entry)).encode() + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


class Tail:
    """Read a file of lines while others append to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[bytes]:
        """Give the whole lines that were added since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        return content[:whole].splitlines()


class Follower:
    """Read a diary while it grows, and know which bodies are being executed at this moment."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.inside: dict[int, Entry] = {}
        self.entered = 0

    def advance(self) -> None:
        """Take in what was written since the last call."""
        for entry in map(Entry.parse, self._tail.lines()):
            if entry.event == "enter":
                self.inside[entry.pid] = entry
                self.entered += 1
            else:
                self.inside.pop(entry.pid, None)

    def forget(self, pid: int) -> Entry | None:
        """Take a dead process out, with the body that died in it."""
        return self.inside.pop(pid, None)
