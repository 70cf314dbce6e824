"""Start keys: unique per task, compared by input, for ever or for a time (G4)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.integration.cli_kit import Cli, cli_for
from tests.support.clock import Clock
from tests.support.engine import Engine, in_thread
from tests.support.proxy import Proxy
from umt_durable import DefinitionError, RunExistsError
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.errors import IdempotencyConflictError
from umt_durable.settings import Settings


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    declare(engine)
    yield engine
    engine.close()


@pytest.fixture
def cli(settings: Settings) -> Iterator[Cli]:
    with cli_for(settings) as cli:
        yield cli


def declare(engine: Engine) -> None:
    """Declare the two tasks of these tests."""
    for name in ("t", "u"):

        @engine.task(name)
        def body(ctx: TaskContext, order: str = "o1") -> None: ...


def test_g4_a_key_belongs_to_one_task_and_outlives_its_run(engine: Engine, clock: Clock) -> None:
    first = engine.start("t", key="k")
    engine.process().deliver(first, "t")
    clock.advance(seconds=3600 * 24 * 365)

    assert engine.start("t", key="k") == first
    assert engine.start("u", key="k") != first
    with pytest.raises(IdempotencyConflictError) as conflict:
        engine.start("t", "o2", key="k")
    assert (conflict.value.task, conflict.value.key, conflict.value.run) == ("t", "k", first)


def test_g4_a_caller_that_rejects_gets_the_id_of_the_earlier_run_and_starts_none(engine: Engine) -> None:
    first = engine.start("t", key="k", attach=False)

    with pytest.raises(RunExistsError, match=first) as refused:
        engine.start("t", key="k", attach=False)

    assert refused.value.run == first
    assert [run.id for run in engine.client.list()] == [first]


def test_g4_a_refused_start_leaves_the_callers_transaction_usable(engine: Engine, database: Database) -> None:
    first = engine.start("t", key="k")

    with psycopg.connect(database.url) as mine, mine.transaction():
        with pytest.raises(RunExistsError):
            engine.start("t", key="k", attach=False, conn=mine)
        with pytest.raises(IdempotencyConflictError):
            engine.start("t", "o2", key="k", conn=mine)
        second = engine.start("t", key="other", conn=mine)

    assert {run.id for run in engine.client.list()} == {first, second}


def test_g4_after_its_lifetime_a_key_may_be_used_again_with_any_input(engine: Engine, clock: Clock) -> None:
    first = engine.start("t", key="k", ttl=60)
    clock.advance(seconds=59)
    assert engine.start("t", key="k", ttl=60) == first

    clock.advance(seconds=2)
    second = engine.start("t", "o2", key="k", attach=False)

    assert second != first
    clock.advance(seconds=3600)
    assert engine.start("t", "o2", key="k") == second


def test_g4_of_two_transactions_with_one_key_the_second_waits_for_the_first(engine: Engine, database: Database) -> None:
    with psycopg.connect(database.url) as mine:
        first = engine.start("t", key="k", conn=mine)
        with in_thread(lambda: engine.start("t", key="k")) as second:
            mine.commit()
    with psycopg.connect(database.url) as mine:
        gone = engine.start("u", key="k", conn=mine)
        with in_thread(lambda: engine.start("u", key="k")) as third:
            mine.rollback()

    assert second == [first]
    assert third != [gone]
    assert {run.id for run in engine.client.list()} == {first, *third}


@pytest.mark.parametrize("loss", ["reply", "statement"])
def test_g4_i24_a_start_whose_reply_was_lost_does_not_reject_itself(
    proxied_url: str, schema: str, database_proxy: Proxy, loss: str
) -> None:
    url = Settings(database_url=proxied_url, schema=schema, embedded=False)
    database = Database(url)
    engine = Engine(database, url)
    declare(engine)

    cut = database_proxy.cut_reply("enqueue_run") if loss == "reply" else database_proxy.cut_before("enqueue_run")
    run_id = engine.start("t", key="k", attach=False)

    assert cut.fired == 1
    assert [run.id for run in engine.client.list()] == [run_id]
    engine.close()
    database.close()


def test_g4_a_task_takes_key_policy_and_lifetime(cli: Cli) -> None:
    task = cli.tasks.one_step
    first = task.enqueue(1, idempotency_key="k", idempotency_ttl=timedelta(days=1))

    assert task.enqueue(1, idempotency_key="k", idempotency_policy="attach").id == first.id
    assert task.apply_async((1,), idempotency_key="k").id == first.id
    with pytest.raises(RunExistsError, match=first.id):
        task.enqueue(1, idempotency_key="k", idempotency_policy="reject")
    assert asyncio.run(task.aenqueue(1, idempotency_key="k")).id == first.id
    with pytest.raises(RunExistsError, match=first.id):
        asyncio.run(task.aenqueue(1, idempotency_key="k", idempotency_policy="reject"))


@pytest.mark.parametrize(
    "options",
    [
        {"idempotency_key": ""},
        {"idempotency_key": 3},
        {"idempotency_key": "k", "idempotency_ttl": 0},
        {"idempotency_key": "k", "idempotency_ttl": timedelta(seconds=-1)},
        {"idempotency_key": "k", "idempotency_ttl": float("nan")},
        {"idempotency_key": "k", "idempotency_ttl": "1d"},
        {"idempotency_key": "k", "idempotency_policy": "replace"},
        {"idempotency_ttl": 60},
        {"idempotency_policy": "reject"},
    ],
)
def test_g4_a_key_policy_or_lifetime_that_makes_no_sense_is_refused(cli: Cli, options: dict[str, Any]) -> None:
    with pytest.raises(DefinitionError, match="idempotency_"):
        cli.tasks.one_step.apply_async((1,), **options)

    assert cli.tasks.durable.list() == []
