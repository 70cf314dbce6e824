"""What bodies say of how far they are: for people, and for the next execution of a step that was cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, in_thread, take_over
from tests.support.wait import until
from umt_durable.database import Connection, Database
from umt_durable.engine.async_context import AsyncTaskContext
from umt_durable.engine.context import TaskContext, current_context
from umt_durable.engine.outcomes import Dropped, Finished, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import DecodingError, DefinitionError, DurableError, EncodingError
from umt_durable.records import Note, Progress
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import progress
from umt_durable.store.guard import Guard

TRIES = RetryPolicy(max_attempts=3, initial=timedelta(milliseconds=1), jitter=0.0)
HOURLY = RetryPolicy(max_attempts=2, initial=timedelta(hours=1), maximum=timedelta(hours=1), jitter=0.0)


class Place(BaseModel):
    """Where an import stands."""

    line: int


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def said(engine: Engine, run_id: str) -> Progress | None:
    """Return what the body of a run has said, as `get` gives it."""
    return engine.client.get(run_id).progress


def test_what_a_body_says_is_seen_while_it_runs_and_after_it_has_ended(engine: Engine) -> None:
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.set_status("reading the file")
        ctx.progress(3, 12)
        ctx.step.run("read", gate.pass_through)
        ctx.progress(12.0, 12)

    run_id = engine.start("t")
    assert said(engine, run_id) is None
    with in_thread(lambda: engine.process().deliver(run_id, "t")) as outcome:
        gate.wait_reached()
        until(lambda: said(engine, run_id) is not None, what="what the body says to be written")
        seen = engine.client.get(run_id).progress
        gate.open()
    assert isinstance(outcome[0], Finished)
    assert seen is not None
    assert (seen.status, seen.done, seen.total) == ("reading the file", 3.0, 12.0)
    [last] = engine.client.list(task="t")
    assert last.progress is not None
    assert (last.progress.status, last.progress.done, last.progress.total) == ("reading the file", 12.0, 12.0)


def test_a_status_said_before_a_park_is_there_once_the_run_is_parked_and_can_be_taken_back(
    engine: Engine, clock: Clock
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.set_status("waiting for the bank, password=hunter2")
        ctx.step.sleep("nap", timedelta(hours=1))
        ctx.set_status(None)
        ctx.progress(1)

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    parked = said(engine, run_id)
    assert parked is not None
    assert parked.status == "waiting for the bank, password=***"
    clock.advance(seconds=3601)
    engine.timers()
    assert isinstance(engine.process().deliver(run_id, "t"), Finished)
    ended = said(engine, run_id)
    assert ended is not None
    assert (ended.status, ended.done, ended.total) == (None, 1.0, None)


def test_the_next_execution_of_a_step_that_was_cut_off_goes_on_from_its_last_heartbeat(
    engine: Engine, clock: Clock
) -> None:
    gate, found = Gate(), []

    def read_lines(ctx: TaskContext) -> int:
        found.append(ctx.last_heartbeat(Place))
        ctx.heartbeat(Place(line=40).model_dump())
        return gate.pass_through(40)

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.run("read", lambda: read_lines(ctx))

    run_id = engine.start("t")
    first = engine.process()
    with in_thread(lambda: first.deliver(run_id, "t")) as outcome:
        gate.wait_reached()
        until(lambda: engine.client.history(run_id).progress, what="the heartbeat to be written")
        first.freeze()
        take_over(engine, clock)
        with in_thread(lambda: engine.process().deliver(run_id, "t")) as second:
            until(lambda: len(found) == 2, what="the step to be entered again")
            gate.open()
    assert found == [None, Place(line=40)]
    assert isinstance(second[0], Finished)
    assert isinstance(outcome[0], Dropped)  # the frozen one was fenced


def test_i5_what_a_zombie_says_is_not_kept(engine: Engine, conn: Connection, clock: Clock) -> None:
    gate, tokens = Gate(), []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        tokens.append(ctx._pass.attempt.token)
        ctx.step.run("read", gate.pass_through)
        ctx.step.sleep("nap", timedelta(hours=1))

    run_id, zombie = engine.start("t"), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")):
        gate.wait_reached()
        assert progress.note(Guard(conn, tokens[0]), [Note("", 1, status="the owner's")])
        zombie.freeze()
        take_over(engine, clock)
        assert not progress.note(Guard(conn, tokens[0]), [Note("", 2, status="the zombie's")])
        gate.open()
    kept = said(engine, run_id)
    assert kept is not None
    assert kept.status == "the owner's"


def test_what_cannot_be_written_costs_the_run_nothing(
    engine: Engine, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        conn.execute(f'ALTER TABLE "{conn.schema}".progress RENAME COLUMN turn TO gone'.encode())
        ctx.set_status("never kept")
        ctx.step.run("one", lambda: 1)
        return "done"

    with caplog.at_level("WARNING"):
        run_id = engine.start("t")
        outcome = engine.process().deliver(run_id, "t")
    assert isinstance(outcome, Finished)
    assert outcome.value == "done"
    assert "what a body says of how far it is could not be kept" in caplog.text or "what a body said" in caplog.text


def test_a_status_that_looks_like_a_sealed_one_is_shown_as_it_was_said(engine: Engine, conn: Connection) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.set_status("sealed:parcel 7")

    run_id, _ = engine.run("t")
    kept = said(engine, run_id)
    assert kept is not None
    assert kept.status == " sealed:parcel 7"
    conn.execute(f'SELECT * FROM "{conn.schema}".payload_keys'.encode())


def test_i24_a_note_that_arrives_late_or_twice_overwrites_nothing_newer(engine: Engine, conn: Connection) -> None:
    seen: list[Any] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        guard = Guard(conn, ctx._pass.attempt.token)
        older, newer = Note("", 1, status="older"), Note("", 2, done=4.0, total=8.0)
        seen.append([progress.note(guard, notes) for notes in ([newer], [older], [newer], [])])

    run_id, _ = engine.run("t")
    assert seen == [[True, False, False, False]]
    kept = said(engine, run_id)
    assert kept is not None
    assert (kept.status, kept.done, kept.total) == (None, 4.0, 8.0)


def test_a_step_that_is_tried_again_has_the_heartbeat_of_the_try_before_and_a_finished_one_leaves_none(
    engine: Engine,
) -> None:
    found: list[Any] = []

    def flaky(ctx: TaskContext) -> int:
        found.append(ctx.last_heartbeat())
        ctx.heartbeat(len(found))
        ctx.heartbeat()
        if len(found) < 3:
            raise ConnectionError("the line is bad")
        return len(found)

    @engine.task("t", retry=TRIES)
    def body(ctx: TaskContext) -> Any:
        ctx.step.run("read", lambda: flaky(ctx))
        return ctx.step.run("read again", ctx.last_heartbeat)

    _, outcome = engine.run("t")
    assert isinstance(outcome, Finished)
    assert (found, outcome.value) == ([None, 1, 2], None)


def test_a_body_without_steps_goes_on_from_its_last_heartbeat(engine: Engine, clock: Clock) -> None:
    @engine.task("t", retry=HOURLY)
    def body(ctx: TaskContext) -> list[int]:
        last = ctx.last_heartbeat(list[int])
        ctx.heartbeat([7])
        if last is None:
            raise ConnectionError("the line is bad")
        return last

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    clock.advance(seconds=3601)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")
    assert isinstance(outcome, Finished)
    assert outcome.value == [7]


def test_i11_a_heartbeat_leaves_a_step_whose_run_was_cancelled(engine: Engine) -> None:
    gate, after = Gate(), []

    def long(ctx: TaskContext) -> None:
        gate.pass_through()
        until(ctx.abort.is_set, what="the cancel to be seen")
        ctx.heartbeat(1)
        after.append("the step went on")

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("long", lambda: long(ctx))

    run_id = engine.start("t")
    with in_thread(lambda: engine.process().deliver(run_id, "t")) as outcome:
        gate.wait_reached()
        engine.client.cancel(run_id)
        gate.open()
    assert isinstance(outcome[0], Finished)
    assert outcome[0].state is RunState.CANCELLED
    assert after == []


def test_an_async_body_and_its_coroutines_say_and_ask_the_same(engine: Engine) -> None:
    found: list[Any] = []

    async def read(ctx: AsyncTaskContext) -> int:
        found.append(await ctx.last_heartbeat())
        ctx.heartbeat(len(found))
        with pytest.raises(DurableError, match=r"await ctx\.last_heartbeat"):
            current_context().last_heartbeat()
        if len(found) < 2:
            raise ConnectionError("the line is bad")
        return len(found)

    @engine.task("t", retry=TRIES)
    async def body(ctx: AsyncTaskContext) -> int:
        ctx.set_status("reading")
        return await ctx.step.options(key="a").run("read", read, ctx)

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Finished)
    assert found == [None, 1]
    kept = said(engine, run_id)
    assert kept is not None
    assert kept.status == "reading"


def test_what_was_said_in_an_earlier_generation_is_gone(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, turn: int) -> Any:
        if turn:
            return ctx.last_heartbeat()
        ctx.heartbeat("from the first")
        return ctx.continue_as_new(1)

    run_id, _ = engine.run("t", 0)
    outcome = engine.process().deliver(run_id, "t")
    assert isinstance(outcome, Finished)
    assert outcome.value is None
    assert engine.client.history(run_id).progress == []


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda ctx: ctx.set_status(7), DefinitionError, "status must be text, not int"),
        (lambda ctx: ctx.set_status("x" * 256), DefinitionError, "at most|0 to 255 characters"),
        (lambda ctx: ctx.set_status("nul\0"), DefinitionError, "status holds a NUL"),
        (lambda ctx: ctx.progress("3"), DefinitionError, "progress: done must be a number from 0 on, not '3'"),
        (lambda ctx: ctx.progress(-1), DefinitionError, "done must be a number from 0 on"),
        (lambda ctx: ctx.progress(True), DefinitionError, "done must be a number from 0 on"),
        (lambda ctx: ctx.progress(10**400), DefinitionError, "done must be a number from 0 on"),
        (lambda ctx: ctx.progress(1, float("nan")), DefinitionError, "total must be a number from 0 on, not nan"),
        (lambda ctx: ctx.heartbeat(object()), EncodingError, "the progress of a heartbeat"),
        (lambda ctx: (ctx.heartbeat("seven"), ctx.last_heartbeat(int)), DecodingError, "int"),
    ],
)
def test_what_cannot_be_kept_is_refused_where_it_is_said(
    engine: Engine, call: Callable[[TaskContext], Any], error: type[Exception], says: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        with pytest.raises(error, match=says):
            call(ctx)
        return "went on"

    _, outcome = engine.run("t")
    assert isinstance(outcome, Finished)
    assert outcome.value == "went on"
