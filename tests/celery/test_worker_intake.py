"""I3: a foreign message is acked only after its run is committed, and nothing is lost while the database is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.celery.stage import Broker, Stage
from tests.support.brokers import RabbitBroker
from tests.support.gates import Gates
from tests.support.workers import Pool

pytestmark = pytest.mark.processes


@pytest.fixture
def stage(broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(broker, redis_url, gates, tmp_path) as stage:
        yield stage


@pytest.fixture
def rabbit_stage(rabbit_broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(rabbit_broker, redis_url, gates, tmp_path) as stage:
        yield stage


@pytest.fixture
def redis_stage(redis_broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(redis_broker, redis_url, gates, tmp_path) as stage:
        yield stage


def test_i3_foreign_message_is_acked_only_after_it_was_taken_in(stage: Stage) -> None:
    worker = stage.worker()
    stage.gates.close("intake")
    run = stage.foreign("rec.hold", "open.foreign")
    stage.gates.wait("intake")

    assert stage.broker.held(stage.queue) == 1
    assert stage.records("body") == []
    assert stage.ping(worker), "a blocked intake must not block the consumer"
    stage.gates.open("intake")

    stage.wait("returned", id=run)
    stage.wait_held(0)


@pytest.mark.rabbitmq
def test_i3_worker_killed_during_intake_loses_no_foreign_message(rabbit_stage: Stage) -> None:
    stage = rabbit_stage
    worker = stage.worker()
    stage.gates.close("intake")
    run = stage.foreign("rec.hold", "open.foreign")
    stage.gates.wait("intake")

    worker.kill9()

    stage.gates.open("intake")
    assert stage.records("taken_in") == []
    stage.worker(name="second")
    stage.wait("returned", id=run)
    assert len(stage.records("intake_try", ids=[run])) == 2
    stage.wait_held(0)


@pytest.mark.rabbitmq
def test_message_of_a_lost_connection_is_left_to_its_redelivery(
    rabbit_stage: Stage, rabbit_broker: RabbitBroker
) -> None:
    stage = rabbit_stage
    worker = stage.worker()
    stage.gates.close("intake")
    run = stage.foreign("rec.hold", "open.foreign")
    stage.gates.wait("intake")

    rabbit_broker.stop()
    worker.wait_for("Connection to broker lost")
    rabbit_broker.start()
    worker.wait_for("Connected to amqp", times=2)
    stage.gates.open("intake")

    stage.wait("taken_in", times=2)
    stage.wait("returned", id=run)
    stage.wait_held(0)
    assert len(stage.records("body", id=run)) == 1
    assert "Couldn't ack" not in worker.text()


def test_protocol_1_message_is_taken_in_as_well(redis_stage: Stage) -> None:
    stage = redis_stage
    stage.worker()
    old = {"task": "rec.hold", "id": "open.old", "args": [], "kwargs": {}, "retries": 0}

    stage.send(json.dumps(old).encode(), {})

    stage.wait("returned", id="open.old")
    assert stage.records("taken_in")[0]["ids"] == ["open.old"]
    stage.wait_held(0)


def test_foreign_messages_wait_unacked_while_the_database_is_away(stage: Stage) -> None:
    worker = stage.worker(concurrency=2)
    stage.gates.close("outage")
    runs = [stage.foreign("rec.hold", f"open.{number}") for number in range(20)]
    stage.wait("intake_try", times=4, timeout=30)

    assert stage.broker.held(stage.queue) == 20
    assert stage.broker.depth(stage.queue) == 18, "prefetch is the brake"
    assert stage.ping(worker)
    stage.gates.open("outage")

    for run in runs:
        stage.wait("returned", id=run)
    stage.wait_held(0)
    tries = len(stage.records("intake_try")) - len(stage.records("taken_in"))
    assert tries < 20, "each outage is waited out with growing pauses"


@pytest.mark.parametrize("green_or_not", ["threads", "solo", "gevent"])
def test_other_pools_take_foreign_messages_in_as_well(redis_stage: Stage, green_or_not: Pool) -> None:
    stage = redis_stage
    worker = stage.worker(pool=green_or_not, concurrency=2 if green_or_not != "solo" else 1)
    stage.gates.close("outage")
    runs = [stage.foreign("rec.hold", f"open.{number}") for number in range(10)]
    stage.wait("intake_try", times=2)

    assert stage.ping(worker)
    stage.gates.open("outage")

    for run in runs:
        stage.wait("returned", id=run)
    stage.wait_held(0)


def test_same_foreign_message_twice_is_taken_in_twice_and_breaks_nothing(redis_stage: Stage) -> None:
    stage = redis_stage
    stage.worker(concurrency=2)

    stage.foreign("rec.hold", "open.same")
    stage.foreign("rec.hold", "open.same")

    stage.wait("returned", id="open.same", times=2)
    stage.wait_held(0)
    stage.assert_works()


def test_message_that_cannot_be_stored_is_dropped_alone(stage: Stage) -> None:
    worker = stage.worker(concurrency=4)
    stage.gates.close("outage")

    for run in ("open.one", "unstorable", "open.two"):
        stage.foreign("rec.hold", run)
    stage.wait("intake_try", times=2)
    stage.gates.open("outage")

    for run in ("open.one", "open.two"):
        stage.wait("returned", id=run)
    stage.wait_held(0)
    assert worker.text().count("Refused a message") == 1
    assert stage.records("body", id="unstorable") == []


@pytest.mark.rabbitmq
def test_foreign_message_nobody_has_begun_goes_back_when_the_worker_ends(rabbit_stage: Stage) -> None:
    stage = rabbit_stage
    worker = stage.worker()
    stage.gates.close("run")
    first = stage.foreign("rec.hold", "run.first")
    stage.wait("body", id=first)
    second = stage.foreign("rec.hold", "open.second")
    stage.wait("taken_in", ids=[second])

    worker.term()
    stage.gates.open("run")
    worker.wait()

    assert stage.broker.depth(stage.queue) == 1
    stage.worker(name="second")
    stage.wait("returned", id=second)
