"""The faults: what is done to a stage, drawn from a seed, and how often each of them was."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import psutil
import psycopg

from tests.support.workers import Worker
from tools.chaos.stage import LEASE_SECONDS, Stage

STATEMENTS: Final = (
    *("claim_run", "commit_step", "commit_steps", "finish_run", "suspend_run", "renew_lease"),
    *("claim_events", "delete_claimed"),
)
"""What loses its reply, by the names of the SQL files."""


class Faults:
    """Draws faults and does them; what has to be healed later is, by the same loop.

    Shape: with the same seed, stage and pace the same faults are drawn in the same order. Whom a fault hits is drawn
    too, among those that are there.
    """

    def __init__(self, stage: Stage, seed: int, say: Callable[[str], None]) -> None:
        self._stage = stage
        self._random = random.Random(seed)
        self._say = say
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._broker_is_down = False
        self._frozen: set[int] = set()
        self.done: Counter[str] = Counter()
        """How often each fault was done."""
        self.table: dict[str, tuple[int, Callable[[], bool]]] = {
            "kill_child": (6, self._kill_child),
            "kill_worker": (2, self._kill_worker),
            "kill_service": (1, self._kill_service),
            "warm_restart": (1, self._warm_restart),
            "freeze_child": (3, self._freeze_child),
            "freeze_worker": (1, self._freeze_worker),
            "reset_connections": (2, self._reset_connections),
            "stall_connections": (1, self._stall_connections),
            "lose_commit": (5, self._lose_commit),
            "lose_reply": (5, self._lose_reply),
            "terminate_backends": (2, self._terminate_backends),
            "crash_postgres": (1, self._crash_postgres),
            "stop_broker": (1, self._stop_broker),
            "wipe_broker": (1, self._wipe_broker),
            "duplicate_hints": (3, self._duplicate_hints),
        }

    def one(self) -> None:
        """Do the next fault; one that finds nobody to hit is not counted."""
        names = list(self.table)
        name = self._random.choices(names, [self.table[each][0] for each in names])[0]
        try:
            found = self.table[name][1]()
        except (StopIteration, psutil.Error):  # it ended by itself in between
            found = False
        if found:
            self.done[name] += 1
            self._say(f"fault {sum(self.done.values())}: {name}")

    def heal_due(self) -> None:
        """Undo what was to be undone by now, and start again what has died."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        for process in self._stage.processes:
            if not process.alive:
                process.start(wait=False)

    def heal(self) -> None:
        """Undo everything."""
        while self._later:
            heapq.heappop(self._later)[2]()
        self._stage.database_proxy.heal()
        self.heal_due()

    def _in(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), act))

    # -- processes -------------------------------------------------------------------------------------------------

    def _a_worker(self) -> Worker | None:
        live = [one for one in self._stage.workers if one.alive and one.pid not in self._frozen]
        return self._random.choice(live) if live else None

    def _a_child(self) -> tuple[Worker, int] | None:
        prefork = [one for one in self._stage.workers if one.pool == "prefork" and one.alive]
        children = [(one, child.pid) for one in prefork for child in one.children() if child.pid not in self._frozen]
        return self._random.choice(children) if children else None

    def _kill_child(self) -> bool:
        found = self._a_child()
        if found is not None:
            found[0].kill_child(found[1])
        return found is not None

    def _kill_worker(self) -> bool:
        worker = self._a_worker()
        if worker is not None:
            worker.kill9()
        return worker is not None

    def _kill_service(self) -> bool:
        live = [one for one in self._stage.serving if one.alive]
        if live:
            self._random.choice(live).kill9()
        return bool(live)

    def _warm_restart(self) -> bool:
        worker = self._a_worker()
        if worker is not None:
            worker.term()
        return worker is not None

    def _freeze_child(self) -> bool:
        found = self._a_child()
        if found is None:
            return False
        worker, child = found
        worker.stop_child(child)
        self._frozen.add(child)

        def thaw() -> None:
            self._frozen.discard(child)
            with suppress(psutil.Error):
                psutil.Process(child).resume()

        self._in(self._random.uniform(0.3, 3) * LEASE_SECONDS, thaw)
        return True

    def _freeze_worker(self) -> bool:
        worker = self._a_worker()
        if worker is None:
            return False
        pid = worker.pid
        worker.stop()
        self._frozen.add(pid)

        def thaw() -> None:
            self._frozen.discard(pid)
            if worker.alive and worker.pid == pid:
                with suppress(psutil.Error):
                    worker.cont()

        self._in(self._random.uniform(0.5, 3) * LEASE_SECONDS, thaw)
        return True

    # -- Postgres --------------------------------------------------------------------------------------------------

    def _reset_connections(self) -> bool:
        return self._stage.database_proxy.reset() > 0

    def _stall_connections(self) -> bool:
        self._stage.database_proxy.blackhole()
        self._in(self._random.uniform(0.1, 1.5) * LEASE_SECONDS, self._stage.database_proxy.heal)
        return True

    def _lose_commit(self) -> bool:
        self._stage.database_proxy.cut_after_commit(self._random.randint(1, 3))
        return True

    def _lose_reply(self) -> bool:
        self._stage.database_proxy.cut_reply(self._random.choice(STATEMENTS))
        return True

    def _terminate_backends(self) -> bool:
        terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        others = " AND backend_type = 'client backend' ORDER BY random() LIMIT %s"
        try:
            with self._stage.connect() as conn:
                return conn.execute((terminate + others).encode(), (self._random.randint(1, 6),)).fetchone() is not None
        except psycopg.OperationalError:
            return False

    def _crash_postgres(self) -> bool:
        self._stage.postgres.restart("immediate")
        return True

    # -- the broker ------------------------------------------------------------------------------------------------

    def _stop_broker(self) -> bool:
        if self._broker_is_down:
            return False
        self._broker_is_down = True
        self._stage.broker.stop()

        def start() -> None:
            self._stage.broker.start()
            self._broker_is_down = False

        self._in(self._random.uniform(0.5, 5), start)
        return True

    def _wipe_broker(self) -> bool:
        if not self._broker_is_down:
            self._stage.broker.wipe()
        return not self._broker_is_down

    def _duplicate_hints(self) -> bool:
        """Have hints of runs in any state leave once more, as of a broker that delivers again, late or out of order."""
        twice = """
            INSERT INTO outbox_event (id, type, run, ordinal, next_attempt_at)
            SELECT gen_random_uuid(), 'run', no, 0, now() FROM run ORDER BY random() LIMIT 20"""
        try:
            with self._stage.connect() as conn:
                return conn.execute(twice.encode()).rowcount > 0
        except psycopg.OperationalError:
            return False
