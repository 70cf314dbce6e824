"""`umt-durable doctor` on a real Postgres and a real broker: each finding, with its fix and the exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import amqp
import pytest
from celery import chord
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.integration import service_kit as kit
from tests.integration.cli_kit import Cli, cli_for, set_revision
from tests.support.brokers import RabbitBroker, RedisBroker
from tests.support.clock import Clock
from tests.support.queues import QUEUE
from tests.support.rabbit import connect
from tests.support.sealing import BOTH
from umt_durable.database import Connection, Database
from umt_durable.payloads import Vault
from umt_durable.settings import Settings
from umt_durable.store import diagnosis, workers

# The private server of the tests does not wait for its disk, which doctor rightly finds.
OF_THE_TESTS = {"durability"}


@pytest.fixture
def cli(settings: Settings, redis_broker: RedisBroker, redis_url: str) -> Iterator[Cli]:
    with cli_for(settings, broker=redis_broker.url, backend=redis_url) as cli:
        cli.tasks.app.conf.result_chord_expires = 0
        yield cli


def findings(cli: Cli, level: str) -> dict[str, dict[str, Any]]:
    """Return what doctor finds at a level, by check."""
    result = cli("doctor", "--json", status=None)
    document = json.loads(result.stdout)
    assert result.exit_code == (1 if document["level"] == "fail" else 0)
    found = {each["check"]: each for each in document["findings"] if each["level"] == level}
    assert level == "ok" or all(each["fix"] for each in found.values())
    return {check: each for check, each in found.items() if level == "ok" or check not in OF_THE_TESTS}


@pytest.fixture
def worker(conn: Connection, database: Database, cli: Cli) -> None:
    """Have a live lease that declares every task of the app."""
    cli.tasks.app.finalize()
    declared = cli.tasks.durable.tasks.declared()
    node = cli.tasks.durable.node
    workers.register(conn, id=node, node=node, pid=1, host="here", lease_seconds=60, versions=declared)


@pytest.mark.usefixtures("worker")
def test_a_sound_deployment_has_nothing_that_fails(cli: Cli) -> None:
    assert findings(cli, "fail") == {}
    assert {"database", "schema", "clock", "timeouts", "workers", "relay", "runs", "broker", "settings", "acks"} <= set(
        findings(cli, "ok")
    )


def test_cells_of_a_finding_are_divided_by_tabs(cli: Cli) -> None:
    lines = [line.split("\t") for line in cli("doctor", status=None).stdout.splitlines()]

    assert ["ok", "schema"] in [line[:2] for line in lines]
    assert {len(line) for line in lines} == {4}


# -- what fails before anything else can be asked ---------------------------------------------------------------------


@pytest.mark.private_postgres_only
def test_an_unreachable_database_and_broker_fail_without_their_passwords() -> None:
    with cli_for(Settings(database_url="postgresql://shop:hunter2@127.0.0.1:1/shop")) as cli:
        found = findings(cli, "fail")

    assert set(found) == {"database", "broker"}
    assert "hunter2" not in json.dumps(found)
    assert "DURABLE_DATABASE_URL" in found["database"]["fix"]


def test_a_missing_schema_fails_with_the_command_to_run(cli: Cli, conn: Connection, schema: str) -> None:
    conn.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))

    assert findings(cli, "fail")["schema"]["fix"] == f"run `umt-durable -A {cli.module} migrate`"
    assert "database" in findings(cli, "ok")


@pytest.mark.parametrize(
    ("revision", "fix"), [("0000", "run `umt-durable -A {} migrate`"), ("9999", "install the version of umt-durable")]
)
def test_a_schema_of_another_version_fails_with_the_fix(cli: Cli, settings: Settings, revision: str, fix: str) -> None:
    set_revision(str(settings.database_url), settings.schema, revision)

    assert findings(cli, "fail")["schema"]["fix"].startswith(fix.format(cli.module))


@pytest.mark.private_postgres_only
def test_a_configuration_that_cannot_be_loaded_is_a_finding(settings: Settings) -> None:
    with cli_for(replace(settings)) as cli:
        del cli.tasks.app.umt_durable
        found = findings(cli, "fail")

    assert "has no Durable" in found["configuration"]["what"]


@pytest.mark.private_postgres_only
def test_a_broker_that_reaches_no_other_process_fails(settings: Settings) -> None:
    with cli_for(settings, broker="memory://") as cli:
        assert "use RabbitMQ, Redis or Valkey" in findings(cli, "fail")["broker"]["fix"]


# -- what stands still ------------------------------------------------------------------------------------------------


@pytest.mark.private_postgres_only
def test_ready_runs_without_any_worker_fail(cli: Cli) -> None:
    cli.tasks.one_step.enqueue(1)

    assert "1 run is ready" in findings(cli, "fail")["workers"]["what"]


@pytest.mark.private_postgres_only
@pytest.mark.usefixtures("worker")
def test_a_blocked_run_is_told_with_the_version_that_no_worker_has(cli: Cli, conn: Connection, schema: str) -> None:
    run = cli.tasks.one_step.enqueue(1).id
    conn.execute(f"UPDATE {schema}.run SET version = 7".encode())

    found = findings(cli, "warn")["blocked"]

    assert "tests.one_step@7" in found["fix"]
    assert run in found["what"]


@pytest.mark.private_postgres_only
@pytest.mark.usefixtures("worker")
def test_a_quarantined_run_is_told_with_its_reason(cli: Cli, conn: Connection, schema: str) -> None:
    run = cli.tasks.one_step.enqueue(1).id
    conn.execute(f"UPDATE {schema}.run SET state = 'quarantined', reason = 'crash_budget'".encode())

    found = findings(cli, "warn")["quarantine"]

    assert "crash_budget" in found["what"]
    assert f"`umt-durable -A {cli.module} show {run}`" in found["fix"]


@pytest.mark.private_postgres_only
@pytest.mark.usefixtures("worker")
def test_a_version_that_no_live_worker_has_is_told(cli: Cli, conn: Connection, schema: str) -> None:
    conn.execute(f"UPDATE {schema}.worker SET versions = %s".encode(), [["tests.one_step", "tests.one_step@1"]])

    assert "this app declares" in findings(cli, "warn")["versions"]["what"]


@pytest.mark.private_postgres_only
@pytest.mark.usefixtures("worker")
def test_dead_messages_fail_with_their_reason_and_how_to_put_them_back(cli: Cli, conn: Connection, schema: str) -> None:
    cli.tasks.one_step.enqueue(1)
    conn.execute(f"UPDATE {schema}.outbox_event SET status = 'dead', reason = 'unroutable'".encode())

    found = findings(cli, "fail")["outbox"]

    assert "unroutable" in found["what"]
    assert "outbox replay --type run" in found["fix"]


@pytest.mark.private_postgres_only
@pytest.mark.usefixtures("worker")
def test_messages_that_no_relay_takes_fail(cli: Cli, conn: Connection, schema: str) -> None:
    cli.tasks.one_step.enqueue(1)
    conn.execute(f"UPDATE {schema}.outbox_event SET next_attempt_at = now() - interval '5 minutes'".encode())

    assert "no relay takes them" in findings(cli, "fail")["relay"]["what"]


@pytest.mark.private_postgres_only
def test_a_sleep_longer_than_results_are_kept_is_measured_on_the_runs_there_are(
    cli: Cli, conn: Connection, schema: str
) -> None:
    cli.tasks.app.conf.result_expires = 3600
    run = cli.tasks.one_step.enqueue(1).id
    conn.execute(
        f"UPDATE {schema}.run SET state = 'sleeping', wake_at = now() + interval '9 days' WHERE id = %s".encode(), [run]
    )

    assert "9 days" in findings(cli, "fail")["result_expires"]["what"]


@pytest.mark.private_postgres_only
def test_members_of_a_chord_that_sleep_longer_than_it_is_kept_are_told(
    cli: Cli, conn: Connection, schema: str, redis_url: str
) -> None:
    cli.tasks.app.conf.result_chord_expires = 3600
    alone = cli.tasks.one_step.delay(1).id
    chord([cli.tasks.one_step.s(2), cli.tasks.one_step.s(3) | cli.tasks.no_step.s()])(cli.tasks.total.s())
    asleep = f"UPDATE {schema}.run SET state = 'sleeping', wake_at = now() + interval '9 days'"
    conn.execute(f"{asleep} WHERE id = %s".encode(), [alone])
    assert "chords" not in findings(cli, "fail")
    conn.execute(asleep.encode())

    found = findings(cli, "fail")["chords"]

    assert (
        "result_chord_expires is 1:00:00, and 2 runs that chords wait for are parked for up to 9 days" in found["what"]
    )
    assert alone not in found["what"]
    assert "set result_chord_expires = 0" in found["fix"]


# -- priorities on RabbitMQ -------------------------------------------------------------------------------------------


@pytest.mark.rabbitmq
@pytest.mark.private_postgres_only
@pytest.mark.parametrize(
    ("declared", "real", "told", "fix"),
    [
        (False, None, "is declared without x-max-priority", "set task_queue_max_priority = 9"),
        (False, False, "is declared without x-max-priority", "delete it (rabbitmqctl delete_queue)"),
        (True, False, "of the broker has no x-max-priority", "delete it (rabbitmqctl delete_queue)"),
        (False, True, "the app declares it without", "set task_queue_max_priority, or queue_arguments"),
        (True, True, None, ""),
        (True, None, None, ""),
    ],
)
def test_a_queue_that_does_not_heed_the_priorities_of_its_runs_is_told(
    settings: Settings, rabbit_broker: RabbitBroker, declared: bool, real: bool | None, told: str | None, fix: str
) -> None:
    with connect(rabbit_broker.server.port, rabbit_broker.vhost) as connection:
        if real is not None:
            arguments = {"x-max-priority": 9} if real else {}
            connection.channel().queue_declare(QUEUE, durable=True, auto_delete=False, arguments=arguments)
    with cli_for(settings, broker=rabbit_broker.url) as cli:
        cli.tasks.app.conf.task_queue_max_priority = 9 if declared else None
        assert "priority" not in findings(cli, "warn")
        run = cli.tasks.one_step.apply_async((1,), priority=5).id

        found = findings(cli, "warn").get("priority")

        if told is None:
            assert found is None
        else:
            assert found is not None
            assert told in found["what"]
            assert fix in found["fix"]
            assert real or run in found["what"]
        if real is None:  # asking has made no queue
            assert rabbit_broker.held(QUEUE) == 0
            with connect(rabbit_broker.server.port, rabbit_broker.vhost) as connection, pytest.raises(amqp.NotFound):
                connection.channel().queue_declare(QUEUE, passive=True)


# -- the server -------------------------------------------------------------------------------------------------------


def test_a_moved_clock_of_the_schema_fails(cli: Cli, clock: Clock) -> None:
    clock.advance(seconds=3600)

    assert "moved by 3600 s" in findings(cli, "fail")["clock"]["what"]


def test_a_user_without_rights_on_the_tables_fails_and_names_them(
    settings: Settings, conn: Connection, schema: str, redis_broker: RedisBroker, redis_url: str
) -> None:
    role = f"guest_{schema}"[:60]
    conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'guest'").format(sql.Identifier(role)))
    try:
        conn.execute(sql.SQL("GRANT USAGE ON SCHEMA {0} TO {1}").format(sql.Identifier(schema), sql.Identifier(role)))
        conn.execute(
            sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA {0} TO {1}").format(
                sql.Identifier(schema), sql.Identifier(role)
            )
        )
        url = make_conninfo(str(settings.database_url), user=role, password="guest")
        with cli_for(replace(settings, database_url=url), broker=redis_broker.url, backend=redis_url) as cli:
            found = findings(cli, "fail")["rights"]
    finally:
        conn.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))

    assert "attempt" in found["what"]
    assert "grants --worker-role" in found["fix"]


@pytest.mark.private_postgres_only
def test_commits_that_are_not_flushed_fail(cli: Cli, conn: Connection) -> None:
    result = cli("doctor", "--json", status=1)

    [found] = [each for each in json.loads(result.stdout)["findings"] if "fsync" in each["what"]]
    assert found["level"] == "fail"
    assert "fsync = on" in found["fix"]


def test_questions_read_only_and_leave_no_transaction_open(cli: Cli, conn: Connection, database: Database) -> None:
    cli("doctor", status=None)

    open_ones = conn.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'umt_durable doctor'"
    ).fetchone()
    assert open_ones == (0,)


@pytest.mark.usefixtures("worker")
def test_sealed_payloads_that_this_app_cannot_open_are_told_with_their_key(
    cli: Cli, settings: Settings, conn: Connection
) -> None:
    kit.enqueue(conn)
    assert "payloads" not in findings(cli, "ok") | findings(cli, "fail")
    sealing = Database(settings, Vault(BOTH))
    with sealing.connect() as own:
        kit.enqueue(own)
        known, unknown = diagnosis.sealed(own)
    sealing.close()

    told = findings(cli, "fail")["payloads"]
    assert (known, unknown) == (["new"], [])
    assert "sealed with the key 'new'" in told["what"]
    assert "it has no payload_codec" in told["what"]
    assert "give it the payload_codec" in told["fix"]
