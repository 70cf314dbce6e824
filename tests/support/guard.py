"""Nothing that a test started outlives the tests, whatever ends them.

Every process started by the tests carries the token of its test session in its environment, and so do its children,
daemons included. At the end of the session whatever still carries it is a stray: it is reported and killed. Should the
test process itself be killed, its watchdog (this file run as a program) sees the pipe close and does the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import psutil

TOKEN = "UMT_TEST_SESSION"
ROOT = Path(__file__).resolve().parents[2]

_never = Event()


class Process(Protocol):
    """What the tests use of a process they have started, whether by `spawn` or by the nursery."""

    pid: int

    @property
    def returncode(self) -> Any: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@cache
def token() -> str:
    """Return the token of this test process; from the first call on its children inherit it."""
    value = f"{os.getpid()}-{uuid.uuid4().hex}"
    os.environ[TOKEN] = value
    return value


@cache
def _watchdog() -> subprocess.Popen[bytes]:
    environment = {**os.environ, TOKEN: ""}
    return subprocess.Popen(
        [sys.executable, __file__, token(), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


@cache
def _folders() -> set[str]:
    return set()


def watch(folder: Path | None = None) -> None:
    """Have the watchdog kill this session's processes should this process die.

    `folder` is a private folder of a server whose command line names it: some servers clear their environment.
    """
    pipe = _watchdog().stdin
    if folder is None or str(folder) in _folders():
        return
    _folders().add(str(folder))
    assert pipe is not None
    pipe.write(f"{folder}\n".encode())
    pipe.flush()


def end_watch() -> None:
    """End the watchdog of this process, which then kills what is left of the session."""
    if _watchdog.cache_info().currsize:
        process = _watchdog()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=30)


def strays(of: str | None = None, folders: Iterable[str] | None = None) -> list[psutil.Process]:
    """Return the live processes that belong to a test session, this process left out."""
    mark = of or token()
    places = tuple(_folders() if folders is None else folders)
    return [
        process for process in psutil.process_iter() if process.pid != os.getpid() and _belongs(process, mark, places)
    ]


def _belongs(process: psutil.Process, mark: str, places: tuple[str, ...]) -> bool:
    try:
        if not lives(process):
            return False
        if process.environ().get(TOKEN) == mark:
            return True
        return any(place in word for word in process.cmdline() for place in places)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def describe(process: psutil.Process) -> str:
    """Return the pid and the start of the command line of a process, live or not."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return f"{process.pid} (ended)"


def lives(process: psutil.Process) -> bool:
    """Return whether a process still runs. A zombie does not: nobody reaps orphans in a plain container."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_there(pid: int) -> bool:
    """Return whether there is a process of that number which still runs."""
    try:
        return lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def wait_gone(processes: Iterable[psutil.Process], *, timeout: float = 10.0) -> list[psutil.Process]:
    """Wait for processes to end and return those that still run when the time is over."""
    deadline = time.monotonic() + timeout
    left = [process for process in processes if lives(process)]
    while left and time.monotonic() < deadline:
        _never.wait(0.01)
        left = [process for process in left if lives(process)]
    return left


def kill_all(processes: Iterable[psutil.Process]) -> list[str]:
    """Kill processes by pid and return their descriptions once they are gone."""
    doomed = [process for process in processes if lives(process)]
    told = [describe(process) for process in doomed]
    for process in doomed:
        _to(process.kill)
    wait_gone(doomed)
    return told


def _to(act: Callable[[], object]) -> None:
    """Do something to a process unless it has just ended."""
    try:
        act()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants, parents first; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def clean_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a process of the tests: this one's without any setting of the product or of Celery."""
    token()
    watch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DURABLE_", "CELERY_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(extra or {})}


def spawn(argv: list[str], log: Path, env: dict[str, str], *, cwd: Path = ROOT) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, both outputs appended to a log file."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=cwd, start_new_session=True
        )


def end(process: Process, *, grace: float = 10.0) -> None:
    """End a process started by `spawn` and all its descendants: SIGTERM, then SIGKILL after `grace` seconds."""
    family = tree(process.pid)
    for relative in family:
        _to(relative.resume)
    if process.poll() is None and grace > 0:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace)
    family += [relative for relative in tree(process.pid) if relative not in family]
    kill_all(family)
    process.wait(timeout=10)


def _guard(mark: str, ward: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folders = [line.decode().strip() for line in sys.stdin.buffer]
    for _ in range(5):
        left = [process for process in strays(mark, folders) if process.pid != ward]
        if not left:
            return
        kill_all(left)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
