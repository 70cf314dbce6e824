"""S12: fifty threads start a run with one key; then other arguments under it; then the same after success."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.gates import Gates
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.errors import IdempotencyConflictError, RunExistsError
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

THREADS = 50
KEY = "order:1"


def test_s12_i24_one_key_makes_one_run_for_fifty_threads_and_ever_after(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
    gates: Gates,
    conn: Connection,
    schema: str,
) -> None:
    """Used again with the same input, a key gives the run that has it, or refuses, as the caller chose."""
    start_worker(pool="threads", concurrency=2)
    gates.close("held")
    at_once = Barrier(THREADS)

    def start(value: int = 7) -> str:
        return str(tasks.one_step.enqueue(value, gate="held", idempotency_key=KEY).id)

    def start_with_the_others(_: int) -> str:
        at_once.wait(timeout=60)
        return start()

    with ThreadPoolExecutor(THREADS) as threads:
        ids = set(threads.map(start_with_the_others, range(THREADS)))
    gates.wait("held")
    before = tasks.durable.get(min(ids))
    with pytest.raises(IdempotencyConflictError) as conflict:
        start(8)
    after = tasks.durable.get(min(ids))
    gates.open("held")
    wait_for_state(min(ids), RunState.SUCCEEDED)

    assert len(ids) == 1
    assert conflict.value.run in ids
    assert after == before
    assert start() in ids
    with pytest.raises(IdempotencyConflictError):
        start(8)
    with pytest.raises(RunExistsError) as refused:
        tasks.one_step.enqueue(7, gate="held", idempotency_key=KEY, idempotency_policy="reject")
    assert refused.value.run in ids
    assert conn.execute(f"SELECT count(*) FROM {schema}.run".encode()).fetchone() == (1,)
    assert body_log.count() == 1
    assert tasks.one_step.AsyncResult(min(ids)).get(timeout=30) == 7
