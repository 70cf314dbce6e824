"""Timers on a real Postgres: nothing early, nothing lost, one outcome for each wait."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.services import timers as timers_module
from umt_durable.services.router import route
from umt_durable.services.timers import Timers
from umt_durable.settings import Settings
from umt_durable.states import RunState, StepKind, WaitState
from umt_durable.store import journal, runs, waits
from umt_durable.store.guard import Guard


@pytest.fixture
def timers(database: Database, settings: Settings) -> Timers:
    return Timers(database, settings)


@pytest.fixture
def other(database: Database) -> Iterator[Connection]:
    """Return a second session."""
    with database.connect() as conn:
        yield conn


def test_i10_a_sleep_ends_at_its_due_time_and_not_before(conn: Connection, timers: Timers, clock: Clock) -> None:
    _, run = kit.sleeping(conn, 60)
    clock.advance(seconds=59)
    early = timers.run_once()
    before = kit.state(conn, run)

    clock.advance(seconds=1)
    on_time = timers.run_once()

    assert (early.woken, before) == (0, "sleeping")
    assert (on_time.woken, on_time.hints, kit.state(conn, run)) == (1, 1, "ready")
    assert [str(step.state) for step in journal.read(conn, run)] == ["done"]
    assert [event[0] for event in kit.events(conn)] == [run]


def test_i10_a_retry_waits_for_its_back_off(conn: Connection, timers: Timers, clock: Clock) -> None:
    new, grant, _ = kit.running(conn)
    runs.retry(Guard(conn, grant.token), delay_seconds=30, error=b"{}", summary="boom")
    early = timers.run_once()

    clock.advance(seconds=31)

    assert (early.woken, timers.run_once().woken, kit.state(conn, new.id)) == (0, 1, "ready")


def test_i9_an_overdue_wait_is_timed_out_once_and_its_run_goes_on(
    conn: Connection, timers: Timers, clock: Clock
) -> None:
    _, run = kit.waiting(conn, timeout=60)
    clock.advance(seconds=61)

    first, second = timers.run_once(), timers.run_once()

    assert (first.timed_out, first.woken, second.work) == (1, 1, 0)
    assert kit.wait_states(conn, run) == {"approved": "timed_out"}
    assert kit.state(conn, run) == "ready"


def test_rg10_of_several_waits_the_earliest_time_out_wakes_the_run_and_the_others_stay_open(
    conn: Connection, timers: Timers, clock: Clock
) -> None:
    new, grant, _ = kit.running(conn)
    guard = Guard(conn, grant.token)
    for name, timeout in (("late", 300.0), ("soon", 60.0), ("never", None)):
        kit.register(guard, name, waits.run_address(new.id, name), timeout=timeout)
    journal.start_sleep(guard, kit.entry("nap", kind=StepKind.SLEEP), duration=timedelta(seconds=120))
    assert runs.suspend(guard, state=RunState.WAITING, steps=["nap"], waits=["late", "soon", "never"])
    clock.advance(seconds=59)
    early = timers.run_once()

    clock.advance(seconds=2)
    timers.run_once()

    assert early.woken == 0
    assert kit.wait_states(conn, grant.token.run) == {"late": "pending", "soon": "timed_out", "never": "pending"}
    assert kit.state(conn, new.id) == "ready"


def test_a_sleep_beside_a_wait_wakes_the_run_without_settling_the_wait(
    conn: Connection, timers: Timers, clock: Clock
) -> None:
    new, grant, _ = kit.running(conn)
    guard = Guard(conn, grant.token)
    kit.register(guard, "approved", waits.run_address(new.id, "approved"), timeout=300)
    journal.start_sleep(guard, kit.entry("nap", kind=StepKind.SLEEP), duration=timedelta(seconds=10))
    assert runs.suspend(guard, state=RunState.WAITING, steps=["nap"], waits=["approved"])
    clock.advance(seconds=11)

    counts = timers.run_once()

    assert (counts.woken, counts.timed_out) == (1, 0)
    assert kit.wait_states(conn, grant.token.run) == {"approved": "pending"}


def test_i9_a_time_out_that_meets_a_fact_in_commit_leaves_the_wait_to_the_fact(
    conn: Connection, timers: Timers, clock: Clock, other: Connection
) -> None:
    """The timer has listed the run as overdue; a router settles its wait first, and its commit decides."""
    new, run = kit.waiting(conn, timeout=60)
    fact = kit.signal(conn, new.id)
    clock.advance(seconds=61)

    with other.transaction():
        runs.lock(other, run)
        waits.settle(other, run, "approved", state=WaitState.SATISFIED, fact=fact)
        runs.wake(other, run, deliver_seconds=30)
        beside = kit.Beside(timers.run_once)
        until(lambda: kit.lock_waiters(conn) == 1 or not beside.is_busy, what="the timer to meet the run's lock")

    assert beside.result().timed_out == 0
    assert kit.wait_states(conn, run) == {"approved": "satisfied"}
    assert len(kit.events(conn)) == 1


def test_i10_a_run_that_parked_anew_after_it_was_listed_sleeps_on(
    conn: Connection, timers: Timers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, run = kit.waiting(conn, timeout=60)
    clock.advance(seconds=61)
    listed = runs.overdue_waiting

    def list_then_go_on(own: Connection, **given: int) -> list[int]:
        found = listed(own, **given)
        with conn.transaction():
            runs.lock(conn, run)
            waits.time_out(conn, run)
            runs.wake(conn, run, deliver_seconds=30)
        guard = Guard(conn, kit.claim(conn, new.id, kit.worker(conn)).token)
        kit.register(guard, "paid", waits.run_address(new.id, "paid"), timeout=600)
        assert runs.suspend(guard, state=RunState.WAITING, steps=[], waits=["paid"])
        return found

    monkeypatch.setattr(runs, "overdue_waiting", list_then_go_on)

    assert timers.run_once().work == 0
    assert kit.state(conn, run) == "waiting"
    assert kit.wait_states(conn, run) == {"approved": "timed_out", "paid": "pending"}


def test_i9_a_fact_that_comes_after_the_time_out_changes_nothing(
    conn: Connection, database: Database, settings: Settings, timers: Timers, clock: Clock
) -> None:
    new, run = kit.waiting(conn, timeout=60)
    clock.advance(seconds=61)
    timers.run_once()

    counts = route(database, settings, kit.signal(conn, new.id))

    assert (counts.routed, counts.settled) == (1, 0)
    assert kit.wait_states(conn, run) == {"approved": "timed_out"}
    assert len(kit.events(conn)) == 1


@pytest.mark.parametrize("countdown", [None, 3600.0])
def test_a_run_that_expired_before_it_was_started_ends_and_says_why(
    countdown: float | None, conn: Connection, timers: Timers, clock: Clock
) -> None:
    new = kit.enqueue(conn, expires_at=clock.now() + timedelta(seconds=10), delay_seconds=countdown)
    fresh = timers.run_once()
    clock.advance(seconds=11)

    counts = timers.run_once()

    assert (fresh.expired, counts.expired, counts.hints) == (0, 1, 1)
    assert kit.table(conn, "SELECT state, reason FROM {}.run") == [("cancelled", "expired")]
    assert new.id
    assert len(kit.events(conn, "result")) == 1


def test_a_run_that_was_started_in_time_does_not_expire(conn: Connection, timers: Timers, clock: Clock) -> None:
    new, _, _ = kit.running(conn, expires_at=clock.now() + timedelta(seconds=10))
    clock.advance(seconds=11)

    assert timers.run_once().expired == 0
    assert kit.state(conn, new.id) == "running"


def test_more_than_one_batch_is_woken_in_one_look(
    conn: Connection, timers: Timers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers_module, "BATCH", 2)
    for _ in range(5):
        kit.enqueue(conn, delay_seconds=10)
    clock.advance(seconds=11)

    assert timers.run_once().woken == 5


def test_rg6_a_run_that_somebody_holds_is_left_for_the_next_look_and_stops_no_other(
    conn: Connection, timers: Timers, clock: Clock, other: Connection
) -> None:
    _, held = kit.waiting(conn, timeout=60)
    _, free = kit.waiting(conn, timeout=60)
    clock.advance(seconds=61)

    with other.transaction():
        runs.lock(other, held)
        first = timers.run_once()
    second = timers.run_once()

    assert (first.timed_out, first.failed, second.timed_out) == (1, 1, 1)
    assert {kit.state(conn, held), kit.state(conn, free)} == {"ready"}


def test_rg6_an_error_over_one_run_is_counted_and_stops_no_other(
    conn: Connection, timers: Timers, clock: Clock
) -> None:
    for _ in range(3):
        kit.waiting(conn, timeout=60)
    clock.advance(seconds=61)

    with kit.failing("timer.commit.a=raise:RuntimeError;nth=3"), kit.counted(telemetry.Counter.DUTY_FAILED) as failed:
        timers.run_once()

        assert failed() == 1
    assert kit.table(conn, "SELECT DISTINCT state FROM {}.run") == [("ready",)]


def test_i24_a_lost_reply_wakes_a_run_once(conn: Connection, timers: Timers, clock: Clock) -> None:
    _, run = kit.sleeping(conn, 10)
    clock.advance(seconds=11)

    with kit.failing("timer.commit.r=raise:OperationalError;nth=1"):
        timers.run_once()

    assert kit.table(conn, "SELECT state, fence FROM {}.run") == [("ready", 3)]
    assert [event[0] for event in kit.events(conn)] == [run]
