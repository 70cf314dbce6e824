"""What callers of Celery see of a durable run: results, errors, links, chains, and what a crash leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery, chain, chord, group

from tests.support.apps import FlakyError, Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Pool, Worker
from umt_durable.database import Connection
from umt_durable.errors import InputError, MessageRefusedError
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.states import AttemptOutcome, RunState
from umt_durable.store import outbox

pytestmark = pytest.mark.processes


@pytest.mark.redis_by_default
def test_results_errors_and_children_reach_the_caller(
    tasks: Tasks, start_worker: Callable[..., Worker], pool: Pool, body_log: BodyLog
) -> None:
    start_worker(pool=pool, concurrency=2 if pool != "solo" else 1)

    fine = tasks.no_step.apply_async((7,), link=tasks.note.s(step="linked"))
    failed = tasks.broken.apply_async((), link_error=tasks.note.s(step="failed"))
    retried = tasks.flaky_step.delay(2)

    assert fine.get(timeout=60) == 7
    with pytest.raises(FlakyError, match="always"):
        failed.get(timeout=60)
    assert retried.get(timeout=60) == 3
    until(lambda: body_log.count(step="linked") == body_log.count(step="failed") == 1, timeout=30, what="callbacks")
    assert [child.id for child in fine.children] != []


def test_i13_canvas_mixes_durable_and_ordinary_tasks(tasks: Tasks, start_worker: Callable[..., Worker]) -> None:
    start_worker(pool="prefork", concurrency=2)

    chained = chain(tasks.no_step.s(3), tasks.add.s(4), tasks.sleeper.s(value=1))()
    grouped = group(tasks.no_step.s(n) for n in range(3))()
    counted = chord([tasks.no_step.s(1), tasks.add.s(1, 1)], tasks.total.s())()

    assert grouped.get(timeout=60) == [0, 1, 2]
    assert counted.get(timeout=60) == 3
    assert chained.get(timeout=60) == 1


@pytest.mark.redis_by_default
@pytest.mark.parametrize("point", ["finish.commit.a", "finish.callback.a", "finish.result.b", "finish.result.a"])
def test_i13_a_crash_after_the_finish_loses_neither_result_nor_callback(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    body_log: BodyLog,
    conn: Connection,
    tmp_path: Path,
    point: str,
) -> None:
    worker_env[ENVIRONMENT] = f"{point}=kill;file:{tmp_path / 'once'}"
    worker_env["DURABLE_HOLD_SECONDS"] = "2"
    start_worker(pool="prefork", concurrency=1)

    result = tasks.no_step.apply_async((7,), link=tasks.one_step.s())

    until((tmp_path / "once").exists, timeout=30, what=f"the child to be killed at {point}")
    assert result.get(timeout=90) == 7
    until(lambda: body_log.count(step="only") == 1, timeout=60, what="the durable callback to run")
    until(lambda: outbox.status(conn)[0] == 0, timeout=60, what="the outbox to be empty")
    assert body_log.count(step="only") == 1
    assert body_log.count(result.id, "body") == 1


@pytest.mark.redis_by_default
@pytest.mark.parametrize("point", ["claim.a", "step.body.a", "step.commit.a", "finish.commit.b"])
def test_i1_i6_a_child_killed_at_any_point_leaves_a_run_that_goes_on(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    body_log: BodyLog,
    tmp_path: Path,
    point: str,
) -> None:
    worker_env[ENVIRONMENT] = f"{point}=kill;file:{tmp_path / 'once'}"
    start_worker(pool="prefork", concurrency=1)

    result = tasks.ten_steps.delay()

    assert result.get(timeout=60) == list(range(1, 11))
    assert (tmp_path / "once").exists()
    counts = body_log.counts(result.id)
    assert [counts[f"step-{n}"] for n in range(2, 11)] == [1] * 9
    assert counts["step-1"] == (2 if point == "step.body.a" else 1)


def test_i3_a_message_of_a_producer_without_this_package_becomes_one_run(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    worker_env: dict[str, str],
    body_log: BodyLog,
) -> None:
    start_worker(pool="prefork", concurrency=2)
    foreign = Celery("elsewhere", broker=worker_env["CELERY_BROKER_URL"], backend=worker_env["CELERY_RESULT_BACKEND"])

    results = [foreign.send_task("tests.one_step", (n,), queue=QUEUE) for n in range(5)]
    twice = [foreign.send_task("tests.one_step", (9,), queue=QUEUE, task_id="the-same") for _ in range(2)]

    assert [result.get(timeout=60) for result in results] == list(range(5))
    assert twice[0].get(timeout=60) == 9
    wait_for_state("the-same", RunState.SUCCEEDED)
    assert body_log.count("the-same", "only") == 1
    foreign.close()


def test_malformed_and_refused_messages_are_dropped_with_one_line_and_the_worker_lives(
    tasks: Tasks, start_worker: Callable[..., Worker], broker: Broker, worker_env: dict[str, str]
) -> None:
    worker = start_worker(pool="prefork", concurrency=1)
    headers = {"task": "tests.one_step", "id": "bad-1", "lang": "py"}

    with tasks.app.connection_for_write() as connection, connection.Producer() as producer:
        send = {"exchange": "", "routing_key": QUEUE}
        producer.publish(
            b"\x80\x04.",
            content_type="application/x-python-serialize",
            content_encoding="binary",
            headers=headers,
            **send,
        )
        producer.publish(
            b"{not json", content_type="application/json", content_encoding="utf-8", headers=headers, **send
        )
        producer.publish(
            b"[[1], {}, {}]",
            content_type="application/json",
            content_encoding="utf-8",
            headers={**headers, "id": 7},
            **send,
        )

    assert tasks.one_step.delay(5).get(timeout=60) == 5
    wait_until_empty(broker, QUEUE)
    assert worker.alive


@pytest.mark.redis_by_default
def test_pickle_and_wrong_arguments_are_refused_at_the_call(tasks: Tasks, conn: Connection) -> None:
    with pytest.raises(MessageRefusedError, match="pickle"):
        tasks.one_step.apply_async((1,), serializer="pickle")
    with pytest.raises(InputError, match="value"):
        tasks.one_step.delay("not a number")
    with pytest.raises(InputError, match="value: is missing"):
        tasks.one_step.delay()

    assert tasks.durable.list() == []


def test_a_forged_hint_runs_nothing_but_the_stored_arguments(
    tasks: Tasks, start_worker: Callable[..., Worker], broker: Broker, body_log: BodyLog
) -> None:
    start_worker(pool="prefork", concurrency=1)
    result = tasks.one_step.apply_async((5,), countdown=3600)
    forged = {
        "task": "tests.one_step",
        "id": result.id,
        "lang": "py",
        "umt_durable": {"v": 1, "gen": 0},
        "argsrepr": "(666,)",
    }

    with tasks.app.connection_for_write() as connection, connection.Producer() as producer:
        for run_id in (result.id, "no-such-run"):
            producer.publish(
                [[666], {}, {}], exchange="", routing_key=QUEUE, serializer="json", headers={**forged, "id": run_id}
            )
    assert tasks.one_step.delay(6).get(timeout=60) == 6
    wait_until_empty(broker, QUEUE)

    assert body_log.count(result.id) == body_log.count("no-such-run") == 0
    assert tasks.durable.get(result.id).state is RunState.SLEEPING


@pytest.mark.redis_by_default
def test_an_existing_bound_task_keeps_its_own_retries(
    tasks: Tasks, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    start_worker(pool="prefork", concurrency=1)

    fine, exhausted = tasks.classic.delay(2), tasks.classic.delay(50)

    assert fine.get(timeout=60) == 3
    with pytest.raises(FlakyError):
        exhausted.get(timeout=60)
    assert body_log.count(fine.id, "body") == 3
    assert body_log.count(exhausted.id, "body") == 4
    assert body_log.count(fine.id, "flaky") == 1


@pytest.mark.redis_by_default
def test_autoretry_for_and_max_retries_of_an_existing_task_are_durable_retries(
    tasks: Tasks, start_worker: Callable[..., Worker], body_log: BodyLog
) -> None:
    start_worker(pool="threads", concurrency=1)

    fine, exhausted = tasks.automatic.delay(2), tasks.automatic.delay(50)

    assert fine.get(timeout=60) == 3
    with pytest.raises(FlakyError):
        exhausted.get(timeout=60)
    assert body_log.count(exhausted.id, "automatic") == 3
    assert [tasks.durable.get(one.id).failures for one in (fine, exhausted)] == [2, 3]
    ends = [attempt.outcome for attempt in tasks.durable.history(fine.id).attempts]
    assert ends == [AttemptOutcome.FAILED, AttemptOutcome.FAILED, AttemptOutcome.COMPLETED]
