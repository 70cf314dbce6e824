"""Priority schedules: on both brokers a run of high priority overtakes a backlog of low ones, through a real worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.apps import MAX_PRIORITY, Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.gates import Gates
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.states import RunState
from umt_durable.store import outbox

pytestmark = pytest.mark.processes

BACKLOG = 12
AHEAD = 2  # the run in the body, and the one hint that a worker reserves beside it


@pytest.fixture
def worker_env(worker_env: dict[str, str]) -> dict[str, str]:
    """Have queues that heed priorities, which RabbitMQ's do only when they are declared so."""
    return {**worker_env, MAX_PRIORITY: "9"}


def test_g5_a_run_of_high_priority_starts_before_a_backlog_of_low_ones(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
    gates: Gates,
    conn: Connection,
) -> None:
    def start(value: int, wish: int, **more: Any) -> str:
        # Celery passes a priority on as it is, and on Redis 0 is the most urgent.
        priority = 9 - wish if broker.name == "redis" else wish
        return str(tasks.one_step.apply_async((value,), more, priority=priority).id)

    start_worker(pool="threads", concurrency=1)
    gates.close("slot")
    first = start(0, 1, gate="slot")
    gates.wait("slot")
    low = [start(number, 1) for number in range(1, BACKLOG + 1)]
    until(lambda: outbox.status(conn)[0] == 0, what="the backlog to have left the outbox")

    high = start(99, 9)
    until(lambda: outbox.status(conn)[0] == 0, what="the hint of high priority to have left the outbox")
    assert broker.depth(QUEUE) >= BACKLOG - AHEAD
    gates.open("slot")
    wait_for_state([first, *low, high], RunState.SUCCEEDED)

    order = [entry.run for entry in body_log.entries(mark="begin")]
    assert sorted(order) == sorted([first, *low, high])
    assert order.index(high) <= AHEAD


def test_g5_the_relay_sends_the_most_urgent_first_when_the_broker_comes_back(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
) -> None:
    """Nothing is reserved here: with every hint in the outbox, the order of starting is that of the wishes."""
    wishes = [1, 5, 9, 1, 5, 9]
    ids = []
    for place, wish in enumerate(wishes):
        priority = 9 - wish if broker.name == "redis" else wish
        ids.append(tasks.one_step.apply_async((place,), priority=priority).id)

    start_worker(pool="threads", concurrency=1)
    wait_for_state(ids, RunState.SUCCEEDED)

    order = [wishes[ids.index(entry.run)] for entry in body_log.entries(mark="begin")]
    assert order == sorted(wishes, reverse=True)
