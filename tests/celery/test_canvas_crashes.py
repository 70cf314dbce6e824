"""Canvas when the finisher dies at each place between its commit and Celery's own work, and when hints come twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from celery import chain, chord
from celery.exceptions import ChordError

from tests.support import canvas_apps
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.canvas_apps import Canvas
from tests.support.clock import Clock
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.bridge import message
from umt_durable.bridge.publisher import Publisher
from umt_durable.database import Connection
from umt_durable.errors import DefinitionError
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.states import RunState
from umt_durable.store import outbox

pytestmark = pytest.mark.processes

APP = "tests.support.canvas_apps:app"
POINTS = ("finish.commit.a", "finish.callback.b", "finish.callback.a", "finish.result.b", "finish.result.a")


@pytest.fixture
def canvas(worker_env: dict[str, str]) -> Iterator[Canvas]:
    """Return the tasks, for calling."""
    canvas = canvas_apps.build(worker_env)
    yield canvas
    canvas.durable.stop()
    canvas.app.close()


def test_i13_finishers_that_die_lose_no_follower_and_double_none(
    canvas: Canvas,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    body_log: BodyLog,
    conn: Connection,
    tmp_path: Path,
) -> None:
    once = {point: tmp_path / point for point in POINTS}
    worker_env["DURABLE_HOLD_SECONDS"] = "2"
    worker_env[ENVIRONMENT] = ",".join(f"{point}=kill;nth=2;file:{path}" for point, path in once.items())
    start_worker(app=APP, pool="prefork", concurrency=2)
    hop = canvas.hop

    chained = [chain(hop.s(1, naps=1), hop.s(label="second"), hop.s(naps=1, label="third"))() for _ in range(4)]
    chords = [chord([hop.s(1), hop.s(2, naps=1)], canvas.hop_total.s())() for _ in range(4)]
    swapped = [chain(canvas.swap.s(1, kind), hop.s(label="after"))() for kind in ("durable", "ordinary", "chain")]
    linked = [hop.apply_async((n,), link=hop.s(label="link"), task_id=f"linked-{n}") for n in range(4)]
    failed = [canvas.fail.apply_async((n,), link_error=canvas.durable_errback.s()) for n in range(3)]

    assert [one.get(timeout=120) for one in chained] == [4] * 4
    assert [one.get(timeout=120) for one in chords] == [5] * 4
    assert [one.get(timeout=120) for one in swapped] == [12] * 3
    assert [one.get(timeout=120) for one in linked] == [n + 1 for n in range(4)]
    for result in failed:
        with pytest.raises(canvas_apps.CanvasError):
            result.get(timeout=120)
    until(lambda: outbox.status(conn)[0] == 0, timeout=90, what="the outbox to be empty")
    until(
        lambda: all(run.state.is_terminal for run in canvas.durable.list(limit=1000)),
        timeout=60,
        what="all runs to end",
    )
    assert all(path.exists() for path in once.values()), "a fail point was not reached"
    for step, times in (("second", 4), ("third", 4), ("after", 3), ("link", 4), ("total", 4)):
        assert body_log.count(step=step) == times, step
    assert [body_log.count(step=f"errback-{one.id}") for one in failed] == [1] * 3


@pytest.mark.long
@pytest.mark.parametrize("kind", ["threads", "gevent", "solo"])
def test_i13_workers_that_die_whole_while_finishing_lose_no_follower_and_double_none(
    canvas: Canvas,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    body_log: BodyLog,
    conn: Connection,
    tmp_path: Path,
    kind: str,
) -> None:
    once = {point: tmp_path / point for point in POINTS}
    worker_env["DURABLE_HOLD_SECONDS"] = "2"
    worker_env[ENVIRONMENT] = ",".join(f"{point}=kill;nth=2;file:{path}" for point, path in once.items())
    worker = start_worker(app=APP, pool=kind, concurrency=1 if kind == "solo" else 4)
    hop = canvas.hop

    # Durable ones alone: an ordinary task dies with its worker, as everywhere in Celery.
    chained = [chain(hop.s(1, naps=1), hop.s(label="second"), hop.s(naps=1, label="third"))() for _ in range(3)]
    chords = [chord([hop.s(1), hop.s(2, naps=1)], canvas.hop_total.s())() for _ in range(3)]
    swapped = [chain(canvas.swap.s(1, "durable"), hop.s(label="after"))() for _ in range(3)]
    linked = [hop.apply_async((n,), link=hop.s(label="link")) for n in range(3)]
    failed = [canvas.fail.apply_async((n,), link_error=canvas.durable_errback.s()) for n in range(3)]

    def supervise() -> bool:
        if not worker.alive:
            worker.start()
        ended = not canvas.durable.list(states=[state for state in RunState if not state.is_terminal], limit=1)
        return ended and outbox.status(conn)[0] == 0 and all(path.exists() for path in once.values())

    until(supervise, timeout=180, what="all runs to end, over the deaths of their workers")
    assert [one.get(timeout=60) for one in chained] == [4] * 3
    assert [one.get(timeout=60) for one in chords] == [5] * 3
    assert [one.get(timeout=60) for one in swapped] == [12] * 3
    assert [one.get(timeout=60) for one in linked] == [n + 1 for n in range(3)]
    # What was in flight beside a finisher in its process is entered anew, by the same run.
    for step, times in (("second", 3), ("third", 3), ("after", 3), ("link", 3), ("total", 3)):
        assert len({entry.run for entry in body_log.entries(step=step)}) == times, step
    assert [len({entry.run for entry in body_log.entries(step=f"errback-{one.id}")}) for one in failed] == [1] * 3


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_i13_a_chord_whose_body_was_claimed_by_a_process_that_died_goes_on(
    canvas: Canvas,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    broker: Broker,
    conn: Connection,
    tmp_path: Path,
) -> None:
    worker_env["DURABLE_HOLD_SECONDS"] = "2"
    worker_env[ENVIRONMENT] = f"finish.result.b=stop;nth=2;file:{tmp_path / 'once'}"
    worker = start_worker(app=APP, pool="solo", concurrency=1)
    waiting = chord([canvas.hop.s(1), canvas.hop.s(2)], canvas.hop_total.s())()
    until((tmp_path / "once").exists, timeout=30, what="the second member's finisher to come to its report")
    # As if it had been killed between its claim and the publishing of the body, which no fail point of ours can hit.
    backend = canvas.app.backend
    backend.client.set(backend.get_key_for_group(waiting.parent.id, ".c"), "a dead process", ex=6)
    worker.kill9()
    del worker_env[ENVIRONMENT]
    start_worker(app=APP, pool="solo", concurrency=1, name="heir")

    assert waiting.get(timeout=60) == 5
    until(lambda: outbox.status(conn)[0] == 0, timeout=60, what="the outbox to be empty")


def test_an_errback_sees_the_failure_it_is_called_for_whoever_publishes_it(
    canvas: Canvas,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    body_log: BodyLog,
    tmp_path: Path,
) -> None:
    worker_env["DURABLE_HOLD_SECONDS"] = "2"
    worker_env[ENVIRONMENT] = f"finish.result.b=kill;file:{tmp_path / 'once'}"
    start_worker(app=APP, pool="prefork", concurrency=1)

    left = canvas.fail.apply_async((1,), link_error=canvas.seeing_errback.s())
    until((tmp_path / "once").exists, timeout=30, what="the finisher to die before it stored the failure")
    whole = canvas.fail.apply_async((2,), link_error=canvas.seeing_errback.s())

    for failed in (left, whole):
        with pytest.raises(canvas_apps.CanvasError):
            failed.get(timeout=90)
        until(
            lambda failed=failed: body_log.count(step=f"saw-FAILURE-{failed.id}") == 1,  # type: ignore[misc]
            timeout=60,
            what="the errback to see the failure",
            diagnose=body_log.text,
        )


def test_duplicate_hints_of_finished_runs_call_nothing_again(
    canvas: Canvas, start_worker: Callable[..., Worker], broker: Broker, body_log: BodyLog, conn: Connection
) -> None:
    start_worker(app=APP, pool="prefork", concurrency=2)
    linked = canvas.hop.apply_async((1,), link=[canvas.mark.s(name="once"), canvas.hop.s(label="link")])
    chained = chain(canvas.swap.s(1, "durable"), canvas.hop.s(label="after"))()
    assert (linked.get(timeout=60), chained.get(timeout=60)) == (2, 12)
    until(lambda: body_log.count(step="link") == 1, timeout=30, what="the link")
    until(lambda: outbox.status(conn)[0] == 0, timeout=60, what="the outbox to be empty")

    publisher = Publisher(canvas.app, schema=canvas.durable.settings.schema)
    for run_id, nesting, task in (
        (linked.id, 0, "canvas.hop"),
        (chained.parent.id, 0, "canvas.swap"),
        (chained.parent.id, 1, "canvas.hop"),
    ):
        for _ in range(3):
            hint = message.hint(
                canvas.app,
                key=uuid4(),
                run_id=run_id,
                nesting=nesting,
                task=task,
                queue=QUEUE,
                priority=None,
                gen=0,
                envelope=None,
            )
            publisher.publish([hint])
    assert canvas.hop.delay(5).get(timeout=60) == 6
    wait_until_empty(broker, QUEUE)
    publisher.close()

    assert [body_log.count(step=step) for step in ("mark-once", "link", "after", "swap-durable")] == [1, 1, 1, 1]


def test_a_member_that_outsleeps_its_chord_is_refused_or_ends_it_visibly(
    canvas: Canvas,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    wait_for_chord: Callable[[str], None],
    clock: Clock,
) -> None:
    worker_env["UMT_TEST_CHORD_EXPIRES"] = "5"
    canvas.app.conf.result_chord_expires = 5
    start_worker(app=APP, pool="threads", concurrency=2)
    waiter = canvas.hop.s(1, naps=1)

    refused = chord([canvas.long_nap.s(1, 3600), canvas.hop.s(1)], canvas.total.s())()
    alone = canvas.long_nap.delay(1, 3600)
    held = canvas.held.s()
    forgotten = chord([held, waiter], canvas.total.s())()

    with pytest.raises((ChordError, DefinitionError), match="result_chord_expires"):  # the body's, or its parent's
        refused.get(timeout=60)
    with pytest.raises(DefinitionError, match="result_chord_expires"):
        refused.parent.results[0].get(timeout=60)
    until(
        lambda: canvas.durable.get(alone.id).state is RunState.SLEEPING, timeout=30, what="a lone sleeper to be parked"
    )
    wait_for_chord(forgotten.parent.id)
    clock.advance(seconds=60)
    canvas.durable.signal(forgotten.parent.results[0].id, "go", 1)
    assert refused.state == "FAILURE"
    with pytest.raises(ChordError, match="result_chord_expires"):
        forgotten.get(timeout=20)


@pytest.fixture
def wait_for_chord(canvas: Canvas) -> Callable[[str], None]:
    """Return a function that waits until the result backend has forgotten a chord of which one part is in."""

    def wait(group_id: str) -> None:
        backend = canvas.app.backend
        size = backend.get_key_for_group(group_id, ".s")
        until(lambda: backend.get(size) is None, timeout=30, what="the backend to forget the chord")

    return wait
