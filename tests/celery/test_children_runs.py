"""Child runs on real workers: many of them, kills while they are made and while they run, and a wiped broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import awaited_apps
from tests.support.awaited_apps import Awaited
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.gates import Gates
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable import RunState
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.states import AttemptOutcome

pytestmark = [pytest.mark.processes, pytest.mark.redis_by_default]

APP = "tests.support.awaited_apps:app"


@pytest.fixture
def awaited(worker_env: dict[str, str]) -> Iterator[Awaited]:
    """Return the tasks, for calling."""
    awaited = awaited_apps.build(worker_env)
    yield awaited
    awaited.durable.stop()
    awaited.app.close()


def _fans_out(awaited: Awaited, body_log: BodyLog, count: int, timeout: float, *, by_map: bool = False) -> None:
    run = (awaited.spread if by_map else awaited.fan).delay(count)
    assert run.get(timeout=timeout) == sum(2 * value for value in range(count))
    assert body_log.count(step="double") == count
    assert body_log.count(run.id, "sum") == 1
    # On a loaded machine the parent may lose its short lease in between; that wakes nobody.
    outcomes = [one.outcome for one in awaited.durable.history(run.id).attempts]
    woken = [outcome for outcome in outcomes if outcome is not AttemptOutcome.LOST]
    assert woken in ([AttemptOutcome.SUSPENDED, AttemptOutcome.COMPLETED], [AttemptOutcome.COMPLETED]), outcomes
    assert len(woken) == 2 or len(outcomes) > len(woken)


def test_i17_a_thousand_children_wake_their_parent_once(
    awaited: Awaited, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    start_worker(app=APP, pool="threads", concurrency=4)
    _fans_out(awaited, body_log, 1_000, timeout=180)


@pytest.mark.long
def test_i17_ten_thousand_children_wake_their_parent_once(
    awaited: Awaited, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    start_worker(app=APP, pool="prefork", concurrency=2)
    _fans_out(awaited, body_log, 10_000, timeout=1_800)


def test_i17_a_map_on_workers_wakes_its_parent_once(
    awaited: Awaited, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    start_worker(app=APP, pool="threads", concurrency=4)
    _fans_out(awaited, body_log, 300, timeout=120, by_map=True)


@pytest.mark.long
def test_i17_a_map_of_ten_thousand_items_on_workers_wakes_its_parent_once(
    awaited: Awaited, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    start_worker(app=APP, pool="prefork", concurrency=2)
    _fans_out(awaited, body_log, 10_000, timeout=1_800, by_map=True)


def test_i17_a_map_on_workers_loses_no_item_and_makes_no_twin_by_kills(
    awaited: Awaited,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    body_log: BodyLog,
    gates: Gates,
    tmp_path: Path,
) -> None:
    worker_env[ENVIRONMENT] = (
        f"child.insert.a=kill;file:{tmp_path / 'insert'},finish.commit.a=kill;nth=3;file:{tmp_path / 'end'}"
    )
    gates.close("working")
    worker = start_worker(app=APP, pool="prefork", concurrency=2)
    run = awaited.spread.delay(7, "working", 3)
    gates.wait("working", processes=2)
    worker.kill_child()
    gates.open("working")

    assert run.get(timeout=120) == sum(2 * value for value in range(7))
    assert (tmp_path / "insert").exists()
    assert len(awaited.durable.list(task="awaited.of-pair", limit=100)) == 7
    assert body_log.count(run.id, "sum") == 1


def test_i17_kills_and_a_wiped_broker_make_no_twins_and_lose_none(
    awaited: Awaited,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    broker: Broker,
    body_log: BodyLog,
    gates: Gates,
    tmp_path: Path,
) -> None:
    worker_env["DURABLE_HOLD_SECONDS"] = "2"
    worker_env[ENVIRONMENT] = (
        f"child.insert.a=kill;file:{tmp_path / 'insert'},finish.commit.a=kill;nth=3;file:{tmp_path / 'end'}"
    )
    gates.close("working")
    worker = start_worker(app=APP, pool="prefork", concurrency=2)
    run = awaited.fan.delay(12, "working")
    gates.wait("working", processes=2)
    until(lambda: awaited.durable.get(run.id).state is RunState.WAITING, timeout=60, what="the parent to wait")
    worker.kill_child()
    broker.wipe()
    gates.open("working")

    assert run.get(timeout=120) == sum(2 * value for value in range(12))
    assert (tmp_path / "insert").exists()
    assert len(awaited.durable.list(task="awaited.double", limit=100)) == 12
    assert body_log.count(run.id, "sum") == 1


def test_a_child_that_another_task_takes_the_place_of_is_awaited_to_the_end(
    awaited: Awaited, start_worker: Callable[..., Worker]
) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)
    assert awaited.swapped.delay(4).get(timeout=60) == 8
