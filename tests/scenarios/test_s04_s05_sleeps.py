"""S04: a sleep leaves the slot. S05: nobody is home at wake time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.clock import Clock
from tests.support.queues import QUEUE
from tests.support.workers import Worker
from umt_durable.states import RunState

pytestmark = pytest.mark.processes


def test_s04_sleeping_runs_hold_no_slot_and_no_message(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
    clock: Clock,
) -> None:
    worker = start_worker(pool="prefork", concurrency=1)
    sleepers = [tasks.sleeper.delay(seconds=300).id for _ in range(50)]
    wait_for_state(sleepers, RunState.SLEEPING)
    wait_until_empty(broker, QUEUE)

    short = tasks.one_step.delay(1)
    wait_for_state(short.id, RunState.SUCCEEDED)
    assert body_log.count(step="after") == 0

    worker.restart()
    clock.advance(seconds=301)
    wait_for_state(sleepers, RunState.SUCCEEDED)

    assert [body_log.counts(run_id) for run_id in sleepers] == [{"before": 1, "after": 1}] * 50


def test_s05_a_run_that_was_due_while_no_worker_lived_goes_on_when_one_comes(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    body_log: BodyLog,
    clock: Clock,
) -> None:
    worker = start_worker(pool="prefork", concurrency=1)
    result = tasks.sleeper.delay(seconds=300)
    wait_for_state(result.id, RunState.SLEEPING)
    worker.term()
    worker.wait()

    clock.advance(seconds=3600)
    worker.start()
    wait_for_state(result.id, RunState.SUCCEEDED)

    assert body_log.counts(result.id) == {"before": 1, "after": 1}
