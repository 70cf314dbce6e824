"""Sealed payloads on real workers: no secret in any column, and nothing lost where a worker has not the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import sealed_app
from tests.support.sealed_app import CODEC, Sealed
from tests.support.sealing import CANARY, leaks
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable import RunState
from umt_durable.database import Connection

pytestmark = [pytest.mark.processes, pytest.mark.redis_by_default]

APP = "tests.support.sealed_app:app"


@pytest.fixture
def sealed(worker_env: dict[str, str]) -> Iterator[Sealed]:
    """Return the tasks, for calling; the workers that are started have the same codec."""
    worker_env[CODEC] = "tests.support.sealing:BOTH"
    sealed = sealed_app.build(worker_env)
    yield sealed
    sealed.durable.stop()
    sealed.app.close()


def _wait(sealed: Sealed, run_id: str, state: RunState) -> None:
    until(lambda: sealed.durable.get(run_id).state is state, timeout=60, what=f"{run_id} to be {state}")


def test_no_table_of_the_schema_shows_a_secret_of_real_runs(
    sealed: Sealed, start_worker: Callable[..., Worker], conn: Connection, schema: str
) -> None:
    run = sealed.secretive.apply_async(
        (CANARY,), headers={"note": CANARY}, link=sealed.note.s(CANARY), stamped_headers=["s"], s=CANARY
    )
    failed = sealed.broken.delay(CANARY)
    event = sealed.durable.outbox.emit("sealed.event", {"card": CANARY})
    sealed.durable.outbox.send(sealed.note.s(CANARY))
    assert leaks(conn, schema) == []

    start_worker(app=APP, pool="prefork", concurrency=2)
    _wait(sealed, run.id, RunState.WAITING)
    until(lambda: len(sealed.durable.history(run.id).steps) >= 7, timeout=60, what="all steps before the fact")
    assert leaks(conn, schema) == []
    sealed.durable.signal(run.id, "seen", {"card": CANARY})

    found = run.get(timeout=60)
    assert len(found) == 9
    assert all(CANARY in one for one in found)
    _wait(sealed, failed.id, RunState.FAILED)
    until(lambda: sealed.durable.outbox.get(event).run is not None, timeout=60, what="the event to start its run")
    _wait(sealed, str(sealed.durable.outbox.get(event).run), RunState.SUCCEEDED)
    assert leaks(conn, schema) == []
    failure = sealed.durable.client.failure(sealed.durable.get(failed.id))
    assert failure is not None
    assert failure.message == f"declined {CANARY}"


def test_a_worker_without_the_key_parks_the_run_and_one_with_it_goes_on(
    sealed: Sealed, worker_env: dict[str, str], start_worker: Callable[..., Worker]
) -> None:
    run = sealed.child.delay(CANARY)
    lacking = start_worker(app=APP, pool="solo", env={**worker_env, CODEC: "tests.support.sealing:ONLY_OLD"})
    _wait(sealed, run.id, RunState.QUARANTINED)
    assert sealed.durable.get(run.id).reason == "payload_key"
    lacking.close()

    start_worker(app=APP, pool="solo")
    sealed.durable.retry(run.id, actor="ann", reason="the key is there now")

    assert run.get(timeout=60) == f"child {CANARY}"
