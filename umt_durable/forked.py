"""What a forked process has from its parent: connections on which both would talk at the same time."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from typing import Any
from weakref import WeakSet

_sockets: frozenset[int] = frozenset()
_forked = False
_lock = threading.Lock()
_seen: WeakSet[Any] = WeakSet()


def is_inherited(fd: int) -> bool:
    """Say whether a socket was open already when this process was forked; False where the system does not tell."""
    return bool(_sockets) and os.fstat(fd).st_ino in _sockets


def is_first_use(thing: Any) -> bool:
    """Say, once for each object in a forked process, that it may be one that the parent has used."""
    if not _forked:
        return False
    with _lock:
        is_new = thing not in _seen
        _seen.add(thing)
    return is_new


def _look() -> None:
    global _sockets, _forked, _lock, _seen
    # The lock and the set may have been in use by another thread at the moment of the fork.
    _forked, _lock, _seen = True, threading.Lock(), WeakSet()
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the one that lists them
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and status.st_ino:
                    found.add(status.st_ino)
    _sockets = frozenset(found)


os.register_at_fork(after_in_child=_look)
