"""`umt-durable outbox list|show|replay`, and what `status` and `doctor` say of dead rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import UUID, uuid4

import pytest

from tests.integration.cli_kit import Cli, cli_for, one_line
from umt_durable.bridge.dispatch import CeleryDispatcher
from umt_durable.bridge.publisher import Publisher
from umt_durable.services.relay import Relay
from umt_durable.settings import Settings


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings, broker="memory://") as cli:
        yield cli


def relay(cli: Cli) -> None:
    """Look at the outbox once, as a relay of the app does."""
    durable = cli.tasks.durable
    dispatcher = CeleryDispatcher(durable, Publisher(durable.app))
    Relay(durable.database, durable.settings, dispatcher, durable.outbox.routes).run_once()


def dead(cli: Cli, *types: str) -> list[UUID]:
    """Emit events that nobody wants, and have them die."""
    emitted = [cli.tasks.durable.outbox.emit(type, {"order": 7, "api_key": "tiger"}) for type in types]
    relay(cli)
    return emitted


def test_c6_dead_rows_are_listed_with_their_reasons_page_by_page(cli: Cli) -> None:
    first, second, third = dead(cli, "a.b", "a.b", "c.d")

    lines = cli.lines("outbox", "list")
    assert [(line[0], line[1], line[3]) for line in lines] == [
        (str(third), "c.d", "1"),
        (str(second), "a.b", "1"),
        (str(first), "a.b", "1"),
    ]
    assert "durable.outbox.route('c.d', task)" in lines[0][5]
    page = json.loads(cli("outbox", "list", "--type", "a.b", "--limit", "1", "--json").stdout)
    assert [row["id"] for row in page["events"]] == [str(second)]
    rest = json.loads(cli("outbox", "list", "--type", "a.b", "--before", page["before"], "--json").stdout)
    assert [row["id"] for row in rest["events"]] == [str(first)]
    assert rest["before"] is None
    assert "tiger" not in cli("outbox", "list", "--json").stdout


def test_a_row_is_shown_without_its_payload_unless_it_is_asked_for(cli: Cli) -> None:
    (row,) = dead(cli, "a.b")

    assert ["status", "dead"] in cli.lines("outbox", "show", str(row))
    plain = json.loads(cli("outbox", "show", str(row), "--json").stdout)
    asked = json.loads(cli("outbox", "show", str(row), "--payload", "--json").stdout)
    assert plain["idempotency_key"] == f"outbox:{row}"
    assert "payload" not in plain
    assert asked["payload"]["order"] == 7
    assert "tiger" not in json.dumps(asked)


def test_c6_rows_are_replayed_one_by_one_or_by_type(cli: Cli) -> None:
    first, second, third = dead(cli, "a.b", "a.b", "c.d")
    cli.tasks.durable.outbox.route("a.b", cli.tasks.note)

    assert cli("outbox", "replay", str(first)).stdout == "1 put back\n"
    assert json.loads(cli("outbox", "replay", "--type", "a.b", "--json").stdout) == {"replayed": 1}
    assert [line[0] for line in cli.lines("outbox", "list")] == [str(third)]
    relay(cli)

    assert ["status", "dispatched"] in cli.lines("outbox", "show", str(second))
    assert "is dispatched: only dead rows" in one_line(cli("outbox", "replay", str(second), status=1))


def test_what_is_not_there_and_what_is_not_said_are_told(cli: Cli) -> None:
    assert cli("outbox", "list").stdout == ""
    assert "no outbox row" in one_line(cli("outbox", "show", str(uuid4()), status=1))
    assert "no outbox row" in one_line(cli("outbox", "replay", "nonsense", status=1))
    assert "--type" in cli("outbox", "replay", status=2).stderr
    assert "--type" in cli("outbox", "replay", str(uuid4()), "--type", "a.b", status=2).stderr


def test_status_counts_dead_rows_and_doctor_says_how_to_put_them_back(cli: Cli) -> None:
    dead(cli, "a.b", "a.b")

    assert ["outbox", "dead", "2"] in cli.lines("status")
    found = [line for line in cli("doctor", status=1).stdout.splitlines() if line.split("\t")[1] == "outbox"]
    assert len(found) == 1
    assert "2 messages of type a.b were given up" in found[0]
    assert "outbox replay --type a.b" in found[0]
