"""How every process of a worker learns that the worker shuts down: a file appears.

Pool children, forked or spawned, are told nothing by Celery before they are ended. The main process names a file in the
environment before it has children, and makes it in the signal handler of a warm or soft shutdown. While a process holds
attempts it looks for the file ten times a second, and then asks each to stop: a body goes on to its next call of the
context, and its run goes to another worker from there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import UUID

from umt_durable.database import after_fork
from umt_durable.services.keeper import abort
from umt_durable.services.lease import Lease

VARIABLE: Final = "UMT_DURABLE_LEAVING"
LOOK_SECONDS: Final = 0.1

_main: int | None = None
"""The process that announced: only it can say that the worker leaves."""


def announce(node: UUID) -> None:
    """Name the file of a main process where its children find the name. The file does not exist yet."""
    global _main
    _main = os.getpid()
    os.environ[VARIABLE] = str(Path(tempfile.gettempdir()) / f"umt-durable-{node.hex}.leaving")


def leave() -> None:
    """Say that this worker shuts down. Safe in a signal handler; repeating it changes nothing.

    Keeps: a pool child says nothing. One that is ended as it begins, by autoscaling or `pool_shrink`, still has the
    signal handler of the main process.
    """
    path = os.environ.get(VARIABLE)
    if path and os.getpid() == _main:
        with contextlib.suppress(OSError):  # a full disk: bodies then run to their end, as they would without us
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def is_leaving() -> bool:
    """Say whether the worker of this process shuts down."""
    path = os.environ.get(VARIABLE)
    return path is not None and os.path.exists(path)


def forget() -> None:
    """Remove the file: no process of this worker is left."""
    path = os.environ.pop(VARIABLE, None)
    if path is not None:
        Path(path).unlink(missing_ok=True)


class Watch:
    """Asks the attempts of this process to stop once its worker shuts down. Costs nothing while there are none."""

    def __init__(self, lease: Callable[[], Lease]) -> None:
        self._lease = lease
        self._begin_anew()
        after_fork(self._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._held = 0
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self) -> Iterator[None]:
        """Watch while a delivery is executed. Outside a worker it changes nothing."""
        if VARIABLE not in os.environ:
            yield
            return
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._held += change
            if not self._held:
                self._busy.clear()
                return
            self._busy.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="umt-durable-leaving", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._busy.wait()
            if is_leaving():
                for held in self._lease().attempts():
                    abort(held, "shutdown")
            pause.wait(LOOK_SECONDS)
