"""The life of one embedded server: started once however many ask, found again by all, stopped by whoever asks.

Whether it is up is decided by a connection that succeeds; whether any process of it still lives, by the lock
`<name>.alive`, which the server inherits when it is started and the kernel drops when its last process is gone. A pid
serves to send a signal only, and only after the process behind it proved to be the server.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Literal, Self

from umt_durable.embedded.binaries import require_extra
from umt_durable.embedded.home import START_SECONDS, Home, can_bind
from umt_durable.embedded.locks import FileLock
from umt_durable.embedded.process import environment, find_server, read_pid, spawn, tail, wait_until
from umt_durable.errors import EmbeddedError

Mode = Literal["fast", "immediate"]

# macOS has no C.UTF-8; there the plain C locale goes together with the encoding UTF8.
LOCALE: Final = "C.UTF-8" if sys.platform == "linux" else "C"
STOP_SECONDS: Final = 30.0
_SOCKET_SECONDS: Final = 5.0
_MAX_LOG_BYTES: Final = 4 * 1024 * 1024


class Server(ABC):
    """A server of one home. As a context manager it is started, and stopped at the end.

    `durable` servers lose nothing at a power cut (Valkey: at most a second); others run faster, for tests.
    `tcp` servers also listen on 127.0.0.1, on a port that stays the same for this home, and ask for a password there.
    """

    name: ClassVar[str]
    program: ClassVar[str]
    pid_file: ClassVar[str]

    def __init__(self, home: Path | Home, *, durable: bool = True, tcp: bool = False) -> None:
        self.home = home if isinstance(home, Home) else Home(home)
        self.durable = durable
        self.tcp = tcp
        self.data = self.home.path / self.name
        self.log = self.home.path / f"{self.name}.log"
        self._served_port: int | None = None
        self._refusal = ""

    @property
    @abstractmethod
    def url(self) -> str:
        """Return the URL of the server: over loopback when `tcp` was asked for, else over its socket."""

    @property
    def pid(self) -> int | None:
        """Return the pid of the running server, or None."""
        return find_server(read_pid(self.data / self.pid_file), self.program, self.data)

    @property
    def answers(self) -> bool:
        """Return whether the server can be connected to now."""
        return self._answers()

    def start(self) -> None:
        """Make the server run and answer; nothing happens when it does already.

        Errors: EmbeddedError with the last lines of the log when it does not come up; when the extra is not installed;
        when it runs already, but without the durability or the port that is asked for.
        """
        with self.home.starting():
            self.start_alone()

    def stop(self, mode: Mode = "fast", *, seconds: float = STOP_SECONDS) -> bool:
        """Make the server be gone, with all its processes; return whether there was any.

        `fast` ends connections and leaves clean data; `immediate` leaves what a crash leaves, and a start recovers.
        Errors: EmbeddedError when it still runs after `seconds`.
        """
        with self.home.starting():
            return self.stop_alone(mode, seconds=seconds)

    def wipe(self) -> None:
        """Remove all data of the stopped server.

        Errors: EmbeddedError when it runs.
        """
        with self.home.starting(), self._alive_lock() as alive:
            if not alive.try_exclusive():
                raise EmbeddedError(f"{self._title} of {self.home.path} runs: stop it before its data is removed")
            if self.data.exists():
                shutil.rmtree(self.data)

    def start_alone(self) -> None:
        """Do what `start` does, for a caller that is inside `home.starting()`."""
        fresh = False
        require_extra()
        if not self._answers():
            alive = self._alive_lock()
            try:
                # Held: a server is starting or stopping, or was killed and has processes that have not noticed yet.
                if not wait_until(lambda: alive.try_exclusive() or self._answers(), self._patience()):
                    raise self._failure("lives but does not answer; `umt-durable down` stops it")
                if fresh := alive.try_exclusive():
                    self._launch(alive)
            finally:
                alive.close()
        if fresh:
            self._await_answer()
        self._settle(fresh=fresh)

    def stop_alone(self, mode: Mode, *, seconds: float = STOP_SECONDS) -> bool:
        """Do what `stop` does, for a caller that is inside `home.starting()`."""
        with self._alive_lock() as alive:
            if alive.try_exclusive():
                self._leave_no_socket()
                return False
            require_extra()
            # A server that is just starting has not written its pid yet.
            wait_until(lambda: alive.try_exclusive() or self.pid is not None, seconds)
            pid = self.pid
            if pid is not None:
                self._signal(pid, mode)
            if not wait_until(alive.try_exclusive, seconds):
                raise self._failure("does not stop" if pid else "lives, but not where this process can see it")
            self._leave_no_socket()
            return True

    @abstractmethod
    def _answers(self) -> bool:
        """Return whether a connection succeeds, and keep the reason when it does not."""

    @abstractmethod
    def _prepare(self, alive: FileLock) -> None:
        """Make the data folder ready for a start; nothing of the server lives, and helpers inherit the lock."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the command line of the server."""

    @abstractmethod
    def _settle(self, *, fresh: bool) -> None:
        """Finish what needs a running server, and check that it is what was asked for."""

    @abstractmethod
    def _signal(self, pid: int, mode: Mode) -> None:
        """Tell the server to stop."""

    @abstractmethod
    def _socket_files(self) -> list[Path]:
        """Return what the server makes in the socket folder."""

    @property
    def _title(self) -> str:
        return f"the embedded {self.name.capitalize()}"

    def _patience(self) -> float:
        """Return how long a server that lives may take to answer: one without a socket is of a home that was moved."""
        coming = not self.data.exists() or any(path.exists() for path in self._socket_files())
        return START_SECONDS if coming else _SOCKET_SECONDS

    def _alive_lock(self) -> FileLock:
        return self.home.lock(f"{self.name}.alive")

    def _launch(self, alive: FileLock) -> None:
        """Start the server, which takes over our lock."""
        other = self.pid
        if other is not None:
            raise EmbeddedError(f"process {other} serves {self.data}, but was not started by umt-durable: stop it")
        if self.tcp:
            self._choose_port()
        self.home.make_socket_folder()
        self._remove_socket_files()
        if self.log.exists() and self.log.stat().st_size > _MAX_LOG_BYTES:
            self.log.unlink()
        self._prepare(alive)
        spawn(
            self._command(),
            folder=self.data,
            log=self.log,
            lock=alive.fileno(),
            account=self.home.account,
            env=environment(LOCALE),
        )

    def _remove_socket_files(self) -> None:
        for path in self._socket_files():
            path.unlink(missing_ok=True)

    def _leave_no_socket(self) -> None:
        # The folder may be somebody else's: then it is not ours to clean, and the next start says so.
        with contextlib.suppress(OSError):
            self._remove_socket_files()
        self.home.drop_socket_folder()

    def _await_answer(self) -> None:
        with self._alive_lock() as alive:
            if not wait_until(lambda: self._answers() or alive.try_exclusive(), START_SECONDS):
                raise self._failure("started, but does not answer")
            if alive.try_exclusive():
                raise self._failure("does not start")

    def _choose_port(self) -> None:
        """Settle on the loopback port: the one of this home, unless it was taken before this object served on it."""
        port = self.home.remembered_port(self.name)
        if port is None or (not can_bind(port) and port != self._served_port):
            port = self.home.choose_port(self.name)
        self._served_port = port

    def _failure(self, what: str) -> EmbeddedError:
        reason = f" ({self._refusal})" if self._refusal else ""
        return EmbeddedError(f"{self._title} of {self.home.path} {what}{reason}; {tail(self.log)}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
