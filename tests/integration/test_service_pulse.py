"""Relay and maintenance running by themselves: woken, polling, idle, and through outages."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from psycopg.pq import TransactionStatus

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingBroker, RecordingDispatcher, empty_schema  # noqa: F401  a fixture
from tests.support.postgres import PrivatePostgres
from tests.support.proxy import Proxy
from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.services import keeper as keeper_module
from umt_durable.services import maintenance as maintenance_module
from umt_durable.services import pulse as pulse_module
from umt_durable.services.keeper import TICK_SECONDS, Keeper
from umt_durable.services.lease import Lease
from umt_durable.services.maintenance import Maintenance
from umt_durable.services.pulse import Pulse, _Look
from umt_durable.services.relay import BATCH, Relay
from umt_durable.settings import Settings
from umt_durable.store import runs

# What is promised here does not depend on the server's version, and some of it takes seconds.
pytestmark = pytest.mark.private_postgres_only

NEVER = 3600.0


@pytest.fixture
def dispatcher() -> RecordingDispatcher:
    return RecordingDispatcher()


@pytest.fixture
def begin(database: Database, settings: Settings, dispatcher: RecordingDispatcher) -> Iterator[Callable[..., Pulse]]:
    """Return a function that starts relay and maintenance; they end with the test."""
    begun: list[Pulse] = []

    def start(*, relay: bool = True, maintenance: bool = True, on: Database | None = None, **changed: Any) -> Pulse:
        given = replace(settings, **changed)
        where = on or Database(given)
        pulse = Pulse(
            where,
            given,
            Relay(where, given, dispatcher) if relay else None,
            Maintenance(where, given) if maintenance else None,
        )
        begun.append(pulse)
        pulse.start()
        databases.append(where)
        return pulse

    databases: list[Database] = []
    yield start
    for pulse in begun:
        pulse.stop()
    for one in databases:
        one.close()


# -- the pulse ------------------------------------------------------------------------------------------------------


@pytest.fixture
def live(conn: Connection) -> None:
    """Have a worker that can execute everything the tests enqueue."""
    kit.worker(conn, seconds=86_400)


@pytest.mark.usefixtures("live")
def test_rg19_a_notify_after_the_commit_wakes_a_relay_that_does_not_poll(
    conn: Connection, database: Database, begin: Callable[..., Pulse], dispatcher: RecordingDispatcher
) -> None:
    begin(poll_seconds=NEVER)
    until(lambda: listening(conn), what="the relay to listen")

    kit.enqueue(conn)
    database.notify()

    until(lambda: dispatcher.hints, what="the hint to leave")


@pytest.mark.usefixtures("live")
def test_what_is_committed_just_after_a_notify_leaves_without_another(
    conn: Connection, database: Database, begin: Callable[..., Pulse], dispatcher: RecordingDispatcher
) -> None:
    """A caller sends one NOTIFY per 5 ms; the relay looks again a little later by itself."""
    begin(poll_seconds=NEVER)
    until(lambda: listening(conn), what="the relay to listen")
    dispatcher.during = lambda: kit.enqueue(conn) if len(dispatcher.hints) < 3 else None

    kit.enqueue(conn)
    database.notify()

    until(lambda: len(dispatcher.hints) >= 4, what="the later hints to leave")


@pytest.mark.usefixtures("live")
def test_a_wake_in_this_process_needs_no_notify(
    conn: Connection, begin: Callable[..., Pulse], dispatcher: RecordingDispatcher
) -> None:
    pulse = begin(poll_seconds=NEVER, notify="off")
    kit.enqueue(conn)

    pulse.wake()

    until(lambda: dispatcher.hints, what="the hint to leave")


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize("changed", [{"pooler": True}, {"notify": "off"}])
def test_behind_a_pooler_or_without_notify_the_poll_finds_everything(
    changed: dict[str, Any], conn: Connection, begin: Callable[..., Pulse], dispatcher: RecordingDispatcher
) -> None:
    begin(**changed)
    new, run = kit.waiting(conn)
    kit.enqueue(conn)
    kit.signal(conn, new.id)

    # The hint of the run that came to wait leaves too, if the relay looks before it is claimed.
    until(lambda: len(dispatcher.hints) >= 2, what="both hints to leave")

    assert kit.state(conn, run) == "ready"
    assert not listening(conn)


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize("roles", [{"maintenance": False}, {"relay": False}])
def test_either_of_the_two_runs_without_the_other(
    roles: dict[str, bool], conn: Connection, begin: Callable[..., Pulse], dispatcher: RecordingDispatcher
) -> None:
    begin(**roles)
    new, run = kit.waiting(conn)
    ready = kit.enqueue(conn)
    kit.signal(conn, new.id)

    if roles.get("relay", True):
        until(lambda: dispatcher.hinted == [kit.number(conn, ready.id)], what="the hint to leave")
        assert kit.state(conn, run) == "waiting"
    else:
        until(lambda: kit.state(conn, run) == "ready", what="the run to be woken")
        assert dispatcher.hints == []


@pytest.mark.usefixtures("live")
def test_what_maintenance_wakes_leaves_at_once(
    conn: Connection, begin: Callable[..., Pulse], dispatcher: RecordingDispatcher
) -> None:
    _, run = kit.sleeping(conn, 0.2)

    begin(notify="off", poll_seconds=0.3)

    until(lambda: dispatcher.hinted == [run], what="the hint to leave")


def test_more_rows_than_one_batch_leave_in_one_go(
    conn: Connection, begin: Callable[..., Pulse], dispatcher: RecordingDispatcher, live: None
) -> None:
    with conn.transaction():
        for _ in range(250):
            kit.enqueue(conn)

    begin(poll_seconds=NEVER)

    until(lambda: len(dispatcher.hints) == 250, what="all hints to leave")


@pytest.mark.usefixtures("live")
def test_through_broken_connections_both_go_on_and_an_outage_is_told_once(
    conn: Connection,
    settings: Settings,
    proxied_url: str,
    database_proxy: Proxy,
    begin: Callable[..., Pulse],
    dispatcher: RecordingDispatcher,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="umt_durable.services.pulse")
    far = Database(replace(settings, database_url=proxied_url))
    begin(on=far, database_url=proxied_url)
    kit.enqueue(conn)
    until(lambda: len(dispatcher.hints) == 1, what="the first hint to leave")

    database_proxy.down()
    until(lambda: "for maintenance, is away" in caplog.text, what="the outage to be noticed")
    new, run = kit.waiting(conn)
    kit.signal(conn, new.id)
    kit.enqueue(conn)
    attempts = database_proxy.connections
    database_proxy.heal()
    until(lambda: len(dispatcher.hints) == 3, what="the other hints to leave")
    until(lambda: "for maintenance, is back" in caplog.text, what="its end to be noticed")

    assert kit.state(conn, run) == "ready"
    assert caplog.text.count("for maintenance, is away") == 1
    assert caplog.text.count("for maintenance, is back") == 1
    assert caplog.text.count("for the relay, is away") <= 1
    assert database_proxy.connections >= attempts


def test_after_a_restart_of_the_server_everything_goes_on(
    conn: Connection,
    private_postgres: PrivatePostgres,
    database: Database,
    begin: Callable[..., Pulse],
    dispatcher: RecordingDispatcher,
    live: None,
) -> None:
    begin()
    kit.enqueue(conn)
    until(lambda: len(dispatcher.hints) == 1, what="the first hint to leave")

    private_postgres.restart("immediate")
    with database.connect() as again:
        kit.enqueue(again)

        until(lambda: len(dispatcher.hints) == 2, what="the second hint to leave")


@pytest.mark.usefixtures("live")
def test_while_the_broker_is_away_nothing_spins_and_its_return_is_noticed(
    conn: Connection, begin: Callable[..., Pulse], dispatcher: RecordingDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = itertools.count(), runs.due_work
    monkeypatch.setattr(runs, "due_work", lambda own: next(looks) >= 0 and look(own))
    dispatcher.down = 0
    with conn.transaction():
        for _ in range(BATCH + 1):  # one batch is given back for a while, the rest stays due
            kit.enqueue(conn)
    with kit.counted(telemetry.Counter.PUBLISH_OUTAGE) as outages:
        pulse = begin(poll_seconds=1.0)  # when all rows were given back, the poll is what finds them due
        until(lambda: outages() >= 3, what="the relay to try again")
        looked_so_far, tried = next(looks), outages()
    assert looked_so_far <= 3 * tried + 15, "an outage makes maintenance look again and again"
    looked = threading.Event()
    assert pulse._maintenance is not None
    pulse._maintenance.look_at_broker = looked.set  # type: ignore[method-assign]  # to see that it is called

    dispatcher.down = None

    until(lambda: dispatcher.hints, what="the hint to leave")
    assert looked.wait(10)


def test_a_pulse_can_be_ended_and_begun_again(
    conn: Connection, begin: Callable[..., Pulse], dispatcher: RecordingDispatcher, live: None
) -> None:
    pulse = begin()
    pulse.stop()
    kit.enqueue(conn)
    pulse.wake()
    ended = not any(
        thread.name in ("umt-durable-relay", "umt-durable-maintenance") and thread.is_alive()
        for thread in threading.enumerate()
    )

    pulse.start()

    until(lambda: dispatcher.hints, what="the hint to leave")
    assert ended


def test_an_idle_process_makes_at_most_three_commits_a_second(
    conn: Connection, settings: Settings, dispatcher: RecordingDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted with the default settings, the lease of a main process included, over a minute that nobody waits for."""
    given, seconds = replace(settings, poll_seconds=0.5, lease_seconds=15.0), 60.0
    now = [boottime()]
    for module in (maintenance_module, pulse_module, keeper_module):
        monkeypatch.setattr(module, "boottime", lambda: now[0])
    database = Database(given)
    lease = Lease(database, given, node=uuid4(), versions=["t"])
    keeper, maintenance = Keeper(lease), Maintenance(database, given)
    pulse, look = Pulse(database, given, Relay(database, given, dispatcher), maintenance), _Look(database)
    with database.connect() as own:
        lease.begin(own)
        pulse._maintain(maintenance, look)
        made = count_commits(monkeypatch, apart=conn)

        ends, beat = now[0] + seconds, 0.0
        while now[0] < ends:
            now[0] += max(maintenance.rest_seconds(given.poll_seconds), pulse_module.LOOKS_APART_SECONDS)
            assert pulse._maintain(maintenance, look) == 0
            if now[0] >= beat:  # the relay's thread has no clock of its own: it waits until it is rung
                keeper._beat(own)
                beat = now[0] + TICK_SECONDS
    look.close()
    pulse.stop()
    lease.stop()
    database.close()

    assert sum("renew_lease" in one for one in made) >= seconds / 6
    assert 2 * seconds * 0.9 <= len(made) <= 3.0 * seconds, Counter(made)


