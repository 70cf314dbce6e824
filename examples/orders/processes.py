"""The processes that the demo starts, kills and cleans up: Celery workers and the bank. It touches no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from examples.orders import bank

ROOT: Final = Path(__file__).resolve().parents[2]
STOP_SECONDS: Final = 10.0
LAST_LINES: Final = 30


class ProcessError(Exception):
    """A process of the demo did not start, or ended by itself."""


class Worker:
    """One `celery worker` with prefork children, in a process group of its own."""

    def __init__(self, name: str, log: Path, environ: Mapping[str, str], *, children: int = 2) -> None:
        self.name = name
        self.killed = False
        self._asked = False
        self._log = log
        command = [sys.executable, "-m", "celery", "-A", "examples.orders.shop", "worker"]
        command += ["--hostname", f"{name}@%h", "--pool", "prefork", "--concurrency", str(children)]
        command += ["--loglevel", "WARNING", "--without-gossip", "--without-mingle"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environ, "PYTHONPATH": _python_path(environ)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        # Not poll(): that would reap the process, and `kill` needs its number to be still its own.
        return _runs(self.pid)

    def owns(self, pid: int) -> bool:
        """Say whether a process is a live pool child of this worker."""
        try:
            return _runs(pid) and psutil.Process(pid).ppid() == self.pid
        except psutil.NoSuchProcess:
            return False

    def family(self) -> list[int]:
        """Give the pids of main process and children."""
        return [self.pid, *(child.pid for child in _children(self.pid))]

    def kill(self) -> None:
        """Kill main process and children with SIGKILL, at once and together."""
        self.killed = True
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(STOP_SECONDS)

    def ask_to_end(self) -> None:
        """Ask for a warm shutdown, once: what is being executed may finish."""
        if not self._asked:
            self._process.terminate()
        self._asked = True

    def stop(self) -> None:
        """End the worker: politely, and after ten seconds by force. Nothing of it is left."""
        if not self.alive:
            self.kill()
            return
        family = _children(self.pid)
        self.ask_to_end()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    @property
    def ended_by_itself(self) -> bool:
        """Whether the worker is gone although nobody killed it."""
        return not self.killed and not self.alive

    def last_words(self) -> str:
        """Give the lines of its log that say why it ended, or the end of the log where none does."""
        lines = self._log.read_text(errors="replace").splitlines()
        reasons = [line for line in lines if "CRITICAL" in line]
        return reasons[-1] if reasons else "\n".join(lines[-LAST_LINES:])


class BankProcess:
    """The bank, running until `stop`. It also ends by itself when the demo dies."""

    def __init__(self, log: Path, seed: int) -> None:
        command = [sys.executable, bank.__file__, "--log", str(log), "--seed", str(seed), "--until-stdin-closes"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            self.stop()
            raise ProcessError("the bank did not start")

    def stop(self) -> None:
        """End the bank."""
        try:
            self._process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def kill_child(pid: int) -> bool:
    """Kill one process with SIGKILL and wait until it runs no more; False when it had ended by itself."""
    try:
        child = psutil.Process(pid)
        child.kill()
    except psutil.NoSuchProcess:
        return False
    psutil.wait_procs([child], timeout=STOP_SECONDS)
    return True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold off Ctrl-C and SIGTERM for the time of the block: a second Ctrl-C must not leave processes behind."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _python_path(environ: Mapping[str, str]) -> str:
    known = environ.get("PYTHONPATH")
    return str(ROOT) if not known else f"{ROOT}{os.pathsep}{known}"
