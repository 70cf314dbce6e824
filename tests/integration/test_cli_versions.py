"""`umt-durable versions`, and what `show` says of a run that no worker has the code for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.integration import service_kit as kit
from tests.integration.cli_kit import Cli, cli_for, one_line
from umt_durable.database import Connection
from umt_durable.settings import Settings

TASK = "tests.one_step"


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings) as cli:
        yield cli


def test_versions_count_live_runs_and_the_workers_that_have_each(cli: Cli, conn: Connection) -> None:
    for _ in range(2):
        cli.tasks.one_step.enqueue(1)
    cli.tasks.durable.pause(cli.tasks.one_step.enqueue(1).id, actor="ann")
    kit.enqueue(conn, task=TASK, version=7)
    kit.worker(conn, versions=[TASK, f"{TASK}@1"])

    lines = cli.lines("versions", "--task", TASK)

    assert lines == [[TASK, "1", "3", "paused:1 ready:2", "1"], [TASK, "7", "1", "ready:1", "0"]]
    [first, second] = json.loads(cli("versions", "--task", TASK, "--json").stdout)["versions"]
    assert (first["states"], second["workers"]) == ({"paused": 1, "ready": 2}, 0)


def test_f3_a_version_is_drained_once_none_of_its_runs_is_left(cli: Cli, conn: Connection) -> None:
    old = kit.enqueue(conn, task=TASK, version=7)
    cli.tasks.one_step.enqueue(1)

    told = cli("versions", "--task", TASK, "--require-drained", "7", status=1).stderr
    cli("cancel", old.id)

    assert told == f"Error: {TASK}@7 is not drained: 1 of its runs have not ended\n"
    assert f"{TASK}@7 is drained" in cli("versions", "--task", TASK, "--require-drained", "7").stdout


def test_drained_without_a_task_and_an_unknown_task_are_refused(cli: Cli) -> None:
    assert "--require-drained needs --task" in cli("versions", "--require-drained", "1", status=2).stderr
    assert "no durable task named 'tests.nonsense'" in one_line(cli("versions", "--task", "tests.nonsense", status=1))


def test_f5_show_names_the_version_that_no_live_worker_has(cli: Cli, conn: Connection) -> None:
    run = kit.enqueue(conn, task=TASK, version=7)

    told = cli.lines("show", run.id)
    kit.worker(conn, versions=[f"{TASK}@7"])

    because = ["because", "missing_code", f"no live worker declares {TASK}@7", "", "start a worker with that code"]
    assert because in told
    reasons = json.loads(cli("show", run.id, "--json").stdout)["because"]
    assert [one["why"] for one in reasons] == ["hint_pending"]
