"""A worker dies while it undoes what a cancelled run has done: another goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.states import RunState

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_d11_a_process_killed_within_an_undo_is_followed_by_one_that_undoes_the_rest(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    wait_for_state: Callable[..., None],
    body_log: BodyLog,
    tmp_path: Path,
) -> None:
    once = tmp_path / "once"
    # The fifth outcome of a step is that of the second undo, whose body has ended by then.
    dying = {**worker_env, ENVIRONMENT: f"step.commit.b=kill;nth=5;file:{once}"}
    start_worker(pool="prefork", concurrency=1, env=dying)
    run = tasks.undoing.delay().id
    wait_for_state(run, RunState.WAITING)

    tasks.durable.cancel(run, reason="customer", compensate=True)
    until(once.exists, timeout=30, what="a process to die within an undo")
    wait_for_state(run, RunState.CANCELLED)

    entered = [one.step for one in body_log.entries(run, mark="begin") if one.step.startswith("undo-")]
    assert entered == ["undo-3", "undo-2", "undo-2", "undo-1"]
    assert tasks.durable.get(run).reason == "customer"
