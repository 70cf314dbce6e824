"""Async bodies and steps: on one event loop, with the same journal as plain ones."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, enter, in_thread
from tests.support.wait import until
from umt_durable.database import Database
from umt_durable.engine.async_context import AsyncSteps, AsyncTaskContext
from umt_durable.engine.context import TaskContext, current_context
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.steps import Steps
from umt_durable.errors import DurableError
from umt_durable.settings import Settings
from umt_durable.states import RunState

tenant: ContextVar[str] = ContextVar("tenant", default="")


class DeclinedError(Exception):
    """A business failure of these tests."""


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


async def tell(log: list[Any], what: object, value: int) -> int:
    """Be an async body that notes that it was entered, and in which thread."""
    await asyncio.sleep(0)
    log.append((what, threading.current_thread().name))
    return value


def test_async_steps_of_an_async_body_run_once_on_the_loop(engine: Engine, clock: Clock) -> None:
    entered: list[Any] = []

    async def first_step(value: int) -> int:
        return await tell(entered, "async", value)

    @engine.task("t")
    async def body(ctx: AsyncTaskContext, base: int) -> int:
        first = await ctx.step.run("async", first_step, base)
        second = await ctx.step.run("plain", lambda: enter(entered, "plain", first + 1))
        await ctx.step.sleep("nap", timedelta(hours=1))
        assert (await ctx.now()).tzinfo is not None
        assert 0 <= await ctx.random() < 1
        return second if (await ctx.uuid()).version == 4 else 0

    run_id, outcome = engine.run("t", 1)
    assert isinstance(outcome, Parked)
    clock.advance(seconds=3601)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 2
    assert entered == [("async", "umt_durable loop"), "plain"]


def test_a_plain_body_calls_async_steps(engine: Engine) -> None:
    entered: list[Any] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.run("async", tell, entered, "async", 7)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 7


def test_a_plain_function_that_returns_a_coroutine_is_a_step_like_a_coroutine_function(engine: Engine) -> None:
    entered: list[Any] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> list[Any]:
        one = ctx.step.run("one", lambda: tell(entered, "one", 1))
        many = ctx.step.map("many", lambda item: tell(entered, "item", item), [2, 3], key=int)
        fact = ctx.step.wait_for_fact("go", check=lambda: tell(entered, "check", 4))
        return [one, many, fact.payload]

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [1, [2, 3], 4]
    assert {thread for _, thread in entered} == {"umt_durable loop"}


def test_d9_an_exit_passes_except_exception_and_ends_what_the_body_began(engine: Engine, clock: Clock) -> None:
    seen: list[str] = []

    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> str:
        asyncio.get_running_loop().create_task(linger())
        await asyncio.sleep(0)
        try:
            await ctx.step.sleep("nap", timedelta(hours=1))
        except Exception:  # noqa: BLE001 - what users write
            seen.append("swallowed")
        return "done"

    async def linger() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Parked)
    assert seen == ["cancelled"]
    clock.advance(seconds=7200)
    engine.timers()
    assert isinstance(engine.process().deliver(run_id, "t"), Finished)


def test_steps_awaited_together_are_done_one_after_the_other(engine: Engine) -> None:
    entered: list[Any] = []

    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> list[int]:
        calls = [ctx.step.options(key=n).run("item", tell, entered, n, n) for n in range(5)]
        return list(await asyncio.gather(*calls))

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [0, 1, 2, 3, 4]
    assert [what for what, _ in entered] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["async body", "plain body"])
def test_d13_a_check_may_be_a_coroutine_function(engine: Engine, clock: Clock, kind: str) -> None:
    asked: list[Any] = []

    async def shipped() -> str | None:
        await tell(asked, "check", 0)
        return "sent" if len(asked) == 2 else None

    @engine.task("async body")
    async def waits(ctx: AsyncTaskContext) -> list[str]:
        fact = await ctx.step.wait_for_fact("shipped", check=shipped, poll=timedelta(seconds=30))
        return [fact.payload, fact.source]

    @engine.task("plain body")
    def waits_too(ctx: TaskContext) -> list[str]:
        fact = ctx.step.wait_for_fact("shipped", check=shipped, poll=timedelta(seconds=30))
        return [fact.payload, fact.source]

    run_id, outcome = engine.run(kind)
    assert isinstance(outcome, Parked)
    clock.advance(seconds=31)
    engine.timers()
    outcome = engine.process().deliver(run_id, kind)

    assert isinstance(outcome, Finished)
    assert outcome.value == ["sent", "check"]
    assert asked == [("check", "umt_durable loop")] * 2


@pytest.mark.parametrize("kind", ["a coroutine function", "a function that gives one"])
def test_d13_a_check_on_the_loop_is_given_no_connection(engine: Engine, kind: str) -> None:
    async def shipped(conn: Any) -> bool:
        return True

    def gives_a_coroutine(conn: Any) -> Any:
        return shipped(conn)

    check = shipped if kind == "a coroutine function" else gives_a_coroutine

    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> None:
        await ctx.step.wait_for_fact("shipped", check=check)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert re.search("a check that (is a coroutine function|gives a coroutine) takes nothing", str(outcome.error))


def test_a_failed_async_step_is_retried_recorded_and_raised_as_its_own_type(engine: Engine) -> None:
    entered: list[int] = []

    async def flaky() -> int:
        entered.append(len(entered))
        if len(entered) < 3:
            raise OSError("not yet")
        raise DeclinedError("no funds")

    @engine.task("t", raises=(DeclinedError,))
    async def body(ctx: AsyncTaskContext) -> str:
        quick = RetryPolicy(5, initial=timedelta(milliseconds=1), retry_on=OSError)
        try:
            await ctx.step.options(retry=quick).run("flaky", flaky)
        except DeclinedError as error:
            return str(error)
        return "never"

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert (outcome.value, entered) == ("no funds", [0, 1, 2])


def test_a_step_inside_the_coroutine_of_a_step_is_refused(engine: Engine) -> None:
    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> str:
        async def inner() -> int:
            return await ctx.step.run("inner", tell, [], "x", 1)

        try:
            return str(await ctx.step.run("outer", inner))
        except DurableError as error:
            return str(error)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert "cannot call the context's steps" in outcome.value


def test_context_variables_reach_steps_and_the_plain_context_gives_what_is_not_awaited(engine: Engine) -> None:
    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> list[str]:
        tenant.set("acme")

        async def read() -> str:
            assert current_context().idempotency_key
            return tenant.get()

        with pytest.raises(DurableError, match="await the steps"):
            current_context().step.run("blocking", tenant.get)
        assert current_context().run_id == ctx.run_id
        return [await ctx.step.run("async", read), await ctx.step.run("plain", tenant.get)]

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == ["acme", "acme"]


@pytest.mark.parametrize("preemptible", [True, False])
def test_d10_a_cancel_interrupts_a_preemptible_coroutine_at_once(engine: Engine, preemptible: bool) -> None:
    reached, asked = threading.Event(), threading.Event()
    ends: list[str] = []

    async def wait(ctx: AsyncTaskContext) -> None:
        reached.set()
        try:
            await ctx.abort
            ends.append(f"asked:{ctx.abort.reason}")
            await asyncio.to_thread(asked.wait)
            ends.append("finished")
        except asyncio.CancelledError:
            ends.append("interrupted")
            raise

    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> None:
        await ctx.step.options(preemptible=preemptible, key=1).run("wait", wait, ctx)
        await ctx.step.run("next", ends.append, "never")

    run_id = engine.start("t")
    with in_thread(lambda: engine.process().deliver(run_id, "t")) as outcome:
        assert reached.wait(30)
        engine.client.cancel(run_id)
        until(lambda: bool(ends), timeout=30, what="the coroutine to hear of the cancel")
        asked.set()

    assert isinstance(outcome[0], Finished)
    assert engine.state(run_id) is RunState.CANCELLED
    assert ends[-1] == ("interrupted" if preemptible else "finished")
    assert set(ends) <= {"asked:cancel", ends[-1]}


def test_a_body_that_exits_the_process_in_a_task_does_not_end_the_loop(engine: Engine) -> None:
    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> str:
        async def leave() -> None:
            raise SystemExit(3)

        task = asyncio.get_running_loop().create_task(leave())
        await asyncio.wait([task])
        assert isinstance(task.exception(), SystemExit)
        return "still here"

    _, first = engine.run("t")
    _, second = engine.run("t")

    assert [outcome.value for outcome in (first, second) if isinstance(outcome, Finished)] == ["still here"] * 2


def test_d6_every_step_can_be_awaited() -> None:
    names = {name for name in dir(Steps) if not name.startswith("_")}

    assert {name for name in dir(AsyncSteps) if not name.startswith("_")} == names


@pytest.mark.parametrize("how", ["step", "options", "now"])
def test_a_call_that_is_never_awaited_fails_the_run_and_is_named(engine: Engine, how: str) -> None:
    entered: list[Any] = []

    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> str:
        match how:
            case "step":
                ctx.step.run("forgotten", tell, entered, "x", 1)  # type: ignore[unused-coroutine]
            case "options":
                ctx.step.options(key=1).run("forgotten", tell, entered, "x", 1)  # type: ignore[unused-coroutine]
            case _:
                ctx.now()  # type: ignore[unused-coroutine]
        return "done"

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    failure = engine.client.failure(engine.client.get(run_id))
    assert outcome.state is RunState.FAILED
    assert failure is not None
    assert failure.type == "DefinitionError"
    assert ("ctx.now(" if how == "now" else "step.run('forgotten'") in failure.message
    assert entered == []
