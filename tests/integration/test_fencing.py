"""Fencing on a real Postgres: zombies, take-overs, cancels. One process per lease, frozen as SIGSTOP would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, Process, RecordingReporter, in_thread, take_over
from tests.support.wait import until, wait_for_row
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.engine.attempt import PROOF_SECONDS
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, RunState
from umt_durable.store import runs


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


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


def test_d9_i11_a_running_run_that_is_cancelled_enters_no_further_step(engine: Engine) -> None:
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


def wait_until_blocked(conn: Connection) -> None:
    """Return once some backend of this database waits for a row lock."""
    wait_for_row(
        conn,
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND query LIKE '/* commit_step */%%'",
        (),
    )


def test_i25_a_hint_that_comes_after_a_jump_of_the_databases_clock_is_not_lost(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return 7

    process = engine.process()
    worker = process.lease.ensure()
    clock.advance(seconds=3600)
    run_id = engine.start("t")
    outcome = process.deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert process.lease.ensure() != worker
