"""The engine at its edges: late bodies, outages in the middle, clocks that jump, and values nobody can store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, RecordingReporter, enter, in_thread
from tests.support.proxy import Proxy
from tests.support.wait import until, wait_for_row
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.engine.attempt import PROOF_SECONDS
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished, Parked
from umt_durable.engine.retry import RetryAfter, RetryPolicy
from umt_durable.errors import DatabaseUnavailableError, DefinitionError
from umt_durable.records import Grant
from umt_durable.settings import Settings
from umt_durable.states import RunState, StepState
from umt_durable.store import runs
from umt_durable.store.guard import Guard


class DeclinedError(Exception):
    """A business failure of these tests."""


@dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that allows nothing to be set on it."""

    code: int


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def proxied(proxied_url: str, schema: str) -> Iterator[Engine]:
    settings = Settings(database_url=proxied_url, schema=schema, embedded=False, lease_seconds=3.0)
    database = Database(settings)
    engine = Engine(database, settings)
    yield engine
    engine.close()
    database.close()


class SlowReporter(RecordingReporter):
    """A result backend that takes longer than a proof lives, while something happens to the run."""

    def __init__(self, engine: Engine, run_id: str, *, cancels: bool) -> None:
        super().__init__()
        self._engine, self._run, self._cancels = engine, run_id, cancels

    def claimed(self, grant: Grant) -> None:
        """Be slow right after the claim."""
        if self._cancels:
            self._engine.client.cancel(self._run)
        asked = boottime()
        until(lambda: boottime() - asked > PROOF_SECONDS, what="the claim's reply to be no proof any more")


def test_i7_i11_a_body_without_steps_is_not_entered_after_a_cancel(engine: Engine) -> None:
    entered: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        entered.append("body")

    run_id = engine.start("t")
    outcome = engine.process().deliver(run_id, "t", reporter=SlowReporter(engine, run_id, cancels=True))

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.CANCELLED
    assert entered == []


def test_i1_i24_a_claim_whose_outcome_is_unknown_is_given_up(
    proxied: Engine, engine: Engine, database_proxy: Proxy, clock: Clock
) -> None:
    @proxied.task("t")
    def body(ctx: TaskContext) -> int:
        return 7

    engine.tasks = proxied.tasks
    run_id, process = proxied.start("t"), proxied.process()
    worker = process.lease.ensure()
    cut = database_proxy.cut_reply("claim_run")
    database_proxy.cut_before("claim_run", times=100)

    with pytest.raises(DatabaseUnavailableError):
        deliver_hastily(proxied.database, process, run_id)

    assert cut.fired == 1
    assert process.lease.ensure() != worker
    clock.advance(seconds=4)
    engine.sweep()
    clock.advance(seconds=1)
    outcome = engine.process().deliver(run_id, "t")
    assert isinstance(outcome, Finished)


def deliver_hastily(database: Database, process: Any, run_id: str) -> None:
    """Deliver with a database that is tried for half a second only."""
    patient = database.do

    def hasty(work: Any, *, seconds: float = 0.5) -> Any:
        return patient(work, seconds=min(seconds, 0.5))

    database.do = hasty  # type: ignore[method-assign]  # the patience of production is half a minute
    try:
        process.deliver(run_id, "t")
    finally:
        database.do = patient  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "wrong", ["nul\0", "half \ud800", 10**5000, FrozenError(3)], ids=["nul", "surrogate", "huge", "frozen"]
)
def test_i26_an_error_that_nobody_can_store_as_it_is_fails_the_run_once(engine: Engine, wrong: Any) -> None:
    entered: list[int] = []

    def fails() -> None:
        entered.append(1)
        raise wrong if isinstance(wrong, Exception) else DeclinedError(wrong)

    @engine.task("t", raises=(DeclinedError, FrozenError))
    def body(ctx: TaskContext) -> None:
        ctx.step.run("a", fails)

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.FAILED
    assert entered == [1]
    assert engine.client.failure(engine.client.get(run_id)) is not None


def test_i25_an_outage_of_the_database_is_never_a_failure_of_the_body(
    proxied: Engine, engine: Engine, database_proxy: Proxy, clock: Clock
) -> None:
    @proxied.task("t")
    def body(ctx: TaskContext) -> str:
        return ctx.now().isoformat()

    engine.tasks = proxied.tasks
    run_id, process = proxied.start("t"), proxied.process()
    patient = proxied.database.do

    def hasty(work: Any, *, seconds: float = 0.5) -> Any:
        return patient(work, seconds=min(seconds, 0.5))

    database_proxy.cut_before("now", times=100)
    proxied.database.do = hasty  # type: ignore[method-assign]  # the patience of production is half a minute
    outcome = process.deliver(run_id, "t")
    proxied.database.do = patient  # type: ignore[method-assign]

    assert isinstance(outcome, Dropped)
    assert engine.client.history(run_id).steps == []
    clock.advance(seconds=5)
    engine.sweep()
    clock.advance(seconds=1)
    assert isinstance(engine.process().deliver(run_id, "t"), Finished)


