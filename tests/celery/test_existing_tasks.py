"""Tasks that were written for Celery and made durable later: what they take, give, raise and read is what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from celery import states
from celery.exceptions import Reject

from tests.support import canvas_apps
from tests.support.bodylog import BodyLog
from tests.support.canvas_apps import Canvas, CanvasError
from tests.support.gates import Gates
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.errors import InputError
from umt_durable.states import RunState
from umt_durable.store import outbox

pytestmark = [pytest.mark.processes, pytest.mark.redis_by_default]

APP = "tests.support.canvas_apps:app"


@pytest.fixture
def canvas(worker_env: dict[str, str]) -> Iterator[Canvas]:
    """Return the tasks, for calling."""
    canvas = canvas_apps.build(worker_env)
    yield canvas
    canvas.durable.stop()
    canvas.app.close()


def test_values_of_existing_tasks_are_what_celery_makes_of_them(
    canvas: Canvas, start_worker: Callable[..., Worker]
) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)
    values, model = canvas.classic_values, canvas.classic_model

    results = {
        "tuple": values.delay("tuple", (3, {4: "4"})),
        "keys": values.delay("keys", given=(5,)),
        "result": values.delay("result"),
        "given": values.delay("given", canvas.app.AsyncResult("other-id").as_tuple()),
    }
    models = [model.delay({"left": 1, "right": 2}), model.delay(canvas_apps.Pair(left=1, right=2))]

    assert {name: result.get(timeout=60) for name, result in results.items()} == {
        "tuple": [1, ["two", [3, {"4": "4"}]]],
        "keys": {"1": [5], "moment": datetime(2026, 11, 30, tzinfo=UTC)},
        "result": [["some-id", None], None],
        "given": [["other-id", None], None],
    }
    assert [one.get(timeout=60) for one in models] == [{"left": 2, "right": 1}] * 2


def test_a_retry_with_other_arguments_has_them(canvas: Canvas, start_worker: Callable[..., Worker]) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)
    again = canvas.classic_again

    results = [again.delay(1, "args"), again.delay(1, "kwargs"), again.delay(value=1, how="args")]

    assert [one.get(timeout=60) for one in results] == [{"value": 2, "retries": 1, "redelivered": False}] * 3


def test_the_state_retry_shows_what_the_retry_is_for(canvas: Canvas, start_worker: Callable[..., Worker]) -> None:
    start_worker(app=APP, pool="threads", concurrency=1)

    result = canvas.classic_again.delay(1, "cause", 3600)

    until(lambda: canvas.durable.get(result.id).state is RunState.RETRYING, timeout=60, what="the retry")
    assert result.state == states.RETRY
    assert isinstance(result.result, CanvasError)
    assert str(result.result) == "the cause"


def test_reject_and_ignore_of_a_body_mean_what_they_mean_to_celery(
    canvas: Canvas, start_worker: Callable[..., Worker], body_log: BodyLog, conn: Connection
) -> None:
    start_worker(app=APP, pool="prefork", concurrency=1)
    again, mark = canvas.classic_again, canvas.mark

    requeued = again.delay(1, "requeue")
    rejected = again.delay(1, "reject")
    ignored = again.apply_async((1, "ignore"), link=mark.s(name="linked"), link_error=canvas.old_errback.s())

    assert requeued.get(timeout=60) == {"value": 1, "retries": 0, "redelivered": True}
    with pytest.raises(Reject):
        rejected.get(timeout=60)
    until(lambda: canvas.durable.get(ignored.id).state is RunState.SUCCEEDED, timeout=60, what="the ignored run to end")
    until(lambda: outbox.status(conn)[0] == 0, timeout=60, what="the outbox to be empty")
    assert canvas.durable.get(rejected.id).state is RunState.FAILED
    assert not ignored.ready()
    assert [body_log.count(step=step) for step in ("mark-linked", f"old-{ignored.id}", "again-requeue")] == [0, 0, 2]


def test_a_wrong_call_is_a_type_error_at_once_or_where_the_task_wants_it_so_when_it_runs(
    canvas: Canvas, start_worker: Callable[..., Worker]
) -> None:
    start_worker(app=APP, pool="threads", concurrency=1)

    with pytest.raises(TypeError, match="value: is missing") as refused:
        canvas.classic.delay()
    late = canvas.classic_loose.delay(1)

    assert isinstance(refused.value, InputError)
    with pytest.raises(TypeError, match="right: is missing"):
        late.get(timeout=60)
    assert canvas.durable.get(late.id).state is RunState.FAILED


def test_a_body_reads_its_declared_limits_and_the_properties_of_its_message(
    canvas: Canvas, start_worker: Callable[..., Worker]
) -> None:
    start_worker(app=APP, pool="threads", concurrency=1)
    call = canvas.classic_request.apply_async

    results = [call(), call(time_limit=10, soft_time_limit=5), call(app_id="1234")]

    assert [one.get(timeout=60) for one in results] == [
        {"limits": [60, 45], "app_id": None},
        {"limits": [10, 5], "app_id": None},
        {"limits": [60, 45], "app_id": "1234"},
    ]


def test_inspect_shows_what_a_run_was_called_with(
    canvas: Canvas, start_worker: Callable[..., Worker], gates: Gates
) -> None:
    start_worker(app=APP, pool="prefork", concurrency=1)
    gates.close("open")
    result = canvas.classic_gated.delay("open", more={"x": [1]})
    until(lambda: gates.reached("open"), timeout=60, what="the body to begin")

    inspect = canvas.app.control.inspect(timeout=10, limit=1)
    [active] = next(iter(inspect.active().values()))
    [safe] = next(iter(inspect.active(safe=True).values()))
    [(_, queried)] = next(iter(inspect.query_task(result.id).values())).values()
    gates.open("open")

    assert (active["id"], active["args"], active["kwargs"]) == (result.id, ["open"], {"more": {"x": [1]}})
    assert (safe["args"], safe["kwargs"]) == ("['open']", "{'more': {'x': [1]}}")
    assert queried["args"] == ["open"]
    assert active["delivery_info"]["priority"] == 0
    assert result.get(timeout=60) == "open"


def test_an_eager_call_under_the_id_of_a_run_that_has_ended_gives_its_outcome(canvas: Canvas) -> None:
    done = [canvas.hop.apply((1,), task_id="done") for _ in range(2)]
    failed = [canvas.fail.apply((1,), task_id="failed") for _ in range(2)]

    assert [one.get() for one in done] == [2, 2]
    assert ["failed with 1" in str(one.result) for one in failed] == [True, True]
    assert [len(canvas.durable.history(run_id).attempts) for run_id in ("done", "failed")] == [1, 1]
