"""S14: Postgres restarts, orderly and at once, under running and sleeping runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.apps import LEDGER, Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.clock import Clock
from tests.support.gates import Gates
from tests.support.postgres import PrivatePostgres
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Database
from umt_durable.states import RunState

pytestmark = [pytest.mark.processes, pytest.mark.private_postgres_only]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_s14_i1_all_runs_succeed_through_a_restart_of_postgres(
    private_postgres: PrivatePostgres,
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    worker_env: dict[str, str],
    broker: Broker,
    database: Database,
    schema: str,
    body_log: BodyLog,
    gates: Gates,
    mode: str,
) -> None:
    table = f'"{schema}".ledger'
    with database.connection() as conn:
        conn.execute(f"CREATE TABLE {table} (step text, value int)".encode())
        Clock(conn, schema)
    worker_env[LEDGER] = table
    gates.close("inside")
    start_worker(pool="threads", concurrency=20)
    sleeping = [tasks.sleeper.delay(seconds=30).id for _ in range(20)]
    wait_for_state(sleeping, RunState.SLEEPING)
    running = [tasks.one_step.delay(number, gate="inside").id for number in range(10)]
    writing = [tasks.booking.delay(number, gate="inside").id for number in range(10)]
    until(
        lambda: (body_log.count(step="only"), body_log.count(step="book")) == (10, 10),
        timeout=60,
        what="20 bodies to be inside, half of them with a transaction open",
    )

    private_postgres.restart("fast" if mode == "fast" else "immediate")
    gates.open("inside")
    database.do(lambda conn: Clock(conn, schema).advance(seconds=31))
    wait_for_state([*running, *writing, *sleeping], RunState.SUCCEEDED, timeout=90)

    with database.connection() as conn:
        rows = conn.execute(f"SELECT value, count(*) FROM {table} GROUP BY value ORDER BY value".encode()).fetchall()
    assert rows == [(number, 1) for number in range(10)]
    assert [body_log.counts(run_id) for run_id in sleeping] == [{"before": 1, "after": 1}] * 20
