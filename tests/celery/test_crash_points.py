"""A real worker dies at a point of the crash table: each run ends once, and no finished step is repeated.

A handful is in the default selection; the others belong to the long suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery.result import AsyncResult

from tests.support.apps import ELSEWHERE, LEDGER, REDELIVERY, Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.clock import Clock
from tests.support.provider import ADDRESS, Provider
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.ledger import install_ledger
from umt_durable.settings import HOLD_SECONDS
from umt_durable.states import RunState
from umt_durable.store import outbox

pytestmark = pytest.mark.processes

DEFAULT = {
    "claim.b",
    "step.commit.b",
    "txstep.commit.b",
    "txstep.commit.a",
    "ledger.commit.b",
    "ledger.commit.a",
    "wait.commit.a",
    "relay.publish.a",
    "op.call.a",
    "continue.commit.a",
}
IN_THE_MAIN_PROCESS = ("intake.", "timer.", "relay.", "router.")
POINTS = {
    "ten_steps": (
        *("claim.b", "claim.a", "step.body.b", "step.body.a", "step.encode.a", "step.commit.b", "step.commit.a"),
        *("finish.commit.b", "finish.commit.a", "finish.result.b", "finish.result.a"),
        *("relay.claim.b", "relay.claim.a", "relay.publish.b", "relay.publish.a", "relay.delete.b", "relay.delete.a"),
    ),
    "booking": ("step.grant.b", "step.grant.a", "txstep.user_sql.a", "txstep.commit.b", "txstep.commit.a"),
    "elsewhere": ("ledger.user_sql.a", "ledger.commit.b", "ledger.commit.a", "ledger.record.a"),
    "shipping": ("op.begin.b", "op.begin.a", "op.call.b", "op.call.a", "op.done.b", "op.done.a"),
    "sleeper": (
        *("sleep.suspend.b", "sleep.suspend.a", "timer.select.a", "timer.commit.b", "timer.commit.a"),
        *("claim.journal_read.b", "claim.journal_read.a"),
    ),
    "waiter": (
        *("wait.key_lock.a", "wait.look.a", "wait.commit.b", "wait.commit.a", "wait.run_lock.a"),
        *("router.key_lock.a", "router.run_lock.a", "router.commit.b", "router.commit.a"),
    ),
    "flaky_run": ("retry.commit.b", "retry.commit.a"),
    "looper": ("continue.commit.b", "continue.commit.a"),
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ten_steps": (),
    "booking": (3,),
    "elsewhere": (6,),
    "shipping": ("ship:17",),
    "sleeper": (2.5, 1),
    "waiter": ("go",),
    "flaky_run": (1,),
    "looper": (1, 4),
}
RESULTS: dict[str, Any] = {
    "ten_steps": list(range(1, 11)),
    "booking": 3,
    "elsewhere": 6,
    "shipping": 1,
    "sleeper": 1,
    "waiter": 5,
    "flaky_run": 2,
    "looper": 4,
}
CASES = [
    pytest.param(task, point, id=point, marks=[] if point in DEFAULT else [pytest.mark.long])
    for task, points in POINTS.items()
    for point in points
]


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
        # A relay looks at the outbox once before its worker is ready.
        when = "nth=2;" if self.point.startswith("relay.claim.") else ""
        acting = {**self.env, "DURABLE_HOLD_SECONDS": "2", ENVIRONMENT: f"{self.point}=kill;{when}file:{self.once}"}
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


@pytest.fixture
def ledger(conn: Connection, schema: str, worker_env: dict[str, str]) -> str:
    """Return the name of the application's table of this test."""
    name = f'"{schema}".ledger'
    conn.execute(f"CREATE TABLE {name} (step text, value int)".encode())
    worker_env[LEDGER] = name
    return name


@pytest.fixture
def booked(other_database_url: str, worker_env: dict[str, str]) -> Iterator[Callable[[], list[int]]]:
    """Return a function that reads what is booked in the other database, where a ledger is installed."""
    install_ledger(other_database_url)
    worker_env[ELSEWHERE] = other_database_url
    with psycopg.connect(other_database_url, autocommit=True) as books:
        books.execute("CREATE TABLE booking (value int)")
        yield lambda: [row[0] for row in books.execute("SELECT value FROM booking").fetchall()]


@pytest.fixture
def carrier(tmp_path: Path, worker_env: dict[str, str]) -> Iterator[Provider]:
    """Return a provider that honours idempotency keys, which the workers of this test call."""
    with Provider("idempotent", tmp_path) as carrier:
        worker_env[ADDRESS] = carrier.address
        yield carrier


# -- the engine and the services --------------------------------------------------------------------------------------


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize(("task", "point"), CASES)
def test_i1_a_run_whose_process_dies_at_a_point_ends_once(
    tasks: Tasks,
    crash: Callable[[str], Crash],
    broker: Broker,
    body_log: BodyLog,
    conn: Connection,
    ledger: str,
    carrier: Provider,
    booked: Callable[[], list[int]],
    task: str,
    point: str,
) -> None:
    death = crash(point)
    death.begin()
    result = getattr(tasks, task).delay(*ARGUMENTS[task])
    if task == "waiter":
        say(tasks, result.id, death)
    death.wait_and_replace()

    assert result.get(timeout=90) == RESULTS[task]
    if point.startswith(("relay.", "finish.")):
        until(lambda: outbox.status(conn)[0] == 0, timeout=60, what="the outbox to be empty")
    rows = conn.execute(f"SELECT value FROM {ledger}".encode()).fetchall()
    assert rows == {"booking": [(3,)], "shipping": [(1,)]}.get(task, [])
    assert booked() == ([6] if task == "elsewhere" else [])
    assert carrier.applied("ship:17") == (task == "shipping")
    assert_no_finished_step_was_repeated(tasks, body_log, result.id)


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


def say(tasks: Tasks, run_id: str, death: Crash) -> None:
    """Say the fact once the run waits, or died on its way there; through a user's connection, so that a router acts."""
    until(
        lambda: tasks.durable.get(run_id).state is RunState.WAITING or death.happened,
        timeout=30,
        what="the run to wait, or its process to die",
    )
    with psycopg.connect(str(tasks.durable.settings.database_url)) as user:
        tasks.durable.signal(run_id, "go", RESULTS["waiter"], conn=user)


def assert_no_finished_step_was_repeated(tasks: Tasks, body_log: BodyLog, run_id: str) -> None:
    """Check the history of a run that lost one process: only the step in flight was entered twice."""
    history = tasks.durable.history(run_id)
    assert all(attempt.outcome is not None for attempt in history.attempts)
    counts = body_log.counts(run_id)
    if "body" in counts:  # no step: it fails once, and is entered anew by each attempt
        assert counts.pop("body") in (2, 3)
    assert sum(counts.values()) <= len(counts) + 1
    assert set(counts.values()) <= {1, 2}


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
