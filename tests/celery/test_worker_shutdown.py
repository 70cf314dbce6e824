"""Warm and cold shutdown are Celery's own, and what they do to a run is an incident (celery's worker guide)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.celery.stage import Broker, Stage
from tests.support.gates import Gates

pytestmark = pytest.mark.processes

SERVICES = ["lease", "pulse", "incidents"]


@pytest.fixture
def stage(broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(broker, redis_url, gates, tmp_path) as stage:
        yield stage


@pytest.fixture
def redis_stage(redis_broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(redis_broker, redis_url, gates, tmp_path) as stage:
        yield stage


def test_cold_shutdown_cancels_a_running_delivery_and_says_so(stage: Stage) -> None:
    worker = stage.worker()
    stage.gates.close("run")
    run = stage.hint("rec.hold")
    body = stage.wait("body", id=run)
    stage.wait_held(0)

    worker.quit()

    assert worker.wait() == 0
    ended = stage.wait("delivery_ended", id=run)
    assert (ended["claim"], ended["known_dead"]) == (body["claim"], False)
    assert ended["reason"] == "cancelled by the worker's shutdown"
    assert len(stage.records("delivery_ended", id=run)) == 1
    assert stage.records("returned") == []
    assert stage.records("signal") == []
    assert stage.result(run).state == "PENDING"
    assert [one["name"] for one in stage.records("service", act="stop")] == SERVICES[::-1]


@pytest.mark.parametrize("first", ["TERM", "QUIT"])
def test_second_signal_cancels_what_the_first_waits_for(redis_stage: Stage, first: str) -> None:
    stage = redis_stage
    worker = stage.worker()
    stage.gates.close("run")
    run = stage.hint("rec.hold")
    stage.wait("body", id=run)
    stage.wait_held(0)

    worker.term() if first == "TERM" else worker.quit()
    worker.wait_for("shutdown (MainProcess)")
    worker.quit()

    worker.wait()
    stage.wait("delivery_ended", id=run)
    assert stage.records("returned") == []
    assert stage.result(run).state == "PENDING"


def test_warm_shutdown_waits_for_the_body_with_its_services_running(stage: Stage) -> None:
    worker = stage.worker(log_level="DEBUG")
    stage.gates.close("run")
    run = stage.hint("rec.hold")
    stage.wait("body", id=run)

    worker.term()
    worker.wait_for("Worker: Stopping Pool")
    assert stage.records("service", act="stop") == []
    stage.gates.open("run")

    assert worker.wait() == 0
    stage.wait("returned", id=run)
    written = [(one["kind"], one.get("act"), one.get("name")) for one in all_records(stage)]
    assert written.index(("returned", None, None)) < written.index(("service", "stop", "incidents"))
    assert [one["name"] for one in stage.records("service", act="start")] == SERVICES
    assert [one["name"] for one in stage.records("service", act="stop")] == SERVICES[::-1]
    assert stage.result(run).state == "SUCCESS"


def test_child_killed_during_a_warm_shutdown_is_still_an_incident(redis_stage: Stage) -> None:
    stage = redis_stage
    worker = stage.worker()
    stage.gates.close("run")
    run = stage.hint("rec.hold")
    body = stage.wait("body", id=run)
    stage.wait_held(0)

    worker.term()
    worker.wait_for("worker: Warm shutdown")
    worker.kill_child(body["pid"])

    worker.wait()
    lost = stage.wait("child_lost", id=run)
    assert (lost["lost"], lost["status"], lost["claim"]) == (body["pid"], -9, body["claim"])


def test_lost_broker_connection_leaves_the_watch_on_children_in_place(redis_stage: Stage) -> None:
    stage = redis_stage
    worker = stage.worker()

    stage.drop_connections()
    worker.wait_for("Connection to broker lost")
    stage.assert_works()
    stage.gates.close("run")
    run = stage.hint("rec.hold")
    body = stage.wait("body", id=run)
    worker.kill_child(body["pid"])

    stage.wait("child_lost", id=run)
    stage.wait("child_lost", lost=body["pid"], id=None)
    stage.assert_works()


def all_records(stage: Stage) -> list[dict[str, object]]:
    """Return the records of the kinds whose order is looked at."""
    return [one for one in stage.all_records() if one["kind"] in ("returned", "service")]
