"""Maps: many items, few statements, each result recorded once and in its place, whatever dies in between."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, dying_at, enter, in_thread, take_over
from umt_durable import sql
from umt_durable.database import Database
from umt_durable.engine import fan
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.parallel import ItemFailure
from umt_durable.engine.retry import RetryPolicy
from umt_durable.settings import Settings
from umt_durable.states import RunState, StepState
from umt_durable.store import journal


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the statements of the package by name."""
    counted: Counter[str] = Counter()
    execute = sql._execute

    def counting(conn: Any, name: str, arity: str, params: dict[str, Any]) -> Any:
        counted[name] += 1
        return execute(conn, name, arity, params)

    monkeypatch.setattr(sql, "_execute", counting)
    return counted


def value(outcome: object) -> Any:
    assert isinstance(outcome, Finished), outcome
    return outcome.value


def deliver(engine: Engine, run_id: str) -> Any:
    return engine.process().deliver(run_id, "t")


def test_results_are_in_item_order_and_typed_and_each_item_is_an_entry(engine: Engine) -> None:
    first = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def pick(item: int) -> UUID:
            if item == 0:
                first.pass_through()
            if item == 3:
                first.open()
            return UUID(int=item)

        found = ctx.step.map("pick", pick, range(4), key=lambda item: f"k{item}")
        assert all(isinstance(one, UUID) for one in found)
        return [one.int for one in found]

    run_id, outcome = engine.run("t")

    assert value(outcome) == [0, 1, 2, 3]
    assert {step.key for step in engine.client.history(run_id).steps} == {f"pick[k{number}]" for number in range(4)}


def test_i6_ten_thousand_items_take_few_commits_and_one_read_of_the_journal(
    database: Database, settings: Settings, clock: Clock, statements: Counter[str]
) -> None:
    # The lease of the other tests is so short that it can be lost while a busy machine computes in all threads.
    engine = Engine(database, replace(settings, lease_seconds=60.0))
    bodies: Counter[int] = Counter()

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        def square(item: int) -> int:
            bodies[item] += 1
            return item * item

        found = ctx.step.map("square", square, range(10_000), key=int)
        assert found == [item * item for item in range(10_000)]
        ctx.step.sleep("nap", timedelta(minutes=1))
        return sum(found)

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    first = Counter(statements)
    clock.advance(seconds=61)
    engine.timers()
    statements.clear()

    assert value(deliver(engine, run_id)) == sum(item * item for item in range(10_000))
    assert set(bodies.values()) == {1}
    assert len(bodies) == 10_000
    assert first["commit_steps"] <= 1_000, first
    assert first["commit_step"] == 0
    assert statements["read_journal"] == 1
    assert statements["commit_steps"] == statements["start_step"] == 0
    engine.close()


@pytest.mark.parametrize("point", ["items.commit.b", "items.commit.a", "step.body.b", "step.body.a"])
def test_i6_a_crash_repeats_only_items_whose_result_was_not_committed(
    engine: Engine, clock: Clock, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan, "BATCH", 10)
    bodies: list[int] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return ctx.step.map("m", lambda item: enter(bodies, item, item), range(100), key=int, concurrency=4)

    run_id, process = engine.start("t"), engine.process()
    with dying_at(point, nth=3), pytest.raises(KeyboardInterrupt):
        process.deliver(run_id, "t")
    done = {step.key for step in engine.client.history(run_id).steps if step.state is StepState.DONE}
    before = len(bodies)
    process.freeze()
    take_over(engine, clock)

    assert value(deliver(engine, run_id)) == list(range(100))
    again = [f"m[{item}]" for item in bodies[before:]]
    assert done.isdisjoint(again)
    assert len(again) == 100 - len(done)


