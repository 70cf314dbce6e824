"""Take-over on a real Postgres: what is lost goes on, what is not is left alone, and nothing stale is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.postgres import PrivatePostgres
from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.services import takeover
from umt_durable.services.takeover import Sweeper
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, RunState
from umt_durable.store import attempts, journal, runs
from umt_durable.store.guard import Guard

DELAY = 0.2  # twice as long as a proof lasts (I7)


@pytest.fixture
def sweeper(database: Database, settings: Settings) -> Sweeper:
    return Sweeper(database, settings)


@pytest.fixture
def other(database: Database) -> Iterator[Connection]:
    """Return a second session."""
    with database.connect() as conn:
        yield conn


def end_lease(conn: Connection, worker: UUID) -> None:
    kit.table(conn, "UPDATE {}.worker SET lease_until = '-infinity' WHERE id = %s", worker)


def test_i5_after_a_take_over_no_write_of_the_old_owner_is_accepted(
    conn: Connection, sweeper: Sweeper, clock: Clock
) -> None:
    new, grant, _ = kit.running(conn)
    clock.advance(seconds=kit.LEASE_SECONDS + 1)

    sweeper.run_once()
    guard = Guard(conn, grant.token)

    assert kit.commit_step(conn, grant, "charge") is None
    assert journal.start(guard, kit.entry("charge")) is None
    assert runs.prove(guard) is None
    assert kit.finish(conn, grant.token) is None
    assert runs.retry(guard, delay_seconds=1, error=b"{}", summary="x") is False
    assert kit.table(conn, "SELECT count(*) FROM {}.step") == [(0,)]
    assert kit.state(conn, new.id) == "ready"


def test_i5_i12_the_old_owner_neither_ends_nor_parks_what_the_next_one_executes(
    conn: Connection, sweeper: Sweeper, clock: Clock
) -> None:
    new, grant, _ = kit.running(conn)
    clock.advance(seconds=kit.LEASE_SECONDS + 1)
    sweeper.run_once()
    clock.advance(seconds=1)
    heir = kit.claim(conn, new.id, kit.worker(conn))
    guard = Guard(conn, grant.token)

    assert kit.finish(conn, grant.token) is None
    assert kit.commit_step(conn, grant, "charge") is None
    assert journal.start(guard, kit.entry("charge")) is None
    assert runs.prove(guard) is None
    assert runs.lock_grant(guard) is None
    assert runs.suspend(guard, state=RunState.SLEEPING, steps=[], waits=[]) is False
    assert runs.retry(guard, delay_seconds=1, error=b"{}", summary="x") is False
    assert runs.hand_over(guard, deliver_seconds=30) is False
    assert (kit.state(conn, new.id), kit.commit_step(conn, heir, "charge")) == ("running", False)


def test_i5_a_write_that_waits_for_an_uncommitted_take_over_is_refused_when_it_commits(
    conn: Connection, database: Database, settings: Settings, clock: Clock, other: Connection
) -> None:
    _, grant, _ = kit.running(conn)
    clock.advance(seconds=kit.LEASE_SECONDS + 1)
    candidate = (grant.token.run, grant.token.fence)

    with other.transaction():
        assert runs.take_over(
            other,
            candidate,
            only_dead=True,
            delay_seconds=0.2,
            deliver_seconds=30,
            budget=5,
            why="test",
            error=b"{}",
        )
        late = kit.Beside(lambda: kit.commit_step(conn, grant, "charge"))
        with database.connect() as look:
            until(lambda: kit.lock_waiters(look) == 1, what="the stale write to wait for the row lock")

    assert late.result() is None
    assert kit.table(conn, "SELECT count(*) FROM {}.step") == [(0,)]


def test_i7_a_run_taken_from_a_process_that_may_live_is_claimable_only_when_no_proof_of_it_can_hold(
    conn: Connection, sweeper: Sweeper, clock: Clock
) -> None:
    new, grant, _ = kit.running(conn)
    clock.advance(seconds=kit.LEASE_SECONDS + 1)
    heir = kit.worker(conn)

    counts = sweeper.run_once()
    kit.table(conn, "UPDATE {}.run SET wake_at = wake_at + interval '1 hour' RETURNING no")
    early = kit.try_claim(conn, new.id, heir)
    kit.table(conn, "UPDATE {}.run SET wake_at = wake_at - interval '1 hour' RETURNING no")

    delay, due = kit.table(
        conn,
        "SELECT extract(epoch FROM r.wake_at - a.ended_at)::float8, o.next_attempt_at = r.wake_at"
        " FROM {}.run r JOIN {}.attempt a ON a.run = r.no JOIN {}.outbox_event o ON o.run = r.no",
    )[0]
    assert DELAY - 0.05 <= delay <= DELAY  # the end was read just after
    assert due
    assert (counts.taken, counts.hints) == (1, 1)
    assert kit.row(conn, grant.token.run, "crashes", "claim", "worker") == (1, None, None)
    clock.advance(seconds=1)
    assert (early, kit.try_claim(conn, new.id, heir) is not None) == (None, True)


def test_b6_the_attempt_of_a_lost_worker_ends_as_lost_and_says_whose_it_was(
    conn: Connection, sweeper: Sweeper, clock: Clock
) -> None:
    _, grant, worker = kit.running(conn)
    clock.advance(seconds=kit.LEASE_SECONDS + 1)

    sweeper.run_once()

    [attempt] = attempts.of_run(conn, grant.token.run)
    assert attempt.outcome is AttemptOutcome.LOST
    assert attempt.error == f"worker {worker} (process 4711 on host-1): its lease has ended"


def test_rg1_a_run_that_finished_after_the_sweeper_listed_it_stays_finished(
    conn: Connection, database: Database, settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, grant, worker = kit.running(conn)
    end_lease(conn, worker)
    listed = runs.lost

    def list_then_finish(*args: Any, **given: Any) -> Any:
        found = listed(*args, **given)
        kit.finish(conn, grant.token)
        return found

    monkeypatch.setattr(runs, "lost", list_then_finish)

    counts = Sweeper(database, settings).run_once()

    assert counts.work == 0
    assert kit.state(conn, new.id) == "succeeded"
    assert [str(one.outcome) for one in attempts.of_run(conn, grant.token.run)] == ["completed"]


def test_rg1_a_worker_that_renewed_after_it_was_listed_keeps_its_run(
    conn: Connection, database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, _, worker = kit.running(conn)
    end_lease(conn, worker)
    listed = runs.lost

    def list_then_renew(*args: Any, **given: Any) -> Any:
        found = listed(*args, **given)
        kit.table(conn, "UPDATE {}.worker SET lease_until = {}.now() + interval '3 s'")
        return found

    monkeypatch.setattr(runs, "lost", list_then_renew)

    assert Sweeper(database, settings).run_once().work == 0
    assert kit.state(conn, new.id) == "running"


def test_rg1_a_run_that_went_on_elsewhere_after_it_was_listed_stays_there(
    conn: Connection, database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is the same, and nobody asks for the lease here: only the fence tells the two grants apart."""
    new, grant, worker = kit.running(conn)
    listed = runs.of_workers

    def list_then_go_on(*args: Any, **given: Any) -> Any:
        found = listed(*args, **given)
        takeover.end_delivery(database, claim=grant.token.claim, known_dead=True, reason="x", settings=settings)
        kit.claim(conn, new.id, kit.worker(conn))
        return found

    monkeypatch.setattr(runs, "of_workers", list_then_go_on)

    assert takeover.end_process(database, node=worker, pid=4711, settings=settings) == 0
    assert kit.row(conn, grant.token.run, "state", "fence") == ("running", 3)


