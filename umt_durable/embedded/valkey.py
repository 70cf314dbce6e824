"""A private Valkey from the binary of the extra `embedded`: the broker and the result backend."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import quote

from umt_durable.embedded.account import give
from umt_durable.embedded.binaries import valkey_program
from umt_durable.embedded.locks import FileLock
from umt_durable.embedded.resp import Connection, ReplyError
from umt_durable.embedded.server import Mode, Server

BROKER_DB: Final = 0
RESULT_DB: Final = 1

_SOCKET: Final = "valkey.sock"
_SIGNALS: Final[dict[Mode, signal.Signals]] = {"fast": signal.SIGTERM, "immediate": signal.SIGKILL}


class ValkeyServer(Server):
    """The Valkey of one home.

    Over its socket it lets in whoever can enter the socket folder, which is the servers' user and root. One with a
    loopback port asks for the password of the home, on its socket too. One that is not durable forgets all at a stop.
    """

    name: ClassVar[str] = "valkey"
    program: ClassVar[str] = "valkey-server"
    pid_file: ClassVar[str] = "valkey.pid"

    _guarded = False

    @property
    def port(self) -> int | None:
        """Return the loopback port, or None when this home never had one."""
        return self.home.remembered_port(self.name)

    @property
    def url(self) -> str:
        """Return the URL for Celery's `broker_url`: over loopback when `tcp` was asked for, else over the socket."""
        return self._url(BROKER_DB)

    @property
    def result_url(self) -> str:
        """Return the URL for Celery's `result_backend`: another database, so that emptying the broker keeps results."""
        return self._url(RESULT_DB)

    def _url(self, database: int) -> str:
        login = f":{quote(self.home.password(), safe='')}@" if self.tcp or self._guarded else ""
        if self.tcp:
            return f"redis://{login}127.0.0.1:{self.port}/{database}"
        return f"redis+socket://{login}{quote(str(self._socket))}?virtual_host={database}"

    @property
    def _socket(self) -> Path:
        return self.home.socket_folder / _SOCKET

    def _answers(self) -> bool:
        try:
            self._connect().close()
        except OSError as error:
            self._refusal = str(error)
            return False
        return True

    def _connect(self) -> Connection:
        """Return a connection that is let in; a server that still loads its data refuses."""
        connection = Connection(self._socket)
        try:
            try:
                connection.command("PING")
            except ReplyError as error:
                if not str(error).startswith("NOAUTH"):
                    raise
                connection.command("AUTH", self.home.password())
                connection.command("PING")
                self._guarded = True
        except OSError:
            connection.close()
            raise
        return connection

    def _prepare(self, alive: FileLock) -> None:
        self.data.mkdir(mode=0o700, exist_ok=True)
        give(self.data, self.home.account)
        (self.data / self.pid_file).unlink(missing_ok=True)
        self._guarded = False

    def _command(self) -> list[str]:
        settings = {
            "port": "0",
            "bind": "127.0.0.1",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            # Relative, since the servers' user may not be able to enter the folder by its full path.
            "dir": ".",
            "pidfile": self.pid_file,
            "save": "",
            "appendonly": "yes" if self.durable else "no",
            # With everysec the write itself is put off while an fsync is slow, and a kill -9 then loses it.
            "appendfsync": "always",
            "proc-title-template": "{title} " + str(self.home.path).replace("{", "{{"),
        }
        program = valkey_program(self.home.account)
        return [str(program), *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def _settle(self, *, fresh: bool) -> None:
        with self._connect() as connection:
            if self.durable and connection.command("CONFIG", "GET", "appendonly") != ["appendonly", "yes"]:
                raise self._failure("runs without durability already; `umt-durable down` stops it")
            if not self.tcp:
                return
            if fresh:
                # In this order: the port opens only when the password is asked for.
                connection.command("CONFIG", "SET", "requirepass", self.home.password())
                self._guarded = True
                connection.command("CONFIG", "SET", "port", str(self.port))
            elif connection.command("CONFIG", "GET", "port") == ["port", "0"]:
                raise self._failure("runs without a loopback port already; `umt-durable down` stops it")

    def _signal(self, pid: int, mode: Mode) -> None:
        os.kill(pid, _SIGNALS[mode])

    def _socket_files(self) -> list[Path]:
        return [self._socket]
