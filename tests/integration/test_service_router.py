"""The router on a real Postgres: no lost wake-up, one outcome for each wait."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.services import router as router_module
from umt_durable.services.router import Router, route
from umt_durable.services.timers import Timers
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import facts, runs, waits
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


# -- no lost wake-up ------------------------------------------------------------------------------------------------


def test_i8_a_fact_said_before_its_wait_is_found_when_the_wait_is_registered(conn: Connection, router: Router) -> None:
    new, grant, _ = kit.running(conn)
    kit.signal(conn, new.id)
    router.run_once()

    assert kit.register(Guard(conn, grant.token), "approved", waits.run_address(new.id, "approved"))
    assert kit.wait_states(conn, grant.token.run) == {"approved": "satisfied"}


def test_i8_a_fact_said_to_a_parked_run_wakes_it_once(conn: Connection, router: Router) -> None:
    new, run = kit.waiting(conn)
    fact = kit.signal(conn, new.id, payload=b'{"by": "ann"}')

    first, second = router.run_once(), router.run_once()

    assert (first.routed, first.settled, first.woken, second.work) == (1, 1, 1, 0)
    assert kit.state(conn, run) == "ready"
    [wait] = waits.of_run(conn, run)
    assert (wait.fact, wait.payload) == (fact, b'{"by": "ann"}')
    assert [event[0] for event in kit.events(conn)] == [run]


def test_i8_a_fact_that_commits_while_its_wait_is_registered_is_routed_after_the_wait(
    conn: Connection, router: Router, other: Connection
) -> None:
    new, grant, _ = kit.running(conn)
    address = waits.run_address(new.id, "approved")

    with other.transaction():
        waits.lock_address(other, address)
        found = kit.register_locked(Guard(other, grant.token), "approved", address)
        kit.signal(conn, new.id)
        while_locked = router.run_once()
    after = router.run_once()

    assert not found
    assert (while_locked.routed, after.routed, after.settled) == (0, 1, 1)
    assert kit.wait_states(conn, grant.token.run) == {"approved": "satisfied"}


def test_i8_a_wait_registered_while_its_fact_is_routed_finds_the_fact(
    conn: Connection, settings: Settings, other: Connection
) -> None:
    """The router has looked and found no wait, but has not committed; the registration waits for the address."""
    new, grant, _ = kit.running(conn)
    address = waits.run_address(new.id, "approved")
    fact = kit.signal(conn, new.id)

    with other.transaction():
        assert router_module._chunk(settings, fact, address, (0, ""), is_last=True)(other).counts.routed == 1
        registering = kit.Beside(lambda: kit.register(Guard(conn, grant.token), "approved", address))
        until(lambda: kit.lock_waiters(other) == 1, what="the registration to wait for the address lock")

    assert registering.result() is True
    assert kit.wait_states(conn, grant.token.run) == {"approved": "satisfied"}


def test_i8_a_fact_in_an_open_transaction_is_seen_by_nobody_and_routed_after_its_commit(
    conn: Connection, router: Router, other: Connection
) -> None:
    new, grant, _ = kit.running(conn)
    guard = Guard(conn, grant.token)

    with other.transaction():
        kit.signal(other, new.id)
        found = kit.register(guard, "approved", waits.run_address(new.id, "approved"))
        assert runs.suspend(guard, state=RunState.WAITING, steps=[], waits=["approved"])
        early = router.run_once()
    late = router.run_once()

    assert (found, early.work, late.woken) == (False, 0, 1)


def test_i2_a_fact_that_was_rolled_back_wakes_nobody(conn: Connection, router: Router, other: Connection) -> None:
    new, run = kit.waiting(conn)
    with other.transaction(force_rollback=True):
        kit.signal(other, new.id)

    assert router.run_once().work == 0
    assert (kit.state(conn, run), kit.wait_states(conn, run)) == ("waiting", {"approved": "pending"})


def test_i8_a_fact_for_a_running_run_settles_its_wait_and_its_owner_sees_that_before_it_parks(
    conn: Connection, router: Router
) -> None:
    new, grant, _ = kit.running(conn)
    guard = Guard(conn, grant.token)
    kit.register(guard, "approved", waits.run_address(new.id, "approved"))
    kit.signal(conn, new.id)

    counts = router.run_once()

    assert (counts.settled, counts.woken, kit.events(conn)) == (1, 0, [])
    with conn.transaction():
        assert runs.lock_grant(guard) is False
        assert waits.count_settled(conn, grant.token.run, ["approved"]) == 1


def test_a_fact_is_never_given_to_a_run_that_is_over(conn: Connection, router: Router) -> None:
    new, run = kit.waiting(conn)
    kit.table(conn, "UPDATE {}.run SET state = 'cancelled', finished_at = {}.now()")
    kit.signal(conn, new.id)

    assert router.run_once().settled == 0
    assert (kit.state(conn, run), kit.wait_states(conn, run)) == ("cancelled", {"approved": "pending"})


def test_a_fact_under_a_key_wakes_every_run_that_waits_for_it_and_none_that_came_later(
    conn: Connection, router: Router
) -> None:
    """G1: one fact, several waiters of its name."""
    first, second = kit.waiting(conn, "paid", key="42")[1], kit.waiting(conn, "paid", key="42")[1]
    elsewhere = kit.waiting(conn, "paid", key="43")[1]
    kit.emit(conn, "paid", "42")
    later = kit.waiting(conn, "paid", key="42")[1]

    counts = router.run_once()

    assert (counts.routed, counts.woken) == (1, 2)
    states = [kit.state(conn, run) for run in (first, second, elsewhere, later)]
    assert states == ["ready", "ready", "waiting", "waiting"]


def test_i9_of_two_facts_the_first_that_is_routed_settles_the_wait(conn: Connection, router: Router) -> None:
    new, run = kit.waiting(conn)
    given = {kit.signal(conn, new.id), kit.signal(conn, new.id)}

    counts = router.run_once()

    assert (counts.routed, counts.settled, counts.woken) == (2, 1, 1)
    assert waits.of_run(conn, run)[0].fact in given
    assert len(kit.events(conn)) == 1


def test_a_fact_for_nobody_is_routed_and_done_with(conn: Connection, router: Router) -> None:
    kit.emit(conn, "paid", "42")

    assert (router.run_once().routed, router.run_once().work, routed(conn)) == (1, 0, [True])


def test_the_sender_routes_its_own_fact_at_once(conn: Connection, database: Database, settings: Settings) -> None:
    new, run = kit.waiting(conn)

    counts = route(database, settings, kit.signal(conn, new.id))

    assert (counts.woken, kit.state(conn, run)) == (1, "ready")
    assert route(database, settings, uuid4()).work == 0


def test_a_sender_whose_fact_cannot_be_routed_now_has_succeeded_all_the_same(
    conn: Connection, database: Database, settings: Settings, router: Router, other: Connection
) -> None:
    new, run = kit.waiting(conn)

    with other.transaction():
        runs.lock(other, run)
        blocked = route(database, settings, kit.signal(conn, new.id))
    later = router.run_once()

    assert (blocked.failed, blocked.routed) == (1, 0)
    assert (later.routed, later.woken) == (1, 1)


def test_a_run_that_somebody_holds_delays_no_other_run_of_the_fact(
    conn: Connection, router: Router, other: Connection
) -> None:
    first, held, last = (kit.waiting(conn, "paid", key="42")[1] for _ in range(3))
    kit.emit(conn, "paid", "42")

    with other.transaction():
        runs.lock(other, held)
        blocked = router.run_once()
    states = [kit.state(conn, run) for run in (first, held, last)]
    after = router.run_once()

    assert states == ["ready", "waiting", "ready"]
    assert (blocked.routed, blocked.woken, after.routed, after.woken) == (0, 2, 1, 1)


def test_a_fact_for_many_waits_is_routed_in_chunks_and_one_that_was_left_half_way_is_finished_by_the_next_router(
    conn: Connection, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "CHUNK", 2)
    numbers = [kit.waiting(conn, "paid", key="42")[1] for _ in range(5)]
    kit.emit(conn, "paid", "42")

    with kit.failing("router.commit.a=raise:RuntimeError;nth=2"):
        broken = router.run_once()
    half_way = [kit.state(conn, run) for run in numbers]
    rest = router.run_once()

    assert (broken.failed, half_way.count("ready"), routed(conn)) == (1, 4, [True])
    assert (rest.routed, rest.woken) == (1, 1)
    assert [kit.state(conn, run) for run in numbers] == ["ready"] * 5
    assert len(kit.events(conn)) == 5


@pytest.mark.parametrize("at", ["router.commit.b", "router.commit.r"])
def test_i24_a_lost_reply_wakes_a_run_once(at: str, conn: Connection, router: Router) -> None:
    new, run = kit.waiting(conn)
    kit.signal(conn, new.id)

    with kit.failing(f"{at}=raise:OperationalError;nth=1"):
        router.run_once()

    assert routed(conn) == [True]
    assert kit.table(conn, "SELECT state, fence FROM {}.run") == [("ready", 3)]
    assert [event[0] for event in kit.events(conn)] == [run]


def test_rg18_facts_that_commit_late_are_routed_whatever_was_routed_since(
    conn: Connection, router: Router, other: Connection
) -> None:
    late, late_run = kit.waiting(conn)
    soon, _ = kit.waiting(conn)

    with other.transaction():
        kit.signal(other, late.id)
        kit.signal(conn, soon.id)
        router.run_once()
    router.run_once()

    assert kit.state(conn, late_run) == "ready"


# -- the re-scan ----------------------------------------------------------------------------------------------------


def test_rg9_a_wait_that_its_fact_missed_is_found_by_the_re_scan_and_counted_as_a_defect(
    conn: Connection, router: Router, clock: Clock
) -> None:
    new, run = kit.waiting(conn)
    facts.mark_routed(conn, kit.signal(conn, new.id))
    fresh = router.rescan()
    clock.advance(seconds=2)

    with kit.counted(telemetry.Counter.RESCAN_HIT) as hits:
        found, again = router.rescan(), router.rescan()

        assert hits() == 1
    assert (fresh.settled, found.settled, found.woken, again.settled) == (0, 1, 1, 0)
    assert (kit.state(conn, run), kit.wait_states(conn, run)) == ("ready", {"approved": "satisfied"})


def test_rg9_the_re_scan_goes_through_all_waits_in_pieces(
    conn: Connection, router: Router, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "RESCAN_CHUNK", 2)
    missed = [kit.waiting(conn) for _ in range(3)]
    for _ in range(4):
        kit.waiting(conn, "paid", key="42")
    for new, _ in missed:
        facts.mark_routed(conn, kit.signal(conn, new.id))
    clock.advance(seconds=2)

    assert router.rescan().settled == 3


def test_the_re_scan_finds_nothing_where_routing_did_its_work(conn: Connection, router: Router, clock: Clock) -> None:
    kit.emit(conn, "paid", "42")
    new, _ = kit.waiting(conn)
    kit.waiting(conn, "paid", key="42")
    kit.signal(conn, new.id)
    router.run_once()
    clock.advance(seconds=2)

    assert router.rescan().work == 0


def test_only_one_process_re_scans_at_a_time(conn: Connection, router: Router, clock: Clock, other: Connection) -> None:
    new, _ = kit.waiting(conn)
    facts.mark_routed(conn, kit.signal(conn, new.id))
    clock.advance(seconds=2)

    with other.transaction():
        assert waits.try_lock_address(other, router_module._RESCAN)
        beside_another = router.rescan()

    assert (beside_another.settled, router.rescan().settled) == (0, 1)


# -- locks ----------------------------------------------------------------------------------------------------------


def test_i23_a_user_s_open_transaction_makes_no_service_wait(
    conn: Connection, database: Database, settings: Settings, router: Router, clock: Clock, other: Connection
) -> None:
    waiting, run = kit.waiting(conn, timeout=60)

    with other.transaction():
        kit.enqueue(other)
        kit.signal(other, waiting.id)
        kit.signal(other, waiting.id, "umt.cancel")
        kit.emit(other, "paid", "42")
        kit.signal(conn, waiting.id)
        routed_now = router.run_once()
        clock.advance(seconds=61)
        timed = Timers(database, settings).run_once()

    assert (routed_now.routed, routed_now.woken, routed_now.failed, timed.failed) == (1, 1, 0, 0)
    assert kit.state(conn, run) == "ready"


def test_rg11_address_locks_are_taken_before_row_locks_and_a_router_holds_no_run_while_it_waits_for_an_address(
    conn: Connection, database: Database, settings: Settings, other: Connection
) -> None:
    """A router never waits for an address: a busy one is left alone. A registration that waits holds nothing else."""
    new, grant, _ = kit.running(conn)
    address = waits.run_address(new.id, "approved")
    fact = kit.signal(conn, new.id)

    with other.transaction():
        waits.lock_address(other, address)
        busy = route(database, settings, fact)
        registering = kit.Beside(lambda: kit.register(Guard(conn, grant.token), "approved", address))
        until(lambda: kit.lock_waiters(other) == 1, what="the registration to wait for the address lock")
        held = kit.table(
            other,
            "SELECT count(*) FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation"
            " WHERE c.relnamespace = to_regnamespace(%s) AND l.mode IN ('RowShareLock', 'RowExclusiveLock')",
            f'"{conn.schema}"',
        )

    assert (busy.work, held) == (0, [(0,)])
    assert registering.result() is True
