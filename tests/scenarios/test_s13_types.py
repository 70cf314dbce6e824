"""S13: values of many types come back from the journal as they were made; what cannot is refused at its step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.gates import Gates
from tests.support.scenario_apps import Scenarios, typed_values
from tests.support.workers import Worker
from umt_durable.states import AttemptOutcome, RunState

pytestmark = pytest.mark.processes

APP = "tests.support.scenario_apps:app"


def test_s13_i26_values_are_equal_and_of_the_same_type_after_a_crash(
    scenarios: Scenarios, start_worker: Callable[..., Worker], body_log: BodyLog, gates: Gates, broker: Broker
) -> None:
    gates.close("made")
    worker = start_worker(app=APP, pool="prefork", concurrency=1)
    result = scenarios.typed.delay("made")
    (child,) = gates.wait("made")

    worker.kill_child(child)
    gates.open("made")

    assert result.get(timeout=60) == []
    assert body_log.counts(result.id) == {**dict.fromkeys(typed_values(), 1), "gate": 2}
    outcomes = [attempt.outcome for attempt in scenarios.durable.history(result.id).attempts]
    assert outcomes == [AttemptOutcome.LOST, AttemptOutcome.COMPLETED]


@pytest.mark.parametrize("kind", ["set", "file"])
def test_s13_i26_what_cannot_be_stored_is_refused_at_its_step_and_not_tried_again(
    scenarios: Scenarios,
    start_worker: Callable[..., Worker],
    wait_for: Callable[..., None],
    body_log: BodyLog,
    broker: Broker,
    kind: str,
) -> None:
    start_worker(app=APP, pool="threads", concurrency=1)

    result = scenarios.unstorable.delay(kind)
    wait_for(result.id, RunState.FAILED)

    failure = scenarios.durable.client.failure(scenarios.durable.get(result.id))
    assert failure is not None
    assert failure.type.endswith("EncodingError")
    assert f"gives-{kind}" in failure.message
    assert body_log.count(result.id) == 1
