"""`umt-durable status|runs|show|signal|cancel|retry|pause|resume`, without a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from tests.integration.cli_kit import Cli, cli_for, one_line, set_revision
from umt_durable.database import Connection
from umt_durable.engine import failures
from umt_durable.errors import DefinitionError
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import waits

DUE = datetime(2100, 1, 1, tzinfo=UTC)
UNKNOWN = "3c7a1f7e-0000-4000-8000-000000000000"
COMMANDS = (
    ["status"],
    ["runs"],
    ["show", UNKNOWN],
    ["signal", UNKNOWN, "go"],
    ["cancel", UNKNOWN],
    ["retry", UNKNOWN],
    ["pause", UNKNOWN],
    ["resume", UNKNOWN],
)


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings) as cli:
        yield cli


def set_state(conn: Connection, schema: str, run: str, state: str, **columns: object) -> None:
    """Put a run into a state that no process holds."""
    names = "".join(f", {name} = %s" for name in columns)
    conn.execute(f"UPDATE {schema}.run SET state = %s{names} WHERE id = %s".encode(), [state, *columns.values(), run])


def write_history(conn: Connection, schema: str, run: str) -> None:
    """Give a run an attempt that failed, a step that is done, one that failed, and a wait."""
    row = conn.execute(f"SELECT no FROM {schema}.run WHERE id = %s".encode(), [run]).fetchone()
    assert row is not None
    error = failures.capture(ValueError("no such card, token=tiger"), step="charge").to_bytes()
    attempt = "%s, 1, gen_random_uuid(), gen_random_uuid(), now(), now(), 'failed', 'boom'"
    conn.execute(f"INSERT INTO {schema}.attempt VALUES ({attempt})".encode(), row)
    columns = "run, key, seq, kind, state, fence, result, error"
    step = f"INSERT INTO {schema}.step ({columns}) VALUES (%s, %s, %s, 'run', %s, 1, %s, %s)"
    conn.execute(step.encode(), [row[0], "look up", 1, "done", b'{"api_key": "tiger", "city": "Ulm"}', None])
    conn.execute(step.encode(), [row[0], "charge", 2, "failed", None, error])
    wait = (
        f"INSERT INTO {schema}.wait (run, key, seq, name, address, mode) VALUES (%s, 'ok', 3, 'approved', %s, 'first')"
    )
    conn.execute(wait.encode(), [*row, waits.run_address(run, "approved")])
    set_state(conn, schema, run, "retrying", error=error, failures=1, wake_at=DUE)


# -- status -----------------------------------------------------------------------------------------------------------


def test_status_counts_runs_by_state_and_what_waits(cli: Cli, conn: Connection, schema: str) -> None:
    ready = [cli.tasks.one_step.enqueue(number).id for number in range(3)]
    set_state(conn, schema, ready[0], "quarantined", reason="crash_budget")

    lines = cli.lines("status")

    assert ["runs", "ready", "2"] in lines
    assert ["runs", "quarantined", "1"] in lines
    assert ["runs", "blocked", "2"] in lines
    assert ["outbox", "pending", "3"] in lines


def test_status_is_one_json_document_when_asked(cli: Cli) -> None:
    cli.tasks.one_step.enqueue(1)

    document = json.loads(cli("status", "--json").stdout)

    assert document["runs"]["ready"] == 1
    assert document["runs"]["succeeded"] == 0
    assert document["outbox"] == {"pending": 1, "dead": 0, "oldest_seconds": document["outbox"]["oldest_seconds"]}
    assert document["workers"] == []


# -- runs -------------------------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_in_cells_divided_by_tabs(cli: Cli) -> None:
    first = cli.tasks.one_step.apply_async((1,), ref="order:1").id
    second = cli.tasks.no_step.enqueue(2).id

    lines = cli.lines("runs")

    assert [line[1] for line in lines] == [second, first]
    assert lines[1][1:8] == [first, "tests.one_step@1", "ready", "order:1", "0", "0", "umt-tests"]
    assert lines[1][8].endswith("Z")


def test_b5_runs_are_filtered_and_paged_by_number(cli: Cli, conn: Connection, schema: str) -> None:
    ids = [cli.tasks.one_step.apply_async((number,), ref=f"order:{number}").id for number in range(4)]
    set_state(conn, schema, ids[2], "sleeping", wake_at=DUE)

    page = json.loads(cli("runs", "--limit", "2", "--json").stdout)
    rest = cli.lines("runs", "--limit", "2", "--before", str(page["before"]))

    assert [run["id"] for run in page["runs"]] == [ids[3], ids[2]]
    assert [line[1] for line in rest] == [ids[1], ids[0]]
    assert [line[1] for line in cli.lines("runs", "--state", "sleeping")] == [ids[2]]
    assert [line[1] for line in cli.lines("runs", "--ref", "order:1")] == [ids[1]]
    assert cli("runs", "--task", "tests.no_step").stdout == ""


def test_paused_is_a_state_that_runs_are_listed_by(cli: Cli, conn: Connection, schema: str) -> None:
    ids = [cli.tasks.one_step.enqueue(number).id for number in range(4)]
    for run_id in ids[:3]:
        cli("pause", run_id)
    set_state(conn, schema, ids[1], "sleeping", wake_at=DUE)
    cli("cancel", ids[2])
    durable = cli.tasks.durable

    assert [line[1] for line in cli.lines("runs", "--state", "paused")] == [ids[1], ids[0]]
    assert [line[1] for line in cli.lines("runs", "--state", "paused", "--state", "cancelled")] == ids[2::-1]
    assert [run.id for run in durable.list(states="paused")] == [ids[1], ids[0]]
    assert [run.id for run in durable.list(states=["sleeping"])] == [ids[1]]
    assert [run.id for run in durable.list(states=["paused", RunState.CANCELLED])] == ids[2::-1]
    assert durable.list(states=[]) == []
    with pytest.raises(DefinitionError, match="'pausing' is not a valid RunState"):
        durable.list(states="pausing")


def test_runs_of_the_package_s_own_tasks_are_shown_when_they_are_asked_for(
    cli: Cli, conn: Connection, schema: str
) -> None:
    users = cli.tasks.one_step.enqueue(1).id
    own = cli.tasks.one_step.enqueue(2).id
    conn.execute(f"UPDATE {schema}.run SET task = 'umt_durable.answered' WHERE id = %s".encode(), [own])
    durable = cli.tasks.durable

    assert [line[1] for line in cli.lines("runs")] == [users]
    assert [line[1] for line in cli.lines("runs", "--all")] == [own, users]
    assert [line[1] for line in cli.lines("runs", "--task", "umt_durable.answered")] == [own]
    assert [run.id for run in durable.list()] == [users]
    assert [run.id for run in durable.list(internal=True)] == [own, users]
    assert (durable.client.counts(), durable.client.counts(internal=True)) == ({"ready": 1}, {"ready": 2})
    assert {*map(tuple, cli.lines("status"))} >= {("runs", "ready", "1"), ("runs", "blocked", "1")}
    assert {*map(tuple, cli.lines("status", "--all"))} >= {("runs", "ready", "2"), ("runs", "blocked", "2")}
    assert not [line for line in cli.lines("versions") if line[0].startswith("umt_durable.")]
    assert ["umt_durable.answered", "1", "1", "ready:1", "0"] in cli.lines("versions", "--all")
    assert cli.lines("versions", "--task", "umt_durable.answered") == [
        ["umt_durable.answered", "1", "1", "ready:1", "0"]
    ]


def test_an_unknown_task_is_an_error_that_names_those_there_are(cli: Cli, conn: Connection, schema: str) -> None:
    told = one_line(cli("runs", "--task", "tests.nonsense", status=1))

    assert "no durable task named 'tests.nonsense'" in told
    assert "tests.one_step@1" in told

    run = cli.tasks.one_step.enqueue(1).id
    conn.execute(f"UPDATE {schema}.run SET task = 'tests.nonsense'".encode())
    assert [line[1] for line in cli.lines("runs", "--task", "tests.nonsense")] == [run]
    assert cli("runs", "--task", "tests.nonsense", "--state", "failed").stdout == ""


def test_text_of_a_run_cannot_steer_a_terminal_or_break_a_line(cli: Cli) -> None:
    cli.tasks.one_step.apply_async((1,), ref="a\tb\n\x1b[31mred")

    [line] = cli.lines("runs")

    assert line[4] == "a\\tb\\n\\x1b[31mred"


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_tells_attempts_steps_waits_and_the_error_and_no_payload(cli: Cli, conn: Connection, schema: str) -> None:
    run = cli.tasks.one_step.enqueue(41).id
    write_history(conn, schema, run)

    told = cli("show", run).stdout
    lines = [line.split("\t") for line in told.splitlines()]

    assert ["run", "state", "retrying"] in lines
    assert ["run", "error", "ValueError: no such card, token=***"] in lines
    assert [line[1:4] for line in lines if line[0] == "attempt"] == [["1", "1", "failed"]]
    assert [(line[2], line[4]) for line in lines if line[0] == "step"] == [("look up", "done"), ("charge", "failed")]
    assert [line[2:5] for line in lines if line[0] == "wait"] == [["ok", "approved", "pending"]]
    assert "Ulm" not in told
    assert "41" not in [cell for line in lines for cell in line]


def test_e11_payloads_are_shown_when_asked_with_secrets_masked(cli: Cli, conn: Connection, schema: str) -> None:
    run = cli.tasks.one_step.enqueue(41).id
    write_history(conn, schema, run)

    document = json.loads(cli("show", run, "--payloads", "--json").stdout)

    assert document["run"]["input"] == {"args": [41], "kwargs": {}}
    assert document["steps"][0]["result"] == {"api_key": "***", "city": "Ulm"}
    assert "ValueError" in document["traceback"]
    assert "tiger" not in cli("show", run, "--payloads").stdout


# -- signal and cancel ------------------------------------------------------------------------------------------------


def test_a_signal_is_a_fact_of_its_run_said_once_per_dedupe_key(cli: Cli, conn: Connection, schema: str) -> None:
    run = cli.tasks.waiter.enqueue("approved").id

    cli("signal", run, "approved", '{"by": "ann"}', "--dedupe", "k")
    cli("signal", run, "approved", '{"by": "ann"}', "--dedupe", "k")

    [(payload, actor)] = conn.execute(f"SELECT payload, actor FROM {schema}.fact".encode()).fetchall()
    assert json.loads(payload) == {"by": "ann"}
    assert actor.startswith("cli")


def test_a_payload_that_is_no_json_is_a_usage_error_and_says_nothing(cli: Cli, conn: Connection, schema: str) -> None:
    run = cli.tasks.waiter.enqueue("approved").id

    told = cli("signal", run, "approved", "yes", status=2).stderr

    assert "Invalid value for JSON" in told
    assert conn.execute(f"SELECT count(*) FROM {schema}.fact".encode()).fetchone() == (0,)


def test_a_reserved_name_is_refused(cli: Cli) -> None:
    run = cli.tasks.waiter.enqueue("approved").id

    assert "reserved" in one_line(cli("signal", run, "umt.cancel", status=1))


def test_cancel_ends_a_run_that_waits_with_its_reason(cli: Cli, conn: Connection, schema: str) -> None:
    run = cli.tasks.waiter.enqueue("approved").id
    set_state(conn, schema, run, "waiting")

    told = cli("cancel", run, "--reason", "customer").stdout
    again = cli("cancel", run).stdout

    assert told == f"{run} cancelled\n"
    assert again == f"{run} has ended before: cancelled\n"
    assert json.loads(cli("cancel", run, "--json").stdout)["reason"] == "customer"


def test_pause_and_resume_say_where_the_run_stands(cli: Cli) -> None:
    run = cli.tasks.one_step.enqueue(1).id

    assert cli("pause", run, "--reason", "stocktaking").stdout == f"{run} ready paused\n"
    assert [line[3] for line in cli.lines("runs")] == ["ready paused"]
    assert json.loads(cli("resume", run, "--json").stdout)["paused_at"] is None

    cli("cancel", run)
    assert f"run {run} is cancelled" in one_line(cli("pause", run, status=1))


def test_retry_releases_or_takes_up_a_run_and_show_tells_who_did_it(cli: Cli, conn: Connection, schema: str) -> None:
    run = cli.tasks.one_step.enqueue(1).id
    assert f"run {run} is ready" in one_line(cli("retry", run, status=1))
    set_state(conn, schema, run, "quarantined", reason="crash_budget")

    assert cli("retry", run, "--reason", "fixed").stdout == f"{run} ready\n"

    cli("cancel", run)
    again = json.loads(cli("retry", run, "--json").stdout)["goes_on_as"]
    assert cli("retry", run).stdout == f"{run} goes on as {again}\n"
    told = [line for line in cli.lines("show", run) if line[0] == "audit"]
    assert [(line[2], line[4]) for line in told] == [("retry", "fixed"), ("cancel", ""), ("retry", "")]
    assert all(line[3].startswith("cli") for line in told)
    assert ["run", "retry_of", run] in cli.lines("show", again)


@pytest.mark.private_postgres_only
@pytest.mark.parametrize("arguments", COMMANDS[2:], ids=lambda arguments: arguments[0])
def test_an_unknown_run_is_one_line_and_exit_status_1(cli: Cli, arguments: list[str]) -> None:
    assert one_line(cli(*arguments, status=1)) == f"Error: no run with id '{UNKNOWN}'"


# -- what is not as it should be --------------------------------------------------------------------------------------


@pytest.mark.private_postgres_only
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a4_a_schema_that_is_behind_is_refused_with_the_command_to_run(
    cli: Cli, settings: Settings, arguments: list[str]
) -> None:
    set_revision(str(settings.database_url), settings.schema, "0000")

    told = one_line(cli(*arguments, status=1))

    assert "is at revision 0000, this code needs" in told
    assert f"run `umt-durable -A {cli.module} migrate`" in told


def test_a4_a_schema_that_is_ahead_is_refused_and_names_what_to_install(cli: Cli, settings: Settings) -> None:
    set_revision(str(settings.database_url), settings.schema, "9999")

    told = one_line(cli("status", status=1))

    assert "revision 9999, which is newer than this code's" in told
    assert "install the version" in told


@pytest.mark.private_postgres_only
@pytest.mark.parametrize("arguments", [*COMMANDS, ["migrate"], ["serve", "--role", "relay"]], ids=lambda each: each[0])
def test_an_unreachable_database_is_one_line_without_the_password(arguments: list[str]) -> None:
    with cli_for(Settings(database_url="postgresql://shop:hunter2@127.0.0.1:1/shop")) as cli:
        told = one_line(cli(*arguments, status=1))

    assert "Postgres cannot be reached" in told
    assert "DURABLE_DATABASE_URL" in told
    assert "hunter2" not in told
