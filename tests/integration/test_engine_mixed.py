"""Where kinds of steps meet in one run: branches, effects, awaited tasks and child runs, also in its retry."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from tests.integration.awaiting_kit import TIMEOUT, Outside
from tests.integration.test_engine_children import Call, Offspring
from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, RecordingReporter, enter, in_thread
from tests.support.wait import until
from umt_durable import ChildrenFailedError, OpInfo, TaskInfo, Unknown
from umt_durable.database import Connection, Database
from umt_durable.engine.answers import Answer, bring
from umt_durable.engine.async_context import AsyncTaskContext
from umt_durable.engine.context import TaskContext, current_context
from umt_durable.engine.exits import Replaced
from umt_durable.engine.failures import capture
from umt_durable.engine.ops import Ops
from umt_durable.engine.outcomes import Finished, Outcome, Parked
from umt_durable.engine.passing import Pass
from umt_durable.errors import DurableError
from umt_durable.settings import Settings
from umt_durable.states import OpState, RunState


class Place:
    """An engine whose runs reach ordinary tasks and children of their own."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.outside = engine, Outside()

    def deliver(self, run_id: str) -> Outcome:
        """Deliver a hint of a run."""
        reporter = RecordingReporter(ordinary=self.outside, durable_tasks=Offspring(self.engine))
        return self.engine.process().deliver(run_id, self.engine.client.get(run_id).task, reporter=reporter)

    def children(self, task: str) -> list[str]:
        """Return the ids of the runs of a task, the newest first."""
        return [run.id for run in self.engine.client.list(task=task)]

    def answer(self, answer: Answer) -> bool:
        """Bring an answer to the step that sent last."""
        _, place, token = self.outside.sent[-1]
        return bring(self.engine.database, self.engine.settings, place, token=token.hex, answer=answer, by="receiver")


@pytest.fixture
def place(database: Database, settings: Settings) -> Iterator[Place]:
    engine = Engine(database, settings)
    yield Place(engine)
    engine.close()


def nobody_knows(gate: Gate) -> Callable[[TaskInfo], Unknown]:
    """Return what cannot find out how a task ended, and says so once another branch has come to the gate."""

    def reconcile(info: TaskInfo) -> Unknown:
        gate.wait_reached()
        return Unknown()

    return reconcile


def value(outcome: object) -> Any:
    assert isinstance(outcome, Finished), outcome
    assert outcome.error is None, outcome
    return outcome.value


def test_i12_a_retry_calls_a_child_that_failed_again_and_awaits_it(place: Place) -> None:
    opens = [False]

    @place.engine.task("child", raises=(LookupError,))
    def child(ctx: TaskContext) -> int:
        if not opens[0]:
            raise LookupError("closed")
        return 40

    @place.engine.task("parent", raises=(LookupError,))
    def parent(ctx: TaskContext) -> Any:
        return ctx.step.call("one", "child")

    run_id = place.engine.start("parent")
    place.deliver(run_id)
    place.deliver(place.children("child")[0])
    place.engine.route()
    place.deliver(run_id)
    assert place.engine.state(run_id) is RunState.FAILED
    opens[0] = True

    again = place.engine.client.retry(run_id, actor="ann")
    assert isinstance(place.deliver(again), Parked)
    newest, *_ = place.children("child")
    place.deliver(newest)
    place.engine.route()

    assert value(place.deliver(again)) == 40
    assert len(place.children("child")) == 2


def test_i12_a_retry_sends_an_awaited_task_that_failed_again_and_waits_for_its_answer(place: Place) -> None:
    @place.engine.task("awaits")
    def awaits(ctx: TaskContext) -> Any:
        return ctx.step.task("label", "print")

    run_id = place.engine.start("awaits")
    place.deliver(run_id)
    place.answer(Answer(failure=capture(LookupError("no paper"))))
    place.deliver(run_id)
    assert place.engine.state(run_id) is RunState.FAILED

    again = place.engine.client.retry(run_id, actor="ann")
    assert isinstance(place.deliver(again), Parked)
    assert place.answer(Answer("printed"))

    assert value(place.deliver(again)) == "printed"
    assert len(place.outside.sent) == 2


