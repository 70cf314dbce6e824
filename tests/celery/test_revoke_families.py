"""Celery's revoke of a run that has children: those that end with it do, and those that were abandoned live on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult, GroupResult

from tests.support import awaited_apps, plain
from tests.support.awaited_apps import Awaited
from tests.support.bodylog import BodyLog
from tests.support.gates import Gates
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.states import RunState

pytestmark = [pytest.mark.processes, pytest.mark.redis_by_default]

APP = "tests.support.awaited_apps:app"
Revoke = Callable[[AsyncResult[Any], Awaited], object]
Tree = tuple[AsyncResult[Any], Worker]


@pytest.fixture
def awaited(worker_env: dict[str, str]) -> Iterator[Awaited]:
    """Return the tasks, for calling."""
    awaited = awaited_apps.build(worker_env)
    yield awaited
    awaited.durable.stop()
    awaited.app.close()


def by_foreign_client(result: AsyncResult[Any], awaited: Awaited) -> None:
    """Revoke as a client without this package does, Flower among them."""
    foreign = plain.build(str(awaited.app.conf.broker_url), str(awaited.app.conf.result_backend))
    foreign.control.revoke(result.id, terminate=True, signal="KILL")
    foreign.close()


WAYS: dict[str, Revoke] = {
    "result": lambda result, _: result.revoke(),
    "terminate": lambda result, awaited: awaited.app.control.revoke(result.id, terminate=True),
    "group": lambda result, awaited: GroupResult("g", [result], app=awaited.app).revoke(),
    "stamp": lambda _, awaited: awaited.app.control.revoke_by_stamped_headers({"customer": ["c1"]}),
    "foreign": by_foreign_client,
}


def of(awaited: Awaited, task: str) -> list[RunState]:
    """Return where the runs of a task stand, the newest first."""
    return [run.state for run in awaited.durable.list(task=task)]


def wait_for_the_end(awaited: Awaited) -> None:
    """Return once all have ended that end with the tree, and show that the abandoned one has not."""

    def look() -> bool:
        return {*of(awaited, "awaited.double")} == {RunState.CANCELLED}

    until(look, timeout=60, what="the children to end", diagnose=lambda: str(of(awaited, "awaited.double")))
    assert of(awaited, "awaited.fan") == [RunState.CANCELLED] * 2
    bound, abandoned = awaited.durable.list(task="awaited.held")
    assert (bound.state, abandoned.state) == (RunState.CANCELLED, RunState.WAITING)
    awaited.durable.signal(abandoned.id, "go", 7)
    assert AsyncResult(abandoned.id, app=awaited.app).get(timeout=60) == 7


@pytest.fixture
def tree(awaited: Awaited, start_worker: Callable[..., Worker], gates: Gates) -> Tree:
    """Return a tree that is started: two of the numbers are being doubled, two are ready, two children wait."""
    gates.close("inside")
    worker = start_worker(app=APP, pool="prefork", concurrency=2)
    signature = awaited.tree.s("inside")
    signature.stamp(customer="c1")
    result = signature.apply_async()
    gates.wait("inside", processes=2)
    return result, worker


@pytest.mark.parametrize("way", WAYS)
def test_i11_a_revoke_ends_the_family_of_a_run_but_for_whom_it_abandoned(
    awaited: Awaited, tree: Tree, gates: Gates, body_log: BodyLog, way: str
) -> None:
    result, _ = tree

    WAYS[way](result, awaited)
    until(lambda: awaited.durable.get(result.id).state is RunState.CANCELLED, timeout=30, what="the parent to end")
    doubling = awaited.durable.list(task="awaited.double")
    until(
        lambda: all(awaited.durable.get(run.id).cancel_at is not None for run in doubling),
        timeout=30,
        what="the cancels of the children",
    )
    gates.open("inside")

    wait_for_the_end(awaited)
    assert body_log.count(step="sum") == 0
    with pytest.raises(TaskRevokedError):
        result.get(timeout=30)


@pytest.mark.parametrize("way", ["result", "terminate", "stamp"])
def test_i11_with_every_worker_down_a_revoke_ends_the_family_and_none_of_it_is_begun_later(
    awaited: Awaited, tree: Tree, start_worker: Callable[..., Worker], gates: Gates, body_log: BodyLog, way: str
) -> None:
    result, worker = tree
    worker.kill9()
    begun = body_log.count(step="double")

    WAYS[way](result, awaited)

    assert awaited.durable.get(result.id).state is RunState.CANCELLED
    assert of(awaited, "awaited.fan") == [RunState.CANCELLED] * 2
    # What the dead worker held is asked to stop, and ends when its lease has.
    assert sorted(of(awaited, "awaited.double")) == [RunState.CANCELLED] * 2 + [RunState.RUNNING] * 2
    gates.open("inside")
    start_worker(app=APP, pool="prefork", concurrency=2, name="later")
    wait_for_the_end(awaited)
    assert body_log.count(step="double") == begun
