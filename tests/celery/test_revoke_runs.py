"""Revoke is cancel: whichever way Celery is told, the run ends in the database, and no wake-up is swallowed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery import group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from tests.celery.signalling import APP
from tests.support import plain
from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.gates import Gates
from tests.support.guard import clean_environment
from tests.support.wait import until
from tests.support.workers import Pool, Worker
from umt_durable.states import AttemptOutcome, RunState

pytestmark = pytest.mark.processes

only_redis = pytest.mark.parametrize("broker", ["redis"], indirect=True)  # what does not depend on the broker


def signals_of(body_log: BodyLog, run: str) -> list[tuple[str, str]]:
    """Return the Celery signals of a run's ends, each with its mark."""
    found = body_log.entries(run)
    return [(one.step.partition(":")[2], one.mark) for one in found if one.step.startswith("signal:")]


def wait_for_signals(body_log: BodyLog, run: str, *wanted: tuple[str, str]) -> None:
    """Return once these signals of a run were sent, and no other; a result is stored a moment before its signal."""
    until(lambda: len(signals_of(body_log, run)) >= len(wanted), what=f"the signals {wanted}")
    assert signals_of(body_log, run) == list(wanted)


def assert_revoked(*results: AsyncResult[Any]) -> None:
    """Assert that callers learn of the cancel."""
    for result in results:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)


def test_i11_every_way_to_revoke_holds_with_every_worker_down(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    body_log: BodyLog,
) -> None:
    one, terminated, *several = (tasks.one_step.delay(number) for number in range(4))
    grouped = group(tasks.one_step.s(number) for number in range(3))()
    stamped = tasks.one_step.s(7)
    stamped.stamp(customer="c1")
    by_stamp = stamped.apply_async()
    other = tasks.one_step.s(8)
    other.stamp(customer="c2")
    kept = other.apply_async()

    one.revoke()
    one.revoke()
    terminated.revoke(terminate=True)
    tasks.app.control.revoke([result.id for result in several])
    grouped.revoke()
    tasks.app.control.revoke_by_stamped_headers({"customer": ["c1", "c9"]})

    revoked = [one, terminated, *several, *grouped.results, by_stamp]
    assert {tasks.durable.get(result.id).state for result in revoked} == {RunState.CANCELLED}
    start_worker(concurrency=1, app=APP)
    assert kept.get(timeout=60) == 8
    assert_revoked(*revoked)
    assert [body_log.count(result.id, "only") for result in revoked] == [0] * len(revoked)
    for result in revoked:
        mark = "True 15" if result is terminated else "False None"
        wait_for_signals(body_log, result.id, ("revoked", f"tests.one_step {mark}"))


