"""Fencing on a real Postgres: zombies, take-overs, lost replies. One process per lease, frozen as SIGSTOP would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.support.clock import Clock
from tests.support.engine import Engine, Process, RecordingReporter, enter, in_thread
from tests.support.proxy import Proxy
from tests.support.wait import until, wait_for_row
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.engine.attempt import PROOF_SECONDS
from umt_durable.engine.context import TaskContext
from umt_durable.engine.executor import Dropped, Finished, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, RunState, StepState
from umt_durable.store import runs


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


class Gate:
    """A body stops here until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def pass_through(self, value: int = 0) -> int:
        """Tell the test, wait for it, and return the value."""
        self._reached.set()
        assert self._open.wait(30)
        return value

    def wait_reached(self) -> None:
        """Wait until a body is here."""
        assert self._reached.wait(30)

    def open(self) -> None:
        """Let the body go on, and all later ones pass."""
        self._open.set()


def take_over(engine: Engine, clock: Clock) -> None:
    """Let the leases of frozen processes end, take their runs over, and let the delay pass."""
    clock.advance(seconds=engine.settings.lease_seconds + 1)
    engine.sweep()
    clock.advance(seconds=1)


def test_i5_a_zombie_cannot_commit_a_step_after_the_take_over(engine: Engine, clock: Clock) -> None:
    gate = Gate()
    entered: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        def work() -> str:
            entered.append(threading.current_thread().name)
            if len(entered) == 1:
                gate.pass_through()
            return f"by {len(entered)}"

        return ctx.step.run("work", work)

    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()
    reporter = RecordingReporter()
    with in_thread(lambda: zombie.deliver(run_id, "t", reporter=reporter)) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        outcome = heir.deliver(run_id, "t")
        gate.open()

    assert isinstance(outcome, Finished)
    assert outcome.value == "by 2"
    assert isinstance(late[0], Dropped)
    assert engine.client.result(engine.client.get(run_id)) == "by 2"
    assert [attempt.outcome for attempt in engine.client.history(run_id).attempts] == [
        AttemptOutcome.LOST,
        AttemptOutcome.COMPLETED,
    ]


def test_i5_a_take_over_that_is_not_committed_yet_still_fences(
    engine: Engine, database: Database, clock: Clock, conn: Connection, schema: str
) -> None:
    """The trap of a bare WHERE: the zombie's commit must wait for the take-over's row lock, and then see it."""
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.run("work", lambda: gate.pass_through(1))

    run_id, zombie = engine.start("t"), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        zombie.freeze()
        with psycopg.connect(database.url) as taking:
            taking.execute(
                f"UPDATE \"{schema}\".run SET state = 'ready', fence = fence + 1, claim = NULL, worker = NULL"
                f" WHERE id = %s".encode(),
                (run_id,),
            )
            gate.open()
            wait_until_blocked(conn)
            taking.commit()

    assert isinstance(late[0], Dropped)
    assert engine.client.history(run_id).steps == []


def test_i7_a_zombie_that_has_not_begun_a_step_does_not_begin_it_after_the_take_over(
    engine: Engine, clock: Clock
) -> None:
    gate = Gate()
    entered: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("a", lambda: 1)
        if not entered:
            entered.append("zombie is between two steps")
            gate.pass_through()
        ctx.step.run("b", lambda: entered.append("b"))

    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        stopped = boottime()
        zombie.freeze()
        take_over(engine, clock)
        assert isinstance(heir.deliver(run_id, "t"), Finished)
        # The delay of a take-over, which the moved clock has skipped: no proof is younger after it.
        until(lambda: boottime() - stopped > PROOF_SECONDS, what="the zombie's last proof to be too old")
        gate.open()

    assert isinstance(late[0], Dropped)
    assert entered.count("b") == 1


def test_i4_of_many_deliveries_at_once_one_is_granted(engine: Engine) -> None:
    entered: list[int] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("work", lambda: entered.append(1))

    run_id = engine.start("t")
    processes = [engine.process() for _ in range(8)]
    outcomes: list[Any] = []
    threads = [
        threading.Thread(target=lambda process=process: outcomes.append(process.deliver(run_id, "t")))
        for process in processes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sum(isinstance(outcome, Finished) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, Dropped) for outcome in outcomes) == 7
    assert entered == [1]


