"""An outage of the broker ends no worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, RedisBroker, wait_until_empty
from tests.support.gates import Gates
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.bridge.broker_repairs import repair_redis_channel
from umt_durable.database import Connection
from umt_durable.states import RunState


def test_a_late_use_of_a_collected_redis_connection_is_a_connection_error(redis_broker: RedisBroker) -> None:
    repair_redis_channel()
    repair_redis_channel()
    app = Celery("plain", broker=redis_broker.url)
    connection = app.connection_for_read()
    channel = connection.default_channel
    connection.collect()

    with pytest.raises(RedisConnectionError):
        channel._connparams()


def never_redispatch(conn: Connection, schema: str) -> None:
    """Have the hints under way count as lost only when this test is long over."""
    later = f"UPDATE {schema}.run SET deliver_by = {schema}.now() + interval '1 hour' WHERE deliver_by IS NOT NULL"
    conn.execute(later.encode())


@pytest.mark.processes
def test_a_worker_survives_outages_of_its_broker(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    worker_env: dict[str, str],
    broker: Broker,
) -> None:
    """A message that Redis had handed out and nobody read is lost; redispatch finds its run."""
    worker_env["DURABLE_DELIVER_SECONDS"] = "5"
    worker = start_worker(pool="prefork", concurrency=2)

    for round_ in range(3):
        started = [tasks.sleeper.delay(0.0, value=n).id for n in range(10)]
        broker.stop()
        broker.start()
        wait_for_state(started, RunState.SUCCEEDED)
        assert worker.alive, f"the worker ended in round {round_}"


@pytest.mark.processes
def test_i21_hints_that_a_broken_connection_held_are_back_without_waiting_for_redispatch(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
    gates: Gates,
    conn: Connection,
    schema: str,
) -> None:
    gates.close("held")
    start_worker(pool="prefork", concurrency=1)
    first = tasks.one_step.delay(0, gate="held").id
    gates.wait("held")
    waiting = tasks.one_step.delay(1).id
    never_redispatch(conn, schema)
    until(lambda: broker.depth(QUEUE) == 0 and broker.held(QUEUE) == 1, timeout=30, what="the worker to hold a hint")

    broker.stop()
    gates.open("held")
    wait_for_state(first, RunState.SUCCEEDED)
    broker.start()
    wait_for_state(waiting, RunState.SUCCEEDED)

    wait_until_empty(broker, QUEUE)
    assert body_log.count(waiting) == 1
