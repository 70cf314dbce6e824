"""Pause and resume of a task or a queue: ready runs are taken by nobody and wait, and go on when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.integration.cli_kit import Cli, cli_for, one_line
from tests.support.clock import Clock
from tests.support.engine import Engine
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished
from umt_durable.engine.pausing import Pauses
from umt_durable.errors import DefinitionError, UnknownQueueError, UnknownTaskError
from umt_durable.services import redispatch, resuming
from umt_durable.services.maintenance import Maintenance
from umt_durable.services.redispatch import Redispatch
from umt_durable.services.relay import Relay
from umt_durable.services.resuming import Resumer
from umt_durable.settings import Settings
from umt_durable.states import RunState, Scope
from umt_durable.store import diagnosis, runs

WHOLE = [(Scope.TASK, kit.TASK), (Scope.QUEUE, "slow")]


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)

    @engine.task(kit.TASK)
    def body(ctx: TaskContext) -> int:
        return ctx.step.run("charge", lambda: 40)

    yield engine
    engine.close()


@pytest.fixture
def pauses(database: Database, settings: Settings) -> Pauses:
    return Pauses(database, settings)


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings) as cli:
        yield cli


def relayed(engine: Engine, dispatcher: kit.RecordingDispatcher) -> list[int | None]:
    """Return the runs whose hints one look of a relay has published."""
    before = len(dispatcher.hinted)
    Relay(engine.database, engine.settings, dispatcher).run_once()
    return dispatcher.hinted[before:]


def acts(conn: Connection) -> list[tuple[object, ...]]:
    return kit.table(conn, "SELECT act, run, actor, reason, detail FROM {}.audit ORDER BY at")


@pytest.mark.parametrize(("scope", "name"), WHOLE)
def test_runs_of_a_paused_task_or_queue_are_neither_hinted_nor_claimed_until_it_is_resumed(
    engine: Engine, pauses: Pauses, conn: Connection, scope: Scope, name: str
) -> None:
    new = kit.enqueue(conn, queue="slow")
    other = kit.enqueue(conn, task="other", queue="fast")
    kit.worker(conn, versions=[kit.TASK, f"{kit.TASK}@1", "other", "other@1"])
    dispatcher = kit.RecordingDispatcher()
    assert pauses.pause(scope, name, actor="ann", reason="stocktaking")
    later = kit.enqueue(conn, queue="slow")

    assert relayed(engine, dispatcher) == [kit.number(conn, other.id)]
    assert engine.process().deliver(new.id, kit.TASK) == Dropped("its task or queue is paused")
    assert engine.client.history(new.id).attempts == []
    assert [(one.scope, one.name, one.actor, one.reason, one.runs) for one in pauses.list()] == [
        (scope, name, "ann", "stocktaking", 2)
    ]
    assert kit.events(conn) == []

    assert pauses.resume(scope, name, actor="bob")
    assert Resumer(engine.database).run_once().brought == 2
    assert Redispatch(engine.database, engine.settings).run_once().hinted == 2
    assert set(relayed(engine, dispatcher)) == {kit.number(conn, one.id) for one in (new, later)}
    assert not isinstance(engine.process().deliver(new.id, kit.TASK), Dropped)
    assert pauses.list() == []
    assert kit.table(conn, "SELECT * FROM {}.pause") == []
    detail = f"{scope} {name}"
    assert acts(conn) == [("pause", None, "ann", "stocktaking", detail), ("resume", None, "bob", None, detail)]


def test_what_is_executed_goes_on_and_is_kept_when_it_is_ready_again(
    engine: Engine, pauses: Pauses, conn: Connection, clock: Clock
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        ctx.step.run("first", lambda: pauses.pause(Scope.TASK, "t", actor="ann"))
        ctx.step.sleep("nap", timedelta(minutes=1))
        return "done"

    run_id = engine.start("t")
    engine.process().deliver(run_id, "t")
    assert engine.state(run_id) is RunState.SLEEPING

    clock.advance(seconds=61)
    engine.timers()

    assert engine.state(run_id) is RunState.READY
    assert engine.process().deliver(run_id, "t") == Dropped("its task or queue is paused")
    assert engine.client.history(run_id).run.crashes == 0
    pauses.resume(Scope.TASK, "t", actor="ann")
    assert isinstance(engine.process().deliver(run_id, "t"), Finished)


def test_i24_a_claim_repeated_after_a_pause_of_the_task_gives_the_grant_it_had(
    pauses: Pauses, conn: Connection
) -> None:
    new, by, claim = kit.enqueue(conn), kit.worker(conn), uuid4()

    def ask() -> object:
        return runs.claim(
            conn, id=new.id, nesting=0, task=kit.TASK, claim=claim, worker=by, versions=[1], limit_seconds=None
        )

    first = ask()
    pauses.pause(Scope.TASK, kit.TASK, actor="ann")

    assert first is not None
    assert ask() is not None


def test_i22_a_paused_backlog_gets_no_hints_and_leaves_in_batches_when_it_is_resumed(
    engine: Engine, pauses: Pauses, conn: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (resuming, redispatch):
        monkeypatch.setattr(module, "BATCH", 4)
        monkeypatch.setattr(module, "BATCHES", 2)
    pauses.pause(Scope.TASK, kit.TASK, actor="ann")
    kit.table(
        conn,
        "INSERT INTO {}.run (id, task, version, state, deliver_by, redelivers)"
        " SELECT 'r' || n, %s, 1, 'ready', {}.now() + interval '1 hour', -1 FROM generate_series(1, 10) AS n"
        " RETURNING 1",
        kit.TASK,
    )
    clock.advance(seconds=7200)
    kit.worker(conn, seconds=600)
    hints, resumer = Redispatch(engine.database, engine.settings), Resumer(engine.database)

    postponed = [hints.run_once() for _ in range(3)]

    assert [(one.hinted, one.postponed) for one in postponed] == [(0, 8), (0, 2), (0, 0)]
    assert kit.events(conn) == []
    pauses.resume(Scope.TASK, kit.TASK, actor="ann")
    assert [resumer.run_once().brought for _ in range(3)] == [8, 2, 0]
    assert [hints.run_once().hinted for _ in range(3)] == [8, 2, 0]
    assert kit.table(conn, "SELECT * FROM {}.pause") == []


def test_i1_a_resume_whose_maintenance_died_is_taken_up_by_the_next(
    engine: Engine, pauses: Pauses, settings: Settings, database: Database, conn: Connection
) -> None:
    new = kit.enqueue(conn)
    kit.worker(conn)
    dispatcher = kit.RecordingDispatcher()
    pauses.pause(Scope.TASK, kit.TASK, actor="ann")
    relayed(engine, dispatcher)
    pauses.resume(Scope.TASK, kit.TASK, actor="ann")

    following = Maintenance(database, settings)
    following.run_once()
    following.run_once()

    assert relayed(engine, dispatcher) == [kit.number(conn, new.id)]


def test_a_task_that_is_paused_anew_stays_paused_and_a_second_pause_changes_nothing(
    engine: Engine, pauses: Pauses, conn: Connection
) -> None:
    new = kit.enqueue(conn)

    assert pauses.pause(Scope.TASK, kit.TASK, actor="ann")
    assert not pauses.pause(Scope.TASK, kit.TASK, actor="bob")
    assert pauses.resume(Scope.TASK, kit.TASK, actor="ann")
    assert not pauses.resume(Scope.TASK, kit.TASK, actor="bob")
    assert pauses.pause(Scope.TASK, kit.TASK, actor="cy")
    Resumer(engine.database).run_once()

    assert engine.process().deliver(new.id, kit.TASK) == Dropped("its task or queue is paused")
    assert [(act, actor) for act, _, actor, *_ in acts(conn)] == [("pause", "ann"), ("resume", "ann"), ("pause", "cy")]


def test_a_run_without_a_queue_is_in_the_one_that_workers_declare_for_its_task(
    engine: Engine, pauses: Pauses, conn: Connection
) -> None:
    new = kit.enqueue(conn)
    kit.table(conn, "UPDATE {}.run SET queue = NULL RETURNING 1")
    kit.worker(conn)
    kit.table(conn, "UPDATE {}.worker SET queues = %s::text::jsonb RETURNING 1", json.dumps({kit.TASK: "slow"}))

    pauses.pause(Scope.QUEUE, "slow", actor="ann")

    assert engine.process().deliver(new.id, kit.TASK) == Dropped("its task or queue is paused")


def test_i2_a_pause_of_a_task_in_a_callers_transaction_holds_if_he_commits(
    pauses: Pauses, database_url: str, conn: Connection
) -> None:
    with psycopg.connect(database_url) as mine:
        assert pauses.pause(Scope.TASK, kit.TASK, actor="ann", conn=mine)
        mine.rollback()
        assert pauses.list() == []
        pauses.pause(Scope.TASK, kit.TASK, actor="ann", conn=mine)
        mine.commit()

    assert [one.name for one in pauses.list()] == [kit.TASK]


def test_a_paused_run_of_a_paused_task_is_not_shown_as_blocked_and_can_be_cancelled(
    engine: Engine, pauses: Pauses, conn: Connection
) -> None:
    new = kit.enqueue(conn)
    pauses.pause(Scope.TASK, kit.TASK, actor="ann")

    assert diagnosis.blocked(conn) == []
    engine.client.cancel(new.id)
    assert engine.state(new.id) is RunState.CANCELLED


def test_bad_pauses_are_refused_before_anything_is_written(cli: Cli, pauses: Pauses, conn: Connection) -> None:
    durable = cli.tasks.durable

    with pytest.raises(UnknownTaskError, match=r"no durable task named 'tests.nonsense'.*tests.one_step"):
        durable.pause_task("tests.nonsense", actor="ann")
    with pytest.raises(UnknownQueueError, match=r"no task and no run has a queue named 'nowhere' \(known: "):
        durable.pause_queue("nowhere", actor="ann")
    with pytest.raises(DefinitionError, match="actor is missing"):
        durable.pause_task("tests.one_step", actor=None)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="the name of the task must be text, not int"):
        durable.pause_task(7, actor="ann")  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="reason must have at most"):
        durable.resume_queue("slow", actor="ann", reason="x" * 2000)
    with pytest.raises(DefinitionError, match="which brings answers"):
        pauses.pause(Scope.TASK, "umt_durable.answered", actor="ann")

    assert pauses.list() == []
    assert acts(conn) == []


def test_people_pause_and_resume_a_task_and_see_it_everywhere(cli: Cli, conn: Connection) -> None:
    run = cli.tasks.one_step.enqueue(1)

    told = cli("task", "pause", "tests.one_step", "--reason", "stocktaking", "--actor", "ann").stdout
    again = cli("task", "pause", "tests.one_step", "--actor", "bob").stdout

    assert (told, again) == ("task tests.one_step is paused\n", "task tests.one_step was paused before\n")
    [paused] = json.loads(cli("status", "--json").stdout)["paused"]
    assert (paused["scope"], paused["name"], paused["actor"], paused["runs"]) == ("task", "tests.one_step", "ann", 1)
    assert ["paused", "task", "tests.one_step", "1"] in [line[:4] for line in cli.lines("status")]
    assert "ready (task paused)" in cli("runs").stdout
    assert json.loads(cli("runs", "--json").stdout)["runs"][0]["waits_for"] == ["task tests.one_step"]
    [why] = [line for line in cli.lines("show", run.id) if line[:2] == ["because", "paused"]]
    assert "stocktaking" in why[2]
    assert why[4].endswith(" task resume tests.one_step`")
    assert "task tests.one_step is paused by ann" in cli("doctor", status=None).stdout
    assert "goes on" in cli("task", "resume", "tests.one_step").stdout
    assert "is not paused" in cli("task", "resume", "tests.one_step").stdout
    assert json.loads(cli("status", "--json").stdout)["paused"] == []
    assert "no durable task named 'nonsense'" in one_line(cli("task", "pause", "nonsense", status=1))


def test_people_pause_a_queue_and_choose_the_runs_in_it(cli: Cli, conn: Connection) -> None:
    queue = cli.tasks.durable.queue_of("tests.one_step")
    kit.enqueue(conn, task="tests.one_step", queue=queue)
    kit.enqueue(conn, task="tests.one_step", queue="other")

    assert json.loads(cli("queue", "pause", queue, "--json").stdout) == {
        "queue": queue,
        "act": "pause",
        "changed": True,
    }
    assert json.loads(cli("cancel", "--queue", queue, "--dry-run", "--json").stdout)["chosen"] == 1
    assert json.loads(cli("pause", "--queue", queue, "--yes", "--actor", "ann", "--json").stdout)["done"] == 1
    assert [(act, actor) for act, run, actor, *_ in acts(conn) if run is not None] == [("pause", "ann")]
    assert "goes on" in cli("queue", "resume", queue).stdout
    assert "no task and no run has a queue" in one_line(cli("queue", "pause", "nowhere", status=1))
