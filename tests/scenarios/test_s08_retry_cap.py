"""S08: a cap of four attempts holds over restarts of the worker, and the last failure comes back as it was raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.clock import Clock
from tests.support.scenario_apps import CAP, CappedError, Scenarios
from tests.support.workers import Worker
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

APP = "tests.support.scenario_apps:app"


@pytest.mark.parametrize("kind", ["capped_run", "capped_step"])
def test_s08_i14_a_retry_cap_holds_over_restarts_of_the_worker(
    scenarios: Scenarios,
    start_worker: Callable[..., Worker],
    wait_for: Callable[..., None],
    body_log: BodyLog,
    clock: Clock,
    broker: Broker,
    kind: str,
) -> None:
    """The attempts of a run, and those of a step of it."""
    worker = start_worker(app=APP, pool="threads", concurrency=1)
    result = getattr(scenarios, kind).delay()

    for attempt in range(1, CAP.max_attempts):
        wait_for(result.id, RunState.RETRYING)
        assert body_log.count(result.id) == attempt
        worker.kill9()
        clock.advance(CAP.maximum)
        worker.start()
    wait_for(result.id, RunState.FAILED)

    assert body_log.count(result.id) == CAP.max_attempts
    for _ in range(2):
        with pytest.raises(CappedError, match="failure 4"):
            result.get(timeout=30)
    failure = scenarios.durable.client.failure(scenarios.durable.get(result.id))
    assert failure is not None
    assert (failure.type.rpartition(".")[2], failure.message) == ("CappedError", "failure 4")
