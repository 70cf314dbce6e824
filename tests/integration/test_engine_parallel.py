"""Branches of a body: each parks for itself, the run parks when all have, and replay knows what each has done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, dying_at, enter, in_thread, take_over
from tests.support.wait import until
from umt_durable.database import Database
from umt_durable.engine.async_context import AsyncTaskContext
from umt_durable.engine.context import TaskContext, current_context
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.parallel import ItemFailure
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import DefinitionError
from umt_durable.settings import Settings
from umt_durable.states import RunState


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def value(outcome: object) -> Any:
    assert isinstance(outcome, Finished), outcome
    return outcome.value


def deliver(engine: Engine, run_id: str) -> Any:
    return engine.process().deliver(run_id, "t")


def entries(engine: Engine, run_id: str) -> dict[str, str]:
    return {step.key: f"{step.kind} {step.state}" for step in engine.client.history(run_id).steps}


def test_branches_run_at_the_same_time_and_their_results_are_typed_by_label(engine: Engine) -> None:
    barrier = threading.Barrier(2)

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def left() -> tuple[int, int]:
            barrier.wait(20)
            return ctx.step.run("load", lambda: 1), ctx.step.run("load", lambda: 2)

        def right(factor: int) -> int:
            barrier.wait(20)
            return ctx.step.run("load", lambda: 3) * factor

        found = ctx.step.parallel({"left": left, "right": (right, 10)})
        assert found["left"] == (1, 2)
        return found["right"]

    run_id, outcome = engine.run("t")

    assert value(outcome) == 30
    assert entries(engine, run_id) == {
        "parallel[left]": "branch done",
        "parallel[left]/load": "run done",
        "parallel[left]/load#2": "run done",
        "parallel[right]": "branch done",
        "parallel[right]/load": "run done",
    }


def test_g1_one_fact_ends_every_wait_of_a_run_for_its_name(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def waits() -> Any:
            return ctx.step.wait_for_fact("answer").payload

        found = ctx.step.parallel({"left": waits, "right": waits, "pair": (ctx.step.wait_all, ["answer", "word"])})
        return [found["left"], found["right"], [fact.payload for fact in found["pair"]]]

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    engine.client.signal(run_id, "answer", "yes")
    assert isinstance(deliver(engine, run_id), Parked)
    assert [wait.state for wait in engine.client.history(run_id).waits if wait.name == "answer"] == ["satisfied"] * 3
    engine.client.signal(run_id, "word", "said")

    assert value(deliver(engine, run_id)) == ["yes", "yes", ["yes", "said"]]


def test_rg10_the_run_parks_when_all_branches_are_parked_until_the_earliest_is_due(
    engine: Engine, clock: Clock
) -> None:
    done: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def nap(minutes: int) -> int:
            ctx.step.sleep("nap", timedelta(minutes=minutes))
            return ctx.step.run("woke", lambda: enter(done, f"nap {minutes}", minutes))

        def answer() -> Any:
            return ctx.step.wait_for_fact("answer", timeout=timedelta(hours=2), default="none").payload

        calls: dict[str, Any] = {"short": (nap, 5), "long": (nap, 60), "fact": answer}
        found = ctx.step.parallel({**calls, "work": (ctx.step.run, "work", lambda: enter(done, "work", 0))})
        return list(found.values())

    before = clock.now()
    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    assert outcome.state is RunState.WAITING
    due = engine.client.get(run_id).wake_at
    assert due is not None
    assert timedelta(minutes=4) < due - before < timedelta(minutes=6)
    for minutes in (5, 56):
        clock.advance(timedelta(minutes=minutes))
        engine.timers()
        assert isinstance(deliver(engine, run_id), Parked)
    engine.client.signal(run_id, "answer", "yes")

    assert value(deliver(engine, run_id)) == [5, 60, "yes", 0]
    assert done == ["work", "nap 5", "nap 60"]


def test_a_branch_that_is_parked_goes_on_while_another_still_works(engine: Engine) -> None:
    gate = Gate()
    order: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def works() -> None:
            ctx.step.run("works", gate.pass_through)
            order.append("works")

        def waits() -> None:
            ctx.step.wait_for_fact("go", timeout=timedelta(days=1))
            order.append("waits")
            gate.open()

        ctx.step.parallel({"works": works, "waits": waits})

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as outcome:
        gate.wait_reached()
        # What is said while the wait is being registered is left to a router.
        until(lambda: bool(engine.client.history(run_id).waits), what="the wait of a branch")
        engine.client.signal(run_id, "go")
        engine.route()
    assert isinstance(outcome[0], Finished), outcome

    assert order == ["waits", "works"]


def test_a_wait_of_a_parked_branch_times_out_while_another_works(engine: Engine) -> None:
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def waits() -> Any:
            found = ctx.step.wait_for_fact("go", timeout=timedelta(seconds=1), default="late").payload
            gate.open()
            return found

        return ctx.step.parallel({"works": lambda: ctx.step.run("works", gate.pass_through), "waits": waits})["waits"]

    _, outcome = engine.run("t")

    assert value(outcome) == "late"


def test_branches_in_branches_and_maps_in_branches(engine: Engine, clock: Clock) -> None:
    bodies: list[Any] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def outer(name: str) -> list[int]:
            def inner(number: int) -> int:
                ctx.step.sleep("nap", timedelta(minutes=number + 1))
                return ctx.step.run("step", lambda: enter(bodies, f"{name}{number}", number))

            found = ctx.step.parallel({str(number): (inner, number) for number in range(2)}, name="inner")
            return [
                *found.values(),
                *ctx.step.map("items", lambda item: enter(bodies, f"{name}i", item), [7, 8], key=int),
            ]

        return list(ctx.step.parallel({"a": (outer, "a"), "b": (outer, "b")}).values())

    run_id, outcome = engine.run("t")
    while isinstance(outcome, Parked):
        clock.advance(timedelta(minutes=1, seconds=1))
        engine.timers()
        outcome = deliver(engine, run_id)

    assert value(outcome) == [[0, 1, 7, 8], [0, 1, 7, 8]]
    assert sorted(bodies) == sorted(["a0", "a1", "b0", "b1", "ai", "ai", "bi", "bi"])
    assert "parallel[a]/inner[0]/nap" in entries(engine, run_id)
    assert "parallel[b]/items[7]" in entries(engine, run_id)


def test_i6_replay_with_the_branches_in_another_order_gives_each_its_own(engine: Engine, clock: Clock) -> None:
    bodies: list[str] = []
    order = ["a", "b", "c"]

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def one(name: str) -> str:
            found = ctx.step.run("load", lambda: enter(bodies, name, name))
            ctx.step.sleep("nap", timedelta(minutes=5))
            return found

        return ctx.step.parallel({name: (one, name) for name in order})

    run_id, _ = engine.run("t")
    order.reverse()
    clock.advance(seconds=301)
    engine.timers()

    assert value(deliver(engine, run_id)) == {"a": "a", "b": "b", "c": "c"}
    assert sorted(bodies) == ["a", "b", "c"]


def test_a_failing_branch_names_itself_is_recorded_and_those_in_flight_end(engine: Engine, clock: Clock) -> None:
    bodies: list[str] = []
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def fails() -> None:
            gate.wait_reached()
            bodies.append("fails")
            gate.open()
            raise ValueError("no stock")

        def works() -> int:
            return enter(bodies, "works", gate.pass_through(1))

        def sleeps() -> None:
            ctx.step.sleep("nap", timedelta(days=1))

        try:
            ctx.step.parallel({"works": works, "fails": fails, "sleeps": sleeps})
        except ValueError as error:
            ctx.step.sleep("nap", timedelta(minutes=5))
            return [str(error), *error.__notes__]
        return "no error"

    run_id, _ = engine.run("t")
    clock.advance(seconds=301)
    engine.timers()

    assert value(deliver(engine, run_id)) == ["no stock", "in 'fails' of step.parallel 'parallel'"]
    assert sorted(bodies) == ["fails", "works"]
    assert entries(engine, run_id)["parallel[fails]"] == "branch failed"
    assert entries(engine, run_id)["parallel[works]"] == "branch done"


def test_collect_gives_results_and_failures(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def fails() -> int:
            raise LookupError("gone")

        found = ctx.step.parallel({"ok": lambda: 1, "bad": fails}, on_error="collect")
        failure = found["bad"]
        assert isinstance(failure, ItemFailure)
        return [found["ok"], failure.key, repr(failure.error)]

    assert value(engine.run("t")[1]) == [1, "bad", "LookupError('gone')"]


def test_a_retry_of_a_step_parks_its_branch_alone(engine: Engine, clock: Clock) -> None:
    tries: list[int] = []
    done: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def flaky() -> int:
            tries.append(1)
            if len(tries) < 3:
                raise OSError("try again")
            return len(tries)

        policy = RetryPolicy(3, initial=timedelta(minutes=5), maximum=timedelta(minutes=5))
        return ctx.step.parallel(
            {
                "flaky": lambda: ctx.step.options(retry=policy).run("flaky", flaky),
                "quick": lambda: ctx.step.run("quick", lambda: enter(done, "quick", 1)),
            }
        )

    run_id, outcome = engine.run("t")
    states = []
    while isinstance(outcome, Parked):
        states.append(outcome.state)
        clock.advance(timedelta(minutes=5, seconds=1))
        engine.timers()
        outcome = deliver(engine, run_id)

    assert value(outcome) == {"flaky": 3, "quick": 1}
    assert states == [RunState.RETRYING] * 2
    assert done == ["quick"]


def test_i11_a_cancel_reaches_all_branches(engine: Engine) -> None:
    gate = Gate()
    later: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def one(name: str) -> None:
            ctx.step.run("first", gate.pass_through)
            ctx.step.run("second", lambda: enter(later, name, 0))

        ctx.step.parallel({name: (one, name) for name in "abc"})

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as outcome:
        gate.wait_reached()
        engine.client.cancel(run_id)
        gate.open()

    assert outcome[0].state is RunState.CANCELLED
    assert later == []


def test_i5_a_zombie_with_branches_commits_nothing_after_the_take_over(engine: Engine, clock: Clock) -> None:
    gate = Gate()
    bodies: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def one(name: str) -> str:
            ctx.step.run("first", gate.pass_through)
            return ctx.step.run("second", lambda: enter(bodies, name, name))

        return ctx.step.parallel({name: (one, name) for name in "abc"})

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as zombie:
        gate.wait_reached()
        process.freeze()
        take_over(engine, clock)
        gate.open()
    assert not isinstance(zombie[0], Finished)
    assert bodies == []
    assert all(step.state != "done" for step in engine.client.history(run_id).steps)

    assert value(deliver(engine, run_id)) == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.parametrize(
    "point",
    [
        "items.commit.b",
        "items.commit.a",
        "step.commit.b",
        "step.commit.a",
        "wait.commit.a",
        "wait.run_lock.a",
        "sleep.suspend.b",
    ],
)
def test_a_crash_at_any_point_repeats_no_step_that_was_committed(engine: Engine, clock: Clock, point: str) -> None:
    bodies: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def steps(name: str) -> int:
            return ctx.step.run("one", lambda: enter(bodies, f"{name}1", 1)) + ctx.step.run(
                "two", lambda: enter(bodies, f"{name}2", 2)
            )

        def waits() -> Any:
            ctx.step.sleep("nap", timedelta(minutes=1))
            return ctx.step.wait_for_fact("go").payload

        return ctx.step.parallel({"a": (steps, "a"), "b": (steps, "b"), "waits": waits})

    run_id, process = engine.start("t"), engine.process()
    outcome: object = None
    with dying_at(point):
        while not isinstance(outcome, BaseException):
            try:
                outcome = process.deliver(run_id, "t")
            except KeyboardInterrupt as died:
                outcome = died
            clock.advance(seconds=61)
            engine.timers()
    done = {step.key for step in engine.client.history(run_id).steps if step.state == "done"}
    before = list(bodies)
    process.freeze()
    take_over(engine, clock)
    engine.client.signal(run_id, "go", 7)
    outcome = deliver(engine, run_id)
    while isinstance(outcome, Parked):
        clock.advance(seconds=61)
        engine.timers()
        outcome = deliver(engine, run_id)

    assert value(outcome) == {"a": 3, "b": 3, "waits": 7}
    names = {
        f"{name}{number}": f"parallel[{name}]/{step}" for name in "ab" for number, step in ((1, "one"), (2, "two"))
    }
    committed = [name for name, key in names.items() if key in done]
    assert not [name for name in bodies[len(before) :] if name in committed]


def test_the_logger_of_a_branch_is_silent_while_that_branch_replays(
    engine: Engine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "umt_durable.task")

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def one(name: str, minutes: int) -> None:
            ctx.logger.info("%s begins", name)
            ctx.step.run("step", lambda: 1)
            ctx.step.sleep("nap", timedelta(minutes=minutes))
            ctx.logger.info("%s woke", name)

        ctx.step.parallel({"a": (one, "a", 5), "b": (one, "b", 10)})
        ctx.logger.info("after")

    run_id, _ = engine.run("t")
    for _ in range(2):
        clock.advance(seconds=301)
        engine.timers()
        deliver(engine, run_id)

    lines = [record.getMessage() for record in caplog.records if record.name == "umt_durable.task"]
    assert sorted(lines[:2]) == ["a begins", "b begins"]
    assert lines[2:] == ["a woke", "b woke", "after"]


def test_a_branch_has_the_context_of_the_body_and_the_key_of_its_own_step(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def one() -> list[Any]:
            ours = current_context() is ctx
            return [ours, ctx.step.run("key", lambda: ctx.idempotency_key), ctx.uuid().hex, ctx.random()]

        found = ctx.step.parallel({"a": one, "b": one})
        return [found["a"][0], found["b"][0], len({*map(str, found["a"]), *map(str, found["b"])})]

    assert value(engine.run("t")[1]) == [True, True, 7]


def test_what_can_never_work_is_refused_before_anything_is_written(engine: Engine) -> None:
    refused: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        calls: list[Any] = [
            lambda: ctx.step.parallel([]),  # type: ignore[call-overload]
            lambda: ctx.step.parallel({"a": 7}),  # type: ignore[arg-type]
            lambda: ctx.step.parallel(cast(Any, {1: int})),
            lambda: ctx.step.parallel({"a": int}, concurrency=0),
            lambda: ctx.step.map("m", int, [1, 2], key=lambda _: "same"),
            lambda: ctx.step.map("m", int, [1], key=lambda _: 1.5),  # type: ignore[arg-type,return-value]
            lambda: ctx.step.map("m", int, [1], key=int, on_error="ignore"),  # type: ignore[call-overload]
            lambda: ctx.step.map("m", int, [1], key=int, concurrency=True),
        ]
        for call in calls:
            try:
                call()
            except DefinitionError as error:
                refused.append(str(error))

    run_id, _ = engine.run("t")

    assert len(refused) == 8, refused
    assert "'same' comes twice" in refused[4]
    assert engine.client.history(run_id).steps == []


def test_no_branches_give_nothing(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return [ctx.step.parallel({}), ctx.step.map("m", int, [], key=int)]

    assert value(engine.run("t")[1]) == [{}, []]


def test_async_branches_and_items_await_their_steps(engine: Engine, clock: Clock) -> None:
    bodies: list[str] = []

    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> Any:
        async def nap(name: str) -> str:
            await ctx.step.sleep("nap", timedelta(minutes=5))
            return await ctx.step.run("step", lambda: enter(bodies, name, name))

        async def double(item: int) -> int:
            return 2 * item

        async def items() -> list[int]:
            return await ctx.step.map("double", double, range(3), key=int)

        async def waits() -> Any:
            return (await ctx.step.wait_any(["go", timedelta(days=1)])).payload

        return await ctx.step.parallel({"a": (nap, "a"), "b": (nap, "b"), "items": items, "waits": waits})

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    engine.client.signal(run_id, "go", 7)
    assert isinstance(deliver(engine, run_id), Parked)
    clock.advance(seconds=301)
    engine.timers()

    assert value(deliver(engine, run_id)) == {"a": "a", "b": "b", "items": [0, 2, 4], "waits": 7}
    assert sorted(bodies) == ["a", "b"]
