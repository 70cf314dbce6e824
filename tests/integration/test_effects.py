"""Effects: one answer for one key, whatever fails; what belongs to it is committed with it, or not at all (I15)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.integration.effect_kit import OP, assert_succeeded, assert_visibly_uncertain
from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, in_thread, take_over
from umt_durable import Done, NotAppliedError, OpConflictError, OpInfo, Policy, Unknown, telemetry, with_attempt_token
from umt_durable.database import Connection, Database
from umt_durable.engine.async_context import AsyncTaskContext
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import DefinitionError, EncodingError, FencingError
from umt_durable.settings import Settings
from umt_durable.states import OpState, RunState, StepState

THRICE = RetryPolicy(3, initial=timedelta(0), maximum=timedelta(0))
LATER = RetryPolicy(2, initial=timedelta(minutes=1))


class DeclinedError(Exception):
    """The provider says no, and has applied nothing."""


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def shelf(conn: Connection, schema: str) -> str:
    """Return a table of the application without a unique constraint, so that doubles show."""
    name = f'"{schema}".shelf'
    conn.execute(f"CREATE TABLE {name} (label int)".encode())
    return name


def shelved(conn: Connection, shelf: str) -> list[int]:
    """Return the rows of the application's table."""
    return [row[0] for row in conn.execute(f"SELECT label FROM {shelf}".encode()).fetchall()]


# -- one answer for one key -------------------------------------------------------------------------------------------


def test_i15_e5_a_recorded_answer_is_given_back_in_this_run_and_in_others(engine: Engine, clock: Clock) -> None:
    infos: list[OpInfo] = []

    def ship(info: OpInfo) -> int:
        infos.append(info)
        return len(infos)

    @engine.task("t")
    def body(ctx: TaskContext) -> list[int]:
        first = ctx.step.effect(OP, ship)
        ctx.step.sleep("nap", timedelta(minutes=1))
        return [first, ctx.step.effect(OP, ship), ctx.step.effect("ship:18", ship)]

    run_id, _ = engine.run("t")
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")
    other, _ = engine.run("t")
    clock.advance(seconds=61)
    engine.timers()
    again = engine.process().deliver(other, "t")

    for ended in (outcome, again):
        assert_succeeded(ended, [1, 1, 2])
    assert [info.op_key for info in infos] == [OP, "ship:18"]
    assert not any(info.resumed for info in infos)


def test_e4_the_key_for_the_provider_belongs_to_the_op_and_not_to_the_run(engine: Engine) -> None:
    keys: list[tuple[str, str]] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        def ship(info: OpInfo) -> None:
            keys.append((info.idempotency_key, ctx.idempotency_key))
            raise NotAppliedError("closed")

        ctx.step.effect(OP, ship)

    engine.run("t")
    engine.client.ops.resolve(OP, not_done=True, actor="ann")
    engine.run("t")

    assert len(keys) == 2
    assert len({key for pair in keys for key in pair}) == 1


@pytest.mark.parametrize("said", ["request", "bound"])
def test_i15_another_request_under_the_same_key_is_refused_and_both_are_named(engine: Engine, said: str) -> None:
    called: list[int] = []

    def ship(weight: int, info: OpInfo) -> int:
        called.append(weight)
        return weight

    @engine.task("t")
    def body(ctx: TaskContext, weight: int) -> int:
        if said == "bound":
            return ctx.step.effect(OP, functools.partial(ship, weight))
        return ctx.step.effect(OP, lambda info: ship(weight, info), request={"weight": weight})

    first, _ = engine.run("t", 3)
    _, same = engine.run("t", 3)
    _, other = engine.run("t", 4)

    assert_succeeded(same, 3)
    assert isinstance(other, Finished)
    assert isinstance(other.error, OpConflictError)
    assert other.error.run == first
    assert other.error.expected != other.error.found
    assert other.error.expected in str(other.error)
    assert other.error.found in str(other.error)
    assert called == [3]