def test_an_uncertain_step_of_a_branch_parks_the_run_for_a_person_once_the_other_branches_are_left(
    place: Place, clock: Clock
) -> None:
    gate = Gate()
    entered: list[Any] = []

    @place.engine.task("mixed")
    def mixed(ctx: TaskContext) -> Any:
        def prints() -> Any:
            return ctx.step.task("label", "print", timeout=TIMEOUT, reconcile=nobody_knows(gate))

        def works() -> Any:
            ctx.step.sleep("wait", TIMEOUT)
            ctx.step.run("slow", lambda: gate.pass_through(1))
            return ctx.step.run("after", lambda: enter(entered, "after", 2))

        return ctx.step.parallel({"prints": prints, "works": works})

    run_id = place.engine.start("mixed")
    assert isinstance(place.deliver(run_id), Parked)
    place.outside.leave(place.engine.database)
    clock.advance(seconds=241)
    place.engine.timers()

    with in_thread(lambda: place.deliver(run_id)) as outcome:
        gate.wait_reached()
        gate.open()
    assert isinstance(outcome[0], Parked), outcome
    found = place.engine.client.get(run_id)
    assert (found.state, found.reason) == (RunState.QUARANTINED, "uncertain_op")
    history = {step.key: step.state for step in place.engine.client.history(run_id).steps}
    assert history["parallel[works]/slow"] == "done"

    place.engine.client.resolve_step(run_id, "parallel[prints]/label", result="late", actor="ann")
    assert value(place.deliver(run_id)) == {"prints": "late", "works": 2}
    assert entered == ["after"]


def test_a_child_of_a_branch_does_not_keep_the_log_silent_once_the_branch_is_replayed(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    @place.engine.task("child")
    def child(ctx: TaskContext) -> int:
        return 1

    @place.engine.task("parent")
    def parent(ctx: TaskContext) -> Any:
        found = ctx.step.parallel({"left": lambda: ctx.step.call("one", "child")})
        ctx.step.wait_for_fact("go")
        ctx.logger.info("goes on")
        return found

    run_id = place.engine.start("parent")
    place.deliver(run_id)
    place.deliver(place.children("child")[0])
    place.engine.route()
    place.deliver(run_id)
    place.engine.client.signal(run_id, "go")
    assert value(place.deliver(run_id)) == {"left": 1}
    assert [record.message for record in caplog.records].count("goes on") == 1


@pytest.mark.parametrize("verb", ["call", "gather"])
def test_a_child_whose_place_is_taken_by_what_is_no_run_has_no_result(place: Place, verb: str) -> None:
    @place.engine.task("child")
    def child(ctx: TaskContext) -> int:
        current_context()._pass.leave(Replaced(message=b"{}"))

    @place.engine.task("parent")
    def parent(ctx: TaskContext) -> Any:
        return ctx.step.call("one", "child") if verb == "call" else ctx.step.gather("one", [Call("child")])

    run_id = place.engine.start("parent")
    place.deliver(run_id)
    place.deliver(place.children("child")[0])
    place.engine.route()
    outcome = place.deliver(run_id)
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, ChildrenFailedError)
    assert "without a result" in str(outcome.error)


def test_the_idempotency_key_of_an_effect_is_the_same_in_a_branch(place: Place) -> None:
    seen: list[tuple[str, str]] = []

    @place.engine.task("ships")
    def ships(ctx: TaskContext) -> Any:
        def do(info: OpInfo) -> int:
            return enter(seen, (ctx.idempotency_key, info.idempotency_key), 1)

        def nested() -> Any:
            return ctx.step.parallel({"in]/": lambda: ctx.step.effect("ship[2]/]", do)})

        return ctx.step.parallel({"one": lambda: ctx.step.effect("ship:1", do), "two": nested})

    _, outcome = place.engine.run("ships")
    assert value(outcome) == {"one": 1, "two": {"in]/": 1}}
    assert len(set(seen)) == 2
    assert all(mine == theirs for mine, theirs in seen)


