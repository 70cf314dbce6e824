"""One cell on its stage: the worker something happens to, what happens, and who comes after it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
from celery import Celery

from tests.crash.app import More
from tests.crash.cells import Cell
from tests.support import guard
from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.clock import Clock
from tests.support.gates import Gates
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.settings import HOLD_SECONDS
from umt_durable.states import RunState

APP = "tests.crash.app:app"
HELD_SECONDS = 2
"""How long what a finisher publishes itself is left to it, in these processes."""
UNHEARD = "unheard"
"""A queue that only the second worker takes from."""

VERBS = {"kill": "kill", "stop": "stop", "drop": "stop", "lose": "raise:OperationalError"}


@dataclass
class Scene:
    """What a cell needs, and what it has done so far."""

    cell: Cell
    tasks: Tasks
    more: More
    conn: Connection
    clock: Clock
    env: dict[str, str]
    broker: Broker
    gates: Gates
    body_log: BodyLog
    once: Path
    make_worker: Callable[..., Worker]
    workers: list[Worker] = field(default_factory=list)
    frozen: psutil.Process | None = None

    # -- who is there -------------------------------------------------------------------------------------------------

    def acting(self) -> dict[str, str]:
        """Return the environment of the processes that something happens to, once, to the first that comes there."""
        # A relay looks at the outbox once before its worker is ready.
        when = "nth=2;" if self.cell.point.startswith("relay.claim.") else ""
        verb = VERBS[self.cell.what]
        return {**self.env, ENVIRONMENT: f"{self.cell.point}={verb};{when}file:{self.once}"}

    def begin(self) -> Worker:
        """Start the worker that something happens to."""
        return self._start(self.cell.pool, "victim", self.acting())

    def bystander(self, name: str, *, queues: tuple[str, ...] = ()) -> Worker:
        """Start a worker that nothing happens to."""
        return self._start("prefork", name, self.env, queues=queues)

    def _start(self, pool: str, name: str, env: dict[str, str], *, queues: tuple[str, ...] = ()) -> Worker:
        concurrency = 1 if pool == "solo" else 2
        worker = self.make_worker(app=APP, pool=pool, concurrency=concurrency, name=name, env=env, queues=queues)
        self.workers.append(worker.start(wait=False))
        # Something may happen to it before it is ready.
        until(
            lambda: f"{worker.node} ready." in worker.text() or (name == "victim" and self.reached),
            timeout=60,
            what=f"{name} to be ready",
            diagnose=self._logs,
        )
        return worker

    # -- what happens -------------------------------------------------------------------------------------------------

    @property
    def reached(self) -> bool:
        """Whether a process has come to the point."""
        return self.once.exists() and bool(self.once.read_text())

    def wait_reached(self) -> int:
        """Return the number of the process that came to the point, once one has."""
        until(lambda: self.reached, timeout=40, what=f"a process to come to {self.cell.point}", diagnose=self._logs)
        return int(self.once.read_text())

    def strike(self, *, heir_queues: tuple[str, ...] = (), needs_heir: bool = False) -> None:
        """Wait until the point is reached, have done there what the cell is about, and bring in who goes on.

        Shape: `needs_heir`: nobody goes on without another worker, whatever happens; it takes from `heir_queues`.
        """
        pid, worker = self.wait_reached(), self.workers[-1]
        match self.cell.what:
            case "kill":
                # Of a process with threads the first may be gone before the others.
                is_gone = (lambda: not worker.alive) if pid == worker.pid else (lambda: not guard.is_there(pid))
                until(is_gone, timeout=20, what="the process to be dead")
                if not worker.alive:
                    self.clock.advance(seconds=HOLD_SECONDS + 1)  # what the dead relay had claimed, and its lease
                    needs_heir = True
            case "stop":
                self.frozen = self._standing(pid)
                lease = float(self.env["DURABLE_LEASE_SECONDS"])
                self.clock.advance(seconds=max(2 * lease, HOLD_SECONDS) + 1)
                needs_heir = True
            case "drop":
                process = self._standing(pid)
                self._cut_off(process)
                process.resume()
            case "lose":
                pass
        if needs_heir:
            self.bystander("heir", queues=heir_queues)

    def _standing(self, pid: int) -> psutil.Process:
        process = psutil.Process(pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED, what="the process to stand still")
        return process

    def _cut_off(self, process: psutil.Process) -> None:
        """Have the server end the connections of a process."""
        ports = [one.laddr.port for one in process.net_connections(kind="tcp") if one.laddr]
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE client_port = ANY(%s)"
        ended = self.conn.execute(query, [ports]).fetchall()
        # A caller has none yet when it comes to the first of its points.
        assert ended or self.cell.act == "caller", "the process has no connection that could be cut"

    def thaw(self) -> None:
        """Let a process go on that stands still: whatever it does now, the run is over without it."""
        frozen, self.frozen = self.frozen, None
        if frozen is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                frozen.resume()
            # A run that begins and ends after it gives it the time to do its worst.
            assert self.tasks.no_step.delay(5).get(timeout=60) == 5

    def _logs(self) -> str:
        return "\n".join(f"--- {worker.name} ---\n{worker.tail()[-2500:]}" for worker in self.workers)

    # -- what is done -------------------------------------------------------------------------------------------------

    def wait_state(self, run_id: str, state: RunState) -> None:
        """Return once a run is in a state, or something has happened to a process on its way there."""
        until(
            lambda: self.tasks.durable.get(run_id).state is state or self.reached,
            timeout=40,
            what=f"the run to be {state}",
            diagnose=self._logs,
        )

    def say(self, run_id: str, payload: Any) -> None:
        """Say the fact `go` to a run, through a user's connection, so that a router applies it."""
        with psycopg.connect(str(self.tasks.durable.settings.database_url)) as user:
            self.tasks.durable.signal(run_id, "go", payload, conn=user)

    def foreign(self, task: str, *args: Any) -> str:
        """Send a message as a producer does that knows nothing of the product."""
        producer = Celery("elsewhere", broker=self.broker.url, backend=self.env["CELERY_RESULT_BACKEND"])
        try:
            return str(producer.send_task(task, args, queue=QUEUE).id)
        finally:
            producer.close()

    def purge(self, queue: str) -> None:
        """Lose what waits in a queue."""
        with self.tasks.app.connection_for_write() as connection:
            connection.default_channel.queue_purge(queue)

    def interrupt(self) -> None:
        """Ask the victim for a warm shutdown."""
        os.kill(self.workers[-1].pid, signal.SIGTERM)
