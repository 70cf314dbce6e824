"""Failures of steps and bodies: retried as the policy says, and raised alike ever after."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, enter
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.retry import RetryAfter, RetryPolicy
from umt_durable.errors import NonRetryableError, StepFailedError
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, RunState


class DeclinedError(Exception):
    """A business failure of these tests."""


class RefusedError(Exception):
    """Has a constructor that cannot be called with what is kept of it."""

    def __init__(self, order: int, *, code: str) -> None:
        self.order, self.code = order, code
        super().__init__(f"order {order} is refused: {code}")


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def test_i14_a_step_is_tried_as_often_as_its_policy_says_with_durable_back_off(engine: Engine, clock: Clock) -> None:
    entered: list[int] = []
    policy = RetryPolicy(4, initial=timedelta(seconds=10), factor=2, maximum=timedelta(hours=1))

    def flaky() -> str:
        entered.append(1)
        raise DeclinedError("no")

    @engine.task("t", retry=policy, raises=(DeclinedError,))
    def body(ctx: TaskContext) -> str:
        return ctx.step.run("flaky", flaky)

    run_id, outcome = engine.run("t")
    for expected in (10, 20, 40):
        assert isinstance(outcome, Parked)
        assert outcome.state is RunState.RETRYING
        clock.advance(seconds=expected - 1)
        engine.timers()
        assert engine.state(run_id) is RunState.RETRYING
        clock.advance(seconds=1.5)
        engine.timers()
        outcome = engine.process().deliver(run_id, "t")

    assert len(entered) == 4
    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.FAILED
    assert isinstance(outcome.error, DeclinedError)
    assert engine.client.history(run_id).steps[0].failures == 4


def test_a_body_that_fails_outside_a_step_is_retried_as_a_run(engine: Engine, clock: Clock) -> None:
    attempts: list[int] = []

    @engine.task("t", retry=RetryPolicy(3, initial=timedelta(seconds=30)))
    def body(ctx: TaskContext) -> int:
        ctx.step.run("a", lambda: 1)
        attempts.append(ctx.attempt)
        if len(attempts) < 3:
            raise DeclinedError("outside")
        return ctx.attempt

    run_id, outcome = engine.run("t")
    for _ in range(2):
        assert isinstance(outcome, Parked)
        clock.advance(seconds=61)
        engine.timers()
        outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 3
    assert attempts == [1, 2, 3]
    assert [a.outcome for a in engine.client.history(run_id).attempts] == [
        AttemptOutcome.FAILED,
        AttemptOutcome.FAILED,
        AttemptOutcome.COMPLETED,
    ]


def test_a_recorded_failure_is_raised_alike_on_first_pass_and_replay(engine: Engine, clock: Clock) -> None:
    caught: list[tuple[type, str]] = []

    def fails() -> None:
        raise DeclinedError("card")

    @engine.task("t", raises=(DeclinedError,))
    def body(ctx: TaskContext) -> str:
        try:
            ctx.step.run("charge", fails)
        except DeclinedError as error:
            caught.append((type(error), str(error)))
        ctx.step.sleep("nap", timedelta(minutes=1))
        return "compensated"

    run_id, _ = engine.run("t")
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == "compensated"
    assert caught == [(DeclinedError, "card")] * 2


def test_what_a_body_catches_is_the_same_on_first_pass_and_replay_with_cause_and_members(
    engine: Engine, clock: Clock
) -> None:
    seen: list[object] = []

    def refuse() -> None:
        try:
            raise OSError(111, "Connection refused")
        except OSError as error:
            raise RefusedError(7, code="E1") from error

    def many() -> None:
        raise ExceptionGroup("lines", [DeclinedError("a"), RefusedError(8, code="E2")])

    @engine.task("t", raises=(DeclinedError, RefusedError))
    def body(ctx: TaskContext) -> None:
        try:
            ctx.step.run("refuse", refuse)
        except RefusedError as error:
            seen.append((str(error), error.order, error.code, repr(error.__cause__)))
        try:
            ctx.step.run("many", many)
        except* RefusedError as group:
            seen.append([(str(error), error.code) for error in group.exceptions if isinstance(error, RefusedError)])
        except* DeclinedError as group:
            seen.append([str(error) for error in group.exceptions])
        ctx.step.sleep("nap", timedelta(minutes=1))

    run_id, _ = engine.run("t")
    first = list(seen)
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.SUCCEEDED
    assert first == [
        ("order 7 is refused: E1", 7, "E1", "ConnectionRefusedError(111, 'Connection refused')"),
        [("order 8 is refused: E2", "E2")],
        ["a"],
    ]
    assert seen == first * 2


def test_an_exception_class_that_nobody_registered_comes_as_step_failed(engine: Engine) -> None:
    def fails() -> None:
        raise DeclinedError("card")

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("charge", fails)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, StepFailedError)
    assert outcome.error.type_name == "DeclinedError"


def test_i14_wake_ups_use_up_neither_attempts_nor_crashes(engine: Engine, clock: Clock) -> None:
    @engine.task("t", retry=RetryPolicy(2, initial=timedelta(0)))
    def body(ctx: TaskContext) -> int:
        for _ in range(8):
            ctx.step.sleep("nap", timedelta(minutes=1))
        if ctx.attempt < 2:
            raise DeclinedError("after all those naps")
        return ctx.attempt

    run_id, outcome = engine.run("t")
    for _ in range(9):
        assert isinstance(outcome, Parked)
        clock.advance(seconds=61)
        engine.timers()
        outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 2
    run = engine.client.get(run_id)
    assert (run.failures, run.crashes, len(engine.client.history(run_id).attempts)) == (1, 0, 10)


def test_retry_after_parks_a_step_for_that_long_and_uses_up_a_try(engine: Engine, clock: Clock) -> None:
    @engine.task("t", retry=RetryPolicy(2, initial=timedelta(seconds=1)))
    def body(ctx: TaskContext) -> None:
        def busy() -> None:
            raise RetryAfter(90)

        ctx.step.run("busy", busy)

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    clock.advance(seconds=80)
    engine.timers()
    assert engine.state(run_id) is RunState.RETRYING
    clock.advance(seconds=11)
    engine.timers()
    engine.process().deliver(run_id, "t")

    assert engine.state(run_id) is RunState.FAILED
    assert engine.client.history(run_id).steps[0].failures == 2


@pytest.mark.parametrize("inside", [True, False], ids=["in a step", "between steps"])
def test_a_non_retryable_error_is_final_whatever_the_policy(engine: Engine, inside: bool) -> None:
    def refuse() -> None:
        raise NonRetryableError("no such card")

    @engine.task("t", retry=RetryPolicy.NETWORK)
    def body(ctx: TaskContext) -> None:
        ctx.step.run("charge", refuse) if inside else refuse()

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, NonRetryableError)
    assert len(engine.client.history(run_id).attempts) == 1


def test_a_predicate_and_a_time_limit_of_a_policy_hold_for_steps_and_runs(engine: Engine, clock: Clock) -> None:
    entered: list[str] = []
    brief = RetryPolicy(9, initial=timedelta(seconds=30), max_elapsed=timedelta(seconds=45), retry_on=is_busy)

    @engine.task("t", retry=brief)
    def body(ctx: TaskContext, why: str) -> None:
        def call() -> None:
            entered.append(why)
            raise DeclinedError(why)

        ctx.step.run("call", call)

    _, outcome = engine.run("t", "broken")
    assert isinstance(outcome, Finished)
    busy, outcome = engine.run("t", "busy")
    assert isinstance(outcome, Parked)
    clock.advance(seconds=31)
    engine.timers()
    outcome = engine.process().deliver(busy, "t")

    assert isinstance(outcome, Finished)
    assert entered == ["broken", "busy", "busy"]


def is_busy(error: BaseException) -> bool:
    """Say whether a failure may be tried again."""
    return str(error) == "busy"


@pytest.mark.parametrize("wrong", [3, "network", RetryPolicy])
def test_a_step_with_something_else_as_policy_is_refused_before_it_is_executed(engine: Engine, wrong: object) -> None:
    entered: list[object] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.options(retry=wrong).run("charge", lambda: enter(entered, "charge", 1))  # type: ignore[arg-type]

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert "retry: a RetryPolicy, such as RetryPolicy.NETWORK, not" in str(outcome.error)
    assert entered == []
