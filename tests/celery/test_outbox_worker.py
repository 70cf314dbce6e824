"""The outbox with real workers and brokers: events, ordinary tasks while the broker is away, dead rows, kills."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from celery import chord, group

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.clock import Clock
from tests.support.guard import clean_environment
from tests.support.wait import until
from tests.support.workers import Serve, Worker
from umt_durable.bridge import sending
from umt_durable.database import Connection
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.settings import HOLD_SECONDS, Settings
from umt_durable.states import OutboxStatus, RunState
from umt_durable.store import outbox

pytestmark = pytest.mark.processes

APP = "tests.celery.outbox_app"
CLI = (sys.executable, "-c", "from umt_durable.bridge.cli import main; main()", "-A", APP)


@pytest.fixture
def orders(conn: Connection, schema: str) -> str:
    """Return the name of the application's own table."""
    name = f'"{schema}".orders'
    conn.execute(f"CREATE TABLE {name} (number int)".encode())
    return name


def test_c5_i2_an_event_emitted_with_the_users_row_runs_its_task_once(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    settings: Settings,
    orders: str,
    body_log: BodyLog,
    conn: Connection,
) -> None:
    start_worker(app=APP, name="left")
    start_worker(app=APP, name="right")
    emitted = []
    for number in range(10):
        with psycopg.connect(str(settings.database_url)) as own:
            own.execute(f"INSERT INTO {orders} VALUES (%s)".encode(), [number])
            event = tasks.durable.outbox.emit("tests.valued", number, conn=own)
            if number % 2:
                own.rollback()
            else:
                emitted.append(event)

    runs = [sending.derive(event) for event in emitted]
    until(lambda: all(status(tasks, event) is OutboxStatus.DISPATCHED for event in emitted), what="the events to leave")
    wait_for_state(runs, RunState.SUCCEEDED)

    assert [body_log.count(run) for run in runs] == [1] * 5
    assert body_log.count(step="only") == 5
    assert conn.execute(f"SELECT count(*) FROM {orders}".encode()).fetchone() == (5,)


def test_c6_ordinary_tasks_sent_while_the_broker_is_stopped_arrive_once(
    tasks: Tasks, start_worker: Callable[..., Worker], broker: Broker, body_log: BodyLog, conn: Connection
) -> None:
    start_worker(app=APP, pool="threads")
    send = tasks.durable.outbox.send
    broker.stop()
    send(tasks.note.si(step="alone"))
    both = send(group(tasks.add.s(1, 2), tasks.add.s(3, 4)))
    total = send(chord([tasks.add.s(1, 2), tasks.add.s(3, 4)], tasks.total.s()))
    tasks.durable.outbox.emit("tests.noted", "hello")
    assert body_log.count() == 0

    broker.start()

    until(lambda: outbox.status(conn)[0] == 0, timeout=60, what="the outbox to be empty")
    assert both.get(timeout=60) == [3, 7]
    assert total.get(timeout=60) == 10
    until(lambda: body_log.count(step="note") == 1, timeout=30, what="the event's task to be called")
    until(lambda: body_log.count(step="alone") == 1, timeout=30, what="the task that was sent to be called")
    assert body_log.count() == 2
    assert outbox.status(conn)[1] == 0


def test_c5_c6_an_event_that_nobody_routes_is_dead_for_the_command_line_until_a_relay_has_its_route(
    tasks: Tasks,
    serve: Callable[..., Serve],
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    worker_env: dict[str, str],
    conn: Connection,
) -> None:
    older = serve("relay")
    lost = tasks.durable.outbox.emit("tests.unknown", 7)
    early = tasks.durable.outbox.emit("tests.valued", 7)
    until(lambda: outbox.status(conn)[1] == 2, what="both events to be dead")

    listed = command(worker_env, "outbox", "list")
    assert [line.split("\t")[:2] for line in listed.splitlines()] == [
        [str(early), "tests.valued"],
        [str(lost), "tests.unknown"],
    ]
    assert "durable.outbox.route('tests.unknown', task)" in listed
    assert "outbox\tdead\t2" in command(worker_env, "status")

    start_worker(app=APP)
    late = tasks.durable.outbox.emit("tests.valued", 8)  # the older relay looks as well
    until(lambda: status(tasks, early) is OutboxStatus.DISPATCHED, what="the event to be dispatched by itself")
    until(lambda: status(tasks, late) is OutboxStatus.DISPATCHED, what="the later event to be dispatched")
    wait_for_state([sending.derive(early), sending.derive(late)], RunState.SUCCEEDED)
    assert command(worker_env, "outbox", "replay", "--type", "tests.unknown") == "1 put back\n"
    until(lambda: outbox.status(conn)[1] == 1, what="it to be dead again")
    older.term()
    older.wait()


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("point", ["event.commit.b", "event.commit.a"])
def test_c7_a_worker_that_is_killed_around_the_commit_leaves_one_run(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    worker_env: dict[str, str],
    body_log: BodyLog,
    clock: Clock,
    tmp_path: Path,
    point: str,
) -> None:
    once = tmp_path / "once"
    worker = start_worker(app=APP, env={**worker_env, ENVIRONMENT: f"{point}=kill;file:{once}"})
    event = tasks.durable.outbox.emit("tests.valued", 7)
    until(once.exists, timeout=30, what=f"the worker to die at {point}")
    until(lambda: not worker.alive, timeout=20, what="the worker to be dead")

    clock.advance(seconds=HOLD_SECONDS + 1)
    start_worker(app=APP, name="heir")

    run = sending.derive(event)
    until(lambda: status(tasks, event) is OutboxStatus.DISPATCHED, what="the event to be dispatched")
    wait_for_state(run, RunState.SUCCEEDED)
    assert body_log.count(run) == body_log.count() == 1
    assert len(tasks.durable.list(task="tests.one_step")) == 1


def status(tasks: Tasks, event: object) -> OutboxStatus:
    """Return where an event stands."""
    return tasks.durable.outbox.get(str(event)).status


def command(env: dict[str, str], *arguments: str) -> str:
    """Return what a command prints, piped."""
    done = subprocess.run(
        [*CLI, *arguments], env=clean_environment(env), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout
