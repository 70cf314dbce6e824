"""Facts under a key on a real Postgres: a run sees what committed after it was made, whatever the clocks say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from umt_durable.database import Connection, Database
from umt_durable.records import Grant, NewRun
from umt_durable.services.router import Router
from umt_durable.settings import Settings
from umt_durable.store import facts, waits
from umt_durable.store.guard import Guard

ADDRESS = waits.key_address("paid", "o1")


@pytest.fixture
def router(database: Database, settings: Settings) -> Router:
    return Router(database, settings)


@pytest.fixture
def other(database: Database) -> Iterator[Connection]:
    """Return a second session."""
    with database.connect() as conn:
        yield conn


def finds(conn: Connection, grant: Grant) -> bool:
    """Register a wait for the fact and say whether it was there."""
    return kit.register(Guard(conn, grant.token), "paid", ADDRESS)


def running(conn: Connection) -> tuple[NewRun, Grant, UUID]:
    return kit.running(conn)


def test_i8_i25_a_fact_whose_transaction_began_before_its_run_wakes_the_run_when_it_commits(
    conn: Connection, router: Router, other: Connection
) -> None:
    with other.transaction():
        kit.emit(other, "paid", "o1")
        _, run = kit.waiting(conn, "paid", key="o1")

    router.run_once()

    assert kit.wait_states(conn, run) == {"paid": "satisfied"}
    assert kit.state(conn, run) == "ready"


def test_i8_i25_a_fact_whose_transaction_began_before_its_run_is_found_when_the_wait_is_registered(
    conn: Connection, router: Router, other: Connection
) -> None:
    with other.transaction():
        kit.emit(other, "paid", "o1")
        _, grant, _ = running(conn)
    router.run_once()

    assert finds(conn, grant)


def test_rg9_i25_the_re_scan_compares_the_order_of_commits_too(
    conn: Connection, router: Router, other: Connection, clock: Clock
) -> None:
    with other.transaction():
        kit.emit(other, "paid", "o1")
        _, run = kit.waiting(conn, "paid", key="o1")
    kit.table(conn, "UPDATE {}.fact SET routed_at = {}.now()")  # as if its router had missed the wait
    clock.advance(seconds=2)

    assert router.rescan().settled == 1
    assert kit.state(conn, run) == "ready"


def test_i8_i25_a_fact_said_after_the_clock_was_set_back_wakes_the_runs_that_were_there(
    conn: Connection, router: Router, clock: Clock
) -> None:
    _, run = kit.waiting(conn, "paid", key="o1")
    _, grant, _ = running(conn)
    clock.advance(seconds=-600)

    kit.emit(conn, "paid", "o1")
    router.run_once()

    assert kit.wait_states(conn, run) == {"paid": "satisfied"}
    assert finds(conn, grant)


def test_a_fact_that_committed_before_a_run_was_made_is_not_for_it(conn: Connection, router: Router) -> None:
    kit.emit(conn, "paid", "o1")
    _, grant, _ = running(conn)

    assert not finds(conn, grant)
    router.run_once()

    assert kit.wait_states(conn, grant.token.run) == {"paid": "pending"}


@pytest.mark.parametrize("order", [("fact", "run"), ("run", "fact")])
def test_i8_a_fact_of_the_run_s_own_transaction_is_always_for_it(
    order: tuple[str, str], conn: Connection, router: Router, other: Connection
) -> None:
    say: dict[str, Callable[[], Any]] = {
        "fact": lambda: kit.emit(other, "paid", "o1"),
        "run": lambda: kit.enqueue(other, id="mine"),
    }
    with other.transaction():
        for what in order:
            kit.table(other, "SELECT pg_current_xact_id()")
            kit.enqueue(conn)  # a later transaction that ends earlier: to a snapshot ours then looks ended
            say[what]()
    kit.drop_hints(conn)
    router.run_once()

    assert finds(conn, kit.claim(conn, "mine", kit.worker(conn)))


def test_i8_facts_and_runs_restored_into_another_server_keep_their_order_by_the_clock(
    conn: Connection, router: Router, clock: Clock
) -> None:
    far = 2**40 + 7  # transactions of a server that counted further than this one
    kit.emit(conn, "paid", "o1")
    kit.table(conn, f"UPDATE {{}}.fact SET xid = '{far}'")
    router.run_once()
    _, run = kit.waiting(conn, "paid", key="o1")
    kit.table(conn, f"UPDATE {{}}.run SET snapshot = '{far}:{far}:'")
    _, younger, _ = running(conn)

    assert not finds(conn, younger)
    clock.advance(seconds=2)
    assert router.rescan().settled == 0  # the old fact was there before both
    kit.emit(conn, "paid", "o1")
    router.run_once()

    assert kit.wait_states(conn, run) == {"paid": "satisfied"}
    assert kit.wait_states(conn, younger.token.run) == {"paid": "satisfied"}


@pytest.mark.parametrize("by_key", [False, True])
def test_a_fact_said_again_with_its_dedupe_gives_the_id_of_the_first(by_key: bool, conn: Connection) -> None:
    new, _, _ = running(conn)
    given: dict[str, Any] = {"name": "paid", "payload": b"1", "actor": None, "dedupe": "d"}

    def say() -> UUID | None:
        if by_key:
            return facts.emit(conn, {**given, "key": "o1", "fact": uuid4()})
        return facts.signal(conn, {**given, "run": new.id, "fact": uuid4()})

    first = say()

    assert say() == first
    assert kit.table(conn, "SELECT id FROM {}.fact") == [(first,)]


def test_i24_a_fact_said_again_with_its_id_gives_that_id(conn: Connection) -> None:
    given = {"name": "paid", "key": "o1", "payload": b"1", "actor": None, "dedupe": None, "fact": uuid4()}

    assert facts.emit(conn, given) == facts.emit(conn, given) == given["fact"]
