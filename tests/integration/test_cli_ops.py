"""`umt-durable ops list|show|resolve`, without a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.integration.cli_kit import Cli, cli_for, one_line
from tests.support.engine import Engine
from umt_durable import OpInfo
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.settings import Settings
from umt_durable.states import RunState


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings) as cli:
        yield cli


@pytest.fixture
def run_id(database: Database, settings: Settings) -> Iterator[str]:
    """Return a run that waits for a person to say what became of `ship:17`; `ship:18` is done."""
    engine = Engine(database, settings)

    def ship(info: OpInfo) -> str:
        raise TimeoutError("no answer, token=tiger")

    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        ctx.step.effect("ship:18", lambda info: {"label": 18})
        return ctx.step.effect("ship:17", ship)

    yield engine.run("t")[0]
    engine.close()


def test_ops_that_wait_for_a_person_are_listed_with_their_run_and_why(cli: Cli, run_id: str) -> None:
    [line] = cli.lines("ops", "list")

    assert line[:6] == ["ship:17", "uncertain", run_id, "quarantined", "1", "1"]
    assert "TimeoutError: no answer" in line[-1]
    assert "tiger" not in line[-1]
    assert [found[0] for found in cli.lines("ops", "list", "--state", "done")] == ["ship:18"]
    assert json.loads(cli("ops", "list", "--json").stdout)["ops"][0]["waiting"] == 1


def test_a_recorded_answer_is_shown_only_when_asked_for(cli: Cli, run_id: str) -> None:
    plain = cli("ops", "show", "ship:18", "--json").stdout
    full = json.loads(cli("ops", "show", "ship:18", "--payloads", "--json").stdout)

    assert "label" not in plain
    assert full["result"] == {"label": 18}
    assert full["idempotency_key"] in plain


@pytest.mark.parametrize(
    ("said", "state"),
    [(["--done", '"label-17"'], "done"), (["--not-done"], "open"), (["--failed", "returned"], "failed")],
)
def test_a_decision_is_kept_with_who_made_it_and_lets_the_run_go_on(
    cli: Cli, run_id: str, said: list[str], state: str
) -> None:
    shown = json.loads(cli("ops", "resolve", "ship:17", *said, "--reason", "the portal", "--json").stdout)

    assert (shown["state"], shown["reason"], shown["waiting"]) == (state, "the portal", 0)
    assert shown["actor"].startswith("cli")
    assert cli.tasks.durable.get(run_id).state is RunState.READY


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ops", "resolve", "ship:17"], "say one of"),
        (["ops", "resolve", "ship:17", "--not-done", "--failed", "x"], "say one of"),
        (["ops", "resolve", "ship:18", "--not-done"], "is done"),
        (["ops", "show", "ship:99"], "no op with key 'ship:99'"),
        (["ops", "show", "ship:17", "--namespace", "other"], "in the namespace 'other'"),
    ],
)
def test_what_cannot_be_decided_is_one_line_and_a_status(
    cli: Cli, run_id: str, arguments: list[str], words: str
) -> None:
    assert words in one_line(cli(*arguments, status=1))


def test_a_result_that_is_no_json_is_refused_with_a_hint(cli: Cli, run_id: str) -> None:
    assert "Text needs quotes" in cli("ops", "resolve", "ship:17", "--done", "label", status=2).stderr
