"""S18: a parent with ten thousand children of one trivial step each; `benchmarks/fan_out.py` records the figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import guard
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.memory import peak_bytes
from tests.support.scenario_apps import Scenarios
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.states import AttemptOutcome, RunState

pytestmark = pytest.mark.processes

APP = "tests.support.scenario_apps:app"
SLOTS = 4
MOST_BYTES = 300 * 2**20


@pytest.mark.parametrize("children", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_s18_i17_a_parent_continues_once_with_the_results_of_all_its_children_in_order(
    scenarios: Scenarios,
    start_worker: Callable[..., Worker],
    wait_for: Callable[..., None],
    body_log: BodyLog,
    broker: Broker,
    conn: Connection,
    schema: str,
    children: int,
) -> None:
    worker = start_worker(app=APP, pool="prefork", concurrency=SLOTS)

    run = scenarios.parent.delay(children).id
    wait_for(run, RunState.SUCCEEDED, timeout=60 + children / 10)

    assert scenarios.durable.client.result(scenarios.durable.get(run)) == [number**2 for number in range(children)]
    assert body_log.counts(run) == {"joined": 1}
    outcomes = [attempt.outcome for attempt in scenarios.durable.history(run).attempts]
    assert outcomes == [AttemptOutcome.SUSPENDED, AttemptOutcome.COMPLETED]
    ended = f"SELECT state, count(*) FROM {schema}.run WHERE task = %s GROUP BY state"
    assert conn.execute(ended.encode(), (scenarios.child.name,)).fetchall() == [("succeeded", children)]
    most = {process.pid: peak_bytes(process.pid) for process in guard.tree(worker.pid)}
    assert max(most.values()) < MOST_BYTES, most


def test_s18_a_parent_without_children_joins_at_once(
    scenarios: Scenarios, start_worker: Callable[..., Worker], body_log: BodyLog, broker: Broker
) -> None:
    start_worker(app=APP, pool="threads", concurrency=1)

    result = scenarios.parent.delay(0)

    assert result.get(timeout=60) == []
    assert body_log.counts(result.id) == {"joined": 1}
    history = scenarios.durable.history(result.id)
    assert [attempt.outcome for attempt in history.attempts] == [AttemptOutcome.COMPLETED]
    assert history.waits == []
