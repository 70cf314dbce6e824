"""What a person says of an effect that nobody else can tell of, and the runs that wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.effect_kit import OP, assert_succeeded, assert_visibly_uncertain
from tests.support.engine import Engine, Gate, in_thread
from umt_durable import OpInfo, OpStateError, UnknownOpError
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished
from umt_durable.errors import DefinitionError, OpFailedError
from umt_durable.services.release import Releaser
from umt_durable.settings import Settings
from umt_durable.states import OpState, RunState
from umt_durable.store import ledger


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def shelf(conn: Connection, schema: str) -> str:
    name = f'"{schema}".shelf'
    conn.execute(f"CREATE TABLE {name} (label int)".encode())
    return name


@pytest.fixture
def infos(engine: Engine, shelf: str) -> list[OpInfo]:
    """Declare a task whose first call gives no answer, and return what its calls were told."""
    infos: list[OpInfo] = []

    def ship(info: OpInfo) -> int:
        infos.append(info)
        if len(infos) == 1:
            raise TimeoutError("no answer")
        return 7

    def put(tx: Any, label: int) -> None:
        tx.execute(f"INSERT INTO {shelf} VALUES ({label})".encode())

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, ship, commit=put)

    return infos


def shelved(conn: Connection, shelf: str) -> list[int]:
    return [row[0] for row in conn.execute(f"SELECT label FROM {shelf}".encode()).fetchall()]


def test_i15_done_releases_every_run_and_what_belongs_to_the_answer_is_committed_once(
    engine: Engine, infos: list[OpInfo], conn: Connection, shelf: str
) -> None:
    first, outcome = engine.run("t")
    assert_visibly_uncertain(engine, first, outcome)
    second, _ = engine.run("t")
    assert engine.client.ops.get(OP).waiting == 2

    op = engine.client.ops.resolve(OP, done=5, actor="ann", reason="seen in the portal")

    assert (op.state, op.actor, op.comment, op.waiting) == (OpState.DONE, "ann", "seen in the portal", 0)
    assert [engine.state(run) for run in (first, second)] == [RunState.READY] * 2
    assert_succeeded(engine.process().deliver(first, "t"), 5)
    assert_succeeded(engine.process().deliver(second, "t"), 5)
    assert len(infos) == 1
    assert shelved(conn, shelf) == [5]


def test_i15_not_done_has_it_called_for_the_first_time_again(engine: Engine, infos: list[OpInfo]) -> None:
    run_id, _ = engine.run("t")

    op = engine.client.ops.resolve(OP, not_done=True, actor="ann")
    outcome = engine.process().deliver(run_id, "t")

    assert (op.state, op.is_clear) == (OpState.OPEN, True)
    assert_succeeded(outcome, 7)
    assert [(info.turn, info.resumed) for info in infos] == [(1, False), (3, False)]


def test_i15_failed_is_the_failure_of_each_run(engine: Engine, infos: list[OpInfo]) -> None:
    run_id, _ = engine.run("t")

    engine.client.ops.resolve(OP, failed="returned to sender", actor="ann")
    outcome = engine.process().deliver(run_id, "t")
    _, other = engine.run("t")

    for ended in (outcome, other):
        assert isinstance(ended, Finished)
        assert isinstance(ended.error, OpFailedError)
        assert (ended.error.op_key, ended.error.message) == (OP, "returned to sender")
    assert len(infos) == 1


def test_i15_a_result_of_the_wrong_type_asks_the_person_again(engine: Engine, infos: list[OpInfo]) -> None:
    run_id, _ = engine.run("t")

    engine.client.ops.resolve(OP, done="five", actor="ann")
    outcome = engine.process().deliver(run_id, "t")

    assert_visibly_uncertain(engine, run_id, outcome)
    failure = engine.client.ops.failure(engine.client.ops.get(OP))
    assert failure is not None
    assert "what ann gave as its result does not fit" in failure.message
    engine.client.ops.resolve(OP, done=5, actor="ann")
    assert_succeeded(engine.process().deliver(run_id, "t"), 5)


def test_a_decision_about_an_op_that_is_done_busy_or_unknown_is_refused(engine: Engine) -> None:
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, lambda info: gate.pass_through(7))

    run_id = engine.start("t")
    with in_thread(lambda: engine.process().deliver(run_id, "t")):
        gate.wait_reached()
        with pytest.raises(OpStateError, match=f"being executed by run {run_id}"):
            engine.client.ops.resolve(OP, not_done=True, actor="ann")
        gate.open()
    with pytest.raises(OpStateError, match="is done"):
        engine.client.ops.resolve(OP, not_done=True, actor="ann")
    with pytest.raises(UnknownOpError):
        engine.client.ops.resolve("ship:99", not_done=True, actor="ann")
    with pytest.raises(DefinitionError, match="say one of"):
        engine.client.ops.resolve(OP, not_done=True, failed="no", actor="ann")
    with pytest.raises(DefinitionError, match="actor="):
        engine.client.ops.resolve(OP, not_done=True, actor="")


def test_i15_runs_whose_release_nobody_lived_to_make_are_found_by_maintenance(
    engine: Engine, infos: list[OpInfo], database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, _ = engine.run("t")
    monkeypatch.setattr("umt_durable.services.release.release", lambda *_: 0)  # the person's process dies before it
    engine.client.ops.resolve(OP, done=5, actor="ann")
    monkeypatch.undo()
    assert engine.state(run_id) is RunState.QUARANTINED

    counts = Releaser(database, settings).run_once()

    assert (counts.ops, counts.woken, counts.failed) == (1, 1, 0)
    assert engine.state(run_id) is RunState.READY
    assert Releaser(database, settings).run_once().work == 0


def test_i15_i8_a_decision_between_the_doubt_and_the_parking_is_not_missed(
    engine: Engine, infos: list[OpInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    park = ledger.wait_for_person

    def decide_first(*args: Any) -> bool:
        monkeypatch.undo()
        engine.client.ops.resolve(OP, done=5, actor="ann")
        return park(*args)

    monkeypatch.setattr(ledger, "wait_for_person", decide_first)

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Dropped)
    assert engine.state(run_id) is RunState.READY
    assert_succeeded(engine.process().deliver(run_id, "t"), 5)


def test_a_run_that_waits_for_a_person_can_be_cancelled_and_its_op_stays_for_the_person(
    engine: Engine, infos: list[OpInfo]
) -> None:
    run_id, _ = engine.run("t")

    engine.client.cancel(run_id, reason="customer")

    assert engine.state(run_id) is RunState.CANCELLED
    assert engine.client.ops.get(OP).state is OpState.UNCERTAIN
    engine.client.ops.resolve(OP, done=5, actor="ann")
    assert engine.state(run_id) is RunState.CANCELLED


def test_ops_are_listed_by_key_and_state_a_page_at_a_time(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, number: int) -> int:
        return ctx.step.effect(f"ship:{number}", lambda info: number)

    for number in range(3):
        engine.run("t", number)

    ops = engine.client.ops
    assert ops.list() == []
    assert [op.op_key for op in ops.list(states=["done"], limit=2)] == ["ship:0", "ship:1"]
    assert [op.op_key for op in ops.list(states=["done"], after="ship:1")] == ["ship:2"]
    assert ops.result(ops.get("ship:2")) == 2
    assert ops.list(states=["done"], namespace="other") == []
    with pytest.raises(DefinitionError):
        ops.list(states=["lost"])
