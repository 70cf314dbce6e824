"""What is known to have ended, on a real Postgres: its runs go on, and crashes are counted."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.wait import until
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.engine import failures
from umt_durable.services import takeover
from umt_durable.settings import Settings
from umt_durable.store import attempts, journal, runs, workers
from umt_durable.store.guard import Guard

DELAY = 0.2  # twice as long as a proof lasts (I7)


@pytest.fixture
def other(database: Database) -> Iterator[Connection]:
    """Return a second session."""
    with database.connect() as conn:
        yield conn


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

    state, reason, error = kit.row(conn, kit.number(conn, new.id), "state", "reason", "error")
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
        assert kit.commit_step(conn, grant, f"step {turn}") is False
        takeover.end_process(database, node=worker, pid=4711, settings=settings)

    assert kit.row(conn, kit.number(conn, new.id), "state", "crashes") == ("ready", 1)


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
    crashes = kit.row(conn, grant.token.run, "crashes")

    takeover.end_delivery(
        database, claim=grant.token.claim, known_dead=True, reason="x", settings=settings, crashed=False
    )

    assert kit.state(conn, new.id) == "ready"
    assert kit.row(conn, grant.token.run, "crashes") == crashes == (0,)


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
    wake_at = kit.row(conn, grant.token.run, "wake_at")[0]
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
