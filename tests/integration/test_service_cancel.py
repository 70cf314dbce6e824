"""Cancel on a real Postgres: in every state, whatever its payload, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.wait import until
from umt_durable.database import Connection, Database
from umt_durable.services.router import Router
from umt_durable.settings import Settings
from umt_durable.states import Reason, RunState
from umt_durable.store import runs
from umt_durable.store.guard import Guard


@pytest.fixture
def router(database: Database, settings: Settings) -> Router:
    return Router(database, settings)


@pytest.fixture
def other(database: Database) -> Iterator[Connection]:
    """Return a second session."""
    with database.connect() as conn:
        yield conn


def routed(conn: Connection) -> list[bool]:
    return [row[0] for row in kit.table(conn, "SELECT routed_at IS NOT NULL FROM {}.fact ORDER BY at")]


def cancel(conn: Connection, run_id: str, payload: bytes | None = b'{"reason": "customer"}') -> None:
    kit.signal(conn, run_id, "umt.cancel", payload)


def put_into(conn: Connection, state: str) -> str:
    """Insert a run in a state and return its id."""
    match state:
        case "ready":
            return kit.enqueue(conn).id
        case "sleeping":
            return kit.sleeping(conn, 60)[0].id
        case "waiting":
            return kit.waiting(conn)[0].id
        case "retrying":
            new, grant, _ = kit.running(conn)
            runs.retry(Guard(conn, grant.token), delay_seconds=30, error=b"{}", summary="boom")
        case "quarantined":
            new, grant, _ = kit.running(conn)
            runs.quarantine(Guard(conn, grant.token), reason=Reason.BAD_INPUT, error=b"{}", summary="bad")
        case _:
            raise AssertionError(state)
    return new.id


@pytest.mark.parametrize("state", ["ready", "sleeping", "waiting", "retrying", "quarantined"])
def test_i11_a_run_that_nobody_executes_is_cancelled_at_once(state: str, conn: Connection, router: Router) -> None:
    run_id = put_into(conn, state)
    assert kit.state(conn, run_id) == state
    cancel(conn, run_id)

    counts = router.run_once()

    assert (counts.routed, counts.cancelled, counts.hints) == (1, 1, 1)
    assert kit.table(conn, "SELECT state, reason, finished_at IS NOT NULL FROM {}.run") == [
        ("cancelled", "customer", True)
    ]
    assert set(kit.wait_states(conn, kit.number(conn, run_id)).values()) <= {"cancelled"}
    assert [status for _, status, *_ in kit.events(conn, "result")][:1] == ["pending"]


def test_i11_the_owner_of_a_running_run_is_asked_and_its_next_write_says_so(conn: Connection, router: Router) -> None:
    new, grant, worker = kit.running(conn)
    cancel(conn, new.id)

    counts = router.run_once()

    assert (counts.routed, counts.asked, counts.cancelled) == (1, 1, 0)
    assert runs.prove(Guard(conn, grant.token)) is True
    assert runs.asked_claims(conn, worker) == [(grant.token.claim, "customer", "cancel")]
    assert kit.finish(conn, grant.token) is RunState.CANCELLED


def test_i12_a_cancel_of_a_run_that_is_over_changes_nothing(conn: Connection, router: Router) -> None:
    new, grant, _ = kit.running(conn)
    kit.finish(conn, grant.token)
    before = kit.table(conn, "SELECT * FROM {}.run")
    cancel(conn, new.id)

    counts = router.run_once()

    assert (counts.routed, counts.cancelled + counts.asked) == (1, 0)
    assert kit.table(conn, "SELECT * FROM {}.run") == before


def test_a_cancel_is_applied_to_the_run_that_replaced_the_first(conn: Connection, router: Router) -> None:
    new, grant, _ = kit.running(conn)
    kit.finish(conn, grant.token)
    kit.enqueue(conn, id=new.id, nesting=1)
    cancel(conn, new.id)

    router.run_once()

    assert kit.table(conn, "SELECT nesting, state FROM {}.run ORDER BY nesting") == [(0, "succeeded"), (1, "cancelled")]


def test_a_cancel_that_waits_for_a_run_which_is_being_replaced_cancels_its_successor(
    conn: Connection, router: Router, other: Connection
) -> None:
    new, grant, _ = kit.running(conn)
    cancel(conn, new.id)

    with other.transaction():
        kit.finish(other, grant.token)
        kit.enqueue(other, id=new.id, nesting=1)
        routing = kit.Beside(router.run_once)
        until(lambda: kit.lock_waiters(conn) == 1, what="the router to wait for the run's lock")

    assert routing.result().cancelled == 1
    assert kit.table(conn, "SELECT nesting, state FROM {}.run ORDER BY nesting") == [(0, "succeeded"), (1, "cancelled")]


@pytest.mark.parametrize(
    "payload",
    [None, b"", b"nonsense", b"[1]", b'{"reason": 7}', b"\xff", b'{"reason": "a\\u0000b\\ud800"}', b"[" * 9999],
)
def test_i26_whatever_the_payload_of_a_cancel_is_the_run_is_cancelled(
    payload: bytes | None, conn: Connection, router: Router
) -> None:
    new = kit.enqueue(conn)
    cancel(conn, new.id, payload)

    router.run_once()

    assert kit.state(conn, new.id) == "cancelled"
    assert routed(conn) == [True]
