"""A delivery that ends without a word from its body is an incident for the engine, never an outcome in Celery (I13)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Signature, chord
from celery.result import AsyncResult

from tests.celery.stage import Broker, Stage
from tests.support.gates import Gates

pytestmark = pytest.mark.processes


@pytest.fixture
def stage(redis_broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(redis_broker, redis_url, gates, tmp_path) as stage:
        yield stage


@pytest.fixture
def each_stage(broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(broker, redis_url, gates, tmp_path) as stage:
        yield stage


def assert_no_outcome(stage: Stage, run: str) -> None:
    """Assert that nobody was told of an end of the run."""
    assert stage.result(run).state == "PENDING"
    assert stage.records("signal", id=run) == []
    assert stage.records("callback") == []


def test_killed_child_is_an_incident_with_its_pid_and_claim_and_no_outcome(each_stage: Stage) -> None:
    stage = each_stage
    worker = stage.worker()
    stage.gates.close("run")
    run = stage.hint("rec.hold")
    body = stage.wait("body", id=run)

    worker.kill_child(body["pid"])

    lost = stage.wait("child_lost", id=run)
    assert (lost["lost"], lost["status"], lost["claim"]) == (body["pid"], -9, body["claim"])
    stage.wait("child_lost", lost=body["pid"], id=None)
    stage.assert_works()
    assert_no_outcome(stage, run)
    assert len(stage.records("child_lost", id=run)) == 1


def test_child_killed_while_idle_is_an_incident_of_the_process_alone(stage: Stage) -> None:
    worker = stage.worker()

    child = worker.kill_child()

    lost = stage.wait("child_lost", lost=child)
    assert (lost["status"], lost.get("claim")) == (-9, None)
    stage.assert_works()


def test_hint_whose_child_is_killed_before_it_accepts_runs_in_another(stage: Stage) -> None:
    worker = stage.worker()
    child = worker.children()[0].pid
    worker.stop_child(child)
    run = stage.hint("rec.hold", "open.unlucky")
    stage.wait_reserved(run)

    worker.kill_child(child)

    assert stage.wait("returned", id=run)["pid"] != child
    stage.wait("child_lost", lost=child)
    assert stage.records("child_lost", id=run) == []


def test_lost_child_fails_no_chord(stage: Stage) -> None:
    worker = stage.worker()
    stage.gates.close("run")
    body, failed = stage.app.signature("rec.plain", task_id="body"), stage.app.signature("rec.plain", task_id="failed")
    header = stage.app.signature("rec.hold", task_id="run.header")
    chord = chord_of(stage, [header], body.on_error(failed))
    begun = stage.wait("body", id="run.header")

    worker.kill_child(begun["pid"])

    stage.wait("child_lost", id="run.header")
    stage.assert_works()
    assert_no_outcome(stage, "run.header")
    assert chord.state == "PENDING"


def test_hard_time_limit_is_one_incident_of_a_process_that_may_live(stage: Stage) -> None:
    stage.worker()
    stage.gates.close("run")

    run = stage.hint("rec.limited")

    body = stage.wait("body", id=run)
    ended = stage.wait("delivery_ended", id=run)
    assert (ended["claim"], ended["known_dead"]) == (body["claim"], False)
    assert "hard time limit of 1" in ended["reason"]
    stage.wait("child_lost", lost=body["pid"])
    stage.assert_works()
    assert_no_outcome(stage, run)
    assert len(stage.records("delivery_ended", id=run)) == 1
    assert stage.records("child_lost", id=run) == []


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_terminated_delivery_is_one_incident_and_stores_nothing(stage: Stage, signal: str) -> None:
    stage.worker()
    stage.gates.close("run")
    run = stage.hint("rec.hold")
    body = stage.wait("body", id=run)

    stage.app.control.revoke(run, terminate=True, signal=signal)

    ended = stage.wait("delivery_ended", id=run)
    assert (ended["claim"], ended["known_dead"]) == (body["claim"], False)
    assert "terminated by signal" in ended["reason"]
    stage.wait("child_lost", lost=body["pid"])
    stage.assert_works()
    assert stage.result(run).state == "PENDING"
    assert stage.records("signal", id=run) == []  # whoever stores the outcome of the cancel tells of it
    assert stage.records("cancel_asked")[0]["at"] < ended["at"]
    assert len(stage.records("delivery_ended", id=run)) == 1


def test_body_that_leaves_with_system_exit_is_an_incident_in_every_pool(stage: Stage, pool: str) -> None:
    stage.worker(pool=pool)

    run = stage.hint("rec.leave")

    ended = stage.wait("delivery_ended", id=run)
    assert (ended["claim"], ended["known_dead"]) == (stage.wait("body", id=run)["claim"], False)
    assert "SystemExit(3)" in ended["reason"]
    stage.assert_works()
    assert_no_outcome(stage, run)


def test_failure_that_the_body_reports_is_celerys_as_ever(stage: Stage) -> None:
    stage.worker()

    run = stage.hint("rec.fail")

    stage.wait("signal", name="task_failure", id=run)
    with pytest.raises(ValueError, match="is not wanted"):
        stage.result(run).get(timeout=10)
    stage.assert_works()
    assert stage.records("delivery_ended", id=run) == []
    assert len(stage.records("signal", id=run)) == 1


def chord_of(stage: Stage, header: list[Signature], body: Signature) -> AsyncResult[object]:
    """Send a chord as a producer without our package would and return its result."""
    result: AsyncResult[object] = chord(header, app=stage.app)(body)
    return result
