"""The load: a process that starts runs, says their facts and keeps a history of what it was promised.

`python -m tools.chaos.load HISTORY RATE SEED` goes on until SIGTERM. It writes to Postgres past the proxy, but the
server's own crashes reach it: a start whose reply is lost is in the history as not acknowledged.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tools.chaos.app import KEYS, NEWS, canary, durable
from umt_durable.errors import DatabaseUnavailableError, UnknownRunError

NEWS_SECONDS = 2.0


@dataclass(frozen=True)
class Start:
    """One line of the history: a run that was asked for, and whether that was acknowledged."""

    run: str
    number: int
    acked: bool


class Load:
    """Starts runs at a rate, tells each one to go a while later, and emits news over and over."""

    def __init__(self, history: Path, rate: float, seed: int) -> None:
        self._history = history
        self._rate = rate
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._due: list[tuple[float, str, int]] = []
        self._news_at = 0.0

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        """Start no more; what was started is still told to go."""
        self._stopping.set()

    def run(self) -> None:
        """Start runs until told to stop, then end once each run was told to go."""
        number = 0
        while not self._stopping.is_set() or self._due:
            if not self._stopping.is_set():
                number += 1
                self._start(number)
            self._tell()
            self._stopping.wait(self._random.expovariate(self._rate))
            if self._stopping.is_set():
                time.sleep(0.01)  # what is left is due by the clock

    def _start(self, number: int) -> None:
        run = f"chaos-{number}"
        try:
            canary.apply_async((number,), task_id=run, ref=str(number))
            acked = True
        except DatabaseUnavailableError:
            acked = False
        with self._history.open("a") as file:
            file.write(json.dumps({"run": run, "number": number, "acked": acked}) + "\n")
        self._due.append((time.monotonic() + self._random.uniform(0, 4), run, number))

    def _tell(self) -> None:
        """Say what is due. A fact that could not be said, or of which that is not known, is said once more."""
        now, left = time.monotonic(), []
        for at, run, number in self._due:
            if at > now or not self._said(run, number):
                left.append((at, run, number))
        self._due = left
        if now >= self._news_at:
            self._news_at = now + NEWS_SECONDS
            for key in range(KEYS):
                emit(key)

    def _said(self, run: str, number: int) -> bool:
        try:
            durable.signal(run, "go", number + 1, dedupe="go")
        except DatabaseUnavailableError:
            return False
        except UnknownRunError:
            return True  # its start was not acknowledged, and it is not there
        return True


def emit(key: int) -> bool:
    """Say the news of a key once, and whether that is known to have worked."""
    try:
        durable.emit(NEWS, str(key), key)
    except DatabaseUnavailableError:
        return False
    return True


def history(path: Path) -> list[Start]:
    """Read what was started."""
    return [Start(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Be the process."""
    load = Load(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    signal.signal(signal.SIGTERM, load.stop)
    print("loading", flush=True)  # how the parent learns of it
    load.run()
    for key in range(KEYS):  # once more, for who was started after the last news
        while not emit(key):
            time.sleep(0.5)
    durable.stop()
    os._exit(0)  # nothing here may hold up the end: the history is written


if __name__ == "__main__":
    main()
