"""What a person reads of an uncertain effect or step has the commands to run: each is pasted as it stands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.integration.awaiting_kit import TIMEOUT, Play, make_play  # noqa: F401  a fixture
from tests.integration.cli_kit import Cli, cli_for
from tests.integration.service_kit import RecordingDispatcher
from tests.support.clock import Clock
from tests.support.engine import Engine
from umt_durable import OpInfo
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Parked
from umt_durable.services.relay import Relay
from umt_durable.settings import HOLD_SECONDS, Settings
from umt_durable.states import RunState
from umt_durable.store import outbox


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings) as cli:
        yield cli


def pasted(cli: Cli, text: str, verb: str) -> list[str]:
    """Return the arguments of the command of that verb which a text has between back-quotes."""
    (command,) = re.findall(rf"`(umt-durable -A \S+ {verb} [^`]*)`", text)
    program, option, module, *arguments = shlex.split(command)
    assert (program, option, module) == ("umt-durable", "-A", cli.module)
    return arguments


def told(cli: Cli, run_id: str) -> str:
    """Return the error that `show` gives of a run."""
    return str(json.loads(cli("show", run_id, "--json").stdout)["error"])


def left_alone(play: Play, clock: Clock) -> None:
    """Have the message leave and no answer come, until the run is left to a person."""
    play.options = {"timeout": TIMEOUT}
    play.deliver()
    play.outside.leave(play.engine.database)
    play.pass_time(clock, seconds=241)
    assert isinstance(play.deliver(), Parked)


@pytest.mark.parametrize("how", ["result", "error"])
def test_the_error_of_an_uncertain_step_has_the_command_that_decides_it(
    cli: Cli, play: Play, clock: Clock, how: str
) -> None:
    left_alone(play, clock)

    error = told(cli, play.run)
    command = pasted(cli, error, "resolve")
    assert command[-2:] == ["--result", "JSON"]
    assert "`--error TEXT`" in error
    cli(*command[:-2], *(["--result", '"label"'] if how == "result" else ["--error", "never printed"]))

    assert play.engine.state(play.run) is RunState.READY


def test_the_error_of_an_uncertain_effect_has_the_command_that_decides_it(
    cli: Cli, database: Database, settings: Settings
) -> None:
    engine, op = Engine(database, settings), "ship: order 17's"

    def ship(info: OpInfo) -> str:
        raise TimeoutError("no answer " + "x" * 600)

    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        return ctx.step.effect(op, ship)

    run_id, _ = engine.run("t")

    error = told(cli, run_id)
    command = pasted(cli, error, "ops resolve")
    assert command == ["ops", "resolve", op, "--done", "JSON"]
    assert "`--not-done`" in error
    assert "`--failed TEXT`" in error
    cli(*command[:-1], '"label"')
    assert engine.state(run_id) is RunState.READY
    engine.close()


def test_a_message_that_was_put_aside_has_the_commands_that_send_it_again_or_decide_its_step(
    cli: Cli, play: Play, conn: Connection, clock: Clock, database: Database, settings: Settings
) -> None:
    play.deliver()
    row, dead = play.outside.sent[0][1].row, uuid4()
    outbox.claim(conn, relay=dead, limit=10, hold_seconds=HOLD_SECONDS)
    outbox.leave(conn, [row], relay=dead, hold_seconds=HOLD_SECONDS)
    clock.advance(seconds=HOLD_SECONDS + 1)
    Relay(database, settings, RecordingDispatcher()).run_once()

    shown = json.loads(cli("outbox", "show", str(row), "--json").stdout)
    assert (shown["status"], shown["run"]) == ("dead", play.run)
    assert pasted(cli, shown["reason"], "resolve") == ["resolve", play.run, "label", "--result", "JSON"]
    assert "1 message of an awaited task may have left or not" in cli("doctor", status=None).stdout
    (line,) = cli.lines("outbox", "list")
    again = pasted(cli, line[-1], "outbox replay")
    assert cli(*again).stdout.strip() == "1 put back"
