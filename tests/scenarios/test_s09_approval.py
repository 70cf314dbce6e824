"""S09: two of three approvers, never the one who asks, within fourteen days, over restarts of the worker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.clock import Clock
from tests.support.scenario_apps import LIMIT, Scenarios, approval
from tests.support.wait import until, wait_for_value
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.states import RunState, WaitState

pytestmark = pytest.mark.processes

APP = "tests.support.scenario_apps:app"
PEOPLE = ["ana", "ben", "cleo", "dan"]


def test_s09_d13_two_of_three_approvers_let_a_run_go_on_and_a_fortnight_without_them_ends_it(
    scenarios: Scenarios,
    start_worker: Callable[..., Worker],
    wait_for: Callable[..., None],
    body_log: BodyLog,
    clock: Clock,
    broker: Broker,
    conn: Connection,
    schema: str,
) -> None:
    def answer(order: str, person: str, note: str) -> None:
        """Say an answer, and return once a router has looked for who waits for it."""
        scenarios.durable.emit("approval", approval(order, person), {"by": person, "note": note}, actor=person)
        unrouted = f"SELECT count(*) FROM {schema}.fact WHERE routed_at IS NULL"
        wait_for_value(conn, unrouted, 0, timeout=30)

    def satisfied(run_id: str) -> int:
        return sum(wait.state is WaitState.SATISFIED for wait in scenarios.durable.history(run_id).waits)

    worker = start_worker(app=APP, pool="threads", concurrency=1)
    bought, forgotten = (scenarios.approve.delay(order, "ana", PEOPLE).id for order in ("bought", "forgotten"))
    wait_for([bought, forgotten], RunState.WAITING)

    answer("bought", "ana", "mine, so yes")
    assert satisfied(bought) == 0, "who asks does not answer"
    answer("bought", "ben", "fine")
    answer("bought", "ben", "I said fine")
    answer("forgotten", "ben", "fine")
    until(lambda: satisfied(bought) == satisfied(forgotten) == 1, timeout=30, what="one answer of each order to count")
    worker.kill9()
    clock.advance(LIMIT - timedelta(days=1))
    worker.start()
    assert [scenarios.durable.get(run).state for run in (bought, forgotten)] == [RunState.WAITING] * 2
    answer("bought", "dan", "fine too")
    wait_for(bought, RunState.SUCCEEDED)
    clock.advance(timedelta(days=1, seconds=1))
    wait_for(forgotten, RunState.SUCCEEDED)
    answer("forgotten", "dan", "too late")

    results = [scenarios.durable.client.result(scenarios.durable.get(run)) for run in (bought, forgotten)]
    answers = {"ben": {"by": "ben", "note": "fine"}, "dan": {"by": "dan", "note": "fine too"}}
    assert results == [{"approved": True, "answers": answers}, {"approved": False}]
    assert body_log.counts(bought) == {"ask": 1, "order": 1}
    assert body_log.counts(forgotten) == {"ask": 1, "remind": 1}
