"""What a worker checks before it starts, says when it starts, and tells its children."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.concurrency import eventlet as eventlet_pool

from tests.celery import recording
from tests.celery.stage import Broker, Stage
from tests.support.gates import Gates
from tests.support.wait import until
from umt_durable.bridge.bootsteps import UnfitWorkerError, refuse_pool
from umt_durable.errors import ConfigurationError


@pytest.fixture
def stage(redis_broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(redis_broker, redis_url, gates, tmp_path) as stage:
        yield stage


def test_eventlet_is_refused_with_the_reason() -> None:
    with pytest.raises(UnfitWorkerError, match=r"eventlet pool is not supported: .* Use -P prefork") as refused:
        refuse_pool(eventlet_pool.TaskPool)

    assert isinstance(refused.value, ConfigurationError)


@pytest.mark.processes
def test_worker_with_a_wrong_schema_does_not_start_and_names_the_command(stage: Stage) -> None:
    told = "the schema is behind this code: run `celery -A proj durable migrate`"
    worker = stage.make_worker(env={recording.SCHEMA_PROBLEM: told})

    worker.start(wait=False)

    assert worker.wait() == 1
    assert f"Error: {told}" in worker.text()
    assert "Traceback" not in worker.text()
    assert stage.records("service") == []


@pytest.mark.processes
def test_worker_says_in_one_line_what_runs_where_and_reserves_one_message_per_slot(stage: Stage) -> None:
    worker = stage.worker(concurrency=3)

    assert worker.text().count("umt_durable: recording\n") == 1
    stats = stage.app.control.inspect(destination=[worker.node], timeout=5.0).stats()[worker.node]
    assert stats["prefetch_count"] == 3
    assert stats["umt_durable"]["intake_waiting"] == 0


@pytest.mark.processes
def test_prefetch_that_the_user_chose_stays_with_a_warning(stage: Stage) -> None:
    worker = stage.worker(options=["--prefetch-multiplier=7"])

    stats = stage.app.control.inspect(destination=[worker.node], timeout=5.0).stats()[worker.node]
    assert stats["prefetch_count"] == 7
    assert worker.text().count("worker_prefetch_multiplier is 7") == 1


@pytest.mark.processes
def test_children_of_one_worker_know_its_node_and_another_worker_has_another(stage: Stage) -> None:
    worker = stage.worker(name="first", concurrency=1)
    node = stage.app.control.inspect(destination=[worker.node], timeout=5.0).stats()[worker.node]["umt_durable"]["node"]
    run = stage.hint("rec.hold", "open.first")
    first = stage.wait("body", id=run)

    worker.kill_child(first["pid"])
    until(lambda: bool(worker.children()), what="a new child")
    stage.hint("rec.hold", "open.second")
    second = stage.wait("body", id="open.second")
    worker.kill9()
    stage.worker(name="other")
    stage.hint("rec.hold", "open.third")
    third = stage.wait("body", id="open.third")

    assert first["node"] == second["node"] == node
    assert third["node"] not in (None, node)