def test_effects_that_become_uncertain_at_the_same_time_are_left_to_a_person_each(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, both = threading.Barrier(2), threading.Barrier(2)
    condemn = Pass.condemn

    def condemn_together(the_pass: Pass, error: DurableError) -> NoReturn:
        try:
            condemn(the_pass, error)
        finally:
            both.wait(20)

    monkeypatch.setattr(Pass, "condemn", condemn_together)

    @place.engine.task("ships")
    def ships(ctx: TaskContext) -> Any:
        def do(info: OpInfo) -> int:
            called.wait(20)
            raise OSError("no answer")

        return ctx.step.parallel({name: (ctx.step.effect, name, do) for name in ("one", "two")})

    run_id, outcome = place.engine.run("ships")
    assert isinstance(outcome, Parked), outcome
    assert place.engine.state(run_id) is RunState.QUARANTINED
    assert {step.state for step in place.engine.client.history(run_id).steps} == {"started"}
    assert {op.state for op in Ops(place.engine.database, place.engine.settings).list()} == {OpState.UNCERTAIN}


def test_an_uncertain_step_deep_in_branches_is_found_again_by_each_of_them(place: Place, clock: Clock) -> None:
    @place.engine.task("deep")
    def deep(ctx: TaskContext) -> Any:
        def prints() -> Any:
            return ctx.step.task("label", "print", timeout=TIMEOUT)

        def waits() -> Any:
            return ctx.step.wait_for_fact("go").payload

        def outer() -> Any:
            return ctx.step.parallel({"prints": prints, "waits": waits}, name="inner")

        return ctx.step.parallel({"outer": outer, "sleeps": lambda: ctx.step.sleep("day", timedelta(days=1))})

    run_id = place.engine.start("deep")
    place.deliver(run_id)
    place.outside.leave(place.engine.database)
    clock.advance(seconds=241)
    place.engine.timers()
    place.deliver(run_id)
    assert place.engine.state(run_id) is RunState.QUARANTINED

    place.engine.client.resolve_step(run_id, "parallel[outer]/inner[prints]/label", result=1, actor="ann")
    assert isinstance(place.deliver(run_id), Parked)
    place.engine.client.signal(run_id, "go", 2)
    assert isinstance(place.deliver(run_id), Parked)
    clock.advance(seconds=90_000)
    place.engine.timers()
    assert value(place.deliver(run_id)) == {"outer": {"prints": 1, "waits": 2}, "sleeps": None}
    assert len(place.outside.sent) == 1


def test_i11_a_cancel_comes_before_the_question_to_a_person(place: Place, clock: Clock) -> None:
    gate = Gate()

    @place.engine.task("mixed")
    def mixed(ctx: TaskContext) -> Any:
        def prints() -> Any:
            return ctx.step.task("label", "print", timeout=TIMEOUT, reconcile=nobody_knows(gate))

        def works() -> int:
            ctx.step.sleep("wait", TIMEOUT)
            return ctx.step.run("slow", lambda: gate.pass_through(1))

        return ctx.step.parallel({"prints": prints, "works": works})

    run_id = place.engine.start("mixed")
    place.deliver(run_id)
    place.outside.leave(place.engine.database)
    clock.advance(seconds=241)
    place.engine.timers()
    with in_thread(lambda: place.deliver(run_id)) as outcome:
        gate.wait_reached()
        place.engine.client.cancel(run_id)
        gate.open()
    assert place.engine.state(run_id) is RunState.CANCELLED, outcome


def test_i6_branches_of_an_async_body_await_all_kinds_of_steps(place: Place, conn: Connection, schema: str) -> None:
    conn.execute(f'CREATE TABLE "{schema}".ledger (amount int)'.encode())

    @place.engine.task("child")
    def child(ctx: TaskContext, number: int) -> int:
        return number * 2

    @place.engine.task("mixed")
    async def mixed(ctx: AsyncTaskContext) -> Any:
        def book(tx: Any) -> int:
            tx.execute(f'INSERT INTO "{schema}".ledger VALUES (5)'.encode())
            return 5

        async def calls() -> Any:
            shipped = await ctx.step.effect("ship:1", lambda info: 1)
            return [shipped, await ctx.step.call("one", "child", 3)]

        async def prints() -> Any:
            return [await ctx.step.transaction("book", book), await ctx.step.task("label", "print")]

        async def waits() -> Any:
            return (await ctx.step.wait_any({"said": "go", "late": timedelta(hours=1)})).label

        async def gathers() -> Any:
            return await ctx.step.gather("many", [Call("child", (1,)), Call("child", (2,))])

        return await ctx.step.parallel({"calls": calls, "prints": prints, "waits": waits, "gathers": gathers})

    run_id = place.engine.start("mixed")
    assert isinstance(place.deliver(run_id), Parked)
    for one in place.children("child"):
        place.deliver(one)
    place.engine.route()
    assert isinstance(place.deliver(run_id), Parked)
    place.answer(Answer("printed"))
    place.engine.client.signal(run_id, "go")

    expected = {"calls": [1, 6], "prints": [5, "printed"], "waits": "said", "gathers": [2, 4]}
    assert value(place.deliver(run_id)) == expected
    assert conn.execute(f'SELECT amount FROM "{schema}".ledger'.encode()).fetchall() == [(5,)]
    assert (len(place.children("child")), len(place.outside.sent)) == (3, 1)


def test_i17_what_ends_before_its_parent_has_parked_lets_its_branch_go_on_at_once(place: Place) -> None:
    gate = Gate()

    @place.engine.task("child")
    def child(ctx: TaskContext) -> int:
        return 7

    @place.engine.task("mixed")
    def mixed(ctx: TaskContext) -> Any:
        return ctx.step.parallel(
            {
                "calls": lambda: ctx.step.call("one", "child"),
                "prints": lambda: ctx.step.task("label", "print"),
                "works": lambda: ctx.step.run("slow", gate.pass_through, 1),
            }
        )

    def done() -> set[str]:
        return {step.key for step in place.engine.client.history(run_id).steps if step.state == "done"}

    run_id = place.engine.start("mixed")
    with in_thread(lambda: place.deliver(run_id)) as outcome:
        gate.wait_reached()
        until(lambda: len(place.engine.client.history(run_id).waits) == 2, what="the waits of both")
        place.deliver(place.children("child")[0])
        place.engine.route()
        place.answer(Answer("printed"))
        until(lambda: {"parallel[calls]", "parallel[prints]"} <= done(), what="both branches to end")
        gate.open()
    assert value(outcome[0]) == {"calls": 7, "prints": "printed", "works": 1}
