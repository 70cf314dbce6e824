"""Sleeps and waits for facts: parked, and ended once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.errors import (
    FactTimeoutError,
)
from umt_durable.settings import Settings
from umt_durable.states import RunState


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def test_code_that_catches_every_exception_cannot_swallow_a_suspension(engine: Engine, clock: Clock) -> None:
    swallowed: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        try:
            ctx.step.sleep("nap", timedelta(minutes=1))
        except Exception:  # noqa: BLE001 - what user code does
            swallowed.append("exception")
        return ctx.step.run("after", lambda: "slept")

    @engine.task("greedy")
    def greedy(ctx: TaskContext) -> str:
        try:
            ctx.step.sleep("nap", timedelta(minutes=1))
        except BaseException:  # noqa: BLE001 - what reckless user code does
            swallowed.append("base")
        try:
            ctx.step.run("after", lambda: swallowed.append("entered"))
        except BaseException:  # noqa: BLE001
            swallowed.append("again")
        return "not slept"

    run_id, outcome = engine.run("t")
    greedy_id, greedy_outcome = engine.run("greedy")

    assert isinstance(outcome, Parked)
    assert isinstance(greedy_outcome, Parked)
    assert swallowed == ["base", "again"]
    assert engine.state(run_id) is engine.state(greedy_id) is RunState.SLEEPING


def test_i10_a_sleep_ends_at_the_time_fixed_once_by_the_database(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.sleep("nap", timedelta(hours=1))

    run_id, _ = engine.run("t")
    due = engine.client.get(run_id).wake_at
    clock.advance(seconds=3590)
    engine.timers()

    assert engine.state(run_id) is RunState.SLEEPING
    assert engine.client.get(run_id).wake_at == due
    clock.advance(seconds=11)
    engine.timers()
    assert engine.state(run_id) is RunState.READY


def test_sleep_until_a_moment_that_has_passed_does_not_park(engine: Engine, clock: Clock) -> None:
    past, future = clock.now() - timedelta(minutes=1), clock.now() + timedelta(hours=1)

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.sleep_until("past", past)
        ctx.step.sleep_until("future", future)

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Parked)
    assert engine.client.get(run_id).wake_at == future


def test_a_fact_before_the_wait_and_one_after_it_both_end_it(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return ctx.step.wait_for_fact("approved").payload

    early, late = engine.start("t"), engine.start("t")
    engine.client.signal(early, "approved", {"by": "ann"})
    assert isinstance(engine.process().deliver(late, "t"), Parked)
    engine.client.signal(late, "approved", {"by": "bob"})

    first, second = engine.process().deliver(early, "t"), engine.process().deliver(late, "t")

    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert (first.value, second.value) == ({"by": "ann"}, {"by": "bob"})


def test_i9_d13_a_time_out_is_recorded_and_a_late_fact_does_not_change_it(engine: Engine, clock: Clock) -> None:
    outcomes: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        try:
            ctx.step.wait_for_fact("approved", timeout=timedelta(days=14))
            outcomes.append("fact")
        except FactTimeoutError:
            outcomes.append("timeout")
        ctx.step.sleep("nap", timedelta(minutes=5))
        return outcomes[-1]

    run_id, _ = engine.run("t")
    clock.advance(timedelta(days=15))
    engine.timers()
    engine.process().deliver(run_id, "t")
    engine.client.signal(run_id, "approved")
    clock.advance(seconds=301)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcomes == ["timeout", "timeout"]


def test_d13_a_check_that_is_true_ends_the_wait_and_is_recorded(engine: Engine, clock: Clock) -> None:
    answers = iter([None, {"row": 7}])
    asked: list[int] = []

    def check() -> Any:
        asked.append(1)
        return next(answers)

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        fact = ctx.step.wait_for_fact("booked", check=check, poll=timedelta(seconds=30))
        ctx.step.sleep("nap", timedelta(minutes=1))
        return [fact.payload, fact.source]

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    assert outcome.state is RunState.WAITING
    clock.advance(seconds=31)
    engine.timers()
    engine.process().deliver(run_id, "t")
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [{"row": 7}, "check"]
    assert len(asked) == 2


def test_emit_wakes_every_run_that_waits_for_the_key_and_no_other(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, order: str) -> Any:
        return ctx.step.wait_for_fact("paid", key=order).payload

    a, b, other = engine.start("t", "o1"), engine.start("t", "o1"), engine.start("t", "o2")
    for run_id in (a, b, other):
        engine.process().deliver(run_id, "t")

    engine.client.emit("paid", "o1", 42)

    assert [engine.state(run_id) for run_id in (a, b, other)] == [RunState.READY, RunState.READY, RunState.WAITING]
