"""Ordinary tasks as steps: executed by a worker that knows nothing of this package, or by one that does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from tests.support import awaited_apps
from tests.support.awaited_apps import Awaited
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.clock import Clock
from tests.support.gates import Gates
from tests.support.plain_app import QUEUE as PLAIN
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Serve, Worker
from umt_durable import RunState, UnknownStepError
from umt_durable.bridge import ordinary
from umt_durable.database import Connection
from umt_durable.engine.answers import Place
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.settings import HOLD_SECONDS
from umt_durable.store import outbox, waits

pytestmark = [pytest.mark.processes, pytest.mark.redis_by_default]

APP = "tests.support.awaited_apps:app"
PLAIN_APP = "tests.support.plain_app:app"

# The second batch of a relay is the message of the step: the first is the hint of its run.
KILLED = "{point}=kill;nth=2;file:{once}"


@pytest.fixture
def awaited(worker_env: dict[str, str]) -> Iterator[Awaited]:
    """Return the tasks, for calling."""
    awaited = awaited_apps.build(worker_env)
    yield awaited
    awaited.durable.stop()
    awaited.app.close()


@pytest.fixture
def with_a_killed_relay(
    awaited: Awaited,
    start_worker: Callable[..., Worker],
    serve: Callable[..., Serve],
    worker_env: dict[str, str],
    clock: Clock,
    tmp_path: Path,
) -> Callable[..., AsyncResult[Any]]:
    """Return a function that starts a run whose relay is killed at a point, and the next relay once its row is free."""

    def start(point: str, **options: Any) -> AsyncResult[Any]:
        start_worker(app=APP, pool="threads", concurrency=2, env={**worker_env, "DURABLE_WORKER_SERVICES": "0"})
        killed = KILLED.format(point=point, once=tmp_path / "killed")
        first = serve("all", app=APP, env={**worker_env, ENVIRONMENT: killed})
        run = awaited.label.delay("plain.label", "A", **options)
        until(lambda: not first.alive, timeout=60, what=f"the relay to be dead at {point}")
        _wait(awaited, run.id, RunState.WAITING)
        clock.advance(seconds=HOLD_SECONDS + 1)
        serve("all", app=APP)
        return run

    return start


@pytest.fixture
def workers(start_worker: Callable[..., Worker]) -> Callable[..., tuple[Worker, Worker]]:
    """Return a function that starts a worker of the durable app and one that knows nothing of it."""

    def start(**plain: Any) -> tuple[Worker, Worker]:
        ours = start_worker(app=APP, pool="prefork", concurrency=2)
        return ours, start_worker(**{"app": PLAIN_APP, "pool": "prefork", "concurrency": 1, "name": "plain", **plain})

    return start


def _wait(awaited: Awaited, run_id: str, state: RunState) -> None:
    until(lambda: awaited.durable.get(run_id).state is state, timeout=60, what=f"{run_id} to be {state}")


def test_plain_app_imports_nothing_of_this_package() -> None:
    said = (
        "import sys, tests.support.plain_app; print([name for name in sys.modules if name.startswith('umt_durable')])"
    )
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("side", ["plain", "own"])
def test_results_and_failures_come_back_as_the_step(
    awaited: Awaited, workers: Callable[..., Any], body_log: BodyLog, side: str
) -> None:
    workers()
    done = awaited.label.delay(f"{side}.label", "A")
    known = awaited.label.delay(f"{side}.boom", "B")
    assert done.get(timeout=60) == {"order": "A", "pages": [1, 2]}
    assert known.get(timeout=60) == "KeyError: 'B'"
    if side == "plain":
        foreign = awaited.label.delay("plain.boom", "C", "own")
        assert foreign.get(timeout=60) == "StepFailedError: label failed: LabelError: no label for C"
    assert body_log.count(done.id, "before") == body_log.count(done.id, "after") == 1
    assert body_log.count(step="label-A") == 1


def test_chains_and_chords_give_the_result_of_the_whole(awaited: Awaited, workers: Callable[..., Any]) -> None:
    workers()
    assert awaited.canvas.delay("chain").get(timeout=60) == 2
    assert awaited.canvas.delay("chord").get(timeout=60) == 2


def test_arguments_that_a_task_here_does_not_take_are_refused_at_the_call(
    awaited: Awaited, start_worker: Callable[..., Worker], conn: Connection
) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)

    run = awaited.canvas.delay("wrong")

    _wait(awaited, run.id, RunState.FAILED)
    failure = awaited.durable.client.failure(awaited.durable.get(run.id))
    assert failure is not None
    assert failure.type == "InputError"
    assert failure.message.startswith("step 'all': arguments of own.label refused: arguments: own_label() takes")
    assert awaited.durable.history(run.id).steps == []
    assert (
        conn.execute(f"SELECT id FROM \"{conn.schema}\".outbox_event WHERE type = 'celery'".encode()).fetchall() == []
    )


def test_kills_of_either_side_lose_and_double_nothing(
    awaited: Awaited,
    workers: Callable[..., tuple[Worker, Worker]],
    worker_env: dict[str, str],
    body_log: BodyLog,
    gates: Gates,
) -> None:
    worker_env["UMT_TEST_REDELIVERY_SECONDS"] = "3"
    gates.close("printing")
    ours, plain = workers()
    run = awaited.label.delay("plain.late", "A", "printing")
    gates.wait("printing")
    _wait(awaited, run.id, RunState.WAITING)

    ours.kill_child()
    plain.kill_child()
    until(lambda: body_log.count(step="label-A") == 2, timeout=60, what="the task to be executed again")
    gates.open("printing")

    assert run.get(timeout=60) == {"order": "A", "pages": [1, 2]}
    assert body_log.count(run.id, "before") == body_log.count(run.id, "after") == 1


def test_a_lost_message_of_an_idempotent_task_is_sent_again_and_no_other(
    awaited: Awaited, start_worker: Callable[..., Worker], broker: Broker, body_log: BodyLog, conn: Connection
) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)
    again = awaited.label.delay("plain.label", "again", timeout=60.0, idempotent=True, resend=2.0)
    never = awaited.label.delay("plain.label", "never", timeout=4.0)
    until(lambda: broker.held(PLAIN) >= 2, timeout=30, what="both messages to be published")

    broker.wipe()
    _wait(awaited, never.id, RunState.QUARANTINED)
    start_worker(app=PLAIN_APP, pool="solo", concurrency=1, name="plain")

    assert again.get(timeout=60) == {"order": "again", "pages": [1, 2]}
    assert body_log.count(step="label-never") == 0
    assert awaited.durable.get(never.id).reason == "uncertain_op"
    awaited.durable.resolve_step(never.id, "label", result={"said": "by Ann"})
    assert never.get(timeout=60) == {"said": "by Ann"}
    with pytest.raises(UnknownStepError):
        awaited.durable.resolve_step(never.id, "label", error="too late")
    until(lambda: outbox.status(conn)[0] == 0, timeout=30, what="the outbox to be empty")


def test_the_result_backend_is_asked_at_the_time_out(
    awaited: Awaited, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    backend, task_id = awaited.app.backend, str(Place("asking", 0, "label").task_id)
    meta: dict[str, object] = {
        "status": "SUCCESS",
        "result": {"seen": True},
        "traceback": None,
        "children": [],
        "task_id": task_id,
    }
    backend.client.set(backend.get_key_for_task(task_id), backend.encode(meta))
    start_worker(app=APP, pool="threads", concurrency=2)
    run = awaited.label.apply_async(("plain.label", "A"), {"timeout": 3.0}, task_id="asking")

    assert run.get(timeout=60) == {"seen": True}
    assert body_log.count(step="label-A") == 0


def test_reconcile_settles_what_nobody_reported(awaited: Awaited, start_worker: Callable[..., Worker]) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)
    done, not_done, unknown = (awaited.careful.delay("A", verdict) for verdict in ("done", "not", "unknown"))

    assert done.get(timeout=60) == {"found": "A"}
    with pytest.raises(Exception, match="did not end within 0:00:05"):
        not_done.get(timeout=60)
    _wait(awaited, unknown.id, RunState.QUARANTINED)
    awaited.durable.resolve_step(unknown.id, "label", error="lost in the mail")
    with pytest.raises(Exception, match="lost in the mail"):
        unknown.get(timeout=60)


def test_late_answers_release_a_run_that_was_left_to_a_person(
    awaited: Awaited, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)
    run = awaited.label.delay("plain.label", "A", timeout=5.0)
    _wait(awaited, run.id, RunState.QUARANTINED)

    start_worker(app=PLAIN_APP, pool="solo", concurrency=1, name="plain")

    assert run.get(timeout=60) == {"order": "A", "pages": [1, 2]}
    assert body_log.count(run.id, "after") == 1


def test_twenty_copies_of_an_answer_wake_once_and_forged_ones_never(
    awaited: Awaited, start_worker: Callable[..., Worker], broker: Broker, body_log: BodyLog, conn: Connection
) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)
    run = awaited.label.delay("plain.label", "A")
    other = awaited.label.delay("plain.label", "B")
    for one in (run, other):
        _wait(awaited, one.id, RunState.WAITING)
    found, theirs = (waits.awaited(conn, one.id, 0, "umt.task/label") for one in (run, other))
    assert found is not None
    assert theirs is not None

    outsider = Celery("outsider", broker=broker.url, set_as_current=False)

    def say(name: str, value: object, task_id: str, **said: object) -> None:
        kwargs = {"run": run.id, "nesting": 0, "step": "label", "token": found.token.hex, **said}
        outsider.send_task(name, (value,), kwargs, task_id=task_id, queue=QUEUE)

    say(ordinary.ANSWERED, "forged", "forged-1", run=other.id)
    say(ordinary.ANSWERED, "forged", "forged-2", token=theirs.token.hex)
    say(ordinary.ANSWERED, "forged", "forged-3", token="")
    say(ordinary.FAILED, "some-task", "forged-4", step="before")
    for _ in range(20):
        say(ordinary.ANSWERED, {"copy": 1}, Place(run.id, 0, "label").receiver(ordinary.ANSWERED))

    assert run.get(timeout=60) == {"copy": 1}
    until(
        lambda: all(awaited.durable.get(f"forged-{n}").state is RunState.SUCCEEDED for n in range(1, 5)),
        timeout=60,
        what="the forged answers to be refused",
    )
    assert awaited.durable.get(other.id).state is RunState.WAITING
    outsider.close()
    assert body_log.count(run.id, "after") == 1
    assert len(awaited.durable.history(run.id).attempts) == 2
    assert body_log.count(other.id, "after") == 0


def test_cancelled_runs_keep_their_tasks_from_starting(
    awaited: Awaited, workers: Callable[..., tuple[Worker, Worker]], body_log: BodyLog, gates: Gates
) -> None:
    gates.close("busy")
    workers()
    busy = awaited.label.delay("plain.label", "busy", "busy")
    gates.wait("busy")
    run = awaited.label.delay("plain.label", "unwanted")
    _wait(awaited, run.id, RunState.WAITING)

    awaited.durable.cancel(run.id, reason="not wanted")
    until(lambda: awaited.app.AsyncResult(run.id).state == "REVOKED", timeout=30, what="the cancel to be reported")
    gates.open("busy")
    assert busy.get(timeout=60)["order"] == "busy"
    last = awaited.label.delay("plain.label", "last")

    assert last.get(timeout=60)["order"] == "last"
    assert body_log.count(step="label-unwanted") == 0


def test_a_task_whose_relay_is_killed_after_publishing_is_executed_once(
    awaited: Awaited,
    with_a_killed_relay: Callable[..., AsyncResult[Any]],
    start_worker: Callable[..., Worker],
    broker: Broker,
    body_log: BodyLog,
    conn: Connection,
) -> None:
    run = with_a_killed_relay("relay.publish.a")

    _wait(awaited, run.id, RunState.QUARANTINED)
    assert broker.held(PLAIN) == 1
    (row,) = awaited.durable.outbox.dead()
    assert row.run == run.id
    assert f"`umt-durable resolve {run.id} label --result JSON`" in str(row.reason)

    start_worker(app=PLAIN_APP, pool="solo", concurrency=1, name="plain")

    assert run.get(timeout=60) == {"order": "A", "pages": [1, 2]}
    assert body_log.count(step="label-A") == 1
    assert body_log.count(run.id, "after") == 1
    until(lambda: broker.held(PLAIN) == 0, timeout=30, what="the one message to be acked")


def test_a_task_that_is_idempotent_is_published_again_by_the_next_relay(
    awaited: Awaited,
    with_a_killed_relay: Callable[..., AsyncResult[Any]],
    start_worker: Callable[..., Worker],
    broker: Broker,
    body_log: BodyLog,
) -> None:
    run = with_a_killed_relay("relay.publish.a", idempotent=True)

    until(lambda: broker.held(PLAIN) == 2, timeout=60, what="the message to be published twice")
    start_worker(app=PLAIN_APP, pool="solo", concurrency=1, name="plain")

    assert run.get(timeout=60) == {"order": "A", "pages": [1, 2]}
    assert body_log.count(run.id, "after") == 1
    assert awaited.durable.outbox.dead() == []


def test_a_task_whose_relay_is_killed_before_publishing_is_left_to_a_person_who_sends_it(
    awaited: Awaited,
    with_a_killed_relay: Callable[..., AsyncResult[Any]],
    start_worker: Callable[..., Worker],
    broker: Broker,
    body_log: BodyLog,
) -> None:
    run = with_a_killed_relay("relay.publish.b")
    start_worker(app=PLAIN_APP, pool="solo", concurrency=1, name="plain")

    _wait(awaited, run.id, RunState.QUARANTINED)
    assert broker.held(PLAIN) == 0
    (row,) = awaited.durable.outbox.dead()
    assert awaited.durable.outbox.replay(row.id) == 1

    assert run.get(timeout=60) == {"order": "A", "pages": [1, 2]}
    assert body_log.count(step="label-A") == 1
