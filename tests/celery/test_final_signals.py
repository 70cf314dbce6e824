"""Celery's signals, handlers and events: once per final state of a run, and once per delivery where they are that."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.celery.observed import APP
from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Pool, Worker
from umt_durable.bridge import message
from umt_durable.bridge.publisher import Publisher
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

only_redis = pytest.mark.parametrize("broker", ["redis"], indirect=True)

SUCCEEDED = {"signal:success": 1, "handler:on_success": 1, "handler:after_return": 1}
FAILED = {"signal:failure": 1, "handler:on_failure": 1, "handler:after_return": 1}
RETRIED = {**SUCCEEDED, "signal:retry": 1, "handler:on_retry": 1}
REVOKED = {"signal:revoked": 1}
PER_DELIVERY = ("signal:prerun", "signal:postrun", "handler:before_start")


class Events:
    """Celery's events, collected on a thread until it is closed."""

    def __init__(self, app: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self._app = app
        self._ending = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()
        assert self._ready.wait(30), "no connection for events"

    def _collect(self) -> None:
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self.seen.append})
            with receiver.consumer_context() as (its_own, _, _):
                self._ready.set()
                while not self._ending.is_set():
                    try:
                        its_own.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

    def of(self, run: str) -> Counter[str]:
        """Return how often each final event of a run came."""
        final = ("task-succeeded", "task-failed", "task-revoked")
        return Counter(one["type"] for one in list(self.seen) if one.get("uuid") == run and one["type"] in final)

    def close(self) -> None:
        """Collect no more."""
        self._ending.set()
        self._thread.join(30)


@pytest.fixture
def seen(tasks: Tasks) -> Iterator[Events]:
    """Return the events of this test's workers."""
    events = Events(tasks.app)
    yield events
    events.close()


def told(body_log: BodyLog, run: str) -> dict[str, int]:
    """Return how often each signal and handler of a run was called, but for those of each delivery."""
    return {step: times for step, times in everything(body_log, run).items() if step not in PER_DELIVERY}


def everything(body_log: BodyLog, run: str) -> Counter[str]:
    """Return how often each signal and handler of a run was called, whatever mark it wrote."""
    found = body_log.entries(run)
    return Counter(one.step for one in found if one.step.startswith(("signal:", "handler:")))


@pytest.mark.parametrize(
    "pool", ["prefork", "gevent", *(pytest.param(pool, marks=pytest.mark.long) for pool in ("threads", "solo"))]
)
@only_redis
def test_signals_handlers_and_events_tell_of_each_end_once(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    body_log: BodyLog,
    broker: Broker,
    seen: Events,
    pool: Pool,
) -> None:
    start_worker(app=APP, pool=pool, concurrency=1 if pool == "solo" else 2, options=["-E"])
    send = tasks.app.send_task

    succeeding = {send("observed.run", (times, False)).id: times for times in (0, 1, 3)}
    failing = {send("observed.run", (times, True)).id: times for times in (0, 1, 3)}
    retrying = [send(name).id for name in ("observed.again", "observed.classic")]
    cancelled = tasks.sleeper.delay(seconds=300).id
    wait_for_state(cancelled, RunState.SLEEPING)
    tasks.durable.cancel(cancelled)

    wait_for_state(list(succeeding), RunState.SUCCEEDED)
    wait_for_state(list(failing), RunState.FAILED)
    wait_for_state(retrying, RunState.SUCCEEDED)
    wanted = {
        **dict.fromkeys(succeeding, SUCCEEDED),
        **dict.fromkeys(failing, FAILED),
        **dict.fromkeys(retrying, RETRIED),
        cancelled: REVOKED,
    }
    ends = {True: "task-succeeded", False: "task-failed"}
    until(lambda: all(told(body_log, run) == one for run, one in wanted.items()), what="what was to be told")
    until(lambda: all(sum(seen.of(run).values()) for run in wanted), what="the final events")
    for run, times in {**succeeding, **failing}.items():
        assert {everything(body_log, run)[one] for one in PER_DELIVERY} == {times + 1}, run
    deliver_again(tasks, [*succeeding, *failing, *retrying])
    wait_until_empty(broker, QUEUE)
    assert {run: told(body_log, run) for run in wanted} == wanted
    assert {run: seen.of(run) for run in succeeding} == {run: Counter({ends[True]: 1}) for run in succeeding}
    assert {run: seen.of(run) for run in failing} == {run: Counter({ends[False]: 1}) for run in failing}
    assert seen.of(cancelled) == Counter({"task-revoked": 1})


def deliver_again(tasks: Tasks, ids: list[str]) -> None:
    """Publish the hints of runs that are over twice more."""
    publisher = Publisher(tasks.app, schema=tasks.durable.settings.schema)
    for run in ids:
        for _ in range(2):
            hint = message.hint(
                tasks.app,
                key=uuid4(),
                run_id=run,
                nesting=0,
                task=tasks.durable.get(run).task,
                queue=QUEUE,
                priority=None,
                gen=0,
                envelope=None,
            )
            publisher.publish([hint])
    publisher.close()


@only_redis
def test_the_log_says_what_became_of_a_delivery(
    tasks: Tasks, start_worker: Callable[..., Worker], wait_for_state: Callable[..., None], pool: Pool
) -> None:
    worker = start_worker(pool=pool)

    result = tasks.sleeper.delay(seconds=300)

    wait_for_state(result.id, RunState.SLEEPING)
    worker.wait_for(f"Task tests.sleeper[{result.id}] parked: sleeping, sleep nap for 0:05:00")
    assert "ignored" not in worker.text()
