"""A log of every entry into a step's body, written by the bodies themselves.

Each entry is one line, appended with one write and forced to disk before the body goes on, so that a process killed in
the middle has said what it entered. The worker processes find the file through `UMT_TEST_BODY_LOG`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

VARIABLE = "UMT_TEST_BODY_LOG"


@dataclass(frozen=True)
class Entry:
    """One line of the log.

    Shape: `mark` is `begin`, `end`, or a word of the body's own; `fence` is 0 where the body knows no run.
    Units: `at` is in seconds of the clock that goes on while the machine sleeps; it compares across processes.
    """

    run: str
    step: str
    mark: str
    fence: int
    attempt: int
    pid: int
    at: float


def clock() -> float:
    """Return seconds of CLOCK_BOOTTIME, or of the monotonic clock where there is none."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def write(step: str, mark: str, *, run: str = "", fence: int = 0, attempt: int = 0) -> None:
    """Append one entry and return once it is on disk. Does nothing where no log is set."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    line = json.dumps(asdict(Entry(run, step, mark, fence, attempt, os.getpid(), clock()))) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def body(step: str) -> Iterator[None]:
    """Log the entry into the body of a step of the current run, and its end unless it raises or dies."""
    from umt_durable import current_context  # imported late: a test process reads logs without it

    ctx = current_context()
    log = partial(write, step, run=ctx.run_id, fence=ctx.attempt_token.fence, attempt=ctx.attempt)
    log("begin")
    yield
    log("end")


class BodyLog:
    """The reader's side of a log. A file that does not exist yet is an empty log."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def from_environment(cls) -> BodyLog:
        """Return the log that this process writes to."""
        return cls(Path(os.environ[VARIABLE]))

    def entries(self, run: str | None = None, step: str | None = None, mark: str | None = None) -> list[Entry]:
        """Return the entries in the order they were written, of one run, step or mark when given."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        found = (Entry(**json.loads(line)) for line in lines)
        return [
            one for one in found if run in (None, one.run) and step in (None, one.step) and mark in (None, one.mark)
        ]

    def count(self, run: str | None = None, step: str | None = None, mark: str = "begin") -> int:
        """Return how often a body was entered."""
        return len(self.entries(run, step, mark))

    def counts(self, run: str) -> dict[str, int]:
        """Return how often each step of a run was entered."""
        found: dict[str, int] = {}
        for entry in self.entries(run, mark="begin"):
            found[entry.step] = found.get(entry.step, 0) + 1
        return found

    def ended(self, run: str) -> set[str]:
        """Return the steps of a run whose body came to its end at least once."""
        return {entry.step for entry in self.entries(run, mark="end")}

    def pids(self, run: str | None = None) -> Sequence[int]:
        """Return the processes that entered a body, in the order of their first entry."""
        return list(dict.fromkeys(entry.pid for entry in self.entries(run, mark="begin")))

    def text(self) -> str:
        """Return the whole log as it stands, for a failure report."""
        return self.path.read_text() if self.path.exists() else "(no body was entered)"