def test_a_bound_argument_that_cannot_be_compared_asks_for_a_request(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> object:
        return ctx.step.effect(OP, functools.partial(lambda lock, info: 1, object()))

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, EncodingError)
    assert "request=" in str(outcome.error)
    assert engine.client.ops.list() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": Policy.FENCED}, "needs reconcile="),
        ({"policy": Policy.PARK, "reconcile": lambda info: Unknown()}, "asks a person"),
        ({"policy": "park"}, "must be one of Policy"),
        ({"not_applied": ["ValueError"]}, "exception classes"),
        ({"reconcile": 3}, "must be a function"),
    ],
)
def test_an_effect_that_could_not_work_is_refused_before_anything_is_written(
    engine: Engine, options: dict[str, Any], words: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> object:
        return ctx.step.effect(OP, lambda info: 1, **options)

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert words in str(outcome.error)
    assert engine.client.ops.list() == []
    assert engine.client.history(run_id).steps == []


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raised", "declared"])
def test_i15_a_failure_that_applied_nothing_is_retried_and_then_final_for_every_run(engine: Engine, how: str) -> None:
    infos: list[OpInfo] = []

    def ship(info: OpInfo) -> None:
        infos.append(info)
        raise NotAppliedError("closed") if how == "raised" else DeclinedError("closed")

    @engine.task("t", retry=THRICE, raises=(DeclinedError,))
    def body(ctx: TaskContext) -> None:
        ctx.step.effect(OP, ship, not_applied=[DeclinedError] if how == "declared" else [])

    _, outcome = engine.run("t")
    other, again = engine.run("t")

    for ended in (outcome, again):
        assert isinstance(ended, Finished)
        assert ended.state is RunState.FAILED
        assert isinstance(ended.error, NotAppliedError if how == "raised" else DeclinedError)
    assert [(info.turn, info.resumed) for info in infos] == [(1, False), (2, False), (3, False)]
    assert engine.client.ops.get(OP).state is OpState.FAILED
    assert engine.client.history(other).steps[0].state is StepState.FAILED


def test_i15_another_failure_leaves_the_effect_unknown_and_the_next_try_resumes(engine: Engine, clock: Clock) -> None:
    infos: list[OpInfo] = []

    def ship(info: OpInfo) -> int:
        infos.append(info)
        if len(infos) == 1:
            raise TimeoutError("no answer")
        return 7

    @engine.task("t", retry=LATER)
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, ship, policy=Policy.IDEMPOTENT_KEY)

    run_id, parked = engine.run("t")
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(parked, Parked)
    assert parked.state is RunState.RETRYING
    assert_succeeded(outcome, 7)
    assert [(info.turn, info.resumed) for info in infos] == [(1, False), (2, True)]


@pytest.mark.parametrize("policy", [None, Policy.IDEMPOTENT_KEY])
def test_i15_an_unknown_failure_without_a_further_try_waits_for_a_person(engine: Engine, policy: Policy | None) -> None:
    entered: list[int] = []

    def ship(info: OpInfo) -> int:
        entered.append(info.turn)
        raise TimeoutError("no answer")

    @engine.task("t", retry=THRICE)
    def body(ctx: TaskContext) -> int:
        try:
            return ctx.step.effect(OP, ship, policy=policy)
        except Exception:  # noqa: BLE001  # the point: a body cannot swallow that nobody knows
            return -1

    run_id, outcome = engine.run("t")

    assert_visibly_uncertain(engine, run_id, outcome)
    assert entered == ([1] if policy is None else [1, 2, 3])
    failure = engine.client.ops.failure(engine.client.ops.get(OP))
    assert failure is not None
    assert failure.summary == "TimeoutError: no answer"


def test_e6_a_look_up_that_cannot_say_is_tried_again_and_then_a_person_is_asked(engine: Engine) -> None:
    looked: list[int] = []

    def ship(info: OpInfo) -> int:
        raise TimeoutError("no answer")

    def look(info: OpInfo) -> Done[int] | Unknown:
        looked.append(info.turn)
        return Unknown()

    @engine.task("t", retry=THRICE)
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, ship, reconcile=look)

    run_id, outcome = engine.run("t")

    assert_visibly_uncertain(engine, run_id, outcome)
    assert looked == [2, 3]


def test_i15_an_answer_that_cannot_be_stored_is_not_called_for_again(engine: Engine) -> None:
    entered: list[int] = []

    def ship(info: OpInfo):  # type: ignore[no-untyped-def]  # with an annotation a set could be stored
        entered.append(1)
        return {1, 2}

    @engine.task("t", retry=THRICE)
    def body(ctx: TaskContext) -> object:
        return ctx.step.effect(OP, ship, policy=Policy.IDEMPOTENT_KEY)

    run_id, outcome = engine.run("t")

    assert_visibly_uncertain(engine, run_id, outcome)
    assert entered == [1]


def test_i15_a_cancelled_run_leaves_its_op_open_and_listed(engine: Engine, clock: Clock) -> None:
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, lambda info: gate.pass_through(1))

    run_id, zombie = engine.start("t"), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")):
        gate.wait_reached()
        zombie.freeze()
        engine.client.cancel(run_id)
        take_over(engine, clock)
        gate.open()

    assert engine.state(run_id) is RunState.CANCELLED
    [op] = engine.client.ops.list()
    assert (op.state, op.is_abandoned, op.busy, op.run_id) == (OpState.OPEN, True, False, run_id)


