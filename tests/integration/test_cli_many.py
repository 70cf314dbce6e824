"""`umt-durable cancel|retry|pause|resume` for all runs that options choose."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.integration import service_kit as kit
from tests.integration.cli_kit import Cli, cli_for
from umt_durable.bridge import bulk
from umt_durable.database import Connection
from umt_durable.settings import Settings

OURS = ("--task", kit.TASK)


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings) as cli:
        yield cli


def states(conn: Connection) -> list[tuple[str, bool]]:
    return kit.table(conn, "SELECT state, paused_at IS NOT NULL FROM {}.run ORDER BY no")


def test_a_dry_run_counts_and_does_nothing(cli: Cli, conn: Connection) -> None:
    for _ in range(3):
        kit.enqueue(conn)
    kit.enqueue(conn, task="shop.other")

    assert cli("cancel", *OURS, "--dry-run").stdout == "3 runs to cancel\n"
    assert states(conn) == [("ready", False)] * 4


def test_all_chosen_runs_are_paused_resumed_cancelled_and_retried_page_by_page(
    cli: Cli, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    for _ in range(5):
        kit.enqueue(conn)
    kit.enqueue(conn, task="shop.other")

    cli("pause", *OURS, "--yes", "--reason", "stocktaking")
    assert states(conn) == [("ready", True)] * 5 + [("ready", False)]
    assert cli("pause", *OURS, "--dry-run").stdout == "0 runs to pause\n"
    assert "5 done, 0 passed over" in cli("resume", *OURS, "--yes").stdout
    cli("cancel", *OURS, "--state", "ready", "--yes")
    assert states(conn)[:5] == [("cancelled", False)] * 5
    told = json.loads(cli("retry", *OURS, "--yes", "--json").stdout)

    assert told == {"act": "retry", "chosen": 5, "done": 5, "dry_run": False}
    assert len(states(conn)) == 11
    assert kit.table(conn, "SELECT count(*) FROM {}.audit WHERE act = 'pause' AND reason = 'stocktaking'") == [(5,)]


def test_runs_are_chosen_by_age(cli: Cli, conn: Connection) -> None:
    kit.enqueue(conn)
    old = kit.enqueue(conn)
    kit.table(conn, "UPDATE {}.run SET created_at = created_at - interval '2 hours' WHERE id = %s", old.id)

    cli("cancel", "--older-than", "1h", "--yes")

    assert states(conn) == [("ready", False), ("cancelled", False)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["cancel"], "name a RUN, or choose runs"),
        (["cancel", "r", "--task", "t"], "name a RUN, or choose runs"),
        (["cancel", "r", "--dry-run"], "are for runs chosen by"),
        (["retry", "--state", "succeeded"], "retry is not possible for succeeded runs"),
        (["pause", "--older-than", "soon"], "--older-than"),
        (["cancel", "--task", kit.TASK], "--yes is needed to cancel 1 runs without a terminal"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error_and_does_nothing(
    cli: Cli, conn: Connection, arguments: list[str], told: str
) -> None:
    kit.enqueue(conn)

    assert told in cli(*arguments, status=2).stderr
    assert states(conn) == [("ready", False)]


def test_paused_runs_are_chosen_by_their_mark_whatever_their_state(cli: Cli, conn: Connection) -> None:
    ids = [kit.enqueue(conn).id for _ in range(4)]
    kit.table(conn, "UPDATE {}.run SET state = 'waiting' WHERE id = ANY(%s)", ids[1:3])
    for run_id in ids[:2]:
        cli("pause", run_id)

    assert cli("cancel", "--state", "paused", "--dry-run").stdout == "2 runs to cancel\n"
    assert cli("cancel", "--state", "paused", "--state", "waiting", "--dry-run").stdout == "3 runs to cancel\n"
    for act in ("pause", "retry"):
        assert f"{act} is not possible for paused runs" in cli(act, "--state", "paused", "--yes", status=2).stderr
    assert "2 done, 0 passed over" in cli("resume", "--state", "paused", "--yes").stdout
    assert [paused for _, paused in states(conn)] == [False] * 4


def test_runs_of_the_package_s_own_tasks_are_chosen_by_their_task_alone(cli: Cli, conn: Connection) -> None:
    own = kit.enqueue(conn, task="umt_durable.answered").id
    kit.enqueue(conn)

    assert cli("cancel", "--state", "ready", "--yes").stdout.endswith("cancel: 1 done, 0 passed over\n")
    assert kit.state(conn, own) == "ready"
    assert "1 done" in cli("cancel", "--task", "umt_durable.answered", "--yes").stdout
