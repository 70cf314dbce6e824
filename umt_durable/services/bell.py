"""Waiting for whichever comes first: time, another thread of this process, or a NOTIFY of another process."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from typing import NamedTuple

from umt_durable.clock import boottime
from umt_durable.database import TRANSIENT, Connection, Database
from umt_durable.errors import DatabaseUnavailableError
from umt_durable.services.keeper import close
from umt_durable.settings import Settings

logger = logging.getLogger(__name__)

LISTEN_AGAIN_SECONDS = 1.0


class Ear:
    """A connection that hears NOTIFY, as long as it stands. Without it the poll does all; it only saves time."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._is_wanted = not settings.pooler and settings.notify != "off"
        self._conn: Connection | None = None
        self._next_try = 0.0

    def fileno(self) -> int | None:
        """Return the socket to wait on; connect first where need be, at most once a second."""
        if self._conn is None and self._is_wanted and boottime() >= self._next_try:
            self._next_try = boottime() + LISTEN_AGAIN_SECONDS
            with contextlib.suppress(DatabaseUnavailableError):
                self._conn = self._database.listen()
        return None if self._conn is None else self._conn.fileno()

    @property
    def is_deaf(self) -> bool:
        """Say whether it should hear, and does not."""
        return self._is_wanted and self._conn is None

    def take(self) -> bool:
        """Take in what has come; say whether that was a notification, or the end of the connection."""
        if self._conn is None:
            return False
        try:
            return len(list(self._conn.notifies(timeout=0))) > 0
        except TRANSIENT as error:
            logger.debug("the listening connection ended: %s", error)
            self.close()
            return True

    def close(self) -> None:
        """Close the connection."""
        self._conn = close(self._conn)


class Woken(NamedTuple):
    """What ended a wait; neither: the time was over."""

    rung: bool
    heard: bool


class Bell:
    """Wakes one thread. Rings before and during a wait are one; they are never lost."""

    def __init__(self) -> None:
        self._rings, self._ringer = socket.socketpair()
        self._rings.setblocking(False)
        self._ringer.setblocking(False)

    def ring(self) -> None:
        """End the wait of the thread, or the next one if it is busy."""
        with contextlib.suppress(OSError):  # full: it has been rung often enough; or closed
            self._ringer.send(b"\0")

    def close(self) -> None:
        """Give the sockets back; ringing it does nothing any more."""
        self._rings.close()
        self._ringer.close()

    def wait(self, seconds: float | None, ear: Ear | None = None) -> Woken:
        """Wait for a ring, or for what an ear hears, but not longer than that."""
        heard = None if ear is None else ear.fileno()
        poller = select.poll()
        poller.register(self._rings, select.POLLIN)
        if heard is not None:
            poller.register(heard, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(None if seconds is None else max(0, round(seconds * 1000)))}
        rung = self._rings.fileno() in ready
        if rung:
            with contextlib.suppress(BlockingIOError):
                while self._rings.recv(4096):
                    pass
        return Woken(rung, ear is not None and heard in ready and ear.take())
