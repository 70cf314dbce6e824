"""What a body is given besides its steps: its input, its token, the request to stop, the logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, in_thread
from tests.support.wait import until
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, RunState, StepState


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def test_d1_d3_the_input_is_validated_and_each_execution_has_a_larger_token(engine: Engine, clock: Clock) -> None:
    seen: list[tuple[Any, ...]] = []

    @engine.task("t")
    def body(ctx: TaskContext, order: str, amount: int) -> None:
        seen.append((dict(ctx.input), ctx.attempt_token.run_id, ctx.attempt_token.fence))
        ctx.step.sleep("nap", timedelta(hours=1))

    run_id, _ = engine.run("t", "A-17", amount=3)
    clock.advance(seconds=3601)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert [given for given, _, _ in seen] == [{"order": "A-17", "amount": 3}] * 2
    assert [run for _, run, _ in seen] == [run_id] * 2
    assert seen[0][2] < seen[1][2]


@pytest.mark.parametrize("how", ["raise_if_set", "throw_if_canceled", "wait"])
def test_d4_d6_d10_a_step_that_looks_at_the_request_stops_in_the_middle(engine: Engine, how: str) -> None:
    """E9: as the copy of a large file does between two chunks."""
    gate = Gate()
    reached: list[Any] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        def copy() -> None:
            gate.pass_through()
            if how == "wait":
                reached.append((ctx.abort.wait(30), ctx.abort.is_set(), ctx.abort.reason))
            until(ctx.abort.is_set, what="the request to stop")
            (ctx.throw_if_canceled if how == "throw_if_canceled" else ctx.abort.raise_if_set)()
            reached.append("went on")

        ctx.step.run("copy", copy)

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as outcome:
        gate.wait_reached()
        engine.client.cancel(run_id)
        gate.open()

    assert isinstance(outcome[0], Finished)
    assert outcome[0].state is RunState.CANCELLED
    assert reached == ([(True, True, "cancel")] if how == "wait" else [])


def test_d4_a_body_is_told_why_it_should_stop(engine: Engine) -> None:
    seen: list[str | None] = []
    process = engine.process()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        for held in process.lease.attempts():
            held.abort("shutdown")
        seen.append(ctx.abort.reason)
        ctx.throw_if_canceled()
        seen.append("went on")

    run_id = engine.start("t")
    outcome = process.deliver(run_id, "t")

    assert isinstance(outcome, Dropped)
    assert engine.state(run_id) is RunState.READY
    assert seen == ["shutdown"]


def test_g2_a_body_sees_its_lease_and_is_told_when_it_is_lost(engine: Engine, settings: Settings) -> None:
    seen: list[tuple[bool, bool, str | None]] = []
    process = engine.process()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        seen.append((ctx.lease.is_lost, 0 < ctx.lease.remaining <= settings.lease_seconds, ctx.abort.reason))
        process.lease.lose()
        seen.append((ctx.lease.is_lost, ctx.lease.remaining > 0, ctx.abort.reason))
        ctx.throw_if_canceled()

    outcome = process.deliver(engine.start("t"), "t")

    assert isinstance(outcome, Dropped)
    assert seen == [(False, True, None), (True, False, "lease_lost")]


def test_g6_what_a_cancelled_attempt_still_does_is_in_the_history(engine: Engine) -> None:
    """A step that ends after the cancel is recorded, and an error the body ends with is shown with its attempt."""
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        def copy() -> str:
            gate.pass_through()
            until(ctx.abort.is_set, what="the request to stop")
            return "copied all the same"

        try:
            ctx.step.run("copy", copy)
            ctx.throw_if_canceled()
        except BaseException as exit:
            raise LookupError("the target is gone") from exit

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as outcome:
        gate.wait_reached()
        engine.client.cancel(run_id)
        gate.open()

    assert isinstance(outcome[0], Finished)
    history = engine.client.history(run_id)
    assert history.run.state is RunState.CANCELLED
    assert [(step.key, step.state) for step in history.steps] == [("copy", StepState.DONE)]
    assert [attempt.outcome for attempt in history.attempts] == [AttemptOutcome.CANCELLED]
    assert history.attempts[0].error == "LookupError: the target is gone"


def test_d5_the_logger_masks_secrets_names_the_run_and_is_silent_on_replay(
    engine: Engine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "umt_durable.task")

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.logger.info("connecting to %s", "postgresql://ann:geheim@db/shop")
        ctx.step.run("step", lambda: 1)
        ctx.step.sleep("nap", timedelta(hours=1))
        ctx.logger.info("woke")

    run_id, _ = engine.run("t")
    clock.advance(seconds=3601)
    engine.timers()
    engine.process().deliver(run_id, "t")

    records = [record for record in caplog.records if record.name == "umt_durable.task"]
    assert [record.getMessage().partition(" ")[0] for record in records] == ["connecting", "woke"]
    assert "geheim" not in records[0].getMessage()
    assert {record.__dict__["run"] for record in records} == {run_id}