@pytest.mark.parametrize("policy", [RetryPolicy.NONE, RetryPolicy(3, initial=timedelta(0))], ids=["none", "three"])
def test_i14_a_database_error_of_the_users_own_counts_as_a_failed_try(engine: Engine, policy: RetryPolicy) -> None:
    entered: list[int] = []

    def book(tx: Any) -> None:
        entered.append(1)
        psycopg.connect("host=127.0.0.1 port=1 connect_timeout=2")

    @engine.task("t", retry=policy)
    def body(ctx: TaskContext) -> None:
        ctx.step.transaction("book", book)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.FAILED
    assert len(entered) == policy.max_attempts


def test_i7_i16_a_transaction_whose_commit_arrives_late_is_not_entered_again(
    engine: Engine, proxied_url: str, database_proxy: Proxy, conn: Connection, schema: str
) -> None:
    """The server is slow over a COMMIT whose connection breaks: a deferred trigger waits for a lock the test holds."""
    entered: list[int] = []
    conn.execute(f'CREATE TABLE "{schema}".ledger (n int)'.encode())
    conn.execute(
        f"""CREATE FUNCTION "{schema}".slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$""".encode()
    )
    conn.execute(
        f"""CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON "{schema}".ledger DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION "{schema}".slow()""".encode()
    )

    def book(tx: Any) -> int:
        tx.execute(f'INSERT INTO "{schema}".ledger VALUES (1)'.encode())
        return enter(entered, 1, len(entered))

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.transaction("book", book, on=proxied_url)

    run_id, process = engine.start("t"), engine.process()
    conn.execute("SELECT pg_advisory_lock(4711)")
    with in_thread(lambda: process.deliver(run_id, "t")) as outcome:
        waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"
        wait_for_row(conn, waiting, what="the COMMIT to wait for the lock")
        database_proxy.reset()
        asking = "SELECT 1 FROM pg_stat_activity WHERE query LIKE '/* start_step */%%' AND wait_event_type = 'Lock'"
        wait_for_row(conn, asking, what="the repeat to ask for its grant")
        conn.execute("SELECT pg_advisory_unlock(4711)")

    assert isinstance(outcome[0], Finished)
    assert outcome[0].value == 0
    assert entered == [1]
    assert conn.execute(f'SELECT count(*) FROM "{schema}".ledger'.encode()).fetchone() == (1,)


def test_i10_i25_a_clock_that_jumps_back_does_not_begin_a_finished_sleep_again(
    engine: Engine, clock: Clock, conn: Connection, schema: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.sleep("nap", timedelta(hours=1))
        ctx.step.run("after", lambda: 1)
        ctx.step.sleep("more", timedelta(hours=1))

    run_id, _ = engine.run("t")
    conn.execute(f"UPDATE \"{schema}\".run SET state = 'ready', wake_at = NULL".encode())  # as a take-over leaves it
    clock.advance(seconds=3601)
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Parked)
    states = {step.key: step.state for step in engine.client.history(run_id).steps}
    assert states == {"nap": StepState.DONE, "after": StepState.DONE, "more": StepState.STARTED}


def test_an_error_raised_while_a_recorded_one_is_handled_is_tried_again(engine: Engine, clock: Clock) -> None:
    tries: list[int] = []

    def fails() -> None:
        raise DeclinedError("card")

    @engine.task(
        "t", retry=RetryPolicy(3, initial=timedelta(seconds=30), give_up_on=DeclinedError), raises=(DeclinedError,)
    )
    def body(ctx: TaskContext) -> str:
        try:
            ctx.step.run("charge", fails)
        except DeclinedError:
            tries.append(1)
            if len(tries) < 3:
                raise RuntimeError("the compensation failed") from None
        return "compensated"

    run_id, outcome = engine.run("t")
    for _ in range(2):
        assert isinstance(outcome, Parked)
        clock.advance(seconds=61)
        engine.timers()
        outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == "compensated"


@pytest.mark.parametrize("key", [42, "", "a\0b", "\ud800", "k" * 256])
def test_a_key_no_fact_can_have_is_refused_at_the_wait(engine: Engine, key: Any) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.wait_for_fact("paid", key=key)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)


def test_a_sleep_or_back_off_beyond_every_calendar_is_refused_or_capped(engine: Engine) -> None:
    @engine.task("sleeps")
    def sleeps(ctx: TaskContext) -> None:
        ctx.step.sleep("nap", timedelta.max)

    @engine.task("retries", retry=RetryPolicy(2))
    def retries(ctx: TaskContext) -> None:
        raise RetryAfter(timedelta.max)

    _, slept = engine.run("sleeps")
    retried_id, retried = engine.run("retries")

    assert isinstance(slept, Finished)
    assert isinstance(slept.error, DefinitionError)
    assert isinstance(retried, Parked)
    assert engine.state(retried_id) is RunState.RETRYING


def test_i7_a_proofs_age_counts_from_before_its_statement_was_sent(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> list[bool]:
        attempt = ctx._pass.attempt

        def slow(guard: Guard) -> bool | None:
            asked, reply = boottime(), runs.prove(guard)
            until(lambda: boottime() - asked > PROOF_SECONDS, what="the reply to be on its way for long")
            return reply

        attempt.write(runs.prove, cancel=bool)
        quick = attempt.is_fresh()
        attempt.write(slow, cancel=bool)
        return [quick, attempt.is_fresh()]

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [True, False]
