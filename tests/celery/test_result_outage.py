"""A result backend that breaks while Celery's tracer stores an outcome: callers see the true one, or none yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import chord
from celery.result import AsyncResult

from tests.celery.impatient import APP
from tests.celery.test_revoke_runs import wait_for_signals
from tests.support.apps import FlakyError, Tasks
from tests.support.bodylog import BodyLog
from tests.support.clock import Clock
from tests.support.proxy import Proxy
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.settings import HOLD_SECONDS

pytestmark = [pytest.mark.processes, pytest.mark.parametrize("broker", ["redis"], indirect=True)]

SUCCESS, FAILURE = b'"status": "SUCCESS"', b'"exc_type": "FlakyError"'


@pytest.fixture
def results(redis_url: str) -> Iterator[Proxy]:
    """Return a proxy in front of the result backend, through which the workers store."""
    address = urlsplit(redis_url)
    with Proxy(address.hostname or "", address.port or 0) as proxy:
        yield proxy


@pytest.fixture
def worker(
    results: Proxy, redis_url: str, worker_env: dict[str, str], start_worker: Callable[..., Worker], clock: Clock
) -> Worker:
    """Return a worker that reaches the result backend through the proxy."""
    port = urlsplit(redis_url).port
    through = redis_url.replace(f":{port}/", f":{results.port}/")
    assert through != redis_url
    return start_worker(concurrency=1, app=APP, env={**worker_env, "CELERY_RESULT_BACKEND": through})


def wait_until_left(worker: Worker, *left: AsyncResult[Any]) -> None:
    """Return once these results could not be stored, by a tracer that has ended."""

    def look() -> bool:
        said = worker.text()
        return all(f"the result of {one.id} is left to the relay" in said for one in left)

    until(look, timeout=60, what="the results to be left to the relay")


def test_i13_a_run_that_succeeded_never_shows_a_failure_of_the_result_backend(
    worker: Worker,
    results: Proxy,
    tasks: Tasks,
    body_log: BodyLog,
    clock: Clock,
    conn: Connection,
    schema: str,
) -> None:
    results.cut_text(SUCCESS)
    result = tasks.one_step.apply_async((5,), link=tasks.note.s(step="linked").set(ignore_result=True))
    wait_until_left(worker, result)
    wait_for_signals(body_log, result.id, ("success", "begin"))
    assert AsyncResult(result.id, app=tasks.app).state == "PENDING"
    kept = f"SELECT type FROM {schema}.outbox_event WHERE type <> 'run'".encode()
    until(lambda: conn.execute(kept).fetchall() == [("result",)], what="the link, which has left, to be forgotten")

    results.heal()
    clock.advance(seconds=HOLD_SECONDS + 1)

    assert result.get(timeout=60) == 5
    wait_for_signals(body_log, result.id, ("success", "begin"))
    assert body_log.count(step="linked") == 1
    assert body_log.count(result.id, "only") == 1
    assert "raised unexpected" not in worker.text()


def test_i13_a_run_that_failed_never_shows_another_error_than_its_own(
    worker: Worker, results: Proxy, tasks: Tasks, body_log: BodyLog, clock: Clock
) -> None:
    results.cut_text(FAILURE)
    result = tasks.broken.apply_async(link_error=tasks.note.s(step="errback").set(ignore_result=True))
    wait_until_left(worker, result)
    wait_for_signals(body_log, result.id, ("failure", "begin"))
    assert AsyncResult(result.id, app=tasks.app).state == "PENDING"
    assert body_log.count(step="errback") == 0

    results.heal()
    clock.advance(seconds=HOLD_SECONDS + 1)

    with pytest.raises(FlakyError, match="always"):
        result.get(timeout=60)
    until(lambda: body_log.count(step="errback") == 1, timeout=30, what="the errback to be called")
    wait_for_signals(body_log, result.id, ("failure", "begin"))


def test_i13_members_of_a_chord_whose_results_could_not_be_stored_are_counted_once(
    worker: Worker, results: Proxy, tasks: Tasks, clock: Clock
) -> None:
    results.cut_text(SUCCESS)
    total = chord([tasks.one_step.s(number) for number in (1, 2)])(tasks.total.s())
    wait_until_left(worker, *total.parent.results)
    assert not total.ready()

    results.heal()
    clock.advance(seconds=HOLD_SECONDS + 1)

    assert total.get(timeout=60) == 3
