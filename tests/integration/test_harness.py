"""The harness itself: servers, brokers, processes, and that nothing of them is left behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from celery import Celery, exceptions
from kombu.exceptions import OperationalError

from tests.support import apps, guard, plain, rabbit, skips
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.clock import Clock
from tests.support.gates import Gates
from tests.support.ports import free_port
from tests.support.postgres import Postgres, PrivatePostgres
from tests.support.queues import QUEUE
from tests.support.wait import until, wait_for_row
from tests.support.workers import Pool, Serve, Worker
from umt_durable.database import Connection

PLAIN = "tests.support.plain:app"


@pytest.fixture
def app(broker: Broker, redis_url: str) -> Celery:
    return plain.build(broker.url, redis_url)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_waiting_in_vain_names_what_was_awaited_and_shows_the_diagnosis() -> None:
    with pytest.raises(AssertionError, match=r"for the moon; the last value was 0\nit is new"):
        until(lambda: 0, timeout=0.01, what="the moon", diagnose=lambda: "it is new")


def test_an_error_in_the_condition_is_not_waited_out() -> None:
    with pytest.raises(ZeroDivisionError):
        until(lambda: 1 / 0, what="nothing")


# -- Postgres ---------------------------------------------------------------------------------------------------------


def test_h1_each_test_has_a_migrated_schema_of_its_own(conn: Connection, schema: str) -> None:
    runs = conn.execute(f"SELECT count(*) FROM {schema}.run".encode()).fetchone()

    assert runs == (0,)


@pytest.mark.private_postgres_only
def test_integration_tests_also_run_on_an_older_server(older_postgres: Postgres) -> None:
    with psycopg.connect(older_postgres.url) as conn:
        assert conn.info.server_version >= 150000


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restarted_server_has_its_rows_and_port(private_postgres: PrivatePostgres, schema: str, mode: str) -> None:
    url = private_postgres.url
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(f"INSERT INTO {schema}.setting VALUES ('kept', '1')".encode())

        private_postgres.restart("immediate" if mode == "immediate" else "fast")

        with pytest.raises(psycopg.OperationalError):
            conn.execute("SELECT 1")
    assert private_postgres.url == url
    with psycopg.connect(url) as again:
        assert again.execute(f"SELECT value FROM {schema}.setting WHERE name = 'kept'".encode()).fetchone() == (1,)


def test_the_clock_of_a_schema_moves_for_every_connection(conn: Connection, schema: str, clock: Clock) -> None:
    before = clock.now()

    clock.advance(seconds=31)
    clock.advance(seconds=3600)

    assert 3631 <= (clock.now() - before).total_seconds() < 3640


def test_a_row_is_waited_for(conn: Connection, schema: str) -> None:
    query = f"SELECT name FROM {schema}.setting WHERE name = %s"

    assert wait_for_row(conn, query, ["min_writer"]) == ("min_writer",)
    with pytest.raises(AssertionError, match="no such name"):
        wait_for_row(conn, query, ["no such name"], timeout=0.01)


# -- brokers ----------------------------------------------------------------------------------------------------------


def test_a_broker_counts_what_waits_and_loses_everything_when_wiped(broker: Broker, app: Celery) -> None:
    before = broker.depth(QUEUE)
    for number in range(3):
        app.send_task("plain.add", (number, 1), priority=number)

    until(lambda: broker.depth(QUEUE) == 3, what="the three messages")
    broker.wipe()

    assert (before, broker.depth(QUEUE), broker.held(QUEUE)) == (0, 0, 0)


def test_a_stopped_broker_refuses_and_keeps_its_messages(broker: Broker, app: Celery) -> None:
    app.send_task("plain.add", (1, 1))
    url = broker.url

    broker.stop()
    connection = app.connection_for_write()
    with pytest.raises(OperationalError):
        connection.ensure_connection(max_retries=1, interval_start=0)
    connection.release()
    broker.start()

    assert broker.url == url
    assert broker.depth(QUEUE) == 1


def test_without_any_rabbitmq_every_way_that_was_tried_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rabbit, "_SHARED_PORT", free_port())
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)

    with pytest.raises(rabbit.NoRabbitError, match=r"none answers.*rabbitmq-server is not on PATH; docker is not on"):
        rabbit.find(tmp_path)


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_h1_a_missing_service_skips_but_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)

    with pytest.raises(outcome, match="no such thing here"):
        skips.missing("no such thing here")


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.private_postgres_only
@pytest.mark.processes
def test_a_worker_is_ready_when_it_takes_tasks(
    app: Celery, pool: Pool, start_worker: Callable[..., Worker], broker: Broker
) -> None:
    start_worker(app=PLAIN, pool=pool)

    result = app.send_task("plain.add", (1, 2))

    assert result.get(timeout=20) == 3
    wait_until_empty(broker, QUEUE)


@pytest.fixture
def redis_env(worker_env_for: Callable[[Broker], dict[str, str]], redis_broker: Broker) -> dict[str, str]:
    """Return the environment of processes on Redis alone, for what does not differ between brokers."""
    return worker_env_for(redis_broker)


@pytest.fixture
def redis_app(redis_broker: Broker, redis_url: str) -> Celery:
    return plain.build(redis_broker.url, redis_url)


@pytest.fixture
def worker(redis_env: dict[str, str]) -> Iterator[Worker]:
    with Worker(app=PLAIN, env=redis_env, concurrency=2) as worker:
        yield worker


@pytest.mark.private_postgres_only
@pytest.mark.processes
def test_a_body_stops_at_a_closed_gate_and_says_where_it_is(
    redis_app: Celery, worker: Worker, gates: Gates, body_log: BodyLog
) -> None:
    gates.close("here")
    result = redis_app.send_task("plain.stop_at", ("here",))

    inside = gates.wait("here")
    marks = [entry.mark for entry in body_log.entries(step="stop_at")]
    gates.open("here")

    assert marks == ["begin"]
    assert inside == {result.get(timeout=20)}
    assert inside <= {child.pid for child in worker.children()}
    assert body_log.ended("") == {"stop_at"}


@pytest.mark.private_postgres_only
@pytest.mark.processes
def test_a_killed_child_is_gone_and_its_worker_goes_on(redis_app: Celery, worker: Worker, gates: Gates) -> None:
    gates.close("here")
    redis_app.send_task("plain.stop_at", ("here",))
    (inside,) = gates.wait("here")

    killed = worker.kill_child(inside)

    assert killed not in {child.pid for child in worker.children()}
    until(lambda: len(worker.children()) == 2, what="a new child")
    assert worker.alive


@pytest.mark.private_postgres_only
@pytest.mark.processes
def test_a_killed_worker_leaves_no_child(worker: Worker) -> None:
    children = worker.children()

    worker.kill9()

    assert len(children) == 2
    assert not any(guard.lives(child) for child in children)
    assert worker.process.returncode == -signal.SIGKILL


@pytest.mark.private_postgres_only
@pytest.mark.processes
def test_a_frozen_worker_goes_on_where_it_stopped(redis_app: Celery, worker: Worker) -> None:
    worker.stop()
    result = redis_app.send_task("plain.add", (1, 2))
    with pytest.raises(exceptions.TimeoutError):
        result.get(timeout=0.3)

    worker.cont()

    assert result.get(timeout=20) == 3


@pytest.mark.private_postgres_only
@pytest.mark.processes
def test_a_worker_shuts_down_when_asked_and_starts_again(redis_app: Celery, worker: Worker) -> None:
    first = worker.pid

    worker.restart()

    assert worker.pid != first
    assert redis_app.send_task("plain.add", (2, 2)).get(timeout=20) == 4


@pytest.mark.private_postgres_only
@pytest.mark.processes
def test_a_process_that_cannot_start_shows_its_log(redis_env: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match=r"ended with status [0-9]+ before it was ready(.|\n)*no_such_module"):
        Worker(app="no_such_module:app", env=redis_env).start()


@pytest.mark.private_postgres_only
@pytest.mark.processes
@pytest.mark.parametrize("role", ["relay", "maintenance", "all"])
def test_a_service_is_ready_when_it_says_so_and_ends_when_asked(redis_env: dict[str, str], role: str) -> None:
    with Serve(role, env=redis_env) as service:
        service.term()

        assert service.wait() == 0


@pytest.mark.private_postgres_only
@pytest.mark.processes
def test_bodies_of_a_run_are_counted_over_processes(redis_env: dict[str, str], body_log: BodyLog, gates: Gates) -> None:
    tasks = apps.build(redis_env)
    gates.close("third")
    with Worker(env=redis_env, pool="prefork", concurrency=1) as worker:
        run = tasks.ten_steps.delay(gate_step=3, gate="third")
        (inside,) = gates.wait("third")
        worker.kill_child(inside)
        gates.open("third")
        until(lambda: body_log.ended(run.id) >= {"step-10"}, timeout=30, what="the last step", diagnose=body_log.text)

    tasks.durable.stop()
    tasks.app.close()
    counts = body_log.counts(run.id)
    fences = [entry.fence for entry in body_log.entries(run.id, "step-3", "begin")]
    assert (counts["step-2"], counts["step-3"], counts["step-4"]) == (1, 2, 1)
    assert fences[0] < fences[1]
    assert body_log.pids(run.id)[0] == inside


# -- what is left behind ----------------------------------------------------------------------------------------------


def test_processes_of_a_killed_test_process_are_killed(tmp_path: Path) -> None:
    script = tmp_path / "ward.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.support import guard\n"
        "env = guard.clean_environment()\n"
        "argv = ['/bin/sh', '-c', 'sleep 600 & echo $! $$; wait']\n"
        "guard.spawn(argv, Path(sys.argv[1]), env)\n"
        "signal.pause()\n"
    )
    log = tmp_path / "log"
    ward = subprocess.Popen([sys.executable, str(script), str(log)], env=guard.clean_environment(), cwd=guard.ROOT)
    until(lambda: log.exists() and log.read_text().endswith("\n"), what="the grandchildren")
    family = [psutil.Process(int(pid)) for pid in log.read_text().split()]

    ward.kill()
    ward.wait()

    until(lambda: not any(guard.lives(one) for one in family), what="the grandchildren to be killed")
    assert len(family) == 2
