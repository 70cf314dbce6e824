"""The folder that holds an embedded pair and everything its processes share.

    .umt_durable/          mode 0700, owned by whoever runs the project
      .gitignore           *
      id                   random; part of the name of the socket folder
      start.lock           held alone while a server is started or stopped
      users.lock           held together by every process that uses the pair
      postgres/            data, owned by the user that the server runs as
      postgres.log         what the server wrote
      postgres.alive       locked by the server itself, as long as any process of it lives
      postgres.port        the loopback port, once one was asked for
      password             mode 0600; for loopback connections
      valkey/ ...          the same for Valkey

The sockets are in a folder of /tmp, mode 0700, since the path of a socket is limited to 107 bytes. Its name is derived
from the home's path and id, so neither a copied home nor one made anew in the same place meets the other's servers.
Whoever deletes a home runs `umt-durable down` first: without it Postgres notices within a minute, Valkey never.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Final

from umt_durable.embedded.account import Account, server_account
from umt_durable.embedded.locks import FileLock
from umt_durable.embedded.process import wait_until
from umt_durable.errors import EmbeddedError

VARIABLE: Final = "DURABLE_EMBEDDED_HOME"
FOLDER: Final = ".umt_durable"
START_SECONDS: Final = 90.0
_SOCKETS: Final = Path("/tmp")  # noqa: S108 - the folder made there is checked for its owner and mode
# Below the range from which systems take the ports of outgoing connections, so that a stopped server's port stays free.
_PORTS: Final = range(15_500, 32_000)


class Home:
    """An existing home folder that belongs to us."""

    def __init__(self, path: Path) -> None:
        """Open the folder, made when it is missing.

        Errors: EmbeddedError when it cannot be made, belongs to another user or may be changed by everybody.
        """
        try:
            self.path = _make(path)
        except OSError as error:
            raise EmbeddedError(
                f"the folder {path} cannot be used: {error.strerror}. Set {VARIABLE} to one that can"
            ) from error
        self._identity = self._read_identity()

    @cached_property
    def account(self) -> Account | None:
        """Return the user that the servers run as, or None for ourselves."""
        return server_account(self._identity, [self.path / "postgres", self.path / "valkey"])

    @property
    def socket_folder(self) -> Path:
        """Return the folder of the sockets, whether it exists or not."""
        uid = self.account.uid if self.account else os.geteuid()
        digest = hashlib.sha256(f"{self.path}\0{self._identity}".encode()).hexdigest()
        return _SOCKETS / f"umt-{uid}-{digest[:12]}"

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Be the only process that starts or stops servers of this home.

        Errors: EmbeddedError when another one is at it for longer than a start may take.
        """
        with self.lock("start.lock") as lock:
            if not wait_until(lock.try_exclusive, START_SECONDS):
                raise EmbeddedError(
                    f"another process has been starting or stopping the servers of {self.path} for too long"
                )
            yield

    def lock(self, name: str) -> FileLock:
        """Open a lock file of this home, without taking the lock."""
        try:
            return FileLock(self.path / name)
        except OSError as error:
            raise EmbeddedError(f"the lock {self.path / name} cannot be used: {error.strerror}") from error

    def make_socket_folder(self) -> Path:
        """Make the folder of the sockets, closed to everybody but the servers' user and root.

        Errors: EmbeddedError when something else is in its place: another user can make any name in /tmp first.
        """
        folder = self.socket_folder
        owner = self.account.uid if self.account else os.geteuid()
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise EmbeddedError(f"no folder for sockets can be made in {_SOCKETS}: {error.strerror}") from error
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and self.account is not None:
            os.chown(folder, self.account.uid, self.account.gid, follow_symlinks=False)
            found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or stat.S_IMODE(found.st_mode) & 0o077:
            raise EmbeddedError(
                f"{folder} was made by somebody else (uid {found.st_uid}): remove it, or set {VARIABLE}"
            )
        return folder

    def drop_socket_folder(self) -> None:
        """Remove the folder of the sockets unless the other server still has one in it."""
        with contextlib.suppress(OSError):
            self.socket_folder.rmdir()

    def password(self) -> str:
        """Return the password for loopback connections, made when there is none."""
        return self._write_once("password", secrets.token_urlsafe(24))

    def remembered_port(self, server: str) -> int | None:
        """Return the loopback port that a server of this home was given, if it was."""
        try:
            return int((self.path / f"{server}.port").read_text())
        except FileNotFoundError:
            return None

    def choose_port(self, server: str) -> int:
        """Give a server a loopback port that is free, and remember it."""
        for _ in range(1000):
            port = _PORTS[secrets.randbelow(len(_PORTS))]
            if can_bind(port):
                path = self.path / f"{server}.port"
                path.unlink(missing_ok=True)
                self._write_once(path.name, str(port))
                return port
        raise EmbeddedError("no free loopback port was found")

    def _read_identity(self) -> str:
        return self._write_once("id", secrets.token_hex(8))

    def _write_once(self, name: str, text: str) -> str:
        """Return the content of a file, which is `text` when it did not exist; any number of processes agree."""
        path, draft = self.path / name, self.path / f".{name}.{secrets.token_hex(4)}"
        if not path.exists():
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        return path.read_text()


def default_home() -> Path:
    """Return the folder named by DURABLE_EMBEDDED_HOME, or `.umt_durable` in the current folder."""
    return Path(os.environ.get(VARIABLE) or FOLDER)


def can_bind(port: int) -> bool:
    """Return whether a server could listen on the loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _make(path: Path) -> Path:
    made = not path.exists()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = path.resolve()
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise EmbeddedError(
            f"the folder {path} belongs to user {found.st_uid}: start this as that user, or set {VARIABLE}"
        )
    if found.st_mode & stat.S_IWOTH:
        raise EmbeddedError(f"everybody may change the folder {path}: take that right away, or set {VARIABLE}")
    ignore = path / ".gitignore"
    if (made or path.name == FOLDER) and not ignore.exists():
        ignore.write_text("*\n")
    return path
