"""`umt-durable serve`: each role in a process of its own, what it refuses, and how it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from kombu import pools
from psycopg import sql

from tests.support import apps
from tests.support.brokers import Broker, RedisBroker
from tests.support.queues import QUEUE
from tests.support.wait import until, wait_for_value
from tests.support.workers import Serve, Worker
from umt_durable.database import Connection
from umt_durable.migrate import head
from umt_durable.settings import Settings
from umt_durable.store import workers

pytestmark = pytest.mark.processes

Start = Callable[..., Serve]


@pytest.fixture
def broker(redis_broker: RedisBroker) -> Broker:
    """Return one broker: the relay's work on each is tested elsewhere."""
    return redis_broker


@pytest.fixture
def tasks(worker_env: dict[str, str]) -> Iterator[apps.Tasks]:
    built = apps.build(worker_env)
    yield built
    built.durable.stop()
    built.app.backend.result_consumer.stop()
    built.app.backend.client.connection_pool.disconnect()
    built.app.pool.force_close_all()
    pools.reset()  # type: ignore[no-untyped-call]  # kombu's pools are the process's own, and would stay closed
    built.app.close()


@pytest.fixture
def staffed(conn: Connection, tasks: apps.Tasks) -> None:
    """Have a live lease that declares every task: a relay publishes no hint that nobody could take."""
    tasks.app.finalize()
    node = tasks.durable.node
    versions = tasks.durable.tasks.declared()
    workers.register(conn, id=node, node=node, pid=1, host="here", lease_seconds=3600, versions=versions)


def declared(conn: Connection, schema: str) -> set[str]:
    """Return what live processes declare."""
    query = (
        f"SELECT coalesce(array_agg(v), '{{}}') FROM {schema}.worker, unnest(versions) AS v WHERE lease_until > now()"
    )
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return set(row[0])


def ends_cleanly(process: Serve, number: int) -> None:
    """Ask a process to end, and see that it does."""
    process.process.send_signal(number)
    assert process.wait(timeout=20) == 0, process.tail()
    assert "Traceback" not in process.text()


@pytest.mark.usefixtures("staffed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_relay_publishes_what_was_enqueued_and_ends_when_asked(
    serve: Start, tasks: apps.Tasks, broker: Broker, number: int
) -> None:
    tasks.one_step.enqueue(1)

    relay = serve("relay")

    until(lambda: broker.depth(QUEUE) == 1, timeout=20, what="the hint", diagnose=relay.tail)
    ends_cleanly(relay, number)


def test_it_says_in_one_line_what_runs_where(serve: Start, settings: Settings, worker_env: dict[str, str]) -> None:
    relay = serve("relay", ready="relay ready")

    [line] = [line for line in relay.text().splitlines() if line.startswith("umt_durable:")]
    assert line.startswith("umt_durable: relay ready · journal ")
    assert settings.schema in line
    assert "redis://" in line


@pytest.mark.usefixtures("staffed")
def test_maintenance_alone_wakes_runs_and_publishes_no_hint_of_theirs(
    serve: Start, tasks: apps.Tasks, broker: Broker, conn: Connection, schema: str
) -> None:
    run = tasks.one_step.enqueue(1).id
    conn.execute(f"UPDATE {schema}.run SET state = 'sleeping', wake_at = now() - interval '1 s'".encode())
    conn.execute(f"DELETE FROM {schema}.outbox_event".encode())

    maintenance = serve("maintenance")

    wait_for_value(conn, f"SELECT state FROM {schema}.run WHERE id = %s", "ready", [run], diagnose=maintenance.tail)
    assert broker.depth(QUEUE) == 0
    relay = serve("relay")
    until(lambda: broker.depth(QUEUE) == 1, timeout=20, what="the hint", diagnose=relay.tail)
    ends_cleanly(maintenance, signal.SIGTERM)


def test_others_see_which_services_are_live(serve: Start, conn: Connection, schema: str) -> None:
    both = serve("all")

    until(lambda: declared(conn, schema) == {"@relay", "@maintenance"}, what="the lease", diagnose=both.tail)
    ends_cleanly(both, signal.SIGTERM)
    assert declared(conn, schema) == set()


def test_workers_that_leave_services_to_serve_run_tasks_to_their_end(
    serve: Start, start_worker: Callable[..., Worker], tasks: apps.Tasks, worker_env: dict[str, str]
) -> None:
    worker_env["DURABLE_WORKER_SERVICES"] = "0"
    worker = start_worker()
    result = tasks.sleeper.delay(0.5, 7)

    serve("all")

    assert result.get(timeout=40) == 7
    assert "relay and maintenance elsewhere" in worker.text()


# -- the schema -------------------------------------------------------------------------------------------------------


def drop(conn: Connection, schema: str) -> None:
    conn.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


@pytest.mark.parametrize("role", ["relay", "maintenance"])
def test_a4_roles_that_may_not_migrate_refuse_a_missing_schema_with_the_command(
    serve: Start, conn: Connection, schema: str, role: str
) -> None:
    drop(conn, schema)

    process = serve(role, ready="run `umt-durable -A tests.support.apps:app migrate`")

    assert process.wait() == 1
    assert "Traceback" not in process.text()
    found = conn.execute("SELECT count(*) FROM pg_namespace WHERE nspname = %s", [schema]).fetchone()
    assert found == (0,)


def test_a4_role_migrate_makes_the_schema_and_ends(serve: Start, conn: Connection, schema: str) -> None:
    drop(conn, schema)

    process = serve("migrate", ready=f"is at revision {head()} now")

    assert process.wait() == 0
    assert declared(conn, schema) == set()


def test_a4_role_all_migrates_and_then_serves(serve: Start, conn: Connection, schema: str) -> None:
    drop(conn, schema)

    both = serve("all")

    until(lambda: "@relay" in declared(conn, schema), what="the lease", diagnose=both.tail)
    ends_cleanly(both, signal.SIGTERM)


def test_an_unreachable_database_is_told_in_one_line_without_the_password(
    serve: Start, worker_env: dict[str, Any]
) -> None:
    worker_env["DURABLE_DATABASE_URL"] = "postgresql://shop:hunter2@127.0.0.1:1/shop"

    process = serve("relay", ready="Postgres cannot be reached")

    assert process.wait() == 1
    assert "hunter2" not in process.text()
    assert "Traceback" not in process.text()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(worker_env["DURABLE_DATABASE_URL"])
