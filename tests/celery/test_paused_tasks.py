"""A paused task with a real worker and broker: its runs wait, other runs pass, and all go on when it is resumed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.apps import Tasks
from tests.support.brokers import Broker, RedisBroker
from tests.support.workers import Worker
from umt_durable.states import RunState

pytestmark = pytest.mark.processes


@pytest.fixture
def broker(redis_broker: RedisBroker) -> Broker:
    """Return one broker: what is paused is decided in the database."""
    return redis_broker


def test_i19_runs_of_a_paused_task_wait_while_others_pass_and_go_on_when_it_is_resumed(
    tasks: Tasks, start_worker: Callable[..., Worker], wait_for_state: Callable[..., None]
) -> None:
    start_worker(pool="threads", concurrency=1)
    assert tasks.durable.pause_task("tests.one_step", actor="ann", reason="stocktaking")
    waiting = [tasks.one_step.delay(number).id for number in range(5)]

    for _ in range(2):  # the second proves that relay and worker have been round again
        wait_for_state(tasks.ten_steps.delay().id, RunState.SUCCEEDED, timeout=60)

    assert {tasks.durable.get(one).state for one in waiting} == {RunState.READY}
    assert [tasks.durable.history(one).attempts for one in waiting] == [[]] * 5
    assert tasks.durable.resume_task("tests.one_step", actor="ann")
    wait_for_state(waiting, RunState.SUCCEEDED, timeout=60)
    assert [len(tasks.durable.history(one).attempts) for one in waiting] == [1] * 5
    assert tasks.durable.pauses.list() == []
