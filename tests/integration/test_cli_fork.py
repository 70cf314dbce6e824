"""`umt-durable fork`, and `Durable.fork` with arguments of its own, which a task's schema checks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.integration import service_kit as kit
from tests.integration.cli_kit import Cli, cli_for, one_line
from umt_durable.bridge.task import DurableTask
from umt_durable.database import Connection
from umt_durable.engine.context import current_context
from umt_durable.errors import DefinitionError, InputError, UnknownTaskError
from umt_durable.settings import Settings


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings) as cli:
        yield cli


def ended(cli: Cli, conn: Connection) -> str:
    """Return a run that has succeeded, with one step that is done."""
    run_id = str(cli.tasks.one_step.enqueue(1).id)
    no = kit.number(conn, run_id)
    kit.table(
        conn,
        "INSERT INTO {}.step (run, key, seq, kind, state, fence, result) VALUES (%s, 'one', 1, 'run', 'done', 1, '1')",
        no,
    )
    kit.table(conn, "UPDATE {}.run SET state = 'succeeded', finished_at = now(), result = '1', fence = 2")
    return run_id


def test_a_fork_is_made_and_the_history_of_both_runs_says_so(cli: Cli, conn: Connection) -> None:
    run_id = ended(cli, conn)

    said = cli("fork", run_id, "--from-step", "one", "--reason", "torn label").stdout

    fork = said.split()[-1]
    assert said == f"{run_id} is forked as {fork}\n"
    shown = json.loads(cli("show", run_id, "--json").stdout)
    assert [(one["act"], one["reason"], one["detail"]) for one in shown["audit"]] == [
        ("fork", "torn label", f"as run {fork} from one")
    ]
    assert shown["audit"][0]["actor"].startswith("cli")
    assert json.loads(cli("show", fork, "--json").stdout)["run"]["fork_of"] == run_id


def test_a_fork_with_other_arguments_and_another_version_is_one_json_document(cli: Cli, conn: Connection) -> None:
    run_id = ended(cli, conn)
    arguments = json.dumps({"value": 7, "gate": "no"})

    document = json.loads(cli("fork", run_id, "--from-step", "one", "--input", arguments, "--json").stdout)

    assert document["run"] == run_id
    shown = json.loads(cli("show", document["fork"], "--payloads", "--json").stdout)["run"]
    assert shown["input"] == {"args": [], "kwargs": {"value": 7, "gate": "no"}}
    assert (
        cli.tasks.durable.get(cli("fork", run_id, "--from-step", "one", "--version", "3").stdout.split()[-1]).version
        == 3
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from-step", "two"], "has no step 'two'"),
        (["--from-step", "one", "--input", '{"value": "much"}'], "value"),
        (["--from-step", "one", "--input", '{"valu": 1}'], "valu: is not a parameter"),
        (["--from-step", "one", "--input", "[1]"], "input: a mapping"),
        (["--from-step", "one", "--version", "0"], "versions count from 1"),
    ],
)
def test_what_is_refused_is_one_line_and_writes_nothing(
    cli: Cli, conn: Connection, arguments: list[str], says: str
) -> None:
    run_id = ended(cli, conn)

    assert says in one_line(cli("fork", run_id, *arguments, status=1))

    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(1,)]


def test_a_run_that_is_under_way_is_refused(cli: Cli) -> None:
    run_id = str(cli.tasks.one_step.enqueue(1).id)

    assert "is ready: only a run that has ended" in one_line(cli("fork", run_id, "--from-step", "one", status=1))


def test_input_that_is_no_json_is_a_wrong_use(cli: Cli, conn: Connection) -> None:
    result = cli("fork", ended(cli, conn), "--from-step", "one", "--input", "{", status=2)

    assert "Invalid value for JSON" in result.output


def test_durable_fork_names_each_argument_that_the_task_refuses(cli: Cli, conn: Connection) -> None:
    run_id, durable = ended(cli, conn), cli.tasks.durable

    with pytest.raises(InputError, match="value: is missing"):
        durable.fork(run_id, from_step="one", actor="ann", input={})
    with pytest.raises(UnknownTaskError, match=r"tests.one_step@9"):
        durable.fork(run_id, from_step="one", actor="ann", input={"value": 1}, version=9)
    with pytest.raises(DefinitionError, match="input: a mapping"):
        durable.fork(run_id, from_step="one", actor="ann", input={1: 2})  # type: ignore[dict-item]
    made = asyncio.run(durable.afork(run_id, from_step="one", actor="ann", input={"value": 1}))
    assert durable.get(made).fork_of == run_id


def test_an_existing_task_continues_with_arguments_as_celery_carries_them(cli: Cli, conn: Connection) -> None:
    """What it is called with next has the form that a message would have given it: a tuple is a list."""
    seen: list[object] = []

    @cli.tasks.app.task(name="tests.loop", base=DurableTask, bind=True, shared=False)
    def loop(self: object, pair: object) -> object:
        seen.append(pair)
        if len(seen) == 1:
            current_context().continue_as_new((1, 2))
        return pair

    with pytest.raises(Exception, match="continues as new"):
        loop.apply(([0],), throw=True)
    [run] = cli.tasks.durable.list(task="tests.loop")
    assert (run.state, run.generation) == ("ready", 1)
    assert kit.table(conn, "SELECT args FROM {}.run") == [(b'{"args":[[1,2]],"kwargs":{}}',)]


def test_all_chosen_runs_are_forked_but_those_that_were_never_at_the_step(cli: Cli, conn: Connection) -> None:
    run_id = ended(cli, conn)
    other = cli.tasks.one_step.enqueue(2).id
    cli("cancel", other)
    kit.enqueue(conn)  # under way: not chosen

    chosen = ("fork", "--from-step", "one", "--task", cli.tasks.one_step.name)
    dry = json.loads(cli(*chosen, "--dry-run", "--json").stdout)
    told = json.loads(cli(*chosen, "--yes", "--reason", "torn labels", "--json").stdout)

    assert dry == {"act": "fork", "chosen": 2, "done": 0, "dry_run": True}
    assert told == {"act": "fork", "chosen": 2, "done": 1, "dry_run": False}
    assert kit.table(conn, "SELECT fork_of FROM {}.run_view WHERE fork_of IS NOT NULL") == [(run_id,)]
    assert "fork is not possible for ready runs" in cli(*chosen, "--state", "ready", status=2).stderr
