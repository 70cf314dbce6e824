"""The pulse: relay and maintenance of one process, looking by themselves and woken when something happens.

Polling finds everything. NOTIFY and the rings between the two threads only save the wait for the next poll.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Final

from umt_durable.clock import boottime
from umt_durable.database import TRANSIENT, Connection, Database
from umt_durable.errors import DatabaseUnavailableError
from umt_durable.services.bell import Bell, Ear
from umt_durable.services.keeper import close
from umt_durable.services.maintenance import Due, Maintenance
from umt_durable.services.outage import Outage
from umt_durable.services.relay import BATCH, Relay
from umt_durable.settings import Settings
from umt_durable.store import runs

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS: Final = 0.01
"""Callers send at most one NOTIFY per 5 ms: what they committed just after it is found by a second look."""
LOOKS_APART_SECONDS: Final = 0.02
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
STOP_SECONDS: Final = 5.0
LOOK_PATIENCE_SECONDS: Final = 5.0


class Pulse:
    """Runs a relay, maintenance, or both, each in a daemon thread.

    Keeps: no outage and no defect ends a thread. One query per poll serves both.
    """

    def __init__(
        self, database: Database, settings: Settings, relay: Relay | None, maintenance: Maintenance | None
    ) -> None:
        self._database = database
        self._settings = settings
        self._relay = relay
        self._maintenance = maintenance
        self._relay_bell, self._maintenance_bell = Bell(), Bell()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._recoveries = 0
        if maintenance is not None:
            maintenance.on_hints = self._ring_relay

    def start(self) -> None:
        """Start the threads; what is due by now is looked at first. Doing it twice changes nothing."""
        if self._threads:
            return
        if self._stopping.is_set():
            self._stopping.clear()
            self._relay_bell, self._maintenance_bell = Bell(), Bell()
        if self._relay is not None:
            self._add("umt-durable-relay", self._relay_loop)
        if self._maintenance is not None:
            self._add("umt-durable-maintenance", self._maintenance_loop)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads after what they are at, within a few seconds."""
        self._stopping.set()
        self._relay_bell.ring()
        self._maintenance_bell.ring()
        for thread in self._threads:
            thread.join(STOP_SECONDS)
        self._threads.clear()
        self._relay_bell.close()
        self._maintenance_bell.close()

    def wake(self) -> None:
        """Have the outbox looked at now: something has been committed."""
        (self._relay_bell if self._relay is not None else self._maintenance_bell).ring()

    def _ring_relay(self) -> None:
        self._relay_bell.ring()

    def _add(self, name: str, loop: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=loop, name=name, daemon=True))

    # -- the relay's thread -----------------------------------------------------------------------------------------

    def _relay_loop(self) -> None:
        assert self._relay is not None
        relay, ear = self._relay, Ear(self._database, self._settings)
        guard = _Guard("the database, for the relay,")
        again = True
        while not self._stopping.is_set():
            seconds = guard.pause or (LOOK_AGAIN_SECONDS if again else self._relay_rest(relay, ear))
            woken = self._relay_bell.wait(seconds, None if guard.pause else ear)
            if self._stopping.is_set():
                break
            if woken.heard:
                self._maintenance_bell.ring()
            found = guard.run(lambda: self._drain(relay))
            again = found > 0 or woken.rung or woken.heard
        ear.close()

    def _relay_rest(self, relay: Relay, ear: Ear) -> float | None:
        """Return how long the relay may wait to be woken; None: maintenance polls for it."""
        if relay.rest_seconds() > 0:
            return relay.rest_seconds()
        if self._maintenance is None:
            return self._poll_seconds()
        return LONGEST_PAUSE if ear.is_deaf else None

    def _drain(self, relay: Relay) -> int:
        """Publish until the outbox is empty; return how many rows were there."""
        found = 0
        while not self._stopping.is_set():
            claimed = relay.run_once().claimed
            found += claimed
            if claimed < BATCH:
                break
        if relay.recoveries != self._recoveries and self._maintenance is not None:
            self._recoveries = relay.recoveries
            self._maintenance.look_at_broker()
            self._maintenance_bell.ring()
        return found

    # -- the thread of maintenance ----------------------------------------------------------------------------------

    def _maintenance_loop(self) -> None:
        assert self._maintenance is not None
        maintenance = self._maintenance
        ear = Ear(self._database, self._settings) if self._relay is None else None
        guard, look = _Guard("the database, for maintenance,"), _Look(self._database)
        found = 1
        while not self._stopping.is_set():
            seconds = guard.pause or (0.0 if found else maintenance.rest_seconds(self._poll_seconds()))
            self._maintenance_bell.wait(seconds, None if guard.pause else ear)
            self._stopping.wait(look.seconds_apart())
            if self._stopping.is_set():
                break
            found = guard.run(lambda: self._maintain(maintenance, look))
            if guard.pause:
                look.close()
        look.close()
        if ear is not None:
            ear.close()

    def _maintain(self, maintenance: Maintenance, look: _Look) -> int:
        due = look.due()
        if due.outbox and self._relay is not None:
            self._relay_bell.ring()
        return maintenance.run_once(due)

    def _poll_seconds(self) -> float:
        return self._settings.poll_seconds * random.uniform(0.95, 1.05)


class _Look:
    """Asks what is due, on a connection that is kept: after a restart of the server it is back with the next try."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._conn: Connection | None = None
        self._at = 0.0

    def seconds_apart(self) -> float:
        """Return for how long the next look should wait, however often the bell rings."""
        return max(0.0, self._at + LOOKS_APART_SECONDS - boottime())

    def due(self) -> Due:
        """Return which scans would find something."""
        self._at = boottime()
        if self._conn is None:
            self._conn = self._database.connect(application="umt_durable look", patience_seconds=LOOK_PATIENCE_SECONDS)
        return Due(*runs.due_work(self._conn))

    def close(self) -> None:
        """Close the connection; the next look makes a new one."""
        self._conn = close(self._conn)


class _Guard:
    """Runs one look after another, whatever happens; `pause` is the rest after a failure, in seconds."""

    def __init__(self, what: str) -> None:
        self._outage = Outage(what, logger)
        self._defects = 0
        self.pause = 0.0

    def run(self, work: Callable[[], int]) -> int:
        """Do one look and return what it found; nothing if it failed."""
        try:
            found = work()
        except (*TRANSIENT, DatabaseUnavailableError) as error:
            self._outage.failed(error)
            self.pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self.pause * 2))
            return 0
        except Exception:
            self._defects += 1
            if self._defects == 1:
                logger.exception("a look of relay or maintenance failed; the next one follows")
            self.pause = LONGEST_PAUSE
            return 0
        self._outage.worked()
        self._defects, self.pause = 0, 0.0
        return found