def test_i11_a_running_run_that_is_cancelled_enters_no_further_step(engine: Engine) -> None:
    gate = Gate()
    entered: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("a", gate.pass_through)
        ctx.step.run("b", lambda: entered.append("b"))

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as outcome:
        gate.wait_reached()
        engine.client.cancel(run_id, reason="customer")
        assert engine.state(run_id) is RunState.RUNNING
        gate.open()

    assert isinstance(outcome[0], Finished)
    assert outcome[0].state is RunState.CANCELLED
    assert entered == []
    assert engine.client.get(run_id).reason == "customer"


def test_i11_a_run_of_a_dead_worker_that_was_cancelled_ends_cancelled(engine: Engine, clock: Clock) -> None:
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("a", gate.pass_through)

    run_id, dead = engine.start("t"), engine.process()
    with in_thread(lambda: dead.deliver(run_id, "t")):
        gate.wait_reached()
        dead.freeze()
        engine.client.cancel(run_id)
        take_over(engine, clock)
        assert engine.state(run_id) is RunState.CANCELLED
        gate.open()


def test_i11_i12_queued_and_parked_runs_are_cancelled_at_once_and_stay_so(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.sleep("nap", timedelta(hours=1))

    queued, sleeping = engine.start("t"), engine.start("t")
    engine.process().deliver(sleeping, "t")

    for run_id in (queued, sleeping):
        engine.client.cancel(run_id)
        engine.client.cancel(run_id)
    clock.advance(timedelta(hours=2))
    engine.timers()

    assert [engine.state(run_id) for run_id in (queued, sleeping)] == [RunState.CANCELLED] * 2
    assert isinstance(engine.process().deliver(queued, "t"), Dropped)


def test_i12_cancelling_a_finished_run_leaves_it_as_it_was(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return 7

    run_id, _ = engine.run("t")
    engine.client.cancel(run_id)

    run = engine.client.get(run_id)
    assert (run.state, engine.client.result(run)) == (RunState.SUCCEEDED, 7)


def test_i14_a_run_that_only_crashes_its_workers_is_quarantined_with_a_reason(engine: Engine, clock: Clock) -> None:
    gate = Gate()
    bodies = [0]

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        def deadly() -> None:
            bodies[0] += 1
            gate.pass_through()

        ctx.step.run("deadly", deadly)

    run_id = engine.start("t")
    threads = []
    for _ in range(engine.settings.max_crashes + 1):
        process, gate = engine.process(), Gate()
        thread = threading.Thread(target=lambda process=process: process.deliver(run_id, "t"), daemon=True)
        threads.append((thread, gate))
        thread.start()
        gate.wait_reached()
        process.freeze()
        take_over(engine, clock)

    run = engine.client.get(run_id)
    assert (run.state, run.reason) == (RunState.QUARANTINED, "crash_budget")
    assert bodies[0] == engine.settings.max_crashes + 1
    assert "deadly" in str(engine.client.failure(run))
    for thread, one in threads:
        one.open()
        thread.join(30)


def test_i14_progress_gives_the_crash_budget_back(engine: Engine, clock: Clock) -> None:
    steps = engine.settings.max_crashes + 3
    gates = [Gate() for _ in range(steps)]
    at = [0]

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        for number in range(steps):
            ctx.step.run("s", lambda: 1)
            if number >= at[0]:
                gates[number].pass_through()
        return steps

    run_id = engine.start("t")
    threads = []
    for number in range(steps):
        at[0] = number
        process = engine.process()
        thread = threading.Thread(target=lambda process=process: process.deliver(run_id, "t"), daemon=True)
        thread.start()
        threads.append(thread)
        gates[number].wait_reached()
        process.freeze()
        take_over(engine, clock)
        assert engine.state(run_id) is RunState.READY
    at[0] = steps
    for gate in gates:
        gate.open()
    outcome = engine.process().deliver(run_id, "t")
    for thread in threads:
        thread.join(30)

    assert isinstance(outcome, Finished)


# -- ambiguous commits ---------------------------------------------------------------------------------------------


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


# -- the transactional step ----------------------------------------------------------------------------------------


@pytest.fixture
def ledger(conn: Connection, schema: str) -> str:
    """Return a table of the application without a unique constraint, so that doubles show."""
    name = f'"{schema}".ledger'
    conn.execute(f"CREATE TABLE {name} (run text, amount int)".encode())
    return name


def booked(conn: Connection, ledger: str) -> int:
    """Count the rows of the application's table."""
    row = conn.execute(f"SELECT count(*) FROM {ledger}".encode()).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("kind", ["psycopg", "sqlalchemy"])
def test_i16_user_rows_and_the_recorded_result_commit_together(
    engine: Engine, database: Database, conn: Connection, ledger: str, kind: str
) -> None:
    def book(tx: Any, run: str, amount: int) -> int:
        if kind == "psycopg":
            tx.execute(f"INSERT INTO {ledger} VALUES (%s, %s)".encode(), (run, amount))
        else:
            assert isinstance(tx, Session)
            tx.connection().exec_driver_sql(f"INSERT INTO {ledger} VALUES (%s, %s)", (run, amount))
        return amount * 2

    source = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database.url))
    binding = None if kind == "psycopg" else source

    @engine.task("t")
    def body(ctx: TaskContext, amount: int) -> int:
        return ctx.step.transaction("book", book, ctx.run_id, amount, on=binding)

    _, outcome = engine.run("t", 21)
    source.dispose()

    assert isinstance(outcome, Finished)
    assert outcome.value == 42
    assert booked(conn, ledger) == 1


