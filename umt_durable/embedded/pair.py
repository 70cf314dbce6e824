"""The embedded pair of a project folder: shared by all its processes, stopped by the last one that leaves.

Every process that uses the pair holds `users.lock` together with the others from `ensure` until it ends. Whoever leaves
does it inside `home.starting()`, so of several that leave at once exactly one finds itself the last. The kernel drops
the lock of a process that is killed; if that was the last one the pair runs on, and the next process that comes
attaches and stops it when it leaves.

Forked children share the lock of the process that called `ensure`. When that one is killed, the pair counts as used for
as long as one of its children lives; when it ends in order, the lock ends for all of them. A child does nothing at its
own exit, unless it called `ensure` itself, which makes it a user of its own. A process that is replaced by `exec`, or
ends without its exit handlers (`os._exit`, SIGTERM without a handler), leaves like one that was killed.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umt_durable.embedded.home import Home, default_home
from umt_durable.embedded.locks import FileLock
from umt_durable.embedded.postgres import PostgresServer
from umt_durable.embedded.process import users_of
from umt_durable.embedded.server import Server
from umt_durable.embedded.valkey import ValkeyServer
from umt_durable.errors import EmbeddedError

logger = logging.getLogger("umt_durable.embedded")

_USERS: Final = "users.lock"
_FAST_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Where the running pair is: its folder, and the URLs for the database, Celery's broker and its result backend."""

    database_url: str
    broker_url: str
    result_url: str
    home: Path


@dataclass(frozen=True, slots=True)
class _Hold:
    """The right of one process to find the pair running."""

    pid: int
    home: Home
    users: FileLock


_holds: dict[Path, _Hold] = {}
_mutex = threading.Lock()


def ensure(home: Path | None = None, *, durable: bool = True) -> Pair:
    """Make the pair of a folder run for as long as this process lives; other processes attach within milliseconds.

    `home` is by default DURABLE_EMBEDDED_HOME, else `.umt_durable` in the current folder.
    Errors: EmbeddedError when the extra is not installed, a server does not start (with the end of its log), the folder
    cannot be used, or the pair runs without the durability that is asked for.
    """
    place = Home(home or default_home())
    postgres, valkey = PostgresServer(place, durable=durable), ValkeyServer(place, durable=durable)
    with _mutex, place.starting():
        new = _hold(place)
        try:
            for server in (postgres, valkey):
                server.start_alone()
        except BaseException:
            if new:
                _leave(place.path)
            raise
    return Pair(postgres.url, valkey.url, valkey.result_url, place.path)


def running(home: Path | None = None) -> Pair | None:
    """Return the pair of a folder if both of its servers run, without becoming a user of it; None when they do not.

    Errors: EmbeddedError when the folder cannot be used.
    """
    path = home or default_home()
    if not path.exists():
        return None
    place = Home(path)
    postgres, valkey = PostgresServer(place), ValkeyServer(place)
    with place.starting():
        if not (postgres.answers and valkey.answers):
            return None
        return Pair(postgres.url, valkey.url, valkey.result_url, place.path)


def down(home: Path | None = None, *, force: bool = False) -> bool:
    """Make both servers of a folder be gone; return whether one of them ran.

    Errors: EmbeddedError when other processes use them and `force` is not given, or when one of them does not stop.
    """
    path = home or default_home()
    if not path.exists():
        return False
    place = Home(path)
    with _mutex, place.starting():
        own = _holds.pop(place.path, None)
        if own is not None:
            _drop(own)
        with place.lock(_USERS) as users:
            if not force and not users.try_exclusive():
                who = ", ".join(map(str, users_of(users.path))) or "of another user"
                raise EmbeddedError(f"the pair of {place.path} is in use by process {who}: end that first, or force it")
            return _stop(place)


def _hold(home: Home) -> bool:
    """Become a user of the pair, inside `home.starting()`; return False when this process is one already."""
    hold = _holds.get(home.path)
    if hold is not None and hold.pid == os.getpid():
        return False
    users = home.lock(_USERS)
    # Held alone only inside `home.starting()`, where we are.
    users.try_shared()
    if hold is not None:
        hold.users.close()
    _holds[home.path] = _Hold(os.getpid(), home, users)
    return True


def _leave(path: Path) -> None:
    """Stop being a user, and stop the pair if nobody else is one, inside `home.starting()`."""
    hold = _holds.pop(path)
    _drop(hold)
    with hold.home.lock(_USERS) as users:
        if users.try_exclusive():
            _stop(hold.home)


def _drop(hold: _Hold) -> None:
    if hold.pid == os.getpid():
        hold.users.release()
    else:
        hold.users.close()


def _stop(home: Home) -> bool:
    servers: tuple[Server, ...] = (ValkeyServer(home), PostgresServer(home))
    stopped = [_stop_one(server) for server in servers]
    return any(stopped)


def _stop_one(server: Server) -> bool:
    try:
        return server.stop_alone("fast", seconds=_FAST_SECONDS)
    except EmbeddedError:
        return server.stop_alone("immediate")


@atexit.register
def _leave_all() -> None:
    for path, hold in list(_holds.items()):
        if hold.pid != os.getpid() or not path.exists():
            continue
        try:
            with hold.home.starting():
                _leave(path)
        except (EmbeddedError, OSError) as error:
            logger.warning("the embedded servers of %s were not stopped: %s", path, error)


def _forget_other_threads() -> None:
    global _mutex
    _mutex = threading.Lock()


os.register_at_fork(after_in_child=_forget_other_threads)
