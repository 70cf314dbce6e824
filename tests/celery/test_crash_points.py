"""A real worker dies while it takes a message in, or writes through Django; `tests/crash` has the other points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from tests.support.apps import REDELIVERY, Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.clock import Clock
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.settings import HOLD_SECONDS

pytestmark = pytest.mark.processes

IN_THE_MAIN_PROCESS = "intake."


@dataclass
class Crash:
    """A worker that dies at a point, once, and what comes after it."""

    point: str
    once: Path
    start: Callable[..., Worker]
    env: dict[str, str]
    clock: Clock
    workers: list[Worker] = field(default_factory=list)

    def begin(self) -> None:
        """Start the worker that will die, or lose a child, at the point."""
        acting = {**self.env, "DURABLE_HOLD_SECONDS": "2", ENVIRONMENT: f"{self.point}=kill;file:{self.once}"}
        self.workers.append(self.start(pool="prefork", concurrency=1, env=acting))

    @property
    def happened(self) -> bool:
        """Return whether a process has reached the point."""
        return self.once.exists()

    def wait_and_replace(self) -> None:
        """Return once the process is dead, and another worker is there if it was the main one."""
        until(lambda: self.happened, timeout=30, what=f"a process to die at {self.point}")
        if self.point.startswith(IN_THE_MAIN_PROCESS):
            until(lambda: not self.workers[0].alive, timeout=20, what="the worker to be dead")
            self.clock.advance(seconds=HOLD_SECONDS + 1)  # what the dead relay had claimed, and its lease, are over
            self.workers.append(self.start(pool="prefork", concurrency=1, name="heir"))


@pytest.fixture
def crash(
    tmp_path: Path, start_worker: Callable[..., Worker], worker_env: dict[str, str], clock: Clock
) -> Callable[[str], Crash]:
    """Return a function that prepares the death of a process at a point."""
    return lambda point: Crash(point, tmp_path / "once", start_worker, worker_env, clock)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("point", ["txstep.commit.b", "txstep.commit.a"])
def test_i16_rows_of_djangos_models_are_written_once_though_the_process_dies_around_their_commit(
    tasks: Tasks,
    crash: Callable[[str], Crash],
    broker: Broker,
    body_log: BodyLog,
    conn: Connection,
    schema: str,
    point: str,
) -> None:
    conn.execute(f'CREATE TABLE "{schema}".booking (id serial PRIMARY KEY, amount int NOT NULL)'.encode())
    death = crash(point)
    death.begin()
    result = tasks.ordering.delay(8)
    death.wait_and_replace()

    assert result.get(timeout=90) == 8
    assert conn.execute(f'SELECT amount FROM "{schema}".booking'.encode()).fetchall() == [(8,)]
    assert body_log.counts(result.id) == {"book": 1 if point == "txstep.commit.a" else 2}


# -- intake -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["intake.commit.b", "intake.insert.b", "intake.insert.a", "intake.commit.a"])
def test_i1_i3_a_foreign_message_whose_worker_dies_while_taking_it_in_makes_one_run(
    tasks: Tasks,
    crash: Callable[[str], Crash],
    broker: Broker,
    worker_env: dict[str, str],
    body_log: BodyLog,
    point: str,
) -> None:
    worker_env[REDELIVERY] = "2"  # seconds after which Redis gives an unacked message to another
    death = crash(point)
    death.begin()
    foreign = Celery("elsewhere", broker=broker.url, backend=worker_env["CELERY_RESULT_BACKEND"])
    sent: AsyncResult[Any] = foreign.send_task("tests.one_step", (4,), queue=QUEUE)
    until(lambda: death.happened, timeout=30, what="the worker to die")
    until(lambda: not death.workers[0].alive, timeout=20, what="the worker to be dead")
    runs = [run.id for run in tasks.durable.list()]
    assert runs == ([sent.id] if point == "intake.commit.a" else [])
    assert broker.held(QUEUE) == 1

    death.wait_and_replace()

    assert sent.get(timeout=60) == 4
    wait_until_empty(broker, QUEUE)
    assert [run.id for run in tasks.durable.list()] == [sent.id]
    assert body_log.counts(sent.id) == {"only": 1}
    foreign.close()
