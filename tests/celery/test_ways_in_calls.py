"""Every way to call a durable task, and what each option becomes in the run, in the hint and in the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import TaskRevokedError
from celery.schedules import schedule
from celery.signals import after_task_publish, before_task_publish

from tests.support import canvas_apps
from tests.support.brokers import Broker
from tests.support.canvas_apps import Canvas
from tests.support.clock import Clock
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable import Durable, Run
from umt_durable.database import Connection
from umt_durable.errors import DefinitionError, DurableError, InputError, MessageRefusedError
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

APP = "tests.support.canvas_apps:app"


@pytest.fixture
def canvas(worker_env: dict[str, str]) -> Iterator[Canvas]:
    """Return the tasks, for calling."""
    canvas = canvas_apps.build(worker_env)
    yield canvas
    canvas.durable.stop()
    canvas.app.close()


@pytest.mark.redis_by_default
def test_every_option_of_a_call_reaches_the_body(canvas: Canvas, start_worker: Callable[..., Worker]) -> None:
    start_worker(app=APP, pool="threads", concurrency=4)
    call, now = canvas.options.apply_async, datetime.now(UTC)
    eta, expires = now + timedelta(seconds=1), now + timedelta(hours=1)

    results = {
        "delay": canvas.options.delay(1, naps=1),
        "countdown": call((1,), countdown=1),
        "eta": call((1,), eta=eta),
        "expires": call((1,), expires=expires),
        "expires in": call((1, 1), expires=3600),
        "priority": call((1, 1), priority=3),
        "queue": call((1,), queue=QUEUE),
        "routing_key": call((1, 1), routing_key=QUEUE),
        "exchange": call((1, 1), exchange=QUEUE, routing_key=QUEUE),
        "task_id": call((1,), task_id="my own id"),
        "headers": call((1, 1), headers={"mine": "here"}),
        "json": call((1,), serializer="json"),
        "msgpack": call((1, 1), serializer="msgpack"),
        "compression": call((1, 1), compression="zlib"),
        "limits": call((1, 1), time_limit=300, soft_time_limit=200),
        "shadow": call((1, 1), shadow="another name"),
        "kwargs": call(kwargs={"value": 1}),
        "ignored": call((1, 1), ignore_result=True),
        "by name": canvas.app.send_task("canvas.options", (1,), {"naps": 1}, headers={"mine": "named"}),
        "signature": canvas.app.signature("canvas.options", args=(1, 1), options={"shadow": "sig"}).delay(),
    }

    found = {name: result.get(timeout=60) for name, result in results.items() if name != "ignored"}
    assert {name: one["value"] for name, one in found.items()} == dict.fromkeys(found, 1)
    assert results["task_id"].id == "my own id"
    assert datetime.fromisoformat(found["eta"]["eta"]) == eta
    assert datetime.fromisoformat(found["expires"]["expires"]) == expires
    assert (found["headers"]["mine"], found["by name"]["mine"]) == ("here", "named")
    assert found["limits"]["timelimit"] == [300, 200]
    assert (found["shadow"]["shadow"], found["signature"]["shadow"]) == ("another name", "sig")
    assert found["priority"]["priority"] is not None
    ignored = results["ignored"]
    assert ignored.ignored
    assert ignored.get(timeout=1) is None
    until(lambda: _run(canvas, ignored.id).state is RunState.SUCCEEDED, timeout=30, what="the ignored run to succeed")
    assert canvas.app.AsyncResult(ignored.id).state == "PENDING"


def test_i10_countdown_and_eta_wait_in_the_database_and_expires_guards_the_first_start(
    canvas: Canvas, start_worker: Callable[..., Worker], worker_env: dict[str, str], broker: Broker, clock: Clock
) -> None:
    worker_env["DURABLE_LEASE_SECONDS"] = "20000"  # the clock's jumps are not to end it
    start_worker(app=APP, pool="threads", concurrency=2)
    later = canvas.hop.apply_async((1,), countdown=3600)
    at = canvas.hop.apply_async((2,), eta=clock.now() + timedelta(hours=2))
    started = canvas.held.apply_async((), expires=1800)
    missed = canvas.hop.apply_async((3,), countdown=7200, expires=600)
    until(lambda: _run(canvas, started.id).state is RunState.WAITING, timeout=30, what="a run to begin to wait")

    assert [_run(canvas, one.id).state for one in (later, at, missed)] == [RunState.SLEEPING] * 3
    assert broker.depth(QUEUE) == 0
    clock.advance(seconds=3700)
    assert later.get(timeout=60) == 2
    assert _run(canvas, at.id).state is RunState.SLEEPING
    with pytest.raises(TaskRevokedError, match="expired"):
        missed.get(timeout=60)
    assert (missed.state, _run(canvas, missed.id).reason) == ("REVOKED", "expired")
    canvas.durable.signal(started.id, "go", 7)
    assert started.get(timeout=60) == 7
    clock.advance(seconds=3700)
    assert at.get(timeout=60) == 3


def test_foreign_producers_with_both_protocols_and_codecs_make_the_same_runs(
    canvas: Canvas, start_worker: Callable[..., Worker], worker_env: dict[str, str]
) -> None:
    start_worker(app=APP, pool="prefork", concurrency=2)
    results = {}
    apps = []
    for protocol in (1, 2):
        for codec in ("json", "msgpack"):
            app = _foreign(worker_env, task_protocol=protocol, task_serializer=codec)
            apps.append(app)
            for compression in (None, "zlib"):
                name = f"{protocol} {codec} {compression}"
                results[name] = app.send_task("canvas.hop", (1,), {"naps": 1}, compression=compression)
    app = apps[-1]
    chained = app.signature("canvas.hop", args=(1,)) | app.signature("canvas.add", args=(5,))
    linked = chained.apply_async()
    later = app.send_task("canvas.hop", (1,), countdown=2)
    mine = canvas.app
    mine.conf.task_protocol = 1
    old = canvas.hop.delay(1, naps=1)

    assert {name: one.get(timeout=60) for name, one in results.items()} == dict.fromkeys(results, 2)
    assert linked.get(timeout=60) == 7
    assert old.get(timeout=60) == 2
    assert later.get(timeout=60) == 2
    for one in apps:
        one.close()


@pytest.mark.redis_by_default
def test_beat_entries_start_runs_with_their_options(canvas: Canvas, start_worker: Callable[..., Worker]) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)
    scheduler = Scheduler(canvas.app, lazy=True)
    results = []

    for task, options in (("canvas.options", {"shadow": "beaten", "expires": 600}), ("canvas.hop", {"priority": 5})):
        entry = ScheduleEntry(
            name=task, task=task, args=(1,), kwargs={"naps": 1}, options=options, schedule=schedule(60), app=canvas.app
        )
        results.append(scheduler.apply_async(entry, advance=False))

    assert results[0].get(timeout=60)["shadow"] == "beaten"
    assert results[1].get(timeout=60) == 2


@pytest.mark.redis_by_default
def test_codecs_that_run_code_and_wrong_arguments_are_refused_before_anything_is_stored(canvas: Canvas) -> None:
    for codec in ("pickle", "yaml"):
        with pytest.raises(MessageRefusedError, match=codec):
            canvas.hop.apply_async((1,), serializer=codec)
    with pytest.raises(InputError, match="value"):
        canvas.app.send_task("canvas.hop", ("no number",))

    assert canvas.durable.list() == []


@pytest.mark.redis_by_default
def test_shared_tasks_and_an_app_of_durable_tasks(canvas: Canvas, start_worker: Callable[..., Worker]) -> None:
    start_worker(app=APP, pool="threads", concurrency=2)
    other = Celery("without", set_as_current=False)

    assert canvas.app.tasks["canvas.shared"].delay(21).get(timeout=60) == 42
    assert "canvas.shared" in other.tasks
    assert canvas.classic.delay(1).get(timeout=60) == 2
    other.close()


@pytest.mark.redis_by_default
@pytest.mark.parametrize("sent_event", [False, True])
def test_celerys_signals_of_publishing_are_sent_where_a_run_is_enqueued(
    canvas: Canvas, start_worker: Callable[..., Worker], sent_event: bool
) -> None:
    canvas.app.conf.task_send_sent_event = sent_event
    start_worker(app=APP, pool="threads", concurrency=2)
    told: list[tuple[str, str]] = []

    def before(sender: str, headers: dict[str, Any], **said: Any) -> None:
        told.append(("before", headers["id"]))
        headers["mine"] = f"from the receiver to {said['routing_key']}"

    def after(sender: str, headers: dict[str, Any], **_: Any) -> None:
        told.append(("after", headers["id"]))
        assert canvas.durable.get(headers["id"]).task == sender

    before_task_publish.connect(before)
    after_task_publish.connect(after)
    try:
        result = canvas.options.apply_async((1, 1), headers={"mine": "overwritten"})
    finally:
        before_task_publish.disconnect(before)
        after_task_publish.disconnect(after)

    assert told == [("before", result.id), ("after", result.id)]
    assert result.get(timeout=60)["mine"] == f"from the receiver to {QUEUE}"


@pytest.mark.redis_by_default
def test_the_event_that_a_task_was_sent_is_published_where_an_app_asks_for_it(canvas: Canvas, conn: Connection) -> None:
    canvas.app.conf.task_send_sent_event = True
    seen: list[Mapping[str, Any]] = []
    with canvas.app.connection_for_read() as connection:
        receiver = canvas.app.events.Receiver(connection, handlers={"task-sent": seen.append})
        with receiver.consumer_context() as (bound, _, _):
            with suppress(TimeoutError):
                bound.drain_events(timeout=0.2)  # on Redis it subscribes only now
            with conn.transaction():
                quiet = canvas.options.enqueue(1, conn=conn)
            loud = canvas.options.delay(1)
            until(lambda: seen or bound.drain_events(timeout=30), timeout=30, what="the event")

    assert [(event["uuid"], event["queue"]) for event in seen] == [(loud.id, QUEUE)]
    assert canvas.durable.get(quiet.id).task == "canvas.options"


@pytest.mark.redis_by_default
def test_an_app_may_make_all_its_tasks_durable_but_celerys_own(canvas: Canvas, worker_env: dict[str, str]) -> None:
    app = Celery(
        "all-durable", broker=worker_env["CELERY_BROKER_URL"], task_cls="umt_durable:DurableTask", set_as_current=False
    )

    @app.task(name="all.early", shared=False, lazy=False)
    def early(value: int) -> int:
        return value + 1

    given = canvas.durable.settings
    durable = Durable(app, database_url=str(given.database_url), schema=given.schema, embedded=False)

    @app.task(name="all.late", shared=False)
    def late(value: int) -> int:
        return value + 2

    runs = [early.delay(1), late.delay(1)]
    assert [durable.get(one.id).state for one in runs] == [RunState.READY] * 2
    assert (early.apply((1,)).get(), late(1)) == (2, 3)
    assert not any(durable.has_task(name) for name in app.tasks if name.startswith("celery."))
    assert app.tasks["celery.chord_unlock"].acks_late == app.conf.task_acks_late
    durable.stop()
    app.close()


@pytest.mark.redis_by_default
def test_direct_and_eager_calls_run_here(canvas: Canvas) -> None:
    assert canvas.classic(1) == 2
    assert canvas.hop(1) == 2
    assert canvas.hop.apply((1,)).get() == 2
    linked = canvas.hop.apply((1,), link=canvas.classic.s())
    assert linked.get() == 2
    failed = canvas.fail.apply((1,))
    assert failed.state == "FAILURE"
    with pytest.raises(canvas_apps.CanvasError):
        failed.get()
    with pytest.raises(canvas_apps.CanvasError):
        canvas.fail(1)
    with pytest.raises(DurableError, match="parked"):
        canvas.hop(1, naps=1)

    canvas.app.conf.task_always_eager = True
    eager = canvas.hop.delay(5)
    assert (eager.get(), eager.state) == (6, "SUCCESS")
    assert _run(canvas, eager.id).state is RunState.SUCCEEDED
    assert (canvas.hop.s(1) | canvas.add.s(1) | canvas.hop.s()).delay().get() == 4
    assert canvas.swap.delay(1, "durable-now").get() == 11
    parked = canvas.hop.delay(1, naps=1)
    assert parked.state == "FAILURE"
    with pytest.raises(DurableError, match="parked"):
        parked.get()
    with pytest.raises(DefinitionError, match="idempotency_key"):
        canvas.hop.apply_async((1,), idempotency_key="one", throw=True)


def test_priority_goes_first_where_the_broker_has_it(canvas: Canvas, start_worker: Callable[..., Worker]) -> None:
    first_is_high = canvas.app.connection_for_write().transport.driver_type != "redis"
    urgent, idle = (9, 0) if first_is_high else (0, 9)

    slow = [canvas.hop.apply_async((n,), priority=idle) for n in range(10)]
    fast = canvas.hop.apply_async((100,), priority=urgent)
    start_worker(app=APP, pool="solo", concurrency=1)

    assert fast.get(timeout=60) == 101
    assert [one.get(timeout=60) for one in slow] == [n + 1 for n in range(10)]
    ends = {run.id: run.finished_at.timestamp() for run in canvas.durable.client.list() if run.finished_at is not None}
    assert sum(ends[one.id] < ends[fast.id] for one in slow) <= 2


def _run(canvas: Canvas, run_id: str) -> Run:
    return canvas.durable.client.get(run_id)


def _foreign(environ: Mapping[str, str], **conf: Any) -> Celery:
    app = Celery(
        "elsewhere",
        broker=environ["CELERY_BROKER_URL"],
        backend=environ["CELERY_RESULT_BACKEND"],
        set_as_current=False,
    )
    app.conf.update(task_default_queue=QUEUE, **conf)
    return app
