"""Replies about effects are lost, and processes die at each point of one: it is applied once, or visibly uncertain."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.integration.effect_kit import OP, assert_succeeded
from tests.support.engine import Engine
from tests.support.proxy import Proxy
from umt_durable import NotAppliedError, OpInfo, failpoints
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.retry import RetryPolicy
from umt_durable.settings import Settings
from umt_durable.states import OpState

TWICE = RetryPolicy(2, initial=timedelta(0), maximum=timedelta(0))


@pytest.fixture
def proxied(proxied_url: str, schema: str, settings: Settings) -> Iterator[Engine]:
    url = Settings(database_url=proxied_url, schema=schema, embedded=False, lease_seconds=settings.lease_seconds)
    database = Database(url)
    engine = Engine(database, url)
    yield engine
    engine.close()
    database.close()


@pytest.fixture
def shelf(conn: Connection, schema: str) -> str:
    name = f'"{schema}".shelf'
    conn.execute(f"CREATE TABLE {name} (label int)".encode())
    return name


@pytest.mark.parametrize("loss", ["reply", "statement"])
@pytest.mark.parametrize("statement", ["begin_op", "settle_op", "take_op", "clear_op"])
def test_i24_i15_a_statement_of_an_effect_is_repeated_after_a_lost_reply_without_a_second_call(
    proxied: Engine, database_proxy: Proxy, statement: str, loss: str
) -> None:
    infos: list[OpInfo] = []

    def ship(info: OpInfo) -> int:
        infos.append(info)
        if statement in ("take_op", "clear_op") and len(infos) == 1:
            raise NotAppliedError("closed")
        return 7

    @proxied.task("t", retry=TWICE)
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, ship)

    cut = database_proxy.cut_reply(statement) if loss == "reply" else database_proxy.cut_before(statement)
    _, outcome = proxied.run("t")

    assert cut.fired == 1
    assert_succeeded(outcome, 7)
    calls = 2 if statement in ("take_op", "clear_op") else 1
    assert [(info.turn, info.resumed) for info in infos] == [(1, False), (2, False)][:calls]


@pytest.mark.parametrize("committed", [True, False])
def test_i24_i15_a_commit_with_the_answer_whose_reply_was_lost_is_looked_up(
    proxied: Engine, proxied_url: str, database_proxy: Proxy, conn: Connection, shelf: str, committed: bool
) -> None:
    calls = [0]

    def ship(info: OpInfo) -> int:
        calls[0] += 1
        return 7

    def put(tx: Any, label: int) -> None:
        tx.execute(f"INSERT INTO {shelf} VALUES ({label})".encode())

    @proxied.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, ship, commit=put, on=proxied_url)

    after, before = database_proxy.cut_after_commit, database_proxy.cut_before
    cut = after(match=b"settle_op") if committed else before("settle_op")
    _, outcome = proxied.run("t")

    assert cut.fired == 1
    assert_succeeded(outcome, 7)
    assert calls == [1]
    assert conn.execute(f"SELECT label FROM {shelf}".encode()).fetchall() == [(7,)]


@pytest.mark.parametrize("loss", ["reply", "statement"])
def test_i24_a_decision_whose_reply_was_lost_is_made_once(proxied: Engine, database_proxy: Proxy, loss: str) -> None:
    def ship(info: OpInfo) -> int:
        raise TimeoutError("no answer")

    @proxied.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, ship)

    run_id, _ = proxied.run("t")
    cut = database_proxy.cut_reply("resolve_op") if loss == "reply" else database_proxy.cut_before("resolve_op")
    op = proxied.client.ops.resolve(OP, done=7, actor="ann")

    assert cut.fired == 1
    assert (op.state, op.turn, op.waiting) == (OpState.DONE, 2, 0)
    assert_succeeded(proxied.process().deliver(run_id, "t"), 7)


@pytest.mark.parametrize("point", ["op.begin.r", "op.done.r"])
def test_i24_i15_the_points_of_lost_replies_stand_where_a_repeat_finds_what_was_written(
    database: Database, settings: Settings, point: str
) -> None:
    engine, calls = Engine(database, settings), [0]

    def ship(info: OpInfo) -> int:
        calls[0] += 1
        return 7

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, ship)

    failpoints.install(f"{point}=raise:OperationalError;nth=1")
    try:
        _, outcome = engine.run("t")
    finally:
        failpoints.install("")
        engine.close()

    assert_succeeded(outcome, 7)
    assert calls == [1]