def count_commits(monkeypatch: pytest.MonkeyPatch, *, apart: Connection) -> list[str]:
    """Have every commit of our connections kept in a list: statements in autocommit, and transactions."""
    made: list[str] = []
    execute, transaction = Connection.execute, Connection.transaction

    def counting_execute(self: Connection, query: Any, *given: Any, **options: Any) -> Any:
        cursor = execute(self, query, *given, **options)
        if self is not apart and self.info.transaction_status == TransactionStatus.IDLE:
            made.append(str(query)[:40])  # begins with the statement's name
        return cursor

    @contextmanager
    def counting_transaction(self: Connection, *given: Any, **options: Any) -> Iterator[Any]:
        with transaction(self, *given, **options) as inner:
            yield inner
        made.append("a transaction")

    monkeypatch.setattr(Connection, "execute", counting_execute)
    monkeypatch.setattr(Connection, "transaction", counting_transaction)
    return made


def listening(conn: Connection) -> bool:
    query = (
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'umt_durable listen'"
    )
    return bool(kit.table(conn, query))


def test_i21_the_end_of_a_lease_is_met_when_it_comes_and_not_at_the_next_poll(
    conn: Connection, begin: Callable[..., Pulse]
) -> None:
    kit.running(conn)
    begin(relay=False, poll_seconds=NEVER)

    until(lambda: kit.table(conn, "SELECT 1 FROM {}.run WHERE state = 'ready'"), what="the take-over")

    late = kit.table(
        conn,
        "SELECT extract(epoch FROM a.ended_at - w.lease_until)::float8"
        " FROM {}.attempt a JOIN {}.worker w ON w.id = a.worker",
    )[0][0]
    assert late >= 0
