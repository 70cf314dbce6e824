"""Bad input and outages as a Celery user meets them: a clear error, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import apps
from tests.support.bodylog import BodyLog
from tests.support.gates import Gates
from tests.support.proxy import Proxy
from tests.support.workers import Worker
from umt_durable.errors import DatabaseUnavailableError, UnknownRunError, UnknownTaskError
from umt_durable.states import AttemptOutcome, RunState

pytestmark = pytest.mark.processes


@pytest.fixture
def behind_proxy(worker_env: dict[str, str], proxied_url: str) -> Iterator[apps.Tasks]:
    """Return tasks whose database is reached through the proxy."""
    tasks = apps.build({**worker_env, "DURABLE_DATABASE_URL": proxied_url})
    yield tasks
    tasks.durable.stop()
    tasks.app.close()


def test_a_start_without_a_reachable_database_is_a_clear_error_and_starts_nothing(
    behind_proxy: apps.Tasks, database_proxy: Proxy, tasks: apps.Tasks
) -> None:
    database_proxy.down()

    with pytest.raises(DatabaseUnavailableError) as refused:
        behind_proxy.one_step.delay(1)
    database_proxy.heal()

    assert "***" in str(refused.value) or "@" not in str(refused.value)
    assert tasks.durable.list() == []
    assert tasks.durable.get(behind_proxy.one_step.delay(2).id).state is RunState.READY


def test_an_unknown_task_and_an_unknown_run_are_named(tasks: apps.Tasks) -> None:
    with pytest.raises(UnknownTaskError, match=r"tests\.nothing"):
        tasks.durable.tasks.get("tests.nothing")
    with pytest.raises(UnknownTaskError, match=r"tests\.one_step@7"):
        tasks.durable.tasks.get("tests.one_step", 7)
    with pytest.raises(UnknownRunError, match="nowhere"):
        tasks.durable.cancel("nowhere")


@pytest.mark.redis_by_default
def test_i25_a_worker_cut_off_from_the_database_leaves_its_run_and_reports_no_failure(
    tasks: apps.Tasks,
    worker_env: dict[str, str],
    proxied_url: str,
    database_proxy: Proxy,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    body_log: BodyLog,
    gates: Gates,
) -> None:
    gates.close("inside")
    start_worker(env={**worker_env, "DURABLE_DATABASE_URL": proxied_url}, pool="threads", concurrency=1)
    result = tasks.ten_steps.delay(gate_step=6, gate="inside")
    gates.wait("inside")

    database_proxy.down()
    start_worker(pool="threads", concurrency=1, name="heir")
    gates.open("inside")
    wait_for_state(result.id, RunState.SUCCEEDED)
    database_proxy.heal()

    assert result.get(timeout=60) == list(range(1, 11))
    counts = body_log.counts(result.id)
    assert [counts[f"step-{number}"] for number in range(1, 6)] == [1] * 5
    assert [attempt.outcome for attempt in tasks.durable.history(result.id).attempts] == [
        AttemptOutcome.LOST,
        AttemptOutcome.COMPLETED,
    ]


def test_a_body_that_exits_its_process_is_bounded_by_the_crash_budget(
    tasks: apps.Tasks, start_worker: Callable[..., Worker], wait_for_state: Callable[..., None], body_log: BodyLog
) -> None:
    start_worker(pool="prefork", concurrency=1)
    result = tasks.exiting.delay()

    wait_for_state(result.id, RunState.QUARANTINED)

    run = tasks.durable.get(result.id)
    assert run.reason == "crash_budget"
    assert body_log.count(result.id) == tasks.durable.settings.max_crashes + 1
    assert result.state != "FAILURE"
    assert len(set(body_log.pids(result.id))) == tasks.durable.settings.max_crashes + 1, "each exit ends its process"
