"""Async durable tasks on the pools of real workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from celery import signature
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.gates import Gates
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Pool, Worker

pytestmark = [pytest.mark.processes, pytest.mark.parametrize("broker", ["redis"], indirect=True)]

APP = "tests.celery.awaiting:app"


def send(tasks: Tasks, name: str, **arguments: object) -> AsyncResult:
    """Send a task of the project by its name."""
    return signature(f"awaiting.{name}", kwargs=arguments, app=tasks.app).apply_async(queue=QUEUE)


@pytest.mark.parametrize("kind", ["prefork", "threads", "solo"])
def test_async_bodies_run_on_every_pool_that_has_no_loop_of_its_own(
    tasks: Tasks, start_worker: Callable[..., Worker], body_log: BodyLog, kind: Pool
) -> None:
    worker = start_worker(app=APP, pool=kind, concurrency=1 if kind == "solo" else 2)

    runs = [send(tasks, "steps", sleep=seconds) for seconds in (0.0, 2.5, 0.0, 2.5)]

    assert [run.get(timeout=60) for run in runs] == [[1, 2, 3]] * 4
    assert [body_log.counts(run.id) for run in runs] == [{"step-1": 1, "step-2": 1, "step-3": 1}] * 4
    assert worker.alive


def test_i1_i6_an_async_run_whose_process_is_killed_goes_on_in_another(
    tasks: Tasks, start_worker: Callable[..., Worker], body_log: BodyLog, gates: Gates
) -> None:
    start_worker(app=APP, pool="prefork", concurrency=2)
    gates.close("second")

    run = send(tasks, "steps", gate="second")
    (child,) = gates.wait("second")
    os.kill(child, signal.SIGKILL)
    until(lambda: body_log.count(run.id, "step-2") == 2, timeout=30, what="the step in flight to be executed again")
    gates.open("second")

    assert run.get(timeout=60) == [1, 2, 3]
    assert body_log.counts(run.id) == {"step-1": 1, "step-2": 2, "step-3": 1}


def test_a_soft_time_limit_cancels_an_async_body_and_fails_its_run(
    tasks: Tasks, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    start_worker(app=APP, pool="prefork", concurrency=1, options=["--soft-time-limit=2"])

    run = send(tasks, "limited")

    with pytest.raises(SoftTimeLimitExceeded):
        run.get(timeout=60)
    assert body_log.count(run.id, "clean-up") == 1


def test_an_async_body_is_refused_on_gevent_with_the_reason(tasks: Tasks, start_worker: Callable[..., Worker]) -> None:
    start_worker(app=APP, pool="gevent", concurrency=2)

    with pytest.raises(Exception, match="prefork, threads or solo"):
        send(tasks, "steps").get(timeout=60)
