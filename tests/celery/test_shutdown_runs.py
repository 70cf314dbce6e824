"""A worker that shuts down finishes the current step and hands its runs over at once; nothing is executed again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import signature

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog, clock
from tests.support.brokers import Broker
from tests.support.gates import Gates
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Pool, Worker
from umt_durable.states import AttemptOutcome, RunState

pytestmark = pytest.mark.processes

APP = "tests.celery.pooled:app"
only_redis = pytest.mark.parametrize("broker", ["redis"], indirect=True)


def assert_each_step_once(body_log: BodyLog, run: str) -> None:
    """Assert that ten steps were entered once each, and none again."""
    assert body_log.counts(run) == {f"step-{number}": 1 for number in range(1, 11)}


@pytest.mark.parametrize("start_method", ["fork", "spawn", "threads", "solo", "gevent"])
@only_redis
def test_warm_shutdown_ends_after_the_step_and_another_worker_goes_on_from_there(
    tasks: Tasks, start_worker: Callable[..., Worker], gates: Gates, body_log: BodyLog, start_method: str
) -> None:
    pool: Pool = "prefork" if start_method in ("fork", "spawn") else start_method  # type: ignore[assignment]  # one of them
    options = ["--pool-start-method=spawn"] if start_method == "spawn" else []
    leaver = start_worker(app=APP, pool=pool, concurrency=1, name="leaver", options=options)
    gates.close("inside")
    result = signature("pooled.steps", (10, 3, "inside"), app=tasks.app).apply_async(queue=QUEUE)
    gates.wait("inside")

    leaver.term()
    leaver.wait_for("Warm shutdown")
    gates.open("inside")

    assert leaver.wait() == 0
    run = tasks.durable.get(result.id)
    assert (run.state, run.crashes) == (RunState.READY, 0)
    assert [one.outcome for one in tasks.durable.history(result.id).attempts] == [AttemptOutcome.SUSPENDED]
    assert body_log.ended(result.id) == {"step-1", "step-2", "step-3"}
    start_worker(app=APP, pool=pool, concurrency=1, name="next")
    assert result.get(timeout=60) == list(range(1, 11))
    assert_each_step_once(body_log, result.id)


def test_a_run_goes_on_at_once_where_another_worker_is_up(
    tasks: Tasks, start_worker: Callable[..., Worker], gates: Gates, body_log: BodyLog
) -> None:
    """G3: nothing waits for the end of a lease."""
    leaver = start_worker(concurrency=1, name="leaver")
    gates.close("inside")
    result = tasks.ten_steps.delay(gate_step=3, gate="inside")
    gates.wait("inside")
    start_worker(concurrency=1, name="next")

    leaver.term()
    leaver.wait_for("Warm shutdown")
    gates.open("inside")

    assert result.get(timeout=60) == list(range(1, 11))
    entries = body_log.entries(result.id, mark="begin")
    left = body_log.entries(result.id, "step-3", "end")[0].at
    taken = next(one.at for one in entries if one.step == "step-4")
    assert taken - left < 3.0, "the hand-over waited for something"
    assert_each_step_once(body_log, result.id)
    leaver.wait()


@only_redis
def test_soft_shutdown_hands_over_before_its_time_is_up(
    tasks: Tasks, start_worker: Callable[..., Worker], worker_env: dict[str, str], gates: Gates, body_log: BodyLog
) -> None:
    leaver = start_worker(concurrency=1, name="leaver", app="tests.celery.softly:app")
    gates.close("inside")
    result = tasks.ten_steps.delay(gate_step=3, gate="inside")
    gates.wait("inside")

    leaver.quit()
    leaver.wait_for("Initiating Soft Shutdown")
    gates.open("inside")

    until(lambda: tasks.durable.get(result.id).state is RunState.READY, what="the run to be handed over")
    assert leaver.wait() == 0
    assert tasks.durable.get(result.id).crashes == 0
    start_worker(concurrency=1, name="next")
    assert result.get(timeout=60) == list(range(1, 11))
    assert_each_step_once(body_log, result.id)


def test_cold_shutdown_repeats_the_step_it_stopped_and_nothing_else(
    tasks: Tasks, start_worker: Callable[..., Worker], gates: Gates, body_log: BodyLog
) -> None:
    leaver = start_worker(concurrency=1, name="leaver")
    gates.close("inside")
    result = tasks.ten_steps.delay(gate_step=3, gate="inside")
    gates.wait("inside")

    began = clock()
    leaver.quit()
    assert leaver.wait() == 0
    assert clock() - began < 15.0
    gates.open("inside")
    until(lambda: tasks.durable.get(result.id).state is RunState.READY, what="the run to be given back")
    assert tasks.durable.get(result.id).crashes == 0, "who asked for a shutdown reported no crash"

    start_worker(concurrency=1, name="next")
    assert result.get(timeout=60) == list(range(1, 11))
    assert body_log.counts(result.id) == {f"step-{number}": 1 + (number == 3) for number in range(1, 11)}


@only_redis
def test_runs_in_hand_that_no_child_had_begun_are_not_lost(
    tasks: Tasks, start_worker: Callable[..., Worker], broker: Broker, gates: Gates, body_log: BodyLog
) -> None:
    leaver = start_worker(concurrency=1, name="leaver", options=["--prefetch-multiplier=4"])
    gates.close("inside")
    first = tasks.ten_steps.delay(gate_step=3, gate="inside")
    gates.wait("inside")
    waiting = [tasks.ten_steps.delay() for _ in range(3)]
    until(lambda: leaver.text().count("received") == 4, what="the worker to hold all four")

    leaver.term()
    leaver.wait_for("Warm shutdown")
    gates.open("inside")
    assert leaver.wait() == 0
    start_worker(concurrency=2, name="next")

    for result in (first, *waiting):
        assert result.get(timeout=60) == list(range(1, 11))
        assert_each_step_once(body_log, result.id)
        assert tasks.durable.get(result.id).crashes == 0