def test_i5_a_zombies_items_are_refused_and_done_again_by_the_next_owner(engine: Engine, clock: Clock) -> None:
    gate = Gate()
    bodies: list[int] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return ctx.step.map("m", lambda item: enter(bodies, item, gate.pass_through(item)), range(20), key=int)

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as zombie:
        gate.wait_reached()
        process.freeze()
        take_over(engine, clock)
        gate.open()

    assert not isinstance(zombie[0], Finished)
    assert all(step.state != "done" for step in engine.client.history(run_id).steps)
    before = len(bodies)
    assert value(deliver(engine, run_id)) == list(range(20))
    assert sorted(bodies[before:]) == list(range(20))


def test_i24_a_batch_whose_reply_was_lost_is_looked_up_and_repeated_without_effect(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    bodies: list[int] = []
    commit_many = journal.commit_many
    lost: list[int] = []

    def losing(guard: Any, outcomes: Any) -> Any:
        reply = commit_many(guard, outcomes)
        if len(lost) < 2:
            lost.append(len(outcomes))
            raise psycopg.OperationalError("the connection is lost")
        return reply

    monkeypatch.setattr(journal, "commit_many", losing)

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return ctx.step.map("m", lambda item: enter(bodies, item, item), range(50), key=int)

    run_id, outcome = engine.run("t")

    assert value(outcome) == list(range(50))
    assert len(lost) == 2
    assert sorted(bodies) == list(range(50))
    assert engine.client.history(run_id).attempts[0].fence == 1


def test_replay_with_other_items_executes_the_new_ones_only(engine: Engine, clock: Clock) -> None:
    items = ["a", "b", "c"]
    bodies: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        found = ctx.step.map("m", lambda item: enter(bodies, item, item.upper()), list(items), key=str)
        ctx.step.sleep("nap", timedelta(minutes=1))
        return found

    run_id, _ = engine.run("t")
    items[:] = ["d", "c", "a"]
    clock.advance(seconds=61)
    engine.timers()

    assert value(deliver(engine, run_id)) == ["D", "C", "A"]
    assert sorted(bodies) == ["a", "b", "c", "d"]


def test_the_same_key_with_another_item_is_no_determinism(engine: Engine, clock: Clock) -> None:
    items = [1, 2]

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        ctx.step.map("m", lambda item: item, list(items), key=lambda item: item % 10)
        ctx.step.sleep("nap", timedelta(minutes=1))

    run_id, _ = engine.run("t")
    items[1] = 12
    clock.advance(seconds=61)
    engine.timers()
    deliver(engine, run_id)

    assert engine.state(run_id) is RunState.QUARANTINED


def test_a_failing_item_is_named_and_no_further_one_is_begun(engine: Engine) -> None:
    bodies: list[int] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def one(item: int) -> int:
            bodies.append(item)
            if item == 2:
                raise LookupError(f"no {item}")
            return item

        try:
            ctx.step.map("m", one, range(100), key=int, concurrency=1)
        except LookupError as error:
            return [str(error), *error.__notes__]

    run_id, outcome = engine.run("t")

    assert value(outcome) == ["no 2", "in 2 of step.map 'm'"]
    assert bodies == [0, 1, 2]
    assert len(engine.client.history(run_id).steps) == 3


def test_the_same_failure_is_raised_on_replay_of_several(engine: Engine, clock: Clock) -> None:
    barrier = threading.Barrier(3)
    raised: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def one(item: int) -> int:
            barrier.wait(20)
            raise LookupError(f"no {item}")

        try:
            ctx.step.map("m", one, range(3), key=int)
        except LookupError as error:
            raised.append(str(error))
        ctx.step.sleep("nap", timedelta(minutes=1))

    run_id, _ = engine.run("t")
    clock.advance(seconds=61)
    engine.timers()
    deliver(engine, run_id)

    assert raised == ["no 0", "no 0"]


def test_collect_keeps_going_and_the_failures_stand_in_their_places(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def one(item: int) -> int:
            if item % 2:
                raise LookupError(f"no {item}")
            return item

        found = ctx.step.map("m", one, range(4), key=int, on_error="collect")
        ctx.step.sleep("nap", timedelta(minutes=1))
        return [f"{one.key}: {one.error}" if isinstance(one, ItemFailure) else one for one in found]

    run_id, _ = engine.run("t")
    clock.advance(seconds=61)
    engine.timers()

    assert value(deliver(engine, run_id)) == [0, "1: no 1", 2, "3: no 3"]


def test_an_item_that_has_to_wait_for_its_next_try_keeps_no_other_from_ending(engine: Engine, clock: Clock) -> None:
    tries: Counter[int] = Counter()

    @engine.task("t", retry=RetryPolicy(2, initial=timedelta(minutes=5), maximum=timedelta(minutes=5)))
    def body(ctx: TaskContext) -> Any:
        def one(item: int) -> int:
            tries[item] += 1
            if item == 0 and tries[item] == 1:
                raise OSError("try again")
            return item

        return ctx.step.map("m", one, range(20), key=int, concurrency=2)

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    assert outcome.state is RunState.RETRYING
    assert sum(step.state == "done" for step in engine.client.history(run_id).steps) == 19
    clock.advance(seconds=301)
    engine.timers()

    assert value(deliver(engine, run_id)) == list(range(20))
    assert tries == Counter(dict.fromkeys(range(20), 1) | {0: 2})


def test_items_have_the_retries_and_the_preemption_that_are_chosen_for_them(engine: Engine) -> None:
    tries: Counter[int] = Counter()

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        async def one(item: int) -> int:
            tries[item] += 1
            if tries[item] == 1:
                raise OSError("try again")
            return item

        quick = RetryPolicy(2, initial=timedelta(milliseconds=1))
        return ctx.step.options(retry=quick, preemptible=True).map("m", one, range(3), key=int)

    assert value(engine.run("t")[1]) == [0, 1, 2]
    assert tries == Counter({0: 2, 1: 2, 2: 2})


def test_no_more_items_or_branches_are_executed_at_once_than_was_asked_for(engine: Engine) -> None:
    lock, going, most = threading.Lock(), [0], [0]
    all_there = threading.Barrier(3)

    def one(item: int) -> int:
        with lock:
            going[0] += 1
            most[0] = max(most[0], going[0])
        all_there.wait(30)  # three at once, or none goes on
        with lock:
            going[0] -= 1
        all_there.wait(30)
        return item

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        items = ctx.step.map("m", one, range(6), key=int, concurrency=3)
        branches = ctx.step.parallel({str(n): partial(one, n) for n in range(6)}, concurrency=3)
        return [items, list(branches.values())]

    assert value(engine.run("t")[1]) == [list(range(6)), list(range(6))]
    assert most[0] == 3


def test_items_know_their_own_idempotency_key_and_may_not_call_steps(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def one(item: int) -> str:
            if item == 1:
                ctx.step.run("inner", lambda: 1)
            return ctx.idempotency_key

        found = ctx.step.map("m", one, range(3), key=int, on_error="collect")
        return [one if isinstance(one, str) else str(one.error) for one in found]

    keys = value(engine.run("t")[1])

    assert len({keys[0], keys[2]}) == 2
    assert "call them from the task's body" in keys[1]


def test_a_result_that_cannot_be_stored_fails_its_item_alone(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        found = ctx.step.map("m", lambda item: object() if item else 1, range(2), key=int, on_error="collect")
        failure = found[1]
        assert isinstance(failure, ItemFailure)
        return [found[0], type(failure.error).__name__, "m[1]" in str(failure.error)]

    assert value(engine.run("t")[1]) == [1, "EncodingError", True]


def test_i23_the_body_and_its_items_never_use_more_connections_than_the_pool_has(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        barrier = threading.Barrier(20)

        def one(item: int) -> int:
            barrier.wait(30)
            return ctx.step.run("step", lambda: item)

        return sum(ctx.step.parallel({str(number): (one, number) for number in range(20)}).values())

    assert value(engine.run("t")[1]) == sum(range(20))
