"""Locks between processes that the kernel drops when their holder dies, whatever killed it.

An flock(2) belongs to an open file description. A forked child shares its parent's: the lock stays until both have
closed it, or until either of them unlocks it. A child that `exec`s another program drops out, since every description
here is opened with O_CLOEXEC.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from umt_durable.errors import EmbeddedError

try:
    import fcntl
except ImportError as error:
    raise EmbeddedError(
        "the embedded Postgres and Valkey need Linux or macOS: set DURABLE_DATABASE_URL and a broker of your own"
    ) from error


class FileLock:
    """An open lock file. As a context manager it unlocks and closes the file at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def fileno(self) -> int:
        """Return the descriptor, for a process that is to inherit the lock."""
        return self._fd

    def try_exclusive(self) -> bool:
        """Take the lock alone unless somebody holds it; return whether it is held now."""
        return self._try(fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """Take the lock together with others unless somebody holds it alone; return whether it is held now."""
        return self._try(fcntl.LOCK_SH)

    def release(self) -> None:
        """Drop the lock, for forked children that share the description too, and close the file."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the file and leave the lock to the processes that inherited it."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
