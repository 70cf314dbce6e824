"""The thread that writes what bodies say of how far they are, about once a second.

It is not the lease's own: what is written may have to be sealed by the application's codec, and waits for locks of
others. A lease must not wait for either.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final, Protocol

from umt_durable import telemetry
from umt_durable.database import Connection, Database, after_fork
from umt_durable.errors import DatabaseUnavailableError
from umt_durable.records import Note, Token
from umt_durable.store import progress
from umt_durable.store import settings as schema_settings
from umt_durable.store.guard import Guard

logger = logging.getLogger(__name__)

EVERY_SECONDS: Final = 1.0
LOCK_WAIT_MS: Final = 200


class Speaker(Protocol):
    """An attempt whose bodies say how far they are."""

    @property
    def token(self) -> Token:
        """The fencing token of its grant."""

    def notes(self) -> Sequence[Note]:
        """Return what nobody has written yet."""

    def wrote(self, notes: Sequence[Note]) -> None:
        """Take note of what was written of it, or will never be."""


class Notes:
    """What the attempts of this process have to say. The thread is begun by the first note and never needed before it.

    Keeps: a note that cannot be written costs nothing but itself.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._begin_anew()
        after_fork(self._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._speakers: set[Speaker] = set()
        self._thread: threading.Thread | None = None

    def hear(self, speaker: Speaker) -> None:
        """Have an attempt's notes written soon."""
        with self._lock:
            self._speakers.add(speaker)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="umt-durable-notes", daemon=True)
                self._thread.start()
        self._wake.set()

    def forget(self, speaker: Speaker) -> None:
        """Hear an attempt no longer: its grant has ended."""
        with self._lock:
            self._speakers.discard(speaker)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                speakers, self._speakers = self._speakers, set()
            for speaker in speakers:
                self._write(speaker)
            self._pause.wait(EVERY_SECONDS)

    _pause: Final = threading.Event()  # never set: what is said meanwhile is written together

    def _write(self, speaker: Speaker) -> None:
        notes = speaker.notes()
        if not notes:
            return

        def write(conn: Connection) -> None:
            with conn.transaction():
                schema_settings.limit_lock_wait(conn, milliseconds=LOCK_WAIT_MS)
                progress.note(Guard(conn, speaker.token), notes)

        try:
            self._database.do(write, seconds=EVERY_SECONDS)
        except Exception as error:  # noqa: BLE001 - a codec's, the server's: the run goes on without the note
            telemetry.count(telemetry.Counter.DUTY_FAILED, duty="note_progress", run=speaker.token.run)
            level = logging.DEBUG if isinstance(error, DatabaseUnavailableError) else logging.WARNING
            logger.log(level, "what a body says of how far it is could not be kept: %s", error)
        else:
            speaker.wrote(notes)
