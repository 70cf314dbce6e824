"""What a caller of the engine may rely on, on a real Postgres: starts, signals and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from uuid import uuid4

import psycopg
import pytest

from tests.support.engine import Engine, RecordingReporter
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped
from umt_durable.errors import (
    AutocommitError,
    DefinitionError,
    IdempotencyConflictError,
    InputError,
    UnknownRunError,
)
from umt_durable.settings import Settings
from umt_durable.states import RunState


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


def test_d12_i2_an_enqueue_or_signal_that_rolled_back_has_no_effect(
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


def test_a_duplicate_hint_finds_nothing_to_claim(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return 1

    run_id, _ = engine.run("t")
    again = engine.process().deliver(run_id, "t", reporter=RecordingReporter())

    assert isinstance(again, Dropped)
