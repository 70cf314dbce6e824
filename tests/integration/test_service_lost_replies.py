"""I24 for every service: its COMMIT takes place, the reply is lost with the connection, and it is done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingBroker, RecordingDispatcher, empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.proxy import Proxy
from umt_durable.database import Connection, Database
from umt_durable.records import NewRun
from umt_durable.services import takeover
from umt_durable.services.intake import take_in
from umt_durable.services.redispatch import Redispatch
from umt_durable.services.relay import Relay
from umt_durable.services.router import Router, route
from umt_durable.services.takeover import Sweeper
from umt_durable.services.timers import Timers
from umt_durable.settings import HOLD_SECONDS, Settings
from umt_durable.store import facts, markers, runs

Run = Callable[[str], None]


@pytest.fixture
def far(settings: Settings, proxied_url: str) -> Iterator[Database]:
    """Return connections that lead through the proxy."""
    far = Database(replace(settings, database_url=proxied_url))
    yield far
    far.close()


def columns(conn: Connection, run: int) -> tuple[object, ...]:
    return kit.table(conn, "SELECT state, fence, crashes, redelivers FROM {}.run WHERE no = %s", run)[0]


def test_i24_take_over(
    conn: Connection, far: Database, database_proxy: Proxy, settings: Settings, clock: Clock
) -> None:
    _, grant, _ = kit.running(conn)
    clock.advance(seconds=kit.LEASE_SECONDS + 1)
    cut = database_proxy.cut_after_commit(match=b"take_over_run")

    Sweeper(far, settings).run_once()

    assert cut.fired == 1
    assert columns(conn, grant.token.run) == ("ready", 2, 1, 0)
    assert len(kit.events(conn)) == 1


def test_i24_the_end_of_a_process(conn: Connection, far: Database, database_proxy: Proxy, settings: Settings) -> None:
    _, grant, worker = kit.running(conn)
    cut = database_proxy.cut_reply("end_leases_of_process")
    second = database_proxy.cut_after_commit(match=b"take_over_run")

    takeover.end_process(far, node=worker, pid=4711, settings=settings)

    assert (cut.fired, second.fired) == (1, 1)
    assert columns(conn, grant.token.run) == ("ready", 2, 1, 0)


def test_i24_timers(conn: Connection, far: Database, database_proxy: Proxy, settings: Settings, clock: Clock) -> None:
    _, asleep = kit.sleeping(conn, 10)
    _, waits_for_it = kit.waiting(conn, timeout=10)
    clock.advance(seconds=11)
    cuts = [database_proxy.cut_after_commit(match=name) for name in (b"wake_due_runs", b"time_out_waits")]

    Timers(far, settings).run_once()

    assert [cut.fired for cut in cuts] == [1, 1]
    assert columns(conn, asleep) == ("ready", 3, 0, 0)
    assert columns(conn, waits_for_it) == ("ready", 3, 0, 0)
    assert kit.wait_states(conn, waits_for_it) == {"approved": "timed_out"}
    assert len(kit.events(conn)) == 2


def test_i24_routing(conn: Connection, far: Database, database_proxy: Proxy, settings: Settings) -> None:
    new, run = kit.waiting(conn)
    fact = kit.signal(conn, new.id)
    cut = database_proxy.cut_after_commit(match=b"settle_wait")

    route(far, settings, fact)
    Router(far, settings).run_once()

    assert cut.fired == 1
    assert columns(conn, run) == ("ready", 3, 0, 0)
    assert kit.wait_states(conn, run) == {"approved": "satisfied"}
    assert facts.unrouted(conn, limit=10) == []


def test_i24_cancelling(conn: Connection, far: Database, database_proxy: Proxy, settings: Settings) -> None:
    new = kit.enqueue(conn)
    fact = kit.signal(conn, new.id, "umt.cancel", b'{"reason": "customer"}')
    cut = database_proxy.cut_after_commit(match=b"cancel_parked_run")

    route(far, settings, fact)

    assert cut.fired == 1
    assert kit.table(conn, "SELECT state, reason, fence FROM {}.run") == [("cancelled", "customer", 1)]
    assert len(kit.events(conn, "result")) == 1


def test_i24_redispatch(
    conn: Connection, far: Database, database_proxy: Proxy, settings: Settings, clock: Clock
) -> None:
    run = kit.number(conn, kit.enqueue(conn).id)
    kit.drop_hints(conn)
    clock.advance(seconds=31)
    kit.worker(conn)
    cut = database_proxy.cut_after_commit(match=b"redispatch_runs")

    Redispatch(far, settings).run_once()

    assert cut.fired == 1
    assert columns(conn, run) == ("ready", 0, 0, 1)
    assert len(kit.events(conn)) == 1


@pytest.mark.parametrize("statement", ["swap_marker", "rehint_ready_runs"])
def test_i24_a_refill(
    statement: str, conn: Connection, far: Database, database_proxy: Proxy, settings: Settings
) -> None:
    broker = RecordingBroker()
    redispatch = Redispatch(far, settings, broker)
    redispatch.watch_broker()
    for _ in range(3):
        kit.enqueue(conn)
    kit.drop_hints(conn)
    broker.wipe()
    redispatch.watch_broker()
    if statement == "swap_marker":
        cut = database_proxy.cut_reply(statement)
    else:
        cut = database_proxy.cut_after_commit(match=statement.encode())

    for _ in range(8):
        redispatch.watch_broker()

    known = markers.read(conn, "default")
    assert cut.fired == 1
    assert known in broker.markers
    assert len(kit.events(conn)) == 3


@pytest.mark.parametrize("statement", ["claim_events", "delete_events"])
def test_i24_the_relay(
    statement: str, conn: Connection, far: Database, database_proxy: Proxy, settings: Settings, clock: Clock
) -> None:
    kit.worker(conn, seconds=3600)
    kit.enqueue(conn)
    dispatcher = RecordingDispatcher()
    relay = Relay(far, settings, dispatcher)
    cut = database_proxy.cut_reply(statement)

    relay.run_once()
    clock.advance(seconds=HOLD_SECONDS + 1)
    relay.run_once()

    assert cut.fired == 1
    assert len(dispatcher.hints) == 1
    assert kit.events(conn) == []


def test_i24_shelving(conn: Connection, far: Database, database_proxy: Proxy, settings: Settings) -> None:
    run = kit.number(conn, kit.enqueue(conn).id)
    cut = database_proxy.cut_after_commit(match=b"shelve_runs")

    Relay(far, settings, RecordingDispatcher()).run_once()

    assert cut.fired == 1
    assert columns(conn, run) == ("ready", 0, 0, -1)  # its hint is known to be nowhere
    assert runs.bring_versions(conn, kit.DECLARED, limit=10)[0] == 1


def test_i24_intake(conn: Connection, far: Database, database_proxy: Proxy, settings: Settings) -> None:
    batch = [NewRun(id=name, task=kit.TASK) for name in ("a", "b")]
    cut = database_proxy.cut_after_commit(match=b"intake_run")

    take_in(far, settings, batch)

    assert cut.fired == 1
    assert kit.table(conn, "SELECT id FROM {}.run ORDER BY id") == [("a",), ("b",)]