def test_rg2_rows_that_cannot_be_taken_starve_no_others(
    conn: Connection, sweeper: Sweeper, clock: Clock, other: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "BATCH", 2)
    numbers = [kit.running(conn)[1].token.run for _ in range(5)]
    clock.advance(seconds=kit.LEASE_SECONDS + 1)

    with other.transaction():
        for run in numbers[:2]:
            runs.lock(other, run)
        counts = sweeper.run_once()

    assert counts.taken == 3
    assert [kit.state(conn, run) for run in numbers] == ["running"] * 2 + ["ready"] * 3


def test_rg3_a_run_is_never_taken_for_its_age(conn: Connection, sweeper: Sweeper, clock: Clock) -> None:
    new, _, _ = kit.running(conn)
    clock.advance(seconds=86_400)
    kit.table(conn, "UPDATE {}.worker SET lease_until = {}.now() + interval '1 s'")

    counts = sweeper.run_once()

    assert (counts.work, kit.state(conn, new.id)) == (0, "running")


def test_a_run_past_the_limit_its_task_declared_is_taken_though_its_worker_lives(
    conn: Connection, sweeper: Sweeper, clock: Clock
) -> None:
    new, worker = kit.enqueue(conn), kit.worker(conn, seconds=3600)
    kit.claim(conn, new.id, worker, limit_seconds=10)
    clock.advance(seconds=11)

    counts = sweeper.run_once()

    assert (counts.taken, kit.state(conn, new.id)) == (1, "ready")