def test_i16_a_zombies_transaction_is_rolled_back_whole(
    engine: Engine, conn: Connection, ledger: str, clock: Clock
) -> None:
    gate = Gate()
    entered = [0]

    def book(tx: Any) -> int:
        entered[0] += 1
        tx.execute(f"INSERT INTO {ledger} VALUES ('r', {entered[0]})".encode())
        if entered[0] == 1:
            gate.pass_through()
        return entered[0]

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.transaction("book", book)

    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        outcome = heir.deliver(run_id, "t")
        gate.open()

    assert isinstance(outcome, Finished)
    assert outcome.value == 2
    assert isinstance(late[0], Dropped)
    assert booked(conn, ledger) == 1


def test_i16_a_result_that_cannot_be_stored_rolls_the_users_rows_back(
    engine: Engine, conn: Connection, ledger: str
) -> None:
    def book(tx: Any) -> Any:
        tx.execute(f"INSERT INTO {ledger} VALUES ('r', 1)".encode())
        return {1, 2}

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.transaction("book", book)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.FAILED
    assert booked(conn, ledger) == 0


@pytest.mark.parametrize("committed", [True, False])
def test_i16_i24_a_commit_whose_reply_was_lost_is_looked_up_before_anything_is_repeated(
    engine: Engine, proxied_url: str, database_proxy: Proxy, conn: Connection, ledger: str, committed: bool
) -> None:
    entered = [0]

    def book(tx: Any) -> int:
        entered[0] += 1
        tx.execute(f"INSERT INTO {ledger} VALUES ('r', 1)".encode())
        return entered[0]

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.transaction("book", book, on=proxied_url)

    if committed:
        cut = database_proxy.cut_after_commit(match=b"commit_step")
    else:
        cut = database_proxy.cut_before("commit_step")
    _, outcome = engine.run("t")

    assert cut.fired == 1
    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.SUCCEEDED
    assert booked(conn, ledger) == 1
    assert entered[0] == (1 if committed else 2)


def wait_until_blocked(conn: Connection) -> None:
    """Return once some backend of this database waits for a row lock."""
    wait_for_row(
        conn,
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND query LIKE '/* commit_step */%%'",
        (),
    )


def test_a_claim_with_a_dead_lease_is_refused(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None: ...

    run_id = engine.start("t")
    process: Process = engine.process()
    worker = process.lease.ensure()
    clock.advance(seconds=60)

    with engine.database.connection() as conn:
        grant = runs.claim(
            conn, id=run_id, nesting=0, task="t", claim=uuid4(), worker=worker, versions=[1], limit_seconds=None
        )

    assert grant is None
