"""An outage of the broker ends no worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.support.apps import Tasks
from tests.support.brokers import Broker, RedisBroker
from tests.support.workers import Worker
from umt_durable.bridge.broker_repairs import repair_redis_channel
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


@pytest.mark.processes
def test_a_worker_survives_outages_of_its_broker(
    tasks: Tasks, start_worker: Callable[..., Worker], wait_for_state: Callable[..., None], broker: Broker
) -> None:
    worker = start_worker(pool="prefork", concurrency=2)

    for round_ in range(3):
        started = [tasks.sleeper.delay(0.0, value=n).id for n in range(10)]
        broker.stop()
        broker.start()
        wait_for_state(started, RunState.SUCCEEDED)
        assert worker.alive, f"the worker ended in round {round_}"
