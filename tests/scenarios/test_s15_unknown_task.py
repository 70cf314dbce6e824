"""S15: a run whose task only worker B has, while for half a minute only worker A is up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import canvas_apps
from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.canvas_apps import Canvas
from tests.support.clock import Clock
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.states import RunState
from umt_durable.store import diagnosis

pytestmark = pytest.mark.processes

SECONDS = 30
B = "tests.support.canvas_apps:app"


@pytest.fixture
def tasks_of_b(worker_env: dict[str, str]) -> Iterator[Canvas]:
    """Return the tasks that A does not have; both read the same queue."""
    found = canvas_apps.build(worker_env)
    yield found
    found.durable.stop()
    found.app.close()


def refusals(worker: Worker, run_id: str) -> int:
    """Return how often a worker was handed a run that it cannot execute."""
    return worker.text().count(f"run {run_id!r} stays blocked")


def test_s15_i19_a_run_waits_for_the_worker_that_has_its_task_and_no_other_spins(
    tasks: Tasks,
    tasks_of_b: Canvas,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
    clock: Clock,
    conn: Connection,
) -> None:
    a = start_worker(pool="threads", concurrency=1, name="a")
    run = tasks_of_b.hop.delay(1)

    for second in range(SECONDS):  # each of A's own runs proves that A has been round again
        clock.advance(seconds=1)
        wait_for_state(tasks.one_step.delay(second).id, RunState.SUCCEEDED)
    wait_until_empty(broker, QUEUE)

    assert refusals(a, run.id) <= 2 * SECONDS
    assert tasks.durable.get(run.id).state is RunState.READY
    assert [(group.task, group.runs) for group in diagnosis.blocked(conn)] == [(tasks_of_b.hop.name, 1)]
    assert tasks.durable.history(run.id).attempts == []
    start_worker(pool="threads", concurrency=1, name="b", app=B)

    # A reads the same queue and may get its hints first; each time it comes back within seconds.
    wait_for_state(run.id, RunState.SUCCEEDED, timeout=25)
    assert len(tasks.durable.history(run.id).attempts) == 1
    assert {entry.pid for entry in body_log.entries(run.id)} != {a.pid}


def test_s15_i19_hints_that_the_wrong_worker_gets_come_back_until_the_right_one_does(
    tasks: Tasks,
    tasks_of_b: Canvas,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    conn: Connection,
) -> None:
    """B is up, as far as its lease says, but A is quicker at their queue."""
    a = start_worker(pool="threads", concurrency=1, name="a")
    tasks_of_b.durable.declare_versions().ensure()
    runs = [tasks_of_b.hop.delay(number) for number in range(3)]

    until(lambda: all(refusals(a, run.id) >= 3 for run in runs), timeout=25, what="A to refuse each hint three times")
    start_worker(pool="threads", concurrency=1, name="b", app=B)

    wait_for_state([run.id for run in runs], RunState.SUCCEEDED, timeout=60)
