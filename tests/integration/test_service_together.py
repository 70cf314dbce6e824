"""All services at once, two of each, on the same runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingBroker, RecordingDispatcher, empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.engine.client import Client
from umt_durable.services.redispatch import Redispatch
from umt_durable.services.relay import Relay
from umt_durable.services.router import Router
from umt_durable.services.takeover import Sweeper
from umt_durable.services.timers import Timers
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import runs, waits
from umt_durable.store.guard import Guard

# What is promised here does not depend on the server's version, and some of it takes seconds.
pytestmark = pytest.mark.private_postgres_only


def test_i23_all_services_at_once_on_the_same_runs_meet_no_deadlock_and_leave_nothing_behind(
    conn: Connection, database: Database, settings: Settings, clock: Clock
) -> None:
    """Runs that sleep, wait, are signalled, cancelled, executed and lost, under two of each service and a client."""
    stop = threading.Event()
    broker, client = RecordingBroker(depths={"q": 0}), Client(database, settings)
    dispatchers = [RecordingDispatcher(), RecordingDispatcher()]
    works: list[Callable[[], Any]] = []
    for dispatcher in dispatchers:
        redispatch = Redispatch(database, settings, broker)
        works += [
            Relay(database, settings, dispatcher).run_once,
            Timers(database, settings).run_once,
            Router(database, settings).run_once,
            Router(database, settings).rescan,
            Sweeper(database, settings).run_once,
            redispatch.run_once,
            redispatch.watch_broker,
            lambda: database.do(lambda own: runs.rehint_ready(own, after=0, limit=100, deliver_seconds=30)),
        ]

    def loop(work: Callable[[], Any]) -> int:
        rounds = 0
        while not stop.is_set():
            work()
            rounds += 1
        return rounds

    with kit.counted(telemetry.Counter.SYSTEM_RETRY) as defects:
        loops = [kit.Beside(lambda work=work: loop(work)) for work in works]  # type: ignore[misc]  # bound now
        ids = [execute(conn, client, turn) for turn in range(42)]
        stop.set()
        rounds = [one.result() for one in loops]

        assert defects() == 0
    clock.advance(seconds=3700)
    kit.worker(conn, seconds=864_000)
    for work in works:
        work()
    rest(database, settings)

    assert min(rounds) > 0
    assert stuck(conn) == []
    assert len(ids) == 42
    assert {kit.state(conn, run_id) for run_id in ids[::6]} == {"cancelled"}


def execute(conn: Connection, client: Client, turn: int) -> str:
    """Take a run through some of its life, as a worker and a client would, and leave it anywhere."""
    new, by = kit.enqueue(conn), kit.worker(conn, seconds=0.3 if turn % 3 else 60)
    if turn % 6 == 0:
        client.cancel(new.id, reason="test")
        return new.id
    grant = runs.claim(
        conn, id=new.id, nesting=0, task=kit.TASK, claim=uuid4(), worker=by, versions=[1], limit_seconds=None
    )
    if grant is None:
        return new.id
    guard = Guard(conn, grant.token)
    address = waits.run_address(new.id, "approved") if turn % 2 else waits.key_address("paid", "1")
    try:
        kit.register(guard, "approved", address, timeout=0.2 if turn % 5 == 0 else None)
        runs.suspend(guard, state=RunState.WAITING, steps=[], waits=["approved"])
    except AssertionError:
        return new.id  # fenced: the sweeper was faster
    if turn % 2:
        client.signal(new.id, "approved")
    else:
        client.emit("paid", "1")
    return new.id


def rest(database: Database, settings: Settings) -> None:
    """Let everything come to rest."""
    for _ in range(5):
        Sweeper(database, settings).run_once()
        Timers(database, settings).run_once()
        Router(database, settings).run_once()
        Redispatch(database, settings).run_once()


def stuck(conn: Connection) -> list[tuple[Any, ...]]:
    """Return the runs that nothing would ever bring on (I1): no owner, no open wait, no hint, no deadline of one."""
    return kit.table(
        conn,
        "SELECT r.no, r.state FROM {}.run AS r WHERE r.finished_at IS NULL"
        " AND NOT EXISTS (SELECT 1 FROM {}.outbox_event AS o WHERE o.run = r.no AND o.status = 'pending')"
        " AND NOT (r.state = 'ready' AND r.deliver_by > {}.now())"
        " AND NOT (r.state = 'running' AND EXISTS"
        " (SELECT 1 FROM {}.worker AS w WHERE w.id = r.worker AND w.lease_until > {}.now()))"
        " AND NOT (r.state = 'waiting' AND EXISTS"
        " (SELECT 1 FROM {}.wait AS w WHERE w.run = r.no AND w.state = 'pending'))",
    )
