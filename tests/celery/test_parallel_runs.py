"""Maps and branches in real workers: every pool executes them, and what is killed in the middle ends once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.gates import Gates
from tests.support.wait import until
from tests.support.workers import POOLS, Worker
from umt_durable.states import RunState, StepState

pytestmark = [pytest.mark.processes, pytest.mark.redis_by_default]

only_redis = pytest.mark.parametrize("broker", ["redis"], indirect=True)
FORKED = {"steps": [1, 2, 3], "sleeps": 4, "waits": 5}
BODIES = {"step-1", "step-2", "step-3", "before", "after", "went"}


def done(tasks: Tasks, run_id: str) -> set[str]:
    """Return the keys of what is recorded as done."""
    return {step.key for step in tasks.durable.history(run_id).steps if step.state is StepState.DONE}


def test_i6_a_child_killed_in_the_middle_of_a_map_repeats_no_item_that_was_committed(
    tasks: Tasks, start_worker: Callable[..., Worker], gates: Gates, body_log: BodyLog
) -> None:
    worker = start_worker(pool="prefork", concurrency=1)
    gates.close("item")
    result = tasks.picker.delay(40, 20, "item")
    until(lambda: len(done(tasks, result.id)) == 39, timeout=60, what="all but one item to be committed")

    worker.kill_child()
    gates.open("item")

    assert result.get(timeout=60) == list(range(40))
    assert body_log.counts(result.id) == {f"item-{item}": 1 + (item == 20) for item in range(40)}


def test_i1_i6_a_worker_killed_in_the_middle_of_branches_leaves_them_to_another(
    tasks: Tasks, start_worker: Callable[..., Worker], gates: Gates, body_log: BodyLog
) -> None:
    first = start_worker(pool="prefork", concurrency=1)
    gates.close("step")
    result = tasks.forker.delay(2.5, "step")
    until(lambda: {"parallel[steps]/one", "parallel[sleeps]/before"} <= done(tasks, result.id), what="the first steps")
    until(lambda: gates.reached("step") != set(), what="the second step of a branch")
    until(lambda: tasks.durable.history(result.id).waits != [], what="the wait of another")

    first.kill9()
    tasks.durable.signal(result.id, "go", 5)
    gates.open("step")
    start_worker(pool="prefork", concurrency=1, name="heir")

    assert result.get(timeout=90) == FORKED
    assert body_log.counts(result.id) == {name: 1 + (name == "step-2") for name in BODIES}


def test_i8_branches_that_all_wait_hold_no_worker(
    tasks: Tasks, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    start_worker(pool="prefork", concurrency=1)
    result = tasks.forker.delay(3600.0)
    until(lambda: tasks.durable.get(result.id).state is RunState.WAITING, timeout=30, what="the run to be parked")

    other: Any = tasks.picker.delay(3)
    assert other.get(timeout=60) == [0, 1, 2]
    tasks.durable.signal(result.id, "go", 5)
    until(lambda: body_log.count(result.id, "went") == 1, what="the branch that waited")
    until(
        lambda: tasks.durable.get(result.id).state is RunState.SLEEPING, timeout=30, what="the run to be parked again"
    )

    assert "parallel[waits]" in done(tasks, result.id)
    tasks.durable.cancel(result.id)
    until(lambda: tasks.durable.get(result.id).state is RunState.CANCELLED, what="the run to be cancelled")


@only_redis
@pytest.mark.parametrize("kind", [*POOLS, "gevent"])
def test_every_pool_executes_maps_and_branches(
    tasks: Tasks, start_worker: Callable[..., Worker], body_log: BodyLog, kind: str
) -> None:
    worker = start_worker(pool=kind, concurrency=1 if kind == "solo" else 2)
    forked, picked = tasks.forker.delay(2.5), tasks.picker.delay(200, concurrency=8)

    assert picked.get(timeout=60) == list(range(200))
    tasks.durable.signal(forked.id, "go", 5)
    assert forked.get(timeout=60) == FORKED
    assert set(body_log.counts(picked.id).values()) == {1}
    assert body_log.counts(forked.id) == dict.fromkeys(BODIES, 1)
    assert "Traceback" not in worker.text()


@only_redis
def test_i6_a_warm_shutdown_in_a_map_commits_what_is_in_flight_and_hands_the_rest_over(
    tasks: Tasks, start_worker: Callable[..., Worker], gates: Gates, body_log: BodyLog
) -> None:
    first = start_worker(pool="prefork", concurrency=1)
    gates.close("item")
    result = tasks.picker.delay(40, 3, "item", 1)
    until(lambda: gates.reached("item") != set(), timeout=60, what="the item that stops")

    first.term()
    first.wait_for("Warm shutdown")
    gates.open("item")
    first.wait()
    start_worker(pool="prefork", concurrency=1, name="heir")

    assert result.get(timeout=60) == list(range(40))
    assert set(body_log.counts(result.id).values()) == {1}
    assert len(tasks.durable.history(result.id).attempts) in (1, 2)
