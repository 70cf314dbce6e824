"""S06: the same message twenty times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.gates import Gates
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Pool, Worker
from umt_durable.bridge.message import hint
from umt_durable.database import Connection
from umt_durable.records import event_id
from umt_durable.states import RunState
from umt_durable.store import workers

pytestmark = pytest.mark.processes


def send_copies(tasks: Tasks, run_id: str, times: int) -> None:
    """Publish the hint of a run's first ready period again, so many times."""
    run = tasks.durable.get(run_id)
    copy = hint(
        tasks.app,
        key=event_id(run.no, 0, "run", 0),
        run_id=run.id,
        nesting=0,
        task=run.task,
        queue=QUEUE,
        priority=None,
        gen=0,
        envelope=None,
    )
    with tasks.app.connection_for_write() as connection, connection.Producer() as producer:
        for _ in range(times):
            producer.publish(
                copy.body,
                exchange=copy.exchange,
                routing_key=copy.routing_key,
                content_type=copy.content_type,
                content_encoding=copy.content_encoding,
                headers=dict(copy.headers),
                correlation_id=run.id,
            )


def wait_for_duplicates(conn: Connection, times: int) -> None:
    """Return once so many deliveries were counted as duplicates."""
    until(
        lambda: workers.sum_counters(conn).get("duplicate_delivery", 0) >= times,
        timeout=30,
        what=f"{times} deliveries to be counted as duplicates",
    )


def test_s06_i3_i24_twenty_copies_of_a_hint_make_one_execution(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
    gates: Gates,
    conn: Connection,
    pool: Pool,
) -> None:
    """Half of them arrive while the run is inside a step, the others after it has ended."""
    start_worker(pool=pool, concurrency=2 if pool != "solo" else 1)
    gates.close("six")
    result = tasks.ten_steps.delay(gate_step=6, gate="six")
    gates.wait("six")

    send_copies(tasks, result.id, 10)
    if pool != "solo":  # its one slot is in the body: there they are met afterwards
        wait_for_duplicates(conn, 10)
    assert tasks.durable.get(result.id).state is RunState.RUNNING
    gates.open("six")
    wait_for_state(result.id, RunState.SUCCEEDED)
    send_copies(tasks, result.id, 10)
    wait_for_duplicates(conn, 20)
    wait_until_empty(broker, QUEUE)

    assert body_log.counts(result.id) == {f"step-{number}": 1 for number in range(1, 11)}
    assert len(tasks.durable.history(result.id).attempts) == 1
    assert result.get(timeout=30) == list(range(1, 11))
