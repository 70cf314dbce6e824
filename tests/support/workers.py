"""Real processes of the product: Celery workers and `umt-durable serve`, started, watched, stopped and killed.

Readiness is read off the process's own output. Whatever a test does, leaving the `with` block ends the whole family of
the process, and a failing test shows the end of its log.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import psutil

from tests.support import guard, nursery
from tests.support.wait import patience, until

Pool = Literal["prefork", "threads", "solo", "gevent"]
POOLS: tuple[Pool, ...] = ("prefork", "threads", "solo")

APP = "tests.support.apps:app"
_TAIL = 6000

RUNNING: list[Running] = []
"""The processes that were started and not closed yet; a failing test shows their logs."""


class Running:
    """A process of the tests from its start until its whole family is gone.

    Shape: `env` holds what is added to a clean environment; `ready` is the text in the output that says it works.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], name: str, ready: str, ready_timeout: float
    ) -> None:
        self.argv = list(argv)
        self.env = dict(env)
        self.name = name
        self._ready = ready
        self._ready_timeout = ready_timeout
        self._folder = Path(tempfile.mkdtemp(prefix="umt-process-"))
        self.log = self._folder / f"{name}.log"
        self._process: guard.Process | None = None
        self._mark = 0
        self._family: list[psutil.Process] = []

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self, *, wait: bool = True) -> Self:
        """Start the process, and by default return once it says that it is ready."""
        assert self._process is None or self._process.poll() is not None, f"{self.name} runs already"
        self._mark = len(self.text())
        if self not in RUNNING:
            RUNNING.append(self)
        self._process = self._spawn(guard.clean_environment(self.env))
        if wait:
            self.wait_ready()
        return self

    def _spawn(self, env: dict[str, str]) -> guard.Process:
        return guard.spawn(self.argv, self.log, env)

    def wait_ready(self) -> None:
        """Return once the output of this start says that the process is ready; AssertionError when it ends before."""

        def look() -> bool:
            assert self.alive, (
                f"{self.name} ended with status {self.process.returncode} before it was ready\n{self.tail()}"
            )
            return self._ready in self.text()[self._mark :]

        until(look, timeout=self._ready_timeout, what=f"{self.name} to be ready", diagnose=self.tail)

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"--- {self.name} ---\n{self.tail()}")
        self.close()

    def close(self, *, grace: float = 0.0) -> None:
        """End the process and everything it started; repeating it changes nothing.

        Units: `grace` is how many seconds a warm shutdown may take before SIGKILL. A pool needs some three, so by
        default it is given none: a test that is about shutting down asks for it.
        """
        if self._process is not None:
            self._remember()
            guard.end(self._process, grace=grace)
            guard.kill_all(self._family)
        if self in RUNNING:
            RUNNING.remove(self)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def process(self) -> guard.Process:
        """Return the process object; AssertionError before the first start."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def pid(self) -> int:
        """Return the id of the main process."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Return whether the main process runs."""
        return self.process.poll() is None

    def text(self) -> str:
        """Return all the process has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        """Return the end of the output, for a failure report."""
        return self.text()[-_TAIL:]

    def wait_for(self, text: str, *, times: int = 1, timeout: float = 20.0) -> None:
        """Return once the output holds a text so many times."""
        until(
            lambda: self.text().count(text) >= times,
            timeout=timeout,
            what=f"{self.name} to write {text!r}",
            diagnose=self.tail,
        )

    # -- what is done to it ---------------------------------------------------------------------------------------

    def kill9(self) -> None:
        """Kill the main process with SIGKILL and return once it and its children are gone."""
        self._remember()
        self.process.kill()
        self.process.wait(timeout=10)
        # Pool children end by themselves when their parent dies (PDEATHSIG), where the system has that.
        guard.kill_all(guard.wait_gone(self._family, timeout=2))

    def term(self) -> None:
        """Ask for a warm shutdown (SIGTERM) and return at once."""
        self.process.send_signal(signal.SIGTERM)

    def quit(self) -> None:
        """Ask for a cold shutdown (SIGQUIT) and return at once."""
        self.process.send_signal(signal.SIGQUIT)

    def wait(self, *, timeout: float = 30.0) -> int:
        """Return the exit status once the main process has ended."""
        try:
            return self.process.wait(timeout=patience(timeout))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end in {timeout} s\n{self.tail()}") from None

    def stop(self) -> None:
        """Freeze the process and its children (SIGSTOP)."""
        for one in guard.tree(self.pid):
            one.suspend()

    def cont(self) -> None:
        """Let a frozen process and its children go on (SIGCONT)."""
        for one in guard.tree(self.pid):
            one.resume()

    def restart(self) -> None:
        """Shut down warmly, then start anew and return once it is ready."""
        self.term()
        self.wait()
        self.start()

    def _remember(self) -> None:
        self._family = guard.tree(self.pid)[1:] or self._family


class Worker(Running):
    """A Celery worker: `celery -A APP worker` with a node name of its own.

    Shape: `queues` empty means the app's own; `log_level` must be INFO or lower, readiness is an INFO line. Without
    `mingle` the worker does not ask its neighbours for their state first, which takes a second.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str],
        app: str = APP,
        pool: Pool = "prefork",
        concurrency: int = 2,
        queues: Sequence[str] = (),
        mingle: bool = False,
        log_level: str = "INFO",
        name: str = "worker",
        options: Sequence[str] = (),
        ready_timeout: float = 60.0,
    ) -> None:
        self.pool = pool
        self.node = f"{name}-{uuid.uuid4().hex[:8]}@localhost"
        given = ["-A", app, "worker", f"--pool={pool}", f"--concurrency={concurrency}"]
        given += [f"--hostname={self.node}", f"--loglevel={log_level}"]
        given += [f"--queues={','.join(queues)}"] if queues else []
        given += [] if mingle else ["--without-mingle"]
        self._given = [*given, *options]
        argv = [sys.executable, "-m", "tests.support.program", *self._given]
        super().__init__(argv, env=env, name=name, ready=f"{self.node} ready.", ready_timeout=ready_timeout)

    def _spawn(self, env: dict[str, str]) -> guard.Process:
        """Start the worker; forked, where that makes no difference to what it is."""
        if self.pool == "gevent" or "--pool-start-method=spawn" in self._given or not nursery.available():
            return super()._spawn(env)
        return nursery.spawn(self._given, self.log, env)

    def children(self) -> list[psutil.Process]:
        """Return the live pool children, oldest first; none where the pool has no processes."""
        if self.pool != "prefork":
            return []
        found = [one for one in guard.tree(self.pid)[1:] if guard.lives(one) and one.ppid() == self.pid]
        return sorted(found, key=lambda one: (one.create_time(), one.pid))

    def kill_child(self, pid: int | None = None) -> int:
        """Kill one pool child with SIGKILL, the oldest when none is named; return its id once it is gone."""
        child = next(one for one in self.children() if pid in (None, one.pid))
        child.kill()
        guard.wait_gone([child])
        return int(child.pid)

    def stop_child(self, pid: int) -> None:
        """Freeze one pool child (SIGSTOP)."""
        next(one for one in self.children() if one.pid == pid).suspend()

    def cont_child(self, pid: int) -> None:
        """Let a frozen pool child go on (SIGCONT)."""
        next(one for one in self.children() if one.pid == pid).resume()


class Serve(Running):
    """`umt-durable serve --role ROLE` for an app, of a role that stays: not `migrate`."""

    def __init__(
        self,
        role: str,
        *,
        env: Mapping[str, str],
        app: str = APP,
        options: Sequence[str] = (),
        ready: str = " ready · ",
        ready_timeout: float = 30.0,
    ) -> None:
        program = [sys.executable, "-c", "from umt_durable.bridge.cli import main; main()"]
        argv = [*program, "-A", app, "serve", "--role", role, *options]
        super().__init__(argv, env=env, name=f"serve-{role}", ready=ready, ready_timeout=ready_timeout)
