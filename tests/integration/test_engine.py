"""The engine on a real Postgres: what a body may rely on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, RecordingReporter, enter
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.executor import Dropped, Finished, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import (
    AutocommitError,
    DefinitionError,
    EncodingError,
    FactTimeoutError,
    IdempotencyConflictError,
    InputError,
    NonDeterminismError,
    StepFailedError,
    UnknownRunError,
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


def test_i9_a_time_out_is_recorded_and_a_late_fact_does_not_change_it(engine: Engine, clock: Clock) -> None:
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


def test_a_check_that_is_true_ends_the_wait_and_is_recorded(engine: Engine, clock: Clock) -> None:
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


def test_i2_an_enqueue_or_signal_that_rolled_back_has_no_effect(
    engine: Engine, database: Database, conn: Connection
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.wait_for_fact("go")

    waiting = engine.start("t")
    engine.process().deliver(waiting, "t")
    with psycopg.connect(database.url) as user:
        kept = engine.start("t", conn=user)
        user.commit()
        lost = engine.start("t", conn=user)
        engine.client.signal(waiting, "go", conn=user)
        user.rollback()
    engine.route()

    assert engine.state(kept) is RunState.READY
    with pytest.raises(UnknownRunError):
        engine.client.get(lost)
    assert engine.state(waiting) is RunState.WAITING


def test_a_connection_in_autocommit_is_refused(engine: Engine, database: Database) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None: ...

    with psycopg.connect(database.url, autocommit=True) as user:
        with pytest.raises(AutocommitError, match="transaction"):
            engine.start("t", conn=user)
        with user.transaction():
            run_id = engine.start("t", conn=user)

    assert engine.state(run_id) is RunState.READY


def test_arguments_of_the_wrong_type_are_refused_at_enqueue_naming_each_field(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, amount: Decimal, receipt: Receipt) -> None: ...

    with pytest.raises(InputError) as refused:
        engine.start("t", amount="much", receipt={"order": "o"}, extra=1)

    assert {field.split(".")[0] for field, _ in refused.value.problems} >= {"amount", "receipt", "extra"}
    assert engine.client.list() == []


def test_the_same_idempotency_key_gives_the_same_run_and_other_input_is_a_conflict(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, order: str) -> None: ...

    first, second = engine.start("t", "o1", key="k"), engine.start("t", "o1", key="k")

    assert first == second
    with pytest.raises(IdempotencyConflictError) as conflict:
        engine.start("t", "o2", key="k")
    assert conflict.value.run == first


def test_an_unknown_run_is_named(engine: Engine) -> None:
    unknown = str(uuid4())

    for call in (
        engine.client.get,
        engine.client.cancel,
        engine.client.history,
        lambda id: engine.client.signal(id, "x"),
    ):
        with pytest.raises(UnknownRunError, match=unknown):
            call(unknown)


@pytest.mark.parametrize("name", ["", "umt.cancel", "x" * 256, "a\0b"])
def test_a_name_no_fact_can_have_is_refused(engine: Engine, name: str) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None: ...

    run_id = engine.start("t")

    with pytest.raises(DefinitionError):
        engine.client.signal(run_id, name)


def test_the_journal_refuses_a_renamed_step_with_other_inputs_and_parks_the_run(engine: Engine, clock: Clock) -> None:
    amount = [1]

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        try:
            ctx.step.run("charge", lambda value: value, amount[0])
        except Exception:  # noqa: BLE001 - user code that catches all does not get past it
            ctx.step.run("other", lambda: 1)
        ctx.step.sleep("nap", timedelta(minutes=1))

    run_id, _ = engine.run("t")
    amount[0] = 2
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Parked)
    run = engine.client.get(run_id)
    assert (run.state, run.reason) == (RunState.QUARANTINED, "nondeterminism")
    failure = engine.client.failure(run)
    assert failure is not None
    assert failure.type == NonDeterminismError.__name__


def test_inserting_and_appending_steps_is_allowed_inside_a_version(engine: Engine, clock: Clock) -> None:
    new_code = [False]
    entered: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        if new_code[0]:
            ctx.step.run("inserted", lambda: entered.append("inserted"))
        ctx.step.run("a", lambda: entered.append("a"))
        ctx.step.sleep("nap", timedelta(minutes=1))
        if new_code[0]:
            ctx.step.run("appended", lambda: entered.append("appended"))

    run_id, _ = engine.run("t")
    new_code[0] = True
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert entered == ["a", "inserted", "appended"]


def test_a_flipped_byte_in_a_recorded_result_parks_the_run(
    engine: Engine, clock: Clock, conn: Connection, schema: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        value = ctx.step.run("a", lambda: 1)
        ctx.step.sleep("nap", timedelta(minutes=1))
        return value

    run_id, _ = engine.run("t")
    conn.execute(f"UPDATE \"{schema}\".step SET result = '2' WHERE key = 'a'".encode())
    clock.advance(seconds=61)
    engine.timers()
    engine.process().deliver(run_id, "t")

    assert engine.client.get(run_id).reason == "journal_corrupt"


def test_input_that_does_not_fit_the_code_parks_the_run(engine: Engine, conn: Connection, schema: str) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, amount: int) -> None: ...

    run_id = engine.start("t", amount=1)
    wrong = b'{"args":[],"kwargs":{"amount":"much"}}'
    conn.execute(f'UPDATE "{schema}".run SET args = %s'.encode(), (wrong,))
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Parked)
    run = engine.client.get(run_id)
    assert (run.state, run.reason) == (RunState.QUARANTINED, "bad_input")
    assert "amount" in str(engine.client.failure(run))


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


def test_steps_inside_a_step_and_coroutines_are_refused(engine: Engine) -> None:
    async def later() -> None: ...

    @engine.task("nested")
    def nested(ctx: TaskContext) -> None:
        ctx.step.run("outer", lambda: ctx.step.run("inner", lambda: 1))

    @engine.task("coroutine")
    def coroutine(ctx: TaskContext) -> None:
        _ = ctx.step.run("later", later)

    assert isinstance(engine.run("nested")[1], Finished)
    _, outcome = engine.run("coroutine")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)


def test_a_duplicate_hint_finds_nothing_to_claim(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return 1

    run_id, _ = engine.run("t")
    again = engine.process().deliver(run_id, "t", reporter=RecordingReporter())

    assert isinstance(again, Dropped)
