"""What callers read of durable runs, on every kind of result backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import chain, group
from celery.result import AsyncResult, GroupResult

from tests.support import canvas_apps
from tests.support.canvas_apps import Canvas, CanvasError
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.bridge.reporter import SuspendedError
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

APP = "tests.support.canvas_apps:app"
BACKENDS = ("redis", "rpc", "sqlite", "postgres")


@pytest.fixture
def backend_url(request: pytest.FixtureRequest, worker_env: dict[str, str], tmp_path: Path) -> str:
    """Return the URL of one kind of result backend, and have the workers use it."""
    database = re.sub(r"^\w+://", "db+postgresql+psycopg://", worker_env["DURABLE_DATABASE_URL"])
    urls = {
        "redis": worker_env["CELERY_RESULT_BACKEND"],
        "rpc": "rpc://",
        "sqlite": f"db+sqlite:///{tmp_path / 'results.sqlite'}",
        "postgres": database,
        "disabled": "disabled://",
    }
    worker_env["CELERY_RESULT_BACKEND"] = urls[request.param]
    return urls[request.param]


@pytest.fixture
def canvas(worker_env: dict[str, str], backend_url: str, start_worker: Callable[..., Worker]) -> Iterator[Canvas]:
    """Return the tasks of a worker that has been started."""
    canvas = canvas_apps.build(worker_env)
    start_worker(app=APP, pool="threads", concurrency=4)
    yield canvas
    canvas.durable.stop()
    canvas.app.close()


@pytest.mark.parametrize("backend_url", BACKENDS, indirect=True)
def test_results_states_and_errors_are_celerys(canvas: Canvas, backend_url: str) -> None:
    fine, held = canvas.hop.apply_async((1, 1), link=canvas.add.s(1)), canvas.held.delay()
    failed, ignored = canvas.fail.delay(3, naps=1), canvas.hop.apply_async((1,), ignore_result=True)

    assert fine.get(timeout=60) == 2
    assert (fine.state, fine.successful(), fine.result) == ("SUCCESS", True, 2)
    with pytest.raises(CanvasError, match="failed with 3"):
        failed.get(timeout=60)
    assert (failed.state, type(failed.result)) == ("FAILURE", CanvasError)
    assert "CanvasError" in str(failed.traceback)
    _wait(canvas, held, RunState.WAITING)
    if backend_url != "rpc://":  # there, a state is seen by who waits for the result
        until(lambda: held.state == "RETRY", timeout=30, what="a parked run to show RETRY")
        assert isinstance(held.info, SuspendedError)
        assert "waiting" in str(held.info)
    assert not held.ready()
    canvas.durable.signal(held.id, "go", 5)
    assert held.get(timeout=60) == 5
    assert (held.state, held.info) == ("SUCCESS", 5)
    _wait(canvas, ignored, RunState.SUCCEEDED)
    assert ignored.get(timeout=1) is None
    assert canvas.app.AsyncResult(ignored.id).state == "PENDING"


@pytest.mark.parametrize("backend_url", BACKENDS, indirect=True)
def test_groups_and_chains_of_results(canvas: Canvas, backend_url: str) -> None:
    grouped = group(canvas.hop.s(n, naps=n % 2) for n in range(4)).apply_async()
    assert grouped.get(timeout=60) == [1, 2, 3, 4]
    assert grouped.successful()
    assert grouped.completed_count() == 4
    mixed = group(canvas.hop.s(1), canvas.fail.s(1, naps=1)).apply_async()
    with pytest.raises(CanvasError):
        mixed.get(timeout=60)
    until(mixed.ready, timeout=30, what="the group to be ready")
    assert mixed.failed()
    if backend_url != "rpc://":  # there, results of tasks that a worker sent go to that worker
        chained = chain(canvas.hop.s(1, naps=1), canvas.add.s(1), canvas.hop.s())()
        assert chained.get(timeout=60) == 4
        assert chained.parent.get(timeout=60) == 3
        assert chained.parent.parent.get(timeout=60) == 2


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # by Celery, in GroupResult.save
@pytest.mark.parametrize("backend_url", ["redis", "sqlite"], indirect=True)
def test_extended_results_say_what_was_called(canvas: Canvas, backend_url: str) -> None:
    linked = canvas.hop.apply_async((1,), {"naps": 1}, link=canvas.add.s(5))
    grouped = group(canvas.hop.s(1), canvas.hop.s(2)).apply_async()
    grouped.save()

    assert linked.get(timeout=60) == 2
    other = AsyncResult(linked.id, app=canvas.app)
    assert (other.name, list(other.args), other.kwargs) == ("canvas.hop", [1], {"naps": 1})
    assert (other.worker is not None, other.retries, other.queue) == (True, 0, "umt-tests")
    assert other.date_done is not None
    (child,) = other.children
    # Celery's client can miss a result that is stored between its look and its subscription; asking again cannot.
    until(child.ready, timeout=30, what="the callback's result")
    assert child.get(timeout=60) == 7
    restored = GroupResult.restore(grouped.id, app=canvas.app)
    assert restored.get(timeout=60) == [2, 3]
    assert [value for _, value in other.collect()] == [2, 7]


@pytest.mark.parametrize("backend_url", ["disabled"], indirect=True)
def test_without_a_backend_runs_and_their_followers_go_on(canvas: Canvas, backend_url: str) -> None:
    chained = chain(canvas.hop.s(1, naps=1), canvas.hop.s(naps=1))()
    failed = canvas.fail.apply_async((1,), link_error=canvas.durable_errback.s())

    _wait(canvas, chained, RunState.SUCCEEDED)
    _wait(canvas, failed, RunState.FAILED)
    until(
        lambda: [run.state for run in canvas.durable.list(task="canvas.durable_errback")] == [RunState.SUCCEEDED],
        timeout=30,
        what="the errback to run",
    )
    assert canvas.durable.client.result(canvas.durable.get(chained.id)) == 3
    with pytest.raises((NotImplementedError, AttributeError)):  # as for any task of Celery's
        chained.get(timeout=1)


def _wait(canvas: Canvas, result: AsyncResult, state: RunState) -> None:
    def look() -> bool:
        return any(run.id == result.id and run.state is state for run in canvas.durable.list())

    until(look, timeout=60, what=f"run {result.id} to be {state}")
