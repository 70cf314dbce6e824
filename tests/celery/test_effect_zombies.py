"""A real worker process is frozen by SIGSTOP at a point of an effect, and goes on when its run is somebody else's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.apps import LEDGER, Tasks
from tests.support.provider import ADDRESS, Mode, Provider
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable import Policy
from umt_durable.database import Connection
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.states import Reason, RunState

pytestmark = pytest.mark.processes

OP = "ship:17"


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize(
    ("mode", "policy", "point"),
    [
        ("idempotent", Policy.IDEMPOTENT_KEY, "op.call.b"),
        ("idempotent", Policy.IDEMPOTENT_KEY, "op.done.b"),
        ("plain", Policy.PARK, "op.call.b"),
    ],
)
def test_i15_a_frozen_process_applies_nothing_twice_when_it_goes_on(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    wait_for_state: Callable[..., None],
    conn: Connection,
    schema: str,
    tmp_path: Path,
    mode: Mode,
    policy: Policy,
    point: str,
) -> None:
    shelf = f'"{schema}".shelf'
    conn.execute(f"CREATE TABLE {shelf} (step text, value int)".encode())
    with Provider(mode, tmp_path) as carrier:
        env = {**worker_env, ADDRESS: carrier.address, LEDGER: shelf}
        first = start_worker(
            pool="solo", concurrency=1, env={**env, ENVIRONMENT: f"{point}=stop;file:{tmp_path / 'once'}"}
        )
        run = tasks.shipping.delay(OP, policy)
        zombie = psutil.Process(first.pid)
        until(lambda: zombie.status() == psutil.STATUS_STOPPED, timeout=30, what=f"the worker to stop at {point}")

        start_worker(pool="solo", concurrency=1, env=env, name="heir")
        parks = policy is Policy.PARK
        wait_for_state(run.id, RunState.QUARANTINED if parks else RunState.SUCCEEDED)
        os.kill(first.pid, signal.SIGCONT)
        until(lambda: "is left" in first.text(), timeout=30, what="the zombie to find that its run is gone")

        assert carrier.applied(OP) == 1
        if parks:
            assert tasks.durable.get(run.id).reason == Reason.UNCERTAIN_OP
            tasks.durable.ops.resolve(OP, done=1, actor="ann", reason="seen in the portal")
        assert run.get(timeout=60) == 1
        assert carrier.applied(OP) == 1
        assert conn.execute(f"SELECT value FROM {shelf}".encode()).fetchall() == [(1,)]
