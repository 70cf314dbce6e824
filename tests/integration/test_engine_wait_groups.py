"""Waits for the first, for all and for some of several facts and timers: one outcome, and the losers end with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, dying_at, in_thread, take_over
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.waitables import FactWait, Timer
from umt_durable.errors import DefinitionError, FactTimeoutError
from umt_durable.settings import Settings
from umt_durable.states import RunState


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def any_task(engine: Engine) -> str:
    """Register a task that waits for the first of three, then sleeps, and returns which it was."""

    @engine.task("any")
    def body(ctx: TaskContext) -> Any:
        won = ctx.step.wait_any({"paid": "paid", "gone": FactWait("gone", key="o1"), "late": Timer(timedelta(days=14))})
        ctx.step.sleep("nap", timedelta(minutes=5))
        return [won.label, won.payload, won.source]

    return "any"


def states(engine: Engine, run_id: str) -> dict[str, str]:
    return {wait.key: str(wait.state) for wait in engine.client.history(run_id).waits}


def go_on(engine: Engine, clock: Clock, run_id: str, task: str) -> Any:
    """Let the nap pass and return what the run returned."""
    engine.process().deliver(run_id, task)
    clock.advance(seconds=301)
    engine.timers()
    outcome = engine.process().deliver(run_id, task)
    assert isinstance(outcome, Finished), outcome
    return outcome.value


def test_i9_the_first_fact_of_any_wins_and_the_others_are_cancelled_with_it(
    engine: Engine, clock: Clock, any_task: str
) -> None:
    run_id, outcome = engine.run(any_task)
    assert isinstance(outcome, Parked)
    assert outcome.state is RunState.WAITING

    engine.client.emit("gone", "o1", "stolen")
    won = states(engine, run_id)
    engine.client.signal(run_id, "paid", 7)
    result = go_on(engine, clock, run_id, any_task)

    assert won == {
        "wait_any": "satisfied",
        "wait_any\\.paid": "cancelled",
        "wait_any\\.gone": "satisfied",
        "wait_any\\.late": "cancelled",
    }
    assert result == ["gone", "stolen", "fact"]
    assert states(engine, run_id) == won


def test_i9_a_timer_of_any_wins_for_good(engine: Engine, clock: Clock, any_task: str) -> None:
    run_id, _ = engine.run(any_task)
    clock.advance(timedelta(days=14, seconds=1))
    engine.timers()
    engine.client.signal(run_id, "paid", 7)
    engine.client.emit("gone", "o1")

    assert go_on(engine, clock, run_id, any_task) == ["late", None, "timer"]


def test_i8_of_several_facts_that_were_there_before_the_first_in_order_wins(
    engine: Engine, clock: Clock, any_task: str
) -> None:
    run_id = engine.start(any_task)
    engine.client.emit("gone", "o1", "stolen")
    engine.client.signal(run_id, "paid", 7)

    assert go_on(engine, clock, run_id, any_task) == ["paid", 7, "fact"]
    assert list(states(engine, run_id).values()).count("satisfied") == 2


def test_s10_facts_under_another_key_and_after_the_time_out_change_nothing(engine: Engine, clock: Clock) -> None:
    outcomes: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        try:
            won = ctx.step.wait_any([FactWait("paid", key="o1"), "gone"], timeout=timedelta(hours=1))
            outcomes.append(str(won.label))
        except FactTimeoutError:
            outcomes.append("time-out")
        ctx.step.sleep("nap", timedelta(minutes=5))

    run_id, _ = engine.run("t")
    engine.client.emit("paid", "o2")
    assert engine.state(run_id) is RunState.WAITING
    clock.advance(seconds=3601)
    engine.timers()
    engine.client.emit("paid", "o1")
    engine.client.signal(run_id, "gone")
    go_on(engine, clock, run_id, "t")

    assert outcomes == ["time-out", "time-out"]
    assert set(states(engine, run_id).values()) == {"timed_out", "cancelled"}


def test_i9_of_a_timer_and_the_time_out_the_one_due_first_counts_however_late_the_timers_look(
    engine: Engine, clock: Clock
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, timer: int, limit: int) -> Any:
        waits = [timedelta(hours=timer), timedelta(hours=timer + 1)]
        return ctx.step.wait_any(waits, timeout=timedelta(hours=limit)).label

    early, late = engine.start("t", 1, 5), engine.start("t", 6, 5)
    for run_id in (early, late):
        engine.process().deliver(run_id, "t")
    clock.advance(timedelta(hours=9))
    engine.timers()
    outcomes = [engine.process().deliver(run_id, "t") for run_id in (early, late)]

    assert [outcome.value for outcome in outcomes if isinstance(outcome, Finished)] == [0, None]
    assert list(states(engine, early).values()) == ["satisfied", "timed_out", "cancelled"]
    assert list(states(engine, late).values()) == ["timed_out", "cancelled", "cancelled"]
    assert "FactTimeoutError" in str(engine.client.get(late).error)


def test_all_gives_each_fact_by_its_label_and_wakes_the_run_once(engine: Engine, clock: Clock) -> None:
    passes: list[int] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        passes.append(1)
        found = ctx.step.wait_all({"b": "b", "a": "a", "pause": timedelta(minutes=1)})
        return [[label, fact.payload] for label, fact in found.items()]

    run_id, _ = engine.run("t")
    engine.client.signal(run_id, "a", 1)
    engine.client.signal(run_id, "b", 2)
    assert engine.state(run_id) is RunState.WAITING
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [["b", 2], ["a", 1], ["pause", None]]
    assert len(passes) == 2


def test_all_of_nothing_is_there_at_once(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return [ctx.step.wait_all([]), ctx.step.wait_all({})]

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [[], {}]


def test_quorum_gives_the_first_n_in_the_order_they_came(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        votes = ctx.step.wait_quorum(2, {"ann": "ann", "bob": "bob", "cid": "cid"}, timeout=timedelta(days=1))
        return [[vote.label, vote.payload] for vote in votes]

    run_id, _ = engine.run("t")
    engine.client.signal(run_id, "cid", True)
    engine.client.signal(run_id, "ann", False)
    engine.client.signal(run_id, "bob", True)
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [["cid", True], ["ann", False]]
    assert states(engine, run_id)["wait_quorum\\.bob"] == "cancelled"


def test_d13_the_check_of_a_part_is_asked_and_settles_the_group(engine: Engine, clock: Clock) -> None:
    rows: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        row = FactWait("booked", check=lambda: rows[:1])
        won = ctx.step.wait_any({"row": row, "gone": "gone"}, poll=timedelta(seconds=30))
        return [won.label, won.payload, won.source]

    run_id, _ = engine.run("t")
    rows.append("r1")
    clock.advance(seconds=31)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == ["row", ["r1"], "check"]
    assert states(engine, run_id)["wait_any\\.gone"] == "cancelled"


def test_several_timed_waits_in_a_row_each_have_their_own_deadline(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        limit = timedelta(minutes=10)
        return [ctx.step.wait_for_fact(f"f{number}", timeout=limit, default=0).source for number in range(3)]

    run_id, outcome = engine.run("t")
    for number in range(3):
        clock.advance(seconds=540)
        engine.timers()
        assert engine.state(run_id) is RunState.WAITING, number
        clock.advance(seconds=61)
        engine.timers()
        outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == ["default"] * 3


def test_rg10_the_run_is_due_at_the_earliest_of_all_parts(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        day, hour = timedelta(days=1), timedelta(hours=1)
        return ctx.step.wait_any({"day": day, "hour": hour, "fact": "fact"}, timeout=2 * day).label

    before = clock.now()
    run_id, _ = engine.run("t")
    due = engine.client.get(run_id).wake_at

    assert due is not None
    assert timedelta(minutes=59) < due - before < timedelta(minutes=61)


def test_i5_a_zombie_can_neither_register_nor_settle_a_group(engine: Engine, clock: Clock, conn: Connection) -> None:
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        ctx.step.run("before", gate.pass_through)
        return ctx.step.wait_any(["a", "b"]).label

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as zombie:
        gate.wait_reached()
        process.freeze()
        take_over(engine, clock)
        gate.open()
    assert engine.client.history(run_id).waits == []
    engine.process().deliver(run_id, "t")
    engine.client.signal(run_id, "b")
    outcome = engine.process().deliver(run_id, "t")

    assert "Dropped" in type(zombie[0]).__name__
    assert isinstance(outcome, Finished)
    assert outcome.value == 1


@pytest.mark.parametrize(
    "point", ["wait.key_lock.a", "wait.look.a", "wait.commit.b", "wait.commit.a", "wait.run_lock.a"]
)
def test_i8_a_crash_while_a_group_is_registered_or_parked_loses_nothing(
    engine: Engine, clock: Clock, point: str, any_task: str
) -> None:
    run_id, process = engine.start(any_task), engine.process()
    with dying_at(point), pytest.raises(KeyboardInterrupt):
        process.deliver(run_id, any_task)
    process.freeze()
    engine.client.emit("gone", "o1", 1)
    take_over(engine, clock)

    assert go_on(engine, clock, run_id, any_task) == ["gone", 1, "fact"]


def test_more_than_64_waits_none_and_impossible_numbers_are_refused_before_anything_is_written(engine: Engine) -> None:
    refused: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        calls: list[Any] = [
            lambda: ctx.step.wait_any([f"f{number}" for number in range(65)]),
            lambda: ctx.step.wait_any([]),
            lambda: ctx.step.wait_quorum(3, ["a", "b"]),
            lambda: ctx.step.wait_quorum(0, ["a", "b"]),
            lambda: ctx.step.wait_any({"x": 7}),  # type: ignore[dict-item]
            lambda: ctx.step.wait_any("abc"),
            lambda: ctx.step.wait_all([FactWait("umt.cancel")]),
            lambda: ctx.step.wait_all([timedelta(seconds=-1)]),
        ]
        for call in calls:
            try:
                call()
            except DefinitionError as error:
                refused.append(str(error))

    run_id, _ = engine.run("t")

    assert len(refused) == 8, refused
    assert "65 waits" in refused[0]
    assert engine.client.history(run_id).waits == []


def test_another_group_on_replay_is_no_determinism(engine: Engine) -> None:
    names = ["a", "b"]

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return ctx.step.wait_any(list(names)).label

    run_id, _ = engine.run("t")
    names[1] = "c"
    engine.client.signal(run_id, "b")
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Parked)
    assert outcome.state is RunState.QUARANTINED


def test_a_cancel_ends_a_group_and_its_parts(engine: Engine, any_task: str) -> None:
    run_id, _ = engine.run(any_task)
    engine.client.cancel(run_id)

    assert engine.state(run_id) is RunState.CANCELLED
    assert set(states(engine, run_id).values()) == {"cancelled"}


def test_i23_groups_over_the_same_addresses_in_opposite_order_do_not_deadlock(engine: Engine) -> None:
    before = telemetry.snapshot()[telemetry.Counter.SYSTEM_RETRY]
    names = [f"n{number}" for number in range(8)]

    @engine.task("t")
    def body(ctx: TaskContext, back: bool) -> Any:
        order = names[::-1] if back else names
        return ctx.step.wait_all([FactWait(name, key="k") for name in order])[0].payload

    runs = [engine.start("t", bool(number % 2)) for number in range(8)]
    processes = [engine.process() for _ in range(2)]

    def work(share: list[str], process: Any) -> None:
        for run_id in share:
            process.deliver(run_id, "t")

    with in_thread(lambda: work(runs[::2], processes[0])), in_thread(lambda: work(runs[1::2], processes[1])):
        for name in names:
            engine.client.emit(name, "k", name)
    engine.route()
    for run_id in runs:
        if engine.state(run_id) is RunState.READY:
            engine.process().deliver(run_id, "t")

    assert {engine.state(run_id) for run_id in runs} == {RunState.SUCCEEDED}
    assert telemetry.snapshot()[telemetry.Counter.SYSTEM_RETRY] == before
