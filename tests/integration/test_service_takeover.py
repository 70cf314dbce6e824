"""Take-over on a real Postgres: what is lost goes on, what is not is left alone, and nothing stale is written."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.postgres import PrivatePostgres
from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.engine import failures
from umt_durable.services import takeover
from umt_durable.services.takeover import Sweeper
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, StepState
from umt_durable.store import attempts, journal, runs, workers
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


def row(conn: Connection, run: int, *columns: str) -> tuple[Any, ...]:
    return kit.table(conn, f"SELECT {', '.join(columns)} FROM {{}}.run WHERE no = %s", run)[0]


def commit_step(conn: Connection, grant: Any, key: str) -> bool | None:
    return journal.commit(Guard(conn, grant.token), kit.entry(key), state=StepState.DONE, result=b"1", digest=b"d")


def test_i5_after_a_take_over_no_write_of_the_old_owner_is_accepted(
    conn: Connection, sweeper: Sweeper, clock: Clock
) -> None:
    new, grant, _ = kit.running(conn)
    clock.advance(seconds=kit.LEASE_SECONDS + 1)

    sweeper.run_once()
    guard = Guard(conn, grant.token)

    assert commit_step(conn, grant, "charge") is None
    assert journal.start(guard, kit.entry("charge")) is None
    assert runs.prove(guard) is None
    assert kit.finish(conn, grant.token) is None
    assert runs.retry(guard, delay_seconds=1, error=b"{}", summary="x") is False
    assert kit.table(conn, "SELECT count(*) FROM {}.step") == [(0,)]
    assert kit.state(conn, new.id) == "ready"


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
        late = kit.Beside(lambda: commit_step(conn, grant, "charge"))
        with database.connect() as look:
            until(lambda: kit.lock_waiters(look) == 1, what="the stale write to wait for the row lock")

    assert late.result() is None
    assert kit.table(conn, "SELECT count(*) FROM {}.step") == [(0,)]


def test_i7_a_run_taken_from_a_process_that_may_live_is_claimable_only_when_no_proof_of_it_can_hold(
    conn: Connection, sweeper: Sweeper, clock: Clock
) -> None:
    _, grant, _ = kit.running(conn)
    clock.advance(seconds=kit.LEASE_SECONDS + 1)

    counts = sweeper.run_once()

    delay, due = kit.table(
        conn,
        "SELECT extract(epoch FROM r.wake_at - a.ended_at)::float8, o.next_attempt_at = r.wake_at"
        " FROM {}.run r JOIN {}.attempt a ON a.run = r.no JOIN {}.outbox_event o ON o.run = r.no",
    )[0]
    assert DELAY - 0.05 <= delay <= DELAY  # the end was read just after
    assert due
    assert (counts.taken, counts.hints) == (1, 1)
    assert row(conn, grant.token.run, "crashes", "claim", "worker") == (1, None, None)


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
    assert row(conn, grant.token.run, "state", "fence") == ("running", 3)


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

    assert row(conn, grant.token.run, "state", "crashes", "fence") == ("ready", 1, grant.token.fence + 1)
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
    assert row(conn, grant.token.run, "state", "reason") == ("cancelled", "customer")
    assert [str(one.outcome) for one in attempts.of_run(conn, grant.token.run)] == ["lost"]
    assert len(kit.events(conn, "result")) == 2  # the second one repairs what the lost process may still store
    assert kit.events(conn) == []
    assert new.id


def crash(conn: Connection, database: Database, settings: Settings, run_id: str, step: str | None) -> int:
    """Give a run to a process that starts a step and is killed."""
    kit.table(conn, "UPDATE {}.run SET wake_at = NULL")
    worker = kit.worker(conn)
    grant = kit.claim(conn, run_id, worker)
    if step is not None:
        assert journal.start(Guard(conn, grant.token), kit.entry(step)) == journal.Started(cancel=False, granted=True)
    return takeover.end_process(database, node=worker, pid=4711, settings=settings, status=-signal.SIGSEGV)


def test_i14_crashes_without_progress_end_in_quarantine_that_names_worker_step_and_signal(
    conn: Connection, database: Database, settings: Settings
) -> None:
    new = kit.enqueue(conn)
    for _ in range(settings.max_crashes):
        crash(conn, database, settings, new.id, "render")
    before = kit.state(conn, new.id)

    crash(conn, database, settings, new.id, "render")

    state, reason, error = row(conn, kit.number(conn, new.id), "state", "reason", "error")
    kept = failures.from_bytes(error)
    assert (before, state, reason) == ("ready", "quarantined", "crash_budget")
    assert "in step 'render'" in kept.message
    assert "process 4711 on host-1" in kept.message
    assert "SIGSEGV" in kept.message
    assert kept.step == "render"
    assert json.loads(error)["type"] == "CrashBudgetExceeded"


def test_i14_progress_between_two_crashes_keeps_a_run_out_of_quarantine(
    conn: Connection, database: Database, settings: Settings
) -> None:
    new = kit.enqueue(conn)
    for turn in range(settings.max_crashes + 2):
        kit.table(conn, "UPDATE {}.run SET wake_at = NULL")
        worker = kit.worker(conn)
        grant = kit.claim(conn, new.id, worker)
        assert commit_step(conn, grant, f"step {turn}") is False
        takeover.end_process(database, node=worker, pid=4711, settings=settings)

    assert row(conn, kit.number(conn, new.id), "state", "crashes") == ("ready", 1)


def test_i21_runs_of_a_process_known_to_have_ended_go_on_at_once(
    conn: Connection, database: Database, settings: Settings
) -> None:
    new, by = kit.enqueue(conn), kit.worker(conn, seconds=3600)
    kit.drop_hints(conn)
    kit.claim(conn, new.id, by)
    _, elsewhere, _ = kit.running(conn)

    taken = takeover.end_process(database, node=by, pid=4711, settings=settings)
    again = takeover.end_process(database, node=by, pid=4711, settings=settings)

    assert (taken, again) == (1, 0)
    assert kit.claim(conn, new.id, kit.worker(conn)).token.fence == 3
    assert [run for run, *_ in kit.events(conn)] == [kit.number(conn, new.id)]
    assert kit.state(conn, elsewhere.token.run) == "running"


def test_i7_a_process_that_was_given_the_number_of_a_dead_one_keeps_its_lease_and_its_runs(
    conn: Connection, database: Database, settings: Settings
) -> None:
    node = uuid4()
    dead, alive = uuid4(), uuid4()
    seen = boottime()
    for id, at in ((dead, seen - 60), (alive, seen + 1)):
        workers.register(conn, id=id, node=node, pid=7, host="h", lease_seconds=3.0, versions=kit.DECLARED, boottime=at)
    lost, held = kit.enqueue(conn), kit.enqueue(conn)
    kit.claim(conn, lost.id, dead)
    kit.claim(conn, held.id, alive)

    assert takeover.end_process(database, node=node, pid=7, settings=settings, seen=seen) == 1

    assert (kit.state(conn, lost.id), kit.state(conn, held.id)) == ("ready", "running")
    assert kit.table(conn, "SELECT lease_until > {}.now() FROM {}.worker WHERE id = %s", alive) == [(True,)]


def test_a_process_that_held_nothing_ends_without_a_trace(
    conn: Connection, database: Database, settings: Settings
) -> None:
    assert takeover.end_process(database, node=uuid4(), pid=1, settings=settings) == 0


@pytest.mark.parametrize(("known_dead", "delay"), [(True, 0.0), (False, DELAY)])
def test_a_delivery_that_is_over_gives_its_run_back_and_waits_only_for_a_process_that_may_live(
    known_dead: bool, delay: float, conn: Connection, database: Database, settings: Settings
) -> None:
    _, grant, _ = kit.running(conn)

    ended = takeover.end_delivery(
        database, claim=grant.token.claim, known_dead=known_dead, reason="time limit", settings=settings
    )
    again = takeover.end_delivery(
        database, claim=grant.token.claim, known_dead=known_dead, reason="time limit", settings=settings
    )

    found = kit.table(
        conn,
        "SELECT extract(epoch FROM r.wake_at - a.ended_at)::float8 FROM {}.run r JOIN {}.attempt a ON a.run = r.no",
    )[0][0]
    assert (ended, again) == (True, False)
    assert delay - 0.05 <= found <= delay + 0.1  # the two were read one after the other
    assert (attempts.of_run(conn, grant.token.run)[0].error or "").endswith(": time limit")


def test_i14_an_end_that_was_asked_for_uses_none_of_the_crash_budget(
    conn: Connection, database: Database, settings: Settings
) -> None:
    new, grant, _ = kit.running(conn)
    crashes = row(conn, grant.token.run, "crashes")

    takeover.end_delivery(
        database, claim=grant.token.claim, known_dead=True, reason="x", settings=settings, crashed=False
    )

    assert kit.state(conn, new.id) == "ready"
    assert row(conn, grant.token.run, "crashes") == crashes == (0,)


def test_a_delivery_is_ended_even_while_its_row_is_locked_for_a_moment(
    conn: Connection, database: Database, settings: Settings, other: Connection
) -> None:
    new, grant, _ = kit.running(conn)

    with other.transaction():
        runs.prove(Guard(other, grant.token))
        ending = kit.Beside(
            lambda: takeover.end_delivery(
                database, claim=grant.token.claim, known_dead=False, reason="revoked", settings=settings
            )
        )
        until(lambda: kit.lock_waiters(conn) == 1, what="the take-over to wait for the owner's lock")

    assert ending.result() is True
    assert kit.state(conn, new.id) == "ready"


def test_i7_the_delay_of_a_take_over_that_waited_for_its_owner_begins_after_the_wait(
    conn: Connection, database: Database, settings: Settings, other: Connection
) -> None:
    """A plain UPDATE would read the clock first, and the delay would be over when it gets the lock."""
    _, grant, _ = kit.running(conn)

    with other.transaction():
        runs.prove(Guard(other, grant.token))
        ending = kit.Beside(
            lambda: takeover.end_delivery(
                database, claim=grant.token.claim, known_dead=False, reason="revoked", settings=settings
            )
        )
        until(lambda: kit.lock_waiters(conn) == 1, what="the take-over to wait for the owner's lock")
        released = kit.table(other, "SELECT pg_sleep(0.3), clock_timestamp()")[0][1]

    assert ending.result() is True
    wake_at = row(conn, grant.token.run, "wake_at")[0]
    assert (wake_at - released).total_seconds() >= DELAY


def test_an_unknown_claim_ends_nothing(database: Database, settings: Settings, schema: str) -> None:
    assert not takeover.end_delivery(database, claim=uuid4(), known_dead=True, reason="x", settings=settings)


def test_the_hint_of_a_lost_message_is_put_back_only_for_a_ready_run(conn: Connection, database: Database) -> None:
    ready = kit.enqueue(conn)
    kit.drop_hints(conn)
    busy, _, _ = kit.running(conn)

    assert takeover.rehint(database, ready.id, 0)
    assert takeover.rehint(database, ready.id, 0)
    assert not takeover.rehint(database, busy.id, 0)
    assert [run for run, *_ in kit.events(conn)] == [kit.number(conn, ready.id)]


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
