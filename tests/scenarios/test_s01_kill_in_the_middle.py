"""S01: kill -9 in the sixth of ten steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.gates import Gates
from tests.support.workers import Pool, Worker
from umt_durable.states import AttemptOutcome, RunState

pytestmark = pytest.mark.processes


def assert_continued(tasks: Tasks, body_log: BodyLog, run_id: str) -> None:
    """Check that nothing finished ran again, and that the result is as without the kill."""
    counts = body_log.counts(run_id)
    assert [counts[f"step-{number}"] for number in range(1, 6)] == [1] * 5
    assert counts["step-6"] == 2
    assert [counts[f"step-{number}"] for number in range(7, 11)] == [1] * 4
    assert tasks.durable.client.result(tasks.durable.get(run_id)) == list(range(1, 11))
    outcomes = [attempt.outcome for attempt in tasks.durable.history(run_id).attempts]
    assert outcomes == [AttemptOutcome.LOST, AttemptOutcome.COMPLETED]


def test_s01_i1_b6_a_killed_pool_childs_run_continues_on_another(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    body_log: BodyLog,
    gates: Gates,
) -> None:
    worker = start_worker(pool="prefork", concurrency=2)
    gates.close("six")
    result = tasks.ten_steps.delay(gate_step=6, gate="six")
    (child,) = gates.wait("six")

    worker.kill_child(child)
    gates.open("six")
    wait_for_state(result.id, RunState.SUCCEEDED)

    assert_continued(tasks, body_log, result.id)
    assert result.get(timeout=30) == list(range(1, 11))


def test_s01_i1_i21_a_killed_workers_run_continues_on_another_worker(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    body_log: BodyLog,
    gates: Gates,
    pool: Pool,
) -> None:
    """E3: as soon as its lease has run out."""
    gates.close("six")
    worker = start_worker(pool=pool, concurrency=1)
    result = tasks.ten_steps.delay(gate_step=6, gate="six")
    gates.wait("six")

    worker.kill9()
    gates.open("six")
    start_worker(pool=pool, concurrency=1, name="heir")
    wait_for_state(result.id, RunState.SUCCEEDED)

    assert_continued(tasks, body_log, result.id)
    assert result.get(timeout=30) == list(range(1, 11))
