"""As much of the Redis protocol as starting a server needs: a connection to a socket, commands, their replies."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias

Reply: TypeAlias = "str | int | list[Reply] | None"

_PATIENCE: Final = 5.0


class ReplyError(OSError):
    """The server answered a command with an error."""


class Connection:
    """A connection to the Unix socket of a server; also a context manager that closes it.

    Errors: OSError when the server is not there, is silent for five seconds, or hangs up; ReplyError when it refuses.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(_PATIENCE)
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._replies = self._socket.makefile("rb")

    def command(self, *words: str) -> Reply:
        """Send one command and return its reply."""
        encoded = [word.encode() for word in words]
        parts = [b"*%d\r\n" % len(encoded), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)]
        self._socket.sendall(b"".join(parts))
        return self._read()

    def close(self) -> None:
        """Close the connection."""
        self._replies.close()
        self._socket.close()

    def _read(self) -> Reply:
        line = self._replies.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("the server closed the connection")
        kind, rest = line[:1], line[1:-2].decode(errors="replace")
        match kind:
            case b"+":
                return rest
            case b"-":
                raise ReplyError(rest)
            case b":":
                return int(rest)
            case b"$":
                return None if rest == "-1" else self._replies.read(int(rest) + 2)[:-2].decode(errors="replace")
            case b"*":
                return [self._read() for _ in range(int(rest))]
            case _:
                raise ReplyError(f"unexpected reply {line!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
