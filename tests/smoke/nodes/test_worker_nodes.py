"""What a user of pytest-celery sees of durable tasks: kills and restarts in its vocabulary, on local processes."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import pytest
from celery import Celery
from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup, CeleryTestWorker

from tests.support.bodylog import BodyLog
from tests.support.gates import Gates
from tests.support.nodes import EXITED, RUNNING, WorkerHandle
from tests.support.wait import until

pytestmark = pytest.mark.processes

each_broker = pytest.mark.parametrize(
    "broker", ["redis", pytest.param("rabbitmq", marks=[pytest.mark.rabbitmq, pytest.mark.long])], indirect=True
)


class WorkerKill(StrEnum):
    """The ways in which the plug-in's users end a worker, and one of a pool's own."""

    NODE_KILL = "SIGKILL"
    SIGTERM = "SIGTERM"
    SIGQUIT = "SIGQUIT"
    CONTROL_SHUTDOWN = "control shutdown"
    CHILD_KILL = "child kill"

    def of(self, setup: CeleryTestSetup, child: int) -> None:
        """End the worker of a set-up, or the child of its pool that executes a body."""
        match self:
            case WorkerKill.CONTROL_SHUTDOWN:
                setup.app.control.shutdown(destination=[setup.worker.hostname()])
            case WorkerKill.CHILD_KILL:
                setup.worker.container.kill_child(child)
            case _:
                setup.worker.kill(signal=str(self))


@each_broker
def test_the_set_up_answers_pings_and_runs_durable_and_ordinary_tasks(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(ping=True, control=True)
    app, queue = celery_setup.app, celery_setup.worker.worker_queue

    stepped = send(app, "smoke.steps", 3, queue=queue)
    napped = send(app, "smoke.nap", 0.1, queue=queue)
    plain = send(app, "smoke.ordinary", 1, queue=queue)

    assert stepped.get(timeout=RESULT_TIMEOUT) == [1, 2, 3]
    assert napped.get(timeout=RESULT_TIMEOUT) == 1
    assert plain.get(timeout=RESULT_TIMEOUT) == 2
    celery_setup.worker.assert_log_exists("Task smoke.steps")
    processes = celery_setup.worker.get_running_processes_info(["pid"])
    assert celery_setup.worker.container.pid in {one["pid"] for one in processes}


@each_broker
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(one, marks=[pytest.mark.long] * (one is not WorkerKill.NODE_KILL), id=one.name)
        for one in WorkerKill
    ],
)
def test_a_durable_task_survives_each_way_to_end_its_worker(
    celery_setup: CeleryTestSetup, gates: Gates, body_log: BodyLog, method: WorkerKill
) -> None:
    worker = celery_setup.worker
    gates.close("inside")
    result = send(celery_setup.app, "smoke.steps", 3, 2, "inside", queue=worker.worker_queue)
    (child,) = gates.wait("inside")

    method.of(celery_setup, child)
    gates.open("inside")
    if method is not WorkerKill.CHILD_KILL:
        worker.container.wait()
        assert worker.container.status == EXITED
        worker.restart()

    assert worker.container.status == RUNNING
    assert result.get(timeout=RESULT_TIMEOUT) == [1, 2, 3]
    counts = body_log.counts(result.id)
    assert (counts["step-1"], counts["step-3"]) == (1, 1)
    assert counts["step-2"] == (1 if method in (WorkerKill.SIGTERM, WorkerKill.CONTROL_SHUTDOWN) else 2)


@each_broker
def test_a_restart_and_a_broker_that_goes_away_keep_what_sleeps(
    celery_setup: CeleryTestSetup, body_log: BodyLog
) -> None:
    worker = celery_setup.worker
    napping = send(celery_setup.app, "smoke.nap", 3.0, queue=worker.worker_queue)
    until(lambda: body_log.count(napping.id, "before") == 1, timeout=30, what="the run to begin")

    worker.restart(force=True)
    celery_setup.broker.kill()
    celery_setup.broker.restart()

    assert napping.get(timeout=RESULT_TIMEOUT) == 1
    assert body_log.counts(napping.id) == {"before": 1, "after": 1}


@pytest.mark.long
@each_broker
def test_a_second_worker_takes_over_from_the_one_that_was_killed(
    celery_setup: CeleryTestSetup, make_worker_handle: Callable[[str], WorkerHandle], gates: Gates, body_log: BodyLog
) -> None:
    gates.close("inside")
    result = send(celery_setup.app, "smoke.steps", 3, 2, "inside", queue=celery_setup.worker.worker_queue)
    gates.wait("inside")
    second = CeleryTestWorker(make_worker_handle("second"), celery_setup.app)
    assert second.ready()

    celery_setup.worker.kill()
    gates.open("inside")

    assert result.get(timeout=RESULT_TIMEOUT) == [1, 2, 3]
    assert body_log.counts(result.id) == {"step-1": 1, "step-2": 2, "step-3": 1}
    assert celery_setup.app.control.ping(destination=[second.hostname()], timeout=5.0)


def send(app: Celery, name: str, *args: object, queue: str) -> Any:
    """Send a task of the set-up's app to its worker."""
    return app.tasks[name].apply_async(args, queue=queue)
