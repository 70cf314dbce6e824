"""pytest-celery's nodes on processes of this machine, where it expects containers.

A node of the plug-in asks little of its container: id, name, status, `celeryconfig`, `ready`, `logs`, `kill`, `reload`,
`restart`, `exec_run`, `teardown`. What follows gives just that for a worker process and for the private brokers of the
tests, so that tests written in the plug-in's vocabulary need no engine.
"""

from __future__ import annotations

import shlex
import signal as signals
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import celery

from tests.support import guard
from tests.support.brokers import Broker
from tests.support.wait import patience
from tests.support.workers import Running

RUNNING, EXITED = "running", "exited"


class ServerHandle:
    """A broker or result backend that the tests run already, in the place of its container."""

    def __init__(self, name: str, url: str, broker: Broker | None = None) -> None:
        self.id = uuid.uuid4().hex
        self.name = name
        self.status = RUNNING
        self._url = url
        self._broker = broker

    @property
    def celeryconfig(self) -> dict[str, str]:
        """Return where it is, for workers and for the test alike."""
        return {"url": self._url, "host_url": self._url}

    def ready(self) -> bool:
        """Say that it answers: the fixtures of the tests give nothing else away."""
        return True

    def logs(self) -> str:
        """Return nothing: the server writes for all tests at once."""
        return ""

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Make the broker unreachable, whatever the signal is."""
        assert self._broker is not None, f"{self.name} is shared and stays"
        self._broker.stop()
        self.status = EXITED

    def reload(self) -> None:
        """Look at the state again; it is always known."""

    def restart(self, timeout: int = 60) -> None:
        """Have it answer again."""
        assert self._broker is not None, f"{self.name} is shared and stays"
        if self.status == RUNNING:
            self._broker.stop()
        self._broker.start()
        self.status = RUNNING

    def teardown(self) -> None:
        """Leave it to the fixture that gave it."""


class WorkerHandle:
    """A `celery worker` process in a folder of its own, in the place of its container.

    Shape: `content` is what the plug-in puts into the volume of a worker: file names with their text.
    """

    queue = "celery"
    level = "INFO"

    def __init__(
        self, folder: Path, content: Mapping[str, bytes], env: Mapping[str, str], *, name: str = "celery_test_worker"
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"{name}-{self.id[:4]}"
        self._worker_name = name
        self._folder = folder
        for path, text in content.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
        self._env = {**env, "PYTHONPATH": f"{folder}:{guard.ROOT}"}
        argv = [sys.executable, "-m", "celery", "-A", "app", "worker", f"--loglevel={self.level}", "--concurrency=2"]
        argv += ["-n", f"{name}@{self.id[:12]}", "-Q", self.queue, "--without-mingle"]
        self._process = Running(argv, env=self._env, name=self.name, ready="ready.", ready_timeout=60.0)
        self._process.start(wait=False)

    # -- what the plug-in asks of any container -----------------------------------------------------------------------

    @property
    def status(self) -> str:
        """Return whether the process runs, in a container's words."""
        return RUNNING if self._process.alive else EXITED

    @property
    def celeryconfig(self) -> dict[str, str]:
        """Return nothing: other nodes do not reach a worker by a URL."""
        return {}

    def ready(self) -> bool:
        """Return once the worker says that it is ready; AssertionError when it ends before."""
        self._process.wait_ready()
        return True

    def logs(self) -> str:
        """Return all it has written, over its restarts."""
        return self._process.text()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal to the main process, as an engine does to the first one of a container."""
        number = signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal)
        if number is signals.SIGKILL:
            self._process.kill9()
        else:
            self._process.process.send_signal(number)

    def reload(self) -> None:
        """Look at the state again; it is always known."""

    def restart(self, timeout: int = 60) -> None:
        """Shut down warmly where it still runs, then start anew and return once it is ready."""
        if self._process.alive:
            self._process.term()
        self._process.wait(timeout=timeout)
        self._process.start()

    def exec_run(self, command: str) -> tuple[int, bytes]:
        """Run a command beside the worker; return its status and what it wrote."""
        argv = shlex.split(command)
        argv[0] = sys.executable if argv[0] == "python" else argv[0]
        done = subprocess.run(
            argv,
            cwd=self._folder,
            env=guard.clean_environment(dict(self._env)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=patience(60),
        )
        return done.returncode, done.stdout

    def teardown(self) -> None:
        """End the process and everything it started."""
        self._process.close()

    # -- what it asks of a worker's -----------------------------------------------------------------------------------

    def version(self) -> str:
        """Return the version of Celery: that of the tests."""
        return str(celery.__version__)

    def log_level(self) -> str:
        """Return the level of the worker's log."""
        return self.level

    def worker_name(self) -> str:
        """Return the first half of the node's name."""
        return self._worker_name

    def worker_queue(self) -> str:
        """Return the queue it consumes."""
        return self.queue

    # -- what only a process can ---------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Return the id of the main process."""
        return self._process.pid

    def wait(self) -> int:
        """Return the exit status once the main process has ended."""
        return self._process.wait(timeout=60)

    def kill_child(self, pid: int) -> None:
        """Kill one process of the pool with SIGKILL."""
        child = next(one for one in guard.tree(self.pid) if one.pid == pid)
        child.kill()
        guard.wait_gone([child])
