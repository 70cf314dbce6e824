"""The database's clock jumps by hours, as after a fail-over, while a worker is inside a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, RedisBroker
from tests.support.clock import Clock
from tests.support.gates import Gates
from tests.support.workers import Worker
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

HOURS = 3600.0


@pytest.fixture
def broker(redis_broker: RedisBroker) -> Broker:
    """Return one broker: no clock of a broker decides anything."""
    return redis_broker


@pytest.mark.parametrize("seconds", [-2 * HOURS, 2 * HOURS], ids=["back", "forward"])
def test_i1_i25_a_jump_of_the_clock_loses_no_run_and_repeats_no_finished_step(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    body_log: BodyLog,
    gates: Gates,
    clock: Clock,
    seconds: float,
) -> None:
    start_worker(pool="prefork", concurrency=3)
    gates.close("six")
    result = tasks.ten_steps.delay(gate_step=6, gate="six")
    gates.wait("six")

    clock.advance(seconds=seconds)
    others = [tasks.one_step.delay(number).id for number in range(5)]
    wait_for_state(others, RunState.SUCCEEDED)
    gates.open("six")
    wait_for_state(result.id, RunState.SUCCEEDED)

    assert result.get(timeout=30) == list(range(1, 11))
    counts = body_log.counts(result.id)
    assert 1 <= counts.pop("step-6") <= 2  # a lease that has ended by the new time is taken over
    assert counts == {f"step-{number}": 1 for number in range(1, 11) if number != 6}
    assert [body_log.count(run_id) for run_id in others] == [1] * 5
    assert all(attempt.outcome is not None for attempt in tasks.durable.history(result.id).attempts)
