"""Workers forked off a process that has imported Celery and the libraries below it already.

Most of what the start of a worker costs is the import of other people's code. This file run as a program, the nursery,
imports that once in a session, and then forks for each worker that is asked for. The product itself, the app and its
tasks are imported by each worker; so are settings read, signals set and threads started. Whoever needs the process that
a user starts (another pool's patches, another start method, the command itself) uses `guard.spawn`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from tests.support import guard, program
from tests.support.wait import until

LIBRARIES: Final = (
    *("celery.bin.celery", "kombu.transport.redis", "kombu.transport.pyamqp"),
    *("psycopg", "psycopg.types.json", "psycopg.types.array", "pydantic", "click", "psutil"),
)
"""What a worker of any test imports, of other people's code.

Of Celery only what it has imported itself when it comes to the app: a tracer that an app begins with patches what is
imported after it.
"""

_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_ANSWER_SECONDS: Final = 60.0
_MOST_BYTES: Final = 1 << 20


@dataclass
class Forked:
    """A forked worker, as `subprocess.Popen` shows a process: it is a child of this process, too."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, once the process has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; subprocess.TimeoutExpired when the process has not ended by then."""
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            finally:
                os.close(ended)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def spawn(arguments: list[str], log: Path, env: dict[str, str], *, cwd: Path = guard.ROOT) -> Forked:
    """Start `celery` with arguments in a session of its own, both outputs appended to a log file."""
    ask = {"arguments": arguments, "log": str(log), "env": env, "cwd": str(cwd)}
    asking, _ = _nursery()
    with _adopting():
        asking.sendall(json.dumps(ask).encode())
        born = psutil.Process(json.loads(asking.recv(_MOST_BYTES))["pid"])
        until(lambda: born.ppid() == os.getpid(), what="a forked worker to become a child of this process")
    return Forked(born.pid)


def close() -> None:
    """End the nursery of this process, if there is one."""
    if _nursery.cache_info().currsize:
        asking, process = _nursery()
        asking.close()
        process.wait(timeout=30)
        _nursery.cache_clear()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Have descendants whose parents end become children of this process, whose exit status it can read."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


@cache
def _nursery() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the nursery of this process; it ends when the socket by which it is asked is closed."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nursery", str(its.fileno())],
            stdin=subprocess.DEVNULL,
            env=guard.clean_environment(),
            cwd=guard.ROOT,
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
    ours.settimeout(_ANSWER_SECONDS)
    return ours, process


def available() -> bool:
    """Say whether this system can do it: Linux."""
    return sys.platform == "linux"


# -- the nursery itself -----------------------------------------------------------------------------------------------


def main() -> None:
    """Import what workers need, then fork for each that is asked for; in a fork, be that worker."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    program.leave_commands_out()
    for name in LIBRARIES:
        importlib.import_module(name)
    assert not any(name.startswith("umt_durable") for name in sys.modules), "each worker imports the product itself"
    while message := asked.recv(_MOST_BYTES):
        ask = json.loads(message)
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid:
                asked.sendall(json.dumps({"pid": pid}).encode())
                os._exit(0)
            asked.close()
            _be(ask)
            return
        os.waitpid(middle, 0)


def _be(ask: dict[str, Any]) -> None:
    """Be the worker that was asked for, in a session of its own; returns, or is left, as the program is."""
    os.setsid()
    output = os.open(ask["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.chdir(ask["cwd"])
    os.environ.clear()
    os.environ.update(ask["env"])
    added = ask["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [place for place in added if place and place not in sys.path]
    sys.argv = ["celery", *ask["arguments"]]
    program.main()


if __name__ == "__main__":
    main()
