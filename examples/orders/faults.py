"""What goes wrong in the demo, when, and how it is made to: kills, a freeze and a broker that forgets everything."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Event, Thread
from typing import Final, Protocol, assert_never

from examples.orders.bank import Call
from examples.orders.processes import Worker, kill_child
from examples.orders.steplog import Entry, Follower, Tail

HUNT_SECONDS: Final = 8.0
LOOK_SECONDS: Final = 0.001
TRIES: Final = 6


class Kind(StrEnum):
    CHILD = "pool child"
    CHARGE = "pool child that waits for the bank"
    FREEZE = "pool child, for longer than its lease"
    WORKER = "whole worker"
    BROKER = "broker"


# When each fault strikes, as a part of the time over which orders come in. The charge is killed more than once: there,
# doing a thing twice costs money.
SCHEDULE: Final = (
    (0.08, Kind.CHILD),
    (0.18, Kind.CHARGE),
    (0.28, Kind.CHILD),
    (0.38, Kind.WORKER),
    (0.48, Kind.FREEZE),
    (0.55, Kind.CHARGE),
    (0.66, Kind.BROKER),
    (0.78, Kind.CHILD),
    (0.86, Kind.CHARGE),
    (0.95, Kind.CHILD),
)
JITTER: Final = 0.03


@dataclass(frozen=True)
class Fault:
    """One planned fault. Units: `after` in seconds since the first step body."""

    after: float
    kind: Kind


@dataclass(frozen=True)
class Kill:
    """One kill that happened, with the body that died if there was one. `paid`: the bank had taken the money."""

    kind: Kind
    pid: int
    body: Entry | None
    paid: bool = False


class Scene(Protocol):
    """What a saboteur can reach."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers there are now."""

    @property
    def diary(self) -> Path:
        """The diary of step bodies."""

    @property
    def bank_log(self) -> Path:
        """The bank's log."""

    def replace_worker(self, dead: Worker) -> Worker:
        """Start a new worker in the place of a dead one."""

    def wipe_broker(self) -> None:
        """Stop the broker, delete all its data and start it again."""


def plan(seed: int, seconds: float) -> list[Fault]:
    """Draw the moments of all faults for orders that come in over `seconds`. The same seed gives the same moments."""
    chance = random.Random(seed)
    return [Fault(seconds * (part + chance.uniform(-JITTER, JITTER)), kind) for part, kind in SCHEDULE]


