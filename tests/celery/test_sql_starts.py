"""A deployment of least-privileged roles with real processes: app, SQL and worker, each with its own database user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.support import apps
from tests.support.queues import QUEUE
from tests.support.roles import Roles, four_roles
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.grants import Role
from umt_durable.settings import Settings
from umt_durable.sql import quote
from umt_durable.states import RunState

pytestmark = [
    pytest.mark.processes,
    pytest.mark.parametrize(
        "broker", ["redis", pytest.param("rabbitmq", marks=[pytest.mark.rabbitmq, pytest.mark.long])], indirect=True
    ),
]


@pytest.fixture
def roles(settings: Settings) -> Iterator[Roles]:
    """Return the roles of this test, with a schema of their owner's."""
    with four_roles(settings) as roles:
        yield roles


@pytest.fixture
def env_of(roles: Roles, worker_env: dict[str, str]) -> Callable[[Role], dict[str, str]]:
    """Return a function that gives the environment of a process that logs in as a role."""

    def environment(role: Role) -> dict[str, str]:
        url = str(roles.settings(role).database_url)
        return {**worker_env, "DURABLE_DATABASE_URL": url, "DURABLE_SCHEMA": roles.admin.schema}

    return environment


@pytest.fixture
def app(env_of: Callable[[Role], dict[str, str]]) -> Iterator[apps.Tasks]:
    """Return the tasks as an application has them, whose database user may start and signal."""
    tasks = apps.build(env_of(Role.APP))
    yield tasks
    tasks.durable.stop()
    tasks.app.close()


@pytest.fixture
def worker(env_of: Callable[[Role], dict[str, str]], start_worker: Callable[..., Worker]) -> Worker:
    """Return a worker with relay and maintenance, whose database user is the worker's."""
    return start_worker(env=env_of(Role.WORKER), concurrency=2)


@pytest.fixture
def say(roles: Roles) -> Iterator[Callable[..., Any]]:
    """Return a function that calls one of the SQL functions as the application's database user, like psql."""
    with roles.connect(Role.APP) as conn:

        def call(text: str, *params: object) -> Any:
            row = conn.execute(f"SELECT {quote(roles.admin.schema)}.{text}".encode(), params).fetchone()
            assert row is not None
            return row[0]

        yield call


def state_is(tasks: apps.Tasks, run_id: str, state: RunState) -> None:
    until(lambda: tasks.durable.get(run_id).state is state, timeout=60, what=f"run {run_id} to be {state}")


def test_d7_each_process_does_its_whole_work_with_the_rights_of_its_own_role(
    app: apps.Tasks, worker: Worker, say: Callable[..., Any]
) -> None:
    by_sql = say("enqueue('tests.one_step', '{\"value\": 5}', idempotency_key => 'k')")
    waiter = say("enqueue('tests.waiter', '[\"go\"]')")
    by_delay, slept = app.one_step.delay(3), app.sleeper.delay(2.5, 4)
    chained = (app.one_step.s(1) | app.one_step.s()).apply_async()
    sent = app.durable.outbox.send(app.add.s(1, 2))
    stamped = app.sleeper.s(3600)
    stamped.stamp(customer="c1")
    endless = [app.sleeper.delay(3600), app.sleeper.delay(3600), stamped.apply_async()]
    for one in endless:
        state_is(app, one.id, RunState.SLEEPING)
    state_is(app, waiter, RunState.WAITING)
    endless[0].revoke()
    app.app.control.revoke_by_stamped_headers({"customer": "c1"})
    say("cancel(%s, 'too late')", endless[1].id)
    say("signal(%s, 'go', '{\"by\": \"ann\"}')", waiter)

    assert app.app.AsyncResult(by_sql).get(timeout=60) == 5
    assert app.app.AsyncResult(waiter).get(timeout=60) == {"by": "ann"}
    assert (by_delay.get(timeout=60), slept.get(timeout=60), sent.get(timeout=60)) == (3, 4, 3)
    assert chained.get(timeout=60) == 1
    for one in endless:
        state_is(app, one.id, RunState.CANCELLED)
    assert app.one_step.enqueue(5, idempotency_key="k").id == by_sql
    assert (app.durable.get(by_sql).version, app.durable.get(by_sql).queue) == (1, QUEUE)
    assert "permission denied" not in worker.text()
    worker.term()
    worker.wait()
    assert "permission denied" not in worker.text()


def test_d1_input_of_a_start_by_sql_that_does_not_fit_parks_it_and_stops_no_other(
    app: apps.Tasks, worker: Worker, say: Callable[..., Any]
) -> None:
    bad = say('enqueue(\'tests.one_step\', \'{"value": "many", "colour": "red"}\')')
    good = say("enqueue('tests.one_step', '[6]')")

    state_is(app, bad, RunState.QUARANTINED)

    run = app.durable.get(bad)
    failure = app.durable.client.failure(run)
    assert run.reason == "bad_input"
    assert failure is not None
    assert "value: " in failure.message
    assert "colour: is not a parameter" in failure.message
    assert app.app.AsyncResult(good).get(timeout=60) == 6


def test_i2_a_trigger_in_the_users_transaction_starts_what_a_worker_executes(
    roles: Roles, app: apps.Tasks, worker: Worker
) -> None:
    schema, user = quote(roles.admin.schema), roles.names[Role.APP]
    with psycopg.connect(str(roles.admin.database_url), autocommit=True) as admin:
        admin.execute(
            f"""CREATE TABLE {schema}.orders (id int PRIMARY KEY, run text);
            GRANT INSERT ON {schema}.orders TO "{user}";
            CREATE FUNCTION {schema}.begin_order() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                NEW.run := {schema}.enqueue('tests.one_step', jsonb_build_object('value', NEW.id),
                                            idempotency_key => 'order:' || NEW.id, ref => 'order:' || NEW.id);
                RETURN NEW;
            END $$;
            CREATE TRIGGER begin_order BEFORE INSERT ON {schema}.orders FOR EACH ROW
                EXECUTE FUNCTION {schema}.begin_order();""".encode()
        )

    with roles.connect(Role.APP) as conn:
        with conn.transaction(force_rollback=True):
            conn.execute(f"INSERT INTO {schema}.orders VALUES (1)".encode())
        conn.execute(f"INSERT INTO {schema}.orders VALUES (2)".encode())

    [run] = app.durable.list()
    assert run.ref == "order:2"
    assert app.app.AsyncResult(run.id).get(timeout=60) == 2
