"""S10: an early fact, a late fact, a wrong fact. S11: cancels while every worker is down."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery.exceptions import TaskRevokedError

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.clock import Clock
from tests.support.wait import wait_for_value
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.states import RunState, WaitState

pytestmark = pytest.mark.processes


def test_s10_i8_i9_early_late_and_wrong_facts(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    clock: Clock,
    conn: Connection,
    schema: str,
) -> None:
    start_worker(pool="threads", concurrency=2)
    early = tasks.waiter.apply_async(("approved",), countdown=3600)
    tasks.durable.signal(early.id, "approved", "before")
    late = tasks.waiter.delay("approved", timeout=60)
    wrong = tasks.waiter.delay("paid", key="order-1")
    wait_for_state([late.id, wrong.id], RunState.WAITING)

    tasks.durable.emit("paid", "order-2", "another order's")
    clock.advance(seconds=3601)
    wait_for_state(early.id, RunState.SUCCEEDED)
    wait_for_state(late.id, RunState.FAILED)
    tasks.durable.signal(late.id, "approved", "too late")
    unrouted = f"SELECT count(*) FROM {schema}.fact WHERE routed_at IS NULL"
    wait_for_value(conn, unrouted, 0, timeout=30)  # only now has a router looked for whom the late fact is

    facts = conn.execute(f"SELECT count(*) FROM {schema}.fact WHERE name = 'approved'".encode()).fetchone()
    assert facts == (2,)
    assert early.get(timeout=30) == "before"
    assert [wait.state for wait in tasks.durable.history(late.id).waits] == [WaitState.TIMED_OUT]
    assert tasks.durable.get(late.id).state is RunState.FAILED
    assert tasks.durable.get(wrong.id).state is RunState.WAITING
    tasks.durable.emit("paid", "order-1", "ours")
    wait_for_state(wrong.id, RunState.SUCCEEDED)
    assert wrong.get(timeout=30) == "ours"


def test_s11_i11_i12_runs_cancelled_while_offline_never_execute(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
    clock: Clock,
) -> None:
    worker = start_worker(pool="prefork", concurrency=2)
    sleeping = [tasks.sleeper.delay(seconds=300) for _ in range(10)]
    done = tasks.one_step.delay(5)
    wait_for_state([result.id for result in sleeping], RunState.SLEEPING)
    wait_for_state(done.id, RunState.SUCCEEDED)
    worker.term()
    worker.wait()
    queued = [tasks.one_step.delay(number) for number in range(10)]
    before = body_log.count()

    for result in [*queued, *sleeping, done]:
        tasks.durable.cancel(result.id, reason="customer")
        tasks.durable.cancel(result.id)
    clock.advance(seconds=301)
    worker.start()
    marker = tasks.one_step.delay(99)
    wait_for_state(marker.id, RunState.SUCCEEDED)

    for result in [*queued, *sleeping]:
        assert tasks.durable.get(result.id).state is RunState.CANCELLED
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
    assert body_log.count() == before + 1
    assert done.get(timeout=30) == 5
    assert tasks.durable.get(done.id).state is RunState.SUCCEEDED
