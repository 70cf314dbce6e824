"""Steps on a real Postgres: executed once, recorded, and replayed as they were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, enter
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import (
    EncodingError,
)
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, RunState, StepState


class DeclinedError(Exception):
    """A business failure of these tests."""


@dataclass(frozen=True)
class Receipt:
    """A typed value of these tests."""

    order: str
    total: Decimal


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def test_a_run_executes_its_steps_once_and_keeps_the_result(engine: Engine) -> None:
    entered: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext, order: str) -> str:
        first = ctx.step.run("a", lambda: enter(entered, "a", 1))
        second = ctx.step.run("b", lambda: enter(entered, "b", first + 1))
        return f"{order}:{second}"

    run_id, outcome = engine.run("t", "o1")

    assert isinstance(outcome, Finished)
    assert outcome.value == "o1:2"
    assert entered == ["a", "b"]
    history = engine.client.history(run_id)
    assert history.run.state is RunState.SUCCEEDED
    assert [(step.key, step.state) for step in history.steps] == [("a", StepState.DONE), ("b", StepState.DONE)]
    assert [attempt.outcome for attempt in history.attempts] == [AttemptOutcome.COMPLETED]


def test_i6_a_replay_gives_back_recorded_results_and_never_enters_the_body_again(engine: Engine, clock: Clock) -> None:
    entered: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> list[int]:
        values = [ctx.step.run(f"s{n}", partial(enter, entered, f"s{n}", n)) for n in range(3)]
        ctx.step.sleep("nap", timedelta(minutes=1))
        return [*values, ctx.step.run("last", lambda: enter(entered, "last", 9))]

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)

    clock.advance(seconds=61)
    engine.timers()
    again = engine.process().deliver(run_id, "t")

    assert isinstance(again, Finished)
    assert again.value == [0, 1, 2, 9]
    assert entered == ["s0", "s1", "s2", "last"]


def test_the_first_pass_sees_the_decoded_value_as_every_replay_will(engine: Engine, clock: Clock) -> None:
    seen: list[Any] = []
    moment = datetime(2026, 11, 29, 12, tzinfo=UTC)

    def typed() -> Receipt:
        return Receipt("o", Decimal("1.10"))

    def plain() -> Any:
        return {"at": moment, "day": date(2026, 1, 2), "id": UUID(int=7), "raw": b"\0\xff", "sum": Decimal("2.50")}

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        seen.append((ctx.step.run("typed", typed), ctx.step.run("plain", plain)))
        ctx.step.sleep("nap", timedelta(minutes=1))

    run_id, _ = engine.run("t")
    clock.advance(seconds=61)
    engine.timers()
    engine.process().deliver(run_id, "t")

    assert len(seen) == 2
    assert seen[0] == seen[1] == (typed(), plain())
    assert type(seen[1][0]) is Receipt


def test_i26_a_result_that_cannot_be_stored_fails_the_step_at_once_naming_step_and_path(engine: Engine) -> None:
    entered: list[int] = []

    @engine.task("t", retry=RetryPolicy.NETWORK)
    def body(ctx: TaskContext) -> None:
        ctx.step.run("bad", lambda: enter(entered, 1, {"lines": [1, {2, 3}]}))

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.FAILED
    assert entered == [1]
    assert isinstance(outcome.error, EncodingError)
    assert "step 'bad'" in str(outcome.error)
    assert "$.lines[1]" in str(outcome.error)
    assert [step.state for step in engine.client.history(run_id).steps] == [StepState.FAILED]


def test_ctx_gives_stable_values_and_the_key_of_the_step(engine: Engine, clock: Clock) -> None:
    seen: list[tuple[Any, ...]] = []
    keys: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        def first_try_fails() -> None:
            keys.append(ctx.idempotency_key)
            if len(keys) == 1:
                raise DeclinedError("once")

        seen.append((ctx.now(), ctx.uuid(), ctx.random(), ctx.run_id, ctx.trace_id))
        ctx.step.options(retry=RetryPolicy(2, initial=timedelta(seconds=30))).run("charge", first_try_fails)

    run_id, _ = engine.run("t")
    clock.advance(seconds=31)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert seen[0] == seen[1]
    assert seen[0][3] == run_id
    assert len(keys) == 2
    assert keys[0] == keys[1]


def test_steps_inside_a_step_are_refused(engine: Engine) -> None:
    @engine.task("nested")
    def nested(ctx: TaskContext) -> None:
        ctx.step.run("outer", lambda: ctx.step.run("inner", lambda: 1))

    _, outcome = engine.run("nested")

    assert isinstance(outcome, Finished)
    assert "cannot call the context's steps" in str(outcome.error)


def test_i6_the_first_pass_too_is_given_what_would_be_read_back(engine: Engine) -> None:
    shared = {"items": [1]}
    same: list[bool] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        found = ctx.step.run("read", lambda: shared)
        same.append(found is shared or found["items"] is shared["items"])
        shared["items"].append(2)
        return found

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert (outcome.value, same) == ({"items": [1]}, [False])