# -- what is committed with the answer --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "engine", "session", "connection"])
def test_i15_e7_what_belongs_to_the_answer_is_committed_with_it(
    engine: Engine, database: Database, conn: Connection, shelf: str, kind: str
) -> None:
    source = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database.url))
    mine = psycopg.connect(database.url)
    bindings: dict[str, Any] = {"ours": None, "engine": source, "session": Session(source), "connection": mine}

    def put(tx: Any, label: int) -> None:
        run = tx.connection().exec_driver_sql if isinstance(tx, Session) else tx.execute
        run(f"INSERT INTO {shelf} VALUES ({label})")

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, lambda info: 7, commit=put, on=bindings[kind])

    _, outcome = engine.run("t")
    _, again = engine.run("t")
    mine.close()
    bindings["session"].close()
    source.dispose()

    assert_succeeded(outcome, 7)
    assert_succeeded(again, 7)
    assert shelved(conn, shelf) == [7]


def test_a_connection_with_a_transaction_open_is_refused(engine: Engine, database: Database) -> None:
    with psycopg.connect(database.url) as mine:
        mine.execute("SELECT 1")

        @engine.task("t")
        def body(ctx: TaskContext) -> int:
            return ctx.step.transaction("book", lambda tx: 1, on=mine)

        _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert "transaction open" in str(outcome.error)


def test_a_function_that_cannot_be_called_as_it_will_be_is_refused_before_anything_is_begun(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, lambda: 1)  # type: ignore[arg-type, misc]

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert "do is called as do(info)" in str(outcome.error)
    assert engine.client.ops.list() == []


def test_i15_e7_a_zombies_commit_meets_a_fencing_error_inside_and_is_rolled_back(
    engine: Engine, conn: Connection, shelf: str, clock: Clock, database: Database
) -> None:
    gate, calls, met = Gate(), [0], list[BaseException]()

    class Watched:
        def __enter__(self) -> psycopg.Connection[Any]:
            self.conn = psycopg.connect(database.url)
            return self.conn

        def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
            if error is not None:
                met.append(error)
            self.conn.close()

    def put(tx: Any, label: int) -> None:
        calls[0] += 1
        tx.execute(f"INSERT INTO {shelf} VALUES ({calls[0]})".encode())
        if calls[0] == 1:
            gate.pass_through()

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, lambda info: 7, commit=put, policy=Policy.IDEMPOTENT_KEY, on=Watched)

    fenced = telemetry.snapshot()["fenced_write"]
    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        outcome = heir.deliver(run_id, "t")
        gate.open()

    assert_succeeded(outcome, 7)
    assert isinstance(late[0], Dropped)
    assert shelved(conn, shelf) == [2]
    assert [type(error) for error in met] == [FencingError]
    assert telemetry.snapshot()["fenced_write"] == fenced + 1


def test_i15_a_commit_that_fails_is_tried_again_with_the_answer_in_hand(
    engine: Engine, conn: Connection, shelf: str
) -> None:
    calls, commits = [0], [0]

    def ship(info: OpInfo) -> int:
        calls[0] += 1
        return 7

    def put(tx: Any, label: int) -> None:
        commits[0] += 1
        tx.execute(f"INSERT INTO {shelf} VALUES ({label})".encode())
        if commits[0] == 1:
            raise ValueError("not yet")

    @engine.task("t", retry=THRICE)
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, ship, commit=put)

    _, outcome = engine.run("t")

    assert_succeeded(outcome, 7)
    assert (calls[0], commits[0]) == (1, 2)
    assert shelved(conn, shelf) == [7]


def test_c9_with_attempt_token_is_the_same_under_its_other_name(
    engine: Engine, database: Database, conn: Connection, shelf: str
) -> None:
    def put(tx: Any, label: int) -> None:
        tx.execute(f"INSERT INTO {shelf} VALUES ({label})".encode())

    with psycopg.connect(database.url) as mine:

        @engine.task("t")
        def body(ctx: TaskContext) -> int:
            return with_attempt_token(mine, OP, lambda info: info.turn, commit=put)

        _, outcome = engine.run("t")
        _, again = engine.run("t")

    assert_succeeded(outcome, 1)
    assert_succeeded(again, 1)
    assert shelved(conn, shelf) == [1]


def test_i15_an_async_body_awaits_an_effect(engine: Engine) -> None:
    async def body(ctx: AsyncTaskContext) -> int:
        return await ctx.step.effect(OP, lambda info: info.turn)

    engine.task("t")(body)
    _, outcome = engine.run("t")

    assert_succeeded(outcome, 1)
    assert engine.client.ops.get(OP).state is OpState.DONE
