"""What the lease does for the attempts held under it: cancels, long bodies, published rows."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID, uuid4

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import Attempt, empty_schema, make_lease  # noqa: F401  two are fixtures
from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.services.lease import Lease
from umt_durable.store import journal, runs
from umt_durable.store.guard import Guard

# What is promised here does not depend on the server's version, and most of it takes a second or two.
pytestmark = pytest.mark.private_postgres_only


def test_d8_an_attempt_is_told_of_a_cancel_within_about_a_second_and_once(
    conn: Connection, make: Callable[..., Lease]
) -> None:
    lease, new = make(), kit.enqueue(conn)
    grant = kit.claim(conn, new.id, lease.ensure())
    attempt, other = Attempt(grant.token), Attempt()
    lease.hold(attempt)
    lease.hold(other)

    with conn.transaction():
        runs.lock(conn, grant.token.run)
        runs.flag_cancel(conn, grant.token.run, reason="customer")
    flagged = boottime()
    until(lambda: attempt.told, what="the attempt to be told")
    ticks = lease.term
    begun = ticks.sent if ticks is not None else 0.0
    until(lambda: lease.term is not None and lease.term.sent > begun, what="the next renewal")

    assert attempt.told[0][1] - flagged < 2.5
    assert (attempt.reasons, other.reasons) == (["cancel"], [])
    lease.release(attempt)
    lease.release(other)


def test_a_body_that_runs_for_long_is_shown_as_started(conn: Connection, make: Callable[..., Lease]) -> None:
    lease, new = make(), kit.enqueue(conn)
    grant = kit.claim(conn, new.id, lease.ensure())
    attempt = Attempt(grant.token, kit.entry("render"))
    lease.hold(attempt)

    until(lambda: journal.read(conn, grant.token.run), what="the step to be shown")

    [step] = journal.read(conn, grant.token.run)
    assert (step.key, str(step.state), step.fence) == ("render", "started", grant.token.fence)
    assert step.started_at is not None
    lease.release(attempt)


def test_a_body_whose_run_is_locked_is_shown_later_and_the_lease_is_renewed_all_the_same(
    conn: Connection, database: Database, make: Callable[..., Lease]
) -> None:
    lease, new = make(), kit.enqueue(conn)
    grant = kit.claim(conn, new.id, lease.ensure())
    attempt = Attempt(grant.token, kit.entry("render"))

    with kit.counted(telemetry.Counter.DUTY_FAILED) as failed, database.connect() as other, other.transaction():
        runs.lock(other, grant.token.run)
        lease.hold(attempt)
        until(failed, what="the keeper to give the row up")
        begun = lease.term.sent if lease.term is not None else 0.0
        until(lambda: lease.term is not None and lease.term.sent > begun, what="a renewal")
        assert journal.read(conn, grant.token.run) == []

    until(lambda: journal.read(conn, grant.token.run), what="the step to be shown")
    lease.release(attempt)


def test_i5_a_body_is_not_shown_after_its_grant_ended(conn: Connection) -> None:
    _, grant, _ = kit.running(conn)
    kit.finish(conn, grant.token)

    journal.mark_started(Guard(conn, grant.token), kit.entry("render"), age_seconds=1.0)

    assert journal.read(conn, grant.token.run) == []


def finished(conn: Connection, lease: Lease) -> tuple[UUID, list[UUID]]:
    """Finish a run with two callbacks and return its claim and the ids of what it published itself."""
    new = kit.enqueue(conn)
    grant = kit.claim(conn, new.id, lease.ensure())
    kit.drop_hints(conn)
    kit.finish(conn, grant.token, callbacks=2)
    return grant.token.claim, [row[0] for row in kit.table(conn, "SELECT id FROM {}.outbox_event")]


def test_i13_rows_a_finished_attempt_published_itself_are_deleted_soon(
    conn: Connection, make: Callable[..., Lease]
) -> None:
    lease = make()
    claim, ids = finished(conn, lease)

    lease.forget(claim, ids)

    assert len(ids) == 3
    until(lambda: not kit.table(conn, "SELECT 1 FROM {}.outbox_event"), timeout=5, what="the rows to be deleted")


@pytest.mark.parametrize("how", ["flush", "stop"])
def test_i13_a_process_that_ends_normally_leaves_no_published_row_behind(
    how: str, conn: Connection, make: Callable[..., Lease]
) -> None:
    lease = make()
    claim, ids = finished(conn, lease)
    lease.forget(claim, ids)

    getattr(lease, how)()

    assert kit.table(conn, "SELECT 1 FROM {}.outbox_event") == []


def test_a_row_a_relay_has_taken_meanwhile_is_not_deleted(conn: Connection, make: Callable[..., Lease]) -> None:
    lease = make()
    claim, ids = finished(conn, lease)
    kit.table(conn, "UPDATE {}.outbox_event SET claim = %s WHERE type = 'result'", uuid4())
    lease.forget(claim, ids)

    lease.flush()

    assert [kind for (kind,) in kit.table(conn, "SELECT type FROM {}.outbox_event")] == ["result"]