def test_rg6_an_error_over_one_run_strands_no_other(conn: Connection, sweeper: Sweeper, clock: Clock) -> None:
    numbers = [kit.running(conn)[1].token.run for _ in range(3)]
    clock.advance(seconds=kit.LEASE_SECONDS + 1)

    with kit.failing("sweep.update.a=raise:RuntimeError;nth=2"), kit.counted(telemetry.Counter.DUTY_FAILED) as failed:
        first = sweeper.run_once()
        second = sweeper.run_once()

        assert failed() == 1
    assert (first.taken, first.failed, second.taken) == (2, 1, 1)
    assert [kit.state(conn, run) for run in numbers] == ["ready"] * 3


@pytest.mark.parametrize("at", ["sweep.commit.b", "sweep.commit.r"])
def test_i24_a_lost_reply_takes_a_run_over_once(at: str, conn: Connection, sweeper: Sweeper, clock: Clock) -> None:
    _, grant, _ = kit.running(conn)
    clock.advance(seconds=kit.LEASE_SECONDS + 1)

    with kit.failing(f"{at}=raise:OperationalError;nth=1"):
        sweeper.run_once()

    assert kit.row(conn, grant.token.run, "state", "crashes", "fence") == ("ready", 1, grant.token.fence + 1)
    assert len(kit.events(conn)) == 1


def test_i11_a_run_to_be_cancelled_ends_cancelled_when_its_owner_is_dead_and_keeps_the_reason(
    conn: Connection, sweeper: Sweeper, clock: Clock
) -> None:
    new, grant, _ = kit.running(conn)
    with conn.transaction():
        runs.lock(conn, grant.token.run)
        runs.flag_cancel(conn, grant.token.run, reason="customer")
    clock.advance(seconds=kit.LEASE_SECONDS + 1)

    counts = sweeper.run_once()

    assert (counts.cancelled, counts.taken) == (1, 0)
    assert kit.row(conn, grant.token.run, "state", "reason") == ("cancelled", "customer")
    assert [str(one.outcome) for one in attempts.of_run(conn, grant.token.run)] == ["lost"]
    assert len(kit.events(conn, "result")) == 2  # the second one repairs what the lost process may still store
    assert kit.events(conn) == []
    assert new.id


def test_after_a_jump_of_the_server_s_clock_nothing_is_taken_for_one_lease(
    conn: Connection, database: Database, settings: Settings, clock: Clock
) -> None:
    new, _, worker = kit.running(conn)
    now = [1000.0]
    sweeper = Sweeper(database, settings, clock=lambda: now[0])
    sweeper.run_once()
    end_lease(conn, worker)

    now[0] -= 6.0  # seen from here, the server's clock went forward by six seconds
    jumped = sweeper.run_once()
    now[0] += settings.lease_seconds * 0.9
    still = sweeper.run_once()
    state = kit.state(conn, new.id)
    now[0] += settings.lease_seconds * 0.2
    later = sweeper.run_once()

    assert jumped.held_off
    assert still.held_off
    assert state == "running"
    assert later.taken == 1


@pytest.mark.private_postgres_only
def test_after_a_restart_of_the_server_nothing_is_taken_for_one_lease(
    conn: Connection, private_postgres: PrivatePostgres, database: Database, settings: Settings
) -> None:
    new, _, worker = kit.running(conn)
    now = [1000.0]
    sweeper = Sweeper(database, settings, clock=lambda: now[0])
    sweeper.run_once()
    end_lease(conn, worker)
    private_postgres.restart("immediate")

    held = until(lambda: sweeper.run_once().held_off, what="the restart to be noticed")
    now[0] += settings.lease_seconds + 0.1
    later = sweeper.run_once()

    assert held
    assert later.taken == 1
    with database.connect() as fresh:
        assert kit.state(fresh, new.id) == "ready"
