"""Replies of the database are lost: repeating a statement gives the outcome it had."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, enter
from tests.support.proxy import Proxy
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.settings import Settings
from umt_durable.states import RunState, StepState


@pytest.fixture
def proxied(proxied_url: str, schema: str, settings: Settings) -> Iterator[Engine]:
    url = Settings(database_url=proxied_url, schema=schema, embedded=False, lease_seconds=settings.lease_seconds)
    database = Database(url)
    engine = Engine(database, url)
    yield engine
    engine.close()
    database.close()


@pytest.mark.parametrize("loss", ["reply", "statement"])
@pytest.mark.parametrize(
    "statement", ["claim_run", "commit_step", "finish_run", "start_sleep", "suspend_run", "record_try"]
)
def test_i24_repeating_a_statement_whose_reply_was_lost_gives_the_same_outcome(
    proxied: Engine, database_proxy: Proxy, clock: Clock, statement: str, loss: str
) -> None:
    entered: list[str] = []

    @proxied.task("t")
    def body(ctx: TaskContext) -> int:
        value = ctx.step.run("a", lambda: enter(entered, "a", 7))
        ctx.step.sleep("nap", timedelta(minutes=1))
        return value

    @proxied.task("flaky")
    def flaky(ctx: TaskContext) -> int:
        def work() -> int:
            entered.append("a")
            if len(entered) == 1:
                raise ValueError("once")
            return 7

        return ctx.step.options(retry=RetryPolicy(2, initial=timedelta(minutes=1))).run("a", work)

    task = "flaky" if statement == "record_try" else "t"
    run_id = proxied.start(task)
    cut = database_proxy.cut_reply(statement) if loss == "reply" else database_proxy.cut_before(statement)
    parked = proxied.process().deliver(run_id, task)
    clock.advance(seconds=61)
    proxied.timers()
    outcome = proxied.process().deliver(run_id, task)

    assert cut.fired == 1
    assert isinstance(parked, Parked)
    assert isinstance(outcome, Finished)
    assert (outcome.state, outcome.value) == (RunState.SUCCEEDED, 7)
    assert entered == (["a", "a"] if task == "flaky" else ["a"])
    assert [step.state for step in proxied.client.history(run_id).steps] == [StepState.DONE] * (
        1 if task == "flaky" else 2
    )


@pytest.mark.parametrize("statement", ["enqueue_run", "signal_run"])
def test_i24_repeating_an_enqueue_or_signal_makes_no_second_one(
    proxied: Engine, database_proxy: Proxy, conn: Connection, schema: str, statement: str
) -> None:
    @proxied.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.wait_for_fact("go")

    cut = database_proxy.cut_reply(statement)
    run_id = proxied.start("t")
    proxied.client.signal(run_id, "go", 1)

    assert cut.fired == 1
    assert len(proxied.client.list()) == 1
    row = conn.execute(f"SELECT count(*) FROM \"{schema}\".fact WHERE name = 'go'".encode()).fetchone()
    assert row == (1,)