class Saboteur:
    """Carries out a plan in a thread of its own, and keeps account of what really happened."""

    def __init__(
        self, scene: Scene, faults: Sequence[Fault], *, freeze_seconds: float, say: Callable[[str], None]
    ) -> None:
        self._scene = scene
        self._faults = faults
        self._say = say
        self._bodies = Follower(scene.diary)
        self._bank = Tail(scene.bank_log)
        self._paid: set[str] = set()
        self._freeze_seconds = freeze_seconds
        # Frozen, and after that left alive, so that it can tell of the write it was refused.
        self._spared: set[int] = set()
        self._helpers: list[Thread] = []
        self._stop = Event()
        self._thread = Thread(target=self._run, name="saboteur", daemon=True)
        self.kills: list[Kill] = []
        self.freezes = 0
        self.wipes = 0
        self.error: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let go of everything: no fault is begun any more, nothing stays frozen."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        for helper in self._helpers:
            helper.join()

    @property
    def to_come(self) -> bool:
        """Whether there are faults still to be done."""
        return self._thread.is_alive()

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive() and not any(helper.is_alive() for helper in self._helpers)

    @property
    def missing(self) -> list[str]:
        """Say which faults of the plan did not happen as planned."""
        planned = Counter(fault.kind for fault in self._faults)
        return [f"{kind}: {self._happened(kind)} of {n}" for kind, n in planned.items() if self._happened(kind) < n]

    def _happened(self, kind: Kind) -> int:
        match kind:
            case Kind.FREEZE:
                return self.freezes
            case Kind.BROKER:
                return self.wipes
            case Kind.WORKER:
                return sum(kill.kind is kind for kill in self.kills)
            case Kind.CHILD:
                return sum(kill.kind is kind and kill.body is not None for kill in self.kills)
            case Kind.CHARGE:
                return sum(kill.kind is kind and kill.paid for kill in self.kills)
            case _:
                assert_never(kind)

    def _run(self) -> None:
        try:
            first = self._hunt(lambda entry: True, HUNT_SECONDS * 4)
            began = time.monotonic()
            for fault in self._faults if first is not None else ():
                self._stop.wait(max(0.0, began + fault.after - time.monotonic()))
                if self._stop.is_set():
                    return
                self._strike(fault.kind)
        except Exception as error:
            self.error = error
            self._say(f"the demo itself failed: {error}")
            raise

    def _strike(self, kind: Kind) -> None:
        match kind:
            case Kind.CHILD:
                self._kill_child(kind, lambda entry: True)
            case Kind.CHARGE:
                self._kill_child(kind, self._is_paid)
            case Kind.FREEZE:
                self._freeze_child()
            case Kind.WORKER:
                self._kill_worker()
            case Kind.BROKER:
                self._say("the broker is stopped and all its data is deleted")
                self._scene.wipe_broker()
                self.wipes += 1
                self._say("the broker is back, empty")

    def _kill_child(self, kind: Kind, wanted: Callable[[Entry], bool]) -> None:
        for _ in range(TRIES):
            entry = self._hunt(wanted, HUNT_SECONDS)
            if entry is None:
                return
            if not kill_child(entry.pid):
                continue
            self._bodies.advance()
            body = self._bodies.forget(entry.pid)
            kill = Kill(kind, entry.pid, body, paid=body is not None and self._is_paid(body))
            self.kills.append(kill)
            self._say(f"kill -9 {entry.pid}: pool child, {_describe(kill)}")
            if body is not None and wanted(body):
                return

    def _kill_worker(self) -> None:
        # Looked up before the hunt, since it takes longer than many a body.
        families = {worker.pid: worker.family() for worker in self._scene.workers}
        entry = self._hunt(self._is_paid, HUNT_SECONDS)
        victims = [worker for worker in self._scene.workers if entry is not None and worker.owns(entry.pid)]
        worker = victims[0] if victims else self._scene.workers[0]
        worker.kill()
        family = families[worker.pid]
        self._bodies.advance()
        bodies = [body for pid in family if (body := self._bodies.forget(pid)) is not None]
        body = max(bodies, key=self._is_paid, default=None)
        kill = Kill(Kind.WORKER, worker.pid, body, paid=body is not None and self._is_paid(body))
        self.kills.append(kill)
        self._say(f"kill -9 {' '.join(map(str, family))}: worker {worker.name} and its children, {_describe(kill)}")
        self._say(f"worker {self._scene.replace_worker(worker).name} is started in its place")

    def _freeze_child(self) -> None:
        entry = self._hunt(self._is_paid, HUNT_SECONDS)
        if entry is None:
            return
        self._spared.add(entry.pid)
        os.kill(entry.pid, signal.SIGSTOP)
        self.freezes += 1
        self._say(f"kill -STOP {entry.pid}: pool child in {entry.step} of {entry.order}, frozen beyond its lease")
        helper = Thread(target=self._thaw, args=(entry.pid,), name="thaw", daemon=True)
        self._helpers.append(helper)
        helper.start()

    def _thaw(self, pid: int) -> None:
        self._stop.wait(self._freeze_seconds)
        if any(worker.owns(pid) for worker in self._scene.workers):
            os.kill(pid, signal.SIGCONT)
            self._say(f"kill -CONT {pid}: it goes on as if nothing had happened; what it writes now is refused")

    def _hunt(self, wanted: Callable[[Entry], bool], seconds: float) -> Entry | None:
        """Wait until a live pool child of ours is inside a wanted body; None when time runs out."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stop.is_set():
            self._bodies.advance()
            for entry in list(self._bodies.inside.values()):
                if entry.pid in self._spared or not wanted(entry):
                    continue
                if any(worker.owns(entry.pid) for worker in self._scene.workers):
                    return entry
            time.sleep(LOOK_SECONDS)
        return None

    def _is_paid(self, entry: Entry) -> bool:
        if entry.step != "charge":
            return False
        self._paid.update(Call.parse(line).key for line in self._bank.lines())
        return entry.key in self._paid


def _describe(kill: Kill) -> str:
    if kill.body is None:
        return "just between two steps"
    where = f"in {kill.body.step} of {kill.body.order}"
    return f"{where}, after the bank took the money" if kill.paid else where
