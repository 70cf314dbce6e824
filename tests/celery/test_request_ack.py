"""When a hint is acked, and what of a message the main process still listens to."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.celery import recording
from tests.celery.stage import Broker, Stage
from tests.support.gates import Gates
from tests.support.workers import Pool

pytestmark = pytest.mark.processes


@pytest.fixture
def stage(broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(broker, redis_url, gates, tmp_path) as stage:
        yield stage


@pytest.fixture
def redis_stage(redis_broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(redis_broker, redis_url, gates, tmp_path) as stage:
        yield stage


def test_running_body_holds_no_unacked_message(stage: Stage, pool: Pool) -> None:
    stage.worker(pool=pool)
    stage.gates.close("run")

    run = stage.hint("rec.hold")

    stage.gates.wait("run")
    stage.wait_held(0)
    assert stage.records("returned", id=run) == []


def test_reserved_hint_stays_in_the_broker_until_a_child_accepts_it(stage: Stage) -> None:
    stage.worker()
    stage.gates.close("run")
    first = stage.hint("rec.hold")
    stage.wait("body", id=first)

    second = stage.hint("rec.hold")

    stage.wait_reserved(second)
    assert stage.broker.held(stage.queue) == 1
    stage.gates.open("run")
    stage.wait("returned", id=second)
    stage.wait_held(0)


def test_hint_that_waits_too_long_for_a_child_goes_to_another_worker(stage: Stage) -> None:
    assert_goes_to_another_worker(stage, "prefork")


def test_hint_that_waits_too_long_for_a_thread_goes_to_another_worker(redis_stage: Stage) -> None:
    assert_goes_to_another_worker(redis_stage, "threads")


def assert_goes_to_another_worker(stage: Stage, busy_pool: Pool) -> None:
    stage.worker(name="busy", pool=busy_pool, env={recording.RESERVED_SECONDS: "0.5"})
    stage.gates.close("run")
    first = stage.hint("rec.hold")
    begun = stage.wait("body", id=first)
    second = stage.hint("rec.hold", "open.second")
    stage.wait_reserved(second)

    stage.worker(name="idle")

    other = stage.wait("returned", id=second)
    assert other["pid"] != begun["pid"]
    stage.gates.open("run")
    stage.wait("returned", id=first)
    stage.assert_works()
    assert len(stage.records("body", id=second)) == 1


def test_eta_expiry_and_revocation_of_a_hint_are_the_rows_affair(redis_stage: Stage) -> None:
    stage = redis_stage
    worker = stage.worker()
    stage.app.control.revoke("open.revoked", reply=True, timeout=5.0, destination=[worker.node])
    now = datetime.now(UTC)

    stage.hint("rec.hold", "open.revoked")
    stage.hint("rec.hold", "open.late", eta=(now + timedelta(days=2)).isoformat())
    stage.hint("rec.hold", "open.expired", expires=(now - timedelta(days=2)).isoformat())

    for run in ("open.revoked", "open.late", "open.expired"):
        assert stage.wait("body", id=run)["eta"] is None
        stage.wait("returned", id=run)


def test_each_delivery_has_a_claim_id_of_its_own(redis_stage: Stage) -> None:
    stage = redis_stage
    stage.worker()

    stage.hint("rec.hold", "open.twice")
    stage.hint("rec.hold", "open.twice")

    stage.wait("body", id="open.twice", times=2)
    assert len({body["claim"] for body in stage.records("body")}) == 2


def test_hint_never_has_its_body_read(redis_stage: Stage) -> None:
    stage = redis_stage
    stage.worker()

    for content_type, body in (("application/x-python-serialize", b"cos\nsystem\n(S'true'\ntR."), ("text/plain", b"?")):
        run = f"open.{content_type.rpartition('/')[2]}"
        stage.send(body, {"task": "rec.hold", "id": run, "umt_durable": {"v": 1, "gen": 1}}, content_type)
        stage.wait("returned", id=run)