@only_redis
def test_revoke_of_a_finished_run_changes_nothing(
    tasks: Tasks, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    worker = start_worker(concurrency=1, app=APP)
    done = tasks.one_step.delay(5)
    assert done.get(timeout=60) == 5

    done.revoke()
    answer = tasks.app.control.revoke(done.id, terminate=True, reply=True, timeout=10, destination=[worker.node])

    assert answer == [{worker.node: {"ok": "terminate: tasks unknown"}}]
    assert tasks.durable.get(done.id).state is RunState.SUCCEEDED
    assert AsyncResult(done.id, app=tasks.app).get(timeout=10) == 5
    assert signals_of(body_log, done.id) == [("success", "begin")]


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_a_terminated_run_is_cancelled_and_not_tried_again_as_a_crash(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    gates: Gates,
    body_log: BodyLog,
    signal: str,
) -> None:
    worker = start_worker(concurrency=1, app=APP)
    gates.close("inside")
    result = tasks.ten_steps.delay(gate_step=2, gate="inside")
    (child,) = gates.wait("inside")

    result.revoke(terminate=True, signal=signal)

    assert_revoked(result)
    run = tasks.durable.get(result.id)
    assert (run.state, run.crashes) == (RunState.CANCELLED, 0)
    until(lambda: child not in [one.pid for one in worker.children()], what="the child to be gone")
    assert tasks.one_step.delay(1).get(timeout=60) == 1
    assert body_log.counts(result.id)["step-2"] == 1
    assert "Traceback" not in worker.text()
    number = {"TERM": 15, "KILL": 9}[signal]
    wait_for_signals(body_log, result.id, ("revoked", f"tests.ten_steps True {number}"))


@only_redis
def test_a_revoke_without_terminate_ends_a_running_body_at_its_next_step(
    tasks: Tasks, start_worker: Callable[..., Worker], pool: Pool, gates: Gates, body_log: BodyLog
) -> None:
    start_worker(pool=pool, concurrency=1, app=APP)
    gates.close("inside")
    result = tasks.ten_steps.delay(gate_step=2, gate="inside")
    gates.wait("inside")

    result.revoke(terminate=pool == "threads")  # which no thread can be
    until(lambda: tasks.durable.get(result.id).cancel_at is not None, what="the cancel to be written")
    gates.open("inside")

    assert_revoked(result)
    assert sorted(step for step in body_log.counts(result.id) if step.startswith("step")) == ["step-1", "step-2"]
    wait_for_signals(body_log, result.id, ("revoked", "tests.ten_steps False None"))
    outcomes = [one.outcome for one in tasks.durable.history(result.id).attempts]
    assert outcomes == [AttemptOutcome.CANCELLED]


def test_a_client_without_this_package_revokes_through_the_workers(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    worker_env: dict[str, str],
    gates: Gates,
    body_log: BodyLog,
) -> None:
    workers = [start_worker(concurrency=1, app=APP, name=name) for name in ("one", "two")]
    foreign = plain.build(worker_env["CELERY_BROKER_URL"], worker_env["CELERY_RESULT_BACKEND"])
    sleeping, listed = (tasks.sleeper.delay(seconds=300) for _ in range(2))
    kept = tasks.sleeper.delay(seconds=4, value=2)
    stamped = tasks.sleeper.s(seconds=300)
    stamped.stamp(customer="c1")
    by_stamp = stamped.apply_async()
    wait_for_state([one.id for one in (sleeping, listed, kept, by_stamp)], RunState.SLEEPING)
    gates.close("inside")
    running = tasks.ten_steps.delay(gate_step=2, gate="inside")
    gates.wait("inside")

    foreign.control.revoke(sleeping.id)
    foreign.control.revoke([listed.id, "no-such-id"])
    foreign.control.revoke_by_stamped_headers({"customer": "c1"})
    foreign.control.terminate(running.id, signal="KILL")

    revoked = [sleeping, listed, by_stamp, running]
    wait_for_state([one.id for one in revoked], RunState.CANCELLED)
    assert_revoked(*revoked)
    listed_ids = foreign.control.inspect(timeout=5, destination=[one.node for one in workers]).revoked()
    assert [listed_ids[one.node] for one in workers] == [["no-such-id"]] * 2
    assert kept.get(timeout=60) == 2
    assert [len(signals_of(body_log, one.id)) for one in revoked] == [1] * 4
    assert [tasks.durable.get(one.id).crashes for one in revoked] == [0] * 4
    foreign.close()


@only_redis
def test_the_command_line_revokes_and_terminates(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    command: Callable[..., str],
) -> None:
    first, second = tasks.one_step.delay(1), tasks.one_step.delay(2)

    command("control", "revoke", first.id, fails=True)  # no worker answers; the run is cancelled all the same
    worker = start_worker(concurrency=1)
    assert second.get(timeout=60) == 2
    sleeping = tasks.sleeper.delay(seconds=300)
    wait_for_state(sleeping.id, RunState.SLEEPING)
    said = command("control", "terminate", "KILL", sleeping.id)

    assert worker.node in said
    assert tasks.durable.get(first.id).state is RunState.CANCELLED
    assert tasks.durable.get(sleeping.id).state is RunState.CANCELLED
    assert_revoked(first, sleeping)


@only_redis
def test_ordinary_tasks_are_revoked_as_ever(
    tasks: Tasks, start_worker: Callable[..., Worker], gates: Gates, body_log: BodyLog
) -> None:
    worker = start_worker(concurrency=1, app=APP)
    gates.close("inside")
    busy = tasks.one_step.delay(1, gate="inside")
    gates.wait("inside")
    ordinary, durable = tasks.add.delay(1, 2), tasks.one_step.delay(3)

    answer = tasks.app.control.revoke(
        [ordinary.id, durable.id], reply=True, timeout=10, destination=[worker.node], limit=1
    )
    gates.open("inside")

    assert_revoked(ordinary, durable)
    assert "flagged as revoked" in answer[0][worker.node]["ok"]
    assert busy.get(timeout=60) == 1
    assert tasks.app.control.inspect(timeout=5, destination=[worker.node]).revoked()[worker.node] == [ordinary.id]
    wait_for_signals(body_log, ordinary.id, ("revoked", "tests.add False None"))


@only_redis
def test_an_id_that_was_revoked_before_it_was_a_run_makes_a_cancelled_run(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    worker_env: dict[str, str],
    body_log: BodyLog,
) -> None:
    worker = start_worker(concurrency=1, app=APP)
    foreign = plain.build(worker_env["CELERY_BROKER_URL"], worker_env["CELERY_RESULT_BACKEND"])
    tasks.app.control.revoke(["of-a-chain", "of-another"], reply=True, timeout=10, destination=[worker.node], limit=1)

    from_elsewhere = foreign.send_task("tests.one_step", (1,), task_id="of-another")
    from_here = tasks.one_step.apply_async((2,), task_id="of-a-chain")

    wait_for_state(["of-a-chain", "of-another"], RunState.CANCELLED)
    assert_revoked(from_here)
    with pytest.raises(TaskRevokedError):
        from_elsewhere.get(timeout=30)
    assert body_log.count(step="only") == 0
    foreign.close()


@pytest.fixture
def command(worker_env: dict[str, str]) -> Callable[..., str]:
    """Return a function that runs `celery` for the app of the tests and returns what it says."""

    def run(*words: str, fails: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "tests.support.apps:app", *words],
            env=clean_environment(worker_env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode != 0) is fails, done.stdout + done.stderr
        return done.stdout

    return run
