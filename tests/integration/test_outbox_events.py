"""Users' events: kept with the caller's rows, each one run, dead with a reason, listed and replayed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa
from celery import chain, group
from sqlalchemy.orm import Session

from tests.integration import service_kit as kit
from tests.integration.outbox_kit import Shop, event, make_shop, run_ids  # noqa: F401  a fixture
from tests.integration.service_kit import Beside, empty_schema, failing  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.proxy import Proxy
from umt_durable import failpoints
from umt_durable.bridge import sending
from umt_durable.database import Connection, Database
from umt_durable.errors import (
    AutocommitError,
    DefinitionError,
    DuplicateOutboxRouteError,
    EncodingError,
    IdempotencyConflictError,
    InputError,
    UnknownEventError,
)
from umt_durable.services.events import EventStarter
from umt_durable.services.relay import RelayCounts
from umt_durable.settings import HOLD_SECONDS, Settings
from umt_durable.sql import statements
from umt_durable.store import workers

T = TypeVar("T")

KINDS = ("session", "connection", "psycopg")
PAID = {"order": 7}


class RolledBackError(Exception):
    """What a test leaves a transaction with."""


@contextmanager
def transaction(kind: str, url: str) -> Iterator[Any]:
    """Open a caller's transaction of one kind; committed at the end."""
    if kind == "psycopg":
        with psycopg.connect(url) as conn:
            yield conn
        return
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    try:
        if kind == "session":
            with Session(engine) as session, session.begin():
                yield session
        else:
            with engine.begin() as connection:
                yield connection
    finally:
        engine.dispose()


def killed_at(place: str, work: Callable[[], object]) -> None:
    """Do work in a process that is killed at a fail point."""
    pid = os.fork()
    if pid == 0:
        try:
            failpoints.install(f"{place}=kill")
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the process was not killed"


def refuse_to_commit(kind: str, url: str, work: Callable[[Any], T]) -> T:
    """Do work in a caller's transaction that is rolled back, and return what it gave."""
    done: list[T] = []
    with suppress(RolledBackError), transaction(kind, url) as own:
        done.append(work(own))
        raise RolledBackError
    return done[0]


# -- emit -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_i2_an_event_exists_if_and_only_if_the_caller_commits(
    conn: Connection, shop: Shop, database_url: str, kind: str
) -> None:
    lost = refuse_to_commit(kind, database_url, lambda own: shop.durable.outbox.emit("order.paid", PAID, conn=own))
    with transaction(kind, database_url) as own:
        kept = shop.durable.outbox.emit("order.paid", PAID, conn=own)
        assert kit.events(conn, "order.paid") == []

    assert event(conn, kept) == ("pending", 0, f"outbox:{kept}", False, None)
    with pytest.raises(UnknownEventError):
        shop.durable.outbox.get(lost)


def test_a_connection_in_autocommit_is_refused(conn: Connection, shop: Shop, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as own, pytest.raises(AutocommitError):
        shop.durable.outbox.emit("order.paid", PAID, conn=own)
    with psycopg.connect(database_url, autocommit=True) as own, pytest.raises(AutocommitError):
        shop.durable.outbox.send(shop.print_label.s(7), conn=own)

    assert kit.table(conn, "SELECT id FROM {}.outbox_event") == []


@pytest.mark.parametrize("kind", KINDS)
def test_c5_the_same_key_of_a_type_is_one_event(conn: Connection, shop: Shop, database_url: str, kind: str) -> None:
    emit = shop.durable.outbox.emit
    with transaction(kind, database_url) as own:
        first = emit("order.paid", PAID, conn=own, idempotency_key="order:7")
        assert emit("order.paid", PAID, conn=own, idempotency_key="order:7") == first
    assert emit("order.paid", PAID, idempotency_key="order:7") == first
    assert emit("order.shipped", PAID, idempotency_key="order:7") != first
    with pytest.raises(IdempotencyConflictError, match=f"event {first}"):
        emit("order.paid", {"order": 8}, idempotency_key="order:7")

    assert len(kit.events(conn, "order.paid")) == 1


def test_i26_a_payload_that_cannot_be_kept_is_refused_with_its_path_and_nothing_is_written(
    conn: Connection, shop: Shop
) -> None:
    with pytest.raises(EncodingError, match=r"event 'order\.paid'.*\$\.lines\[1\]"):
        shop.durable.outbox.emit("order.paid", {"lines": [1, {2}]})

    assert kit.table(conn, "SELECT id FROM {}.outbox_event") == []


@pytest.mark.parametrize("type", ["run", "result", "callback", "celery", "umt.cancel", "", "x" * 256, "a\0b"])
def test_a_reserved_or_impossible_type_is_refused(conn: Connection, shop: Shop, type: str) -> None:
    with pytest.raises(DefinitionError):
        shop.durable.outbox.emit(type, PAID)
    with pytest.raises(DefinitionError):
        shop.durable.outbox.route(type, shop.paid)


def test_events_from_sql_are_events_too(conn: Connection, shop: Shop) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    emit = "SELECT {}.emit_outbox('order.paid', '{\"order\": 7}', 'order:7')"
    (first,), (again,) = kit.table(conn, emit)[0], kit.table(conn, emit)[0]
    assert first == again
    with pytest.raises(psycopg.errors.UniqueViolation, match="another payload"):
        kit.table(conn, "SELECT {}.emit_outbox('order.paid', '{\"order\": 8}', 'order:7')")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="reserved"):
        kit.table(conn, "SELECT {}.emit_outbox('run', '{}'::jsonb)".replace("'{}'", "'[]'"))

    assert shop.relay().run_once().started == 1
    assert run_ids(conn) == [sending.derive(first)]


# -- routes -----------------------------------------------------------------------------------------------------------


def test_a3_two_owners_of_a_type_are_refused_and_both_are_named(shop: Shop) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    shop.durable.outbox.route("order.paid", shop.paid)  # a module that is loaded twice

    with pytest.raises(DuplicateOutboxRouteError, match=r"'order\.paid'.*shop\.paid.*print_label"):
        shop.durable.outbox.route("order.paid", shop.print_label)
    with pytest.raises(DefinitionError, match="need a task"):
        shop.durable.outbox.route("order.shipped", object())


def test_c5_an_event_starts_one_run_whose_key_is_the_rows(conn: Connection, shop: Shop) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    plain = shop.durable.outbox.emit("order.paid", PAID)
    keyed = shop.durable.outbox.emit("order.paid", {"order": 8}, idempotency_key="order:8")
    relay = shop.relay()

    assert relay.run_once().started == 2

    assert sorted(run_ids(conn)) == sorted([sending.derive(plain), sending.derive(keyed)])
    keys = kit.table(conn, "SELECT key, run FROM {}.idempotency_key WHERE task = 'shop.paid'")
    assert dict(keys) == {f"outbox:{plain}": sending.derive(plain), "order:8": sending.derive(keyed)}
    assert event(conn, plain) == ("dispatched", 1, f"outbox:{plain}", True, None)
    assert shop.durable.outbox.get(plain).run == sending.derive(plain)
    assert shop.durable.client.result(shop.durable.get(sending.derive(plain))) is None
    relay.run_once()  # the hints of the two
    assert relay.run_once().claimed == 0


def test_c5_the_decorator_routes_and_unpacks(conn: Connection, shop: Shop) -> None:
    @shop.durable.outbox.on("order.refunded", unpack=True)
    @shop.durable.task(name="shop.refunded")
    def refunded(ctx: object, order: int, reason: str = "") -> None: ...

    shop.durable.outbox.emit("order.refunded", {"order": 7, "reason": "broken"})
    bad = shop.durable.outbox.emit("order.refunded", [7])

    counts = shop.relay().run_once()

    assert (counts.started, counts.refused) == (1, 1)
    assert len(run_ids(conn, "shop.refunded")) == 1
    assert event(conn, bad)[0] == "dead"


def test_c6_an_event_of_an_ordinary_task_leaves_once_under_an_id_of_its_own(conn: Connection, shop: Shop) -> None:
    shop.durable.outbox.route("order.packed", "print_label")
    packed = shop.durable.outbox.emit("order.packed", {"at": datetime(2026, 1, 2, tzinfo=UTC)})

    assert shop.relay().run_once().published == 1

    (message,) = shop.sent()
    assert message.headers["id"] == sending.derive(packed)
    assert json.loads(message.body)[0][0]["at"]["__value__"].startswith("2026-01-02")
    assert event(conn, packed) == ("dispatched", 1, f"outbox:{packed}", True, None)


def test_c5_arguments_that_the_task_refuses_kill_the_event_with_the_reason(conn: Connection, shop: Shop) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    bad = shop.durable.outbox.emit("order.paid", {"order": "many"})
    good = shop.durable.outbox.emit("order.paid", PAID)

    counts = shop.relay().run_once()

    assert (counts.started, counts.refused) == (1, 1)
    status, attempts, _, _, reason = event(conn, bad)
    assert (status, attempts) == ("dead", 1)
    assert "InputError: arguments of shop.paid refused: event.order" in reason
    assert run_ids(conn) == [sending.derive(good)]


def test_c5_a_key_that_another_run_of_the_task_has_kills_the_event_with_the_reason(
    conn: Connection, shop: Shop
) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    run = shop.paid.enqueue({"order": 6}, idempotency_key="order:7")
    clash = shop.durable.outbox.emit("order.paid", PAID, idempotency_key="order:7")

    shop.relay().run_once()

    assert event(conn, clash)[0] == "dead"
    assert run.id in event(conn, clash)[4]
    assert run_ids(conn) == [run.id]


# -- events without a route -------------------------------------------------------------------------------------------


def test_c5_an_event_without_a_route_is_dead_at_once_and_says_how_to_route_it(conn: Connection, shop: Shop) -> None:
    unknown = shop.durable.outbox.emit("order.paid", PAID)

    assert shop.relay().run_once().refused == 1

    status, attempts, _, _, reason = event(conn, unknown)
    assert (status, attempts) == ("dead", 1)
    assert "'order.paid'" in reason
    assert "durable.outbox.route('order.paid', task)" in reason


def test_c5_a_relay_without_the_route_leaves_the_event_to_a_live_process_that_has_it(
    conn: Connection, shop: Shop, database: Database, settings: Settings, clock: Clock
) -> None:
    old = Shop(settings, database)
    shop.durable.outbox.route("order.paid", shop.paid)
    kit.worker(conn, versions=list(shop.durable.declared_routes()), seconds=3600)
    paid = shop.durable.outbox.emit("order.paid", PAID)

    for _ in range(5):
        assert old.relay().run_once().returned == 1
        clock.advance(seconds=2)
    assert event(conn, paid)[:2] == ("pending", 0)

    assert shop.relay().run_once().started == 1
    old.durable.stop()


def test_c5_an_event_that_died_for_lack_of_a_route_lives_again_when_a_relay_has_it(
    conn: Connection, shop: Shop, database: Database, settings: Settings
) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    paid = shop.durable.outbox.emit("order.paid", PAID)
    refused = shop.durable.outbox.emit("order.paid", {"order": "many"})
    old = Shop(settings, database)
    old.relay().run_once()
    assert event(conn, paid)[0] == event(conn, refused)[0] == "dead"

    relay = shop.relay()
    assert relay.run_once().started == 1
    assert event(conn, refused)[0] == "dead"  # now for what is in it
    shop.relay().run_once()
    assert event(conn, refused)[0] == "dead"
    assert "InputError" in event(conn, refused)[4]
    old.durable.stop()


def test_a_worker_declares_its_routes_only_where_it_has_a_relay(conn: Connection, shop: Shop) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    lease = shop.durable.declare_versions()
    lease.ensure()
    (row,) = workers.recent(conn)
    assert "@outbox:order.paid" in row.versions
    lease.stop()


# -- failures ---------------------------------------------------------------------------------------------------------


def test_c6_failures_are_tried_again_with_back_off_up_to_five_minutes_and_then_dead(
    conn: Connection, shop: Shop, clock: Clock
) -> None:
    shop.durable.outbox.route("order.packed", "print_label")
    shop.app.conf.task_create_missing_queues = False
    shop.app.conf.task_routes = {"print_label": {"queue": "nobody-has-this"}}
    packed = shop.durable.outbox.emit("order.packed", PAID)
    relay = shop.relay()

    delays = []
    for attempt in (1, 2, 3):
        assert relay.run_once().refused == 1
        assert event(conn, packed)[1] == attempt
        ((wait,),) = kit.table(conn, "SELECT next_attempt_at - {}.now() FROM {}.outbox_event WHERE id = %s", packed)
        delays.append(wait)
        clock.advance(seconds=301)

    assert all(delay <= timedelta(minutes=5) for delay in delays)
    assert event(conn, packed)[0] == "dead"
    assert relay.run_once().claimed == 0


def test_c6_an_outage_of_the_broker_uses_no_attempt_and_stops_no_run(
    conn: Connection, database: Database, settings: Settings, clock: Clock
) -> None:
    away = Shop(settings, database, broker="amqp://guest:guest@127.0.0.1:1//")
    away.durable.outbox.route("order.packed", "print_label")
    away.durable.outbox.route("order.paid", away.paid)
    packed = away.durable.outbox.emit("order.packed", PAID)
    away.durable.outbox.send(away.print_label.s(7))
    paid = away.durable.outbox.emit("order.paid", PAID)

    counts = away.relay().run_once()

    assert (counts.started, counts.returned, counts.refused) == (1, 2, 0)
    assert event(conn, packed)[:2] == ("pending", 0)
    assert event(conn, paid)[0] == "dispatched"
    away.durable.stop()


# -- several relays, kills, lost replies ------------------------------------------------------------------------------


def test_c4_c7_two_relays_at_once_start_each_event_once(conn: Connection, shop: Shop) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    emitted = [shop.durable.outbox.emit("order.paid", {"order": number}) for number in range(250)]

    def drain() -> int:
        relay, started = shop.relay(), 0
        while (counts := relay.run_once()).claimed:
            started += counts.started
        return started

    both = [Beside(drain), Beside(drain)]

    assert sum(one.result() for one in both) == 250
    assert sorted(run_ids(conn)) == sorted(sending.derive(id) for id in emitted)


@pytest.mark.parametrize(
    ("place", "started"), [("relay.claim.a", False), ("event.commit.b", False), ("event.commit.a", True)]
)
def test_c7_a_relay_that_dies_around_the_commit_leaves_exactly_one_run(
    conn: Connection, shop: Shop, clock: Clock, place: str, started: bool
) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    paid = shop.durable.outbox.emit("order.paid", PAID)
    killed_at(place, lambda: shop.relay().run_once())
    assert run_ids(conn) == ([sending.derive(paid)] if started else [])
    assert event(conn, paid)[0] == ("dispatched" if started else "pending")

    clock.advance(seconds=HOLD_SECONDS + 1)
    shop.relay().run_once()

    assert run_ids(conn) == [sending.derive(paid)]
    assert event(conn, paid)[0] == "dispatched"


def test_c7_a_relay_that_was_slow_starts_no_second_run(conn: Connection, shop: Shop, clock: Clock) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    paid = shop.durable.outbox.emit("order.paid", PAID)
    slow = uuid4()
    entries = kit.claimed(conn, slow)
    clock.advance(seconds=HOLD_SECONDS + 1)
    assert shop.relay().run_once().started == 1

    starter = EventStarter(shop.durable.database, shop.durable.settings, shop.durable.outbox.routes)
    handled = starter.handle(entries, slow)

    assert handled.started == set()
    assert run_ids(conn) == [sending.derive(paid)]
    assert event(conn, paid)[0] == "dispatched"


def test_i24_a_lost_reply_to_the_commit_starts_one_run(
    conn: Connection, shop: Shop, settings: Settings, proxied_url: str, database_proxy: Proxy
) -> None:
    far = Shop(replace(settings, database_url=proxied_url), Database(replace(settings, database_url=proxied_url)))
    far.durable.outbox.route("order.paid", far.paid)
    emitted = database_proxy.cut_reply("emit_event")
    paid = far.durable.outbox.emit("order.paid", PAID)
    cut = database_proxy.cut_after_commit(match=b"dispatch_events")

    assert far.relay().run_once().started == 1

    assert (emitted.fired, cut.fired) == (1, 1)
    assert run_ids(conn) == [sending.derive(paid)]
    assert event(conn, paid)[0] == "dispatched"
    assert len(kit.events(conn, "order.paid")) == 1
    far.durable.stop()


def test_i23_an_open_transaction_with_the_same_key_holds_no_other_event_back(
    conn: Connection, shop: Shop, database_url: str, clock: Clock
) -> None:
    shop.durable.outbox.route("order.paid", shop.paid)
    held = shop.durable.outbox.emit("order.paid", PAID, idempotency_key="order:7")
    free = shop.durable.outbox.emit("order.paid", {"order": 8})
    relay = shop.relay()

    def run_beside(own: Any) -> RelayCounts:
        shop.paid.enqueue(PAID, conn=own, idempotency_key="order:7")
        return relay.run_once()

    counts = refuse_to_commit("psycopg", database_url, run_beside)

    assert (counts.started, counts.returned, counts.refused) == (1, 1, 0)
    assert run_ids(conn) == [sending.derive(free)]
    clock.advance(seconds=1)
    assert relay.run_once().started == 1
    assert event(conn, held)[:2] == ("dispatched", 1)


# -- dead rows --------------------------------------------------------------------------------------------------------


def test_c6_dead_rows_are_listed_page_by_page_and_replayed(conn: Connection, shop: Shop) -> None:
    box = shop.durable.outbox
    emitted = [box.emit("order.paid", {"order": number}) for number in range(3)]
    other = box.emit("order.shipped", PAID)
    shop.relay().run_once()

    assert [row.id for row in box.dead(limit=3)] == [other, emitted[2], emitted[1]]
    assert [row.id for row in box.dead(limit=3, before=emitted[1])] == [emitted[0]]
    assert [row.id for row in box.dead(type="order.shipped")] == [other]
    assert box.dead()[0].reason is not None

    assert box.replay(emitted[0]) == 1
    assert event(conn, emitted[0])[:2] == ("pending", 0)
    assert box.replay(emitted[0]) == 0
    assert box.replay(type="order.paid") == 2
    box.route("order.paid", shop.paid)
    assert shop.relay().run_once().started == 3
    assert [row.id for row in box.dead()] == [other]


def test_what_cannot_be_replayed_or_listed_is_said(shop: Shop) -> None:
    box = shop.durable.outbox
    for bad in (uuid4(), "no-id", None):
        if bad is not None:
            with pytest.raises(UnknownEventError):
                box.replay(bad)
    with pytest.raises(DefinitionError, match="either the id"):
        box.replay()
    with pytest.raises(DefinitionError, match="limit"):
        box.dead(limit=0)
    with pytest.raises(UnknownEventError):
        box.dead(before=uuid4())


def test_i1_c6_any_row_may_be_dead_and_lives_again(conn: Connection, shop: Shop) -> None:
    kit.worker(conn, versions=["shop.paid", "shop.paid@1"])
    shop.paid.enqueue(PAID)
    kit.table(conn, "UPDATE {}.outbox_event SET status = 'dead', attempts = 20, reason = 'tried'")
    (row,) = shop.durable.outbox.dead()
    assert (row.type, row.attempts, row.run) == ("run", 20, run_ids(conn)[0])

    assert shop.durable.outbox.replay(row.id) == 1

    assert shop.relay().run_once().published == 1


def test_dispatched_events_cost_neither_the_relay_nor_the_status_anything(conn: Connection, shop: Shop) -> None:
    kit.table(
        conn,
        "INSERT INTO {}.outbox_event (id, type, payload, status, next_attempt_at, published_at)"
        " SELECT gen_random_uuid(), 'order.paid', 'null', 'dispatched', now(), now() FROM generate_series(1, 5000)",
    )
    kit.table(conn, "ANALYZE {}.outbox_event")
    found = statements(conn.schema)

    for name in ("outbox_status", "dead_events", "claim_events"):
        given = {"relay": uuid4(), "limit": 100, "hold": timedelta(seconds=15)} if name == "claim_events" else {}
        plan = conn.execute(b"EXPLAIN (FORMAT TEXT) " + found[name].text, given).fetchall()
        text = "\n".join(line for (line,) in plan)
        assert "Seq Scan on outbox_event" not in text, text


# -- ordinary tasks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_i2_a_task_is_sent_if_and_only_if_the_caller_commits(
    conn: Connection, shop: Shop, database_url: str, kind: str
) -> None:
    send = shop.durable.outbox.send
    refuse_to_commit(kind, database_url, lambda own: send(shop.print_label.s(1), conn=own))
    with transaction(kind, database_url) as own:
        result = send(shop.print_label.s(2), conn=own)
    with transaction(kind, database_url) as own:
        named = send(shop.print_label.si(3), conn=own, task_id="label-3")

    assert shop.relay().run_once().published == 2

    assert {message.headers["id"] for message in shop.sent()} == {result.id, named.id}
    assert named.id == "label-3"
    assert kit.events(conn, "celery") == []


def test_i2_a_durable_signature_is_enqueued_in_the_callers_transaction(
    conn: Connection, shop: Shop, database_url: str
) -> None:
    refuse_to_commit("session", database_url, lambda own: shop.durable.outbox.send(shop.paid.s(PAID), conn=own))
    with transaction("session", database_url) as own:
        result = shop.durable.outbox.send(shop.paid.s(PAID), conn=own, task_id="paid-7")

    assert run_ids(conn) == [result.id] == ["paid-7"]
    assert kit.events(conn, "celery") == []


def test_a_canvas_of_both_kinds_starts_each_member_once(conn: Connection, shop: Shop, clock: Clock) -> None:
    send = shop.durable.outbox.send
    mixed = send(group(shop.paid.s(PAID), shop.print_label.s(1), shop.print_label.s(2)))
    linked = send(chain(shop.print_label.s(3), shop.paid.si(PAID)))
    with failing("relay.publish.a=raise:RuntimeError"), pytest.raises(RuntimeError):
        shop.relay().run_once()
    clock.advance(seconds=HOLD_SECONDS + 1)
    shop.relay().run_once()

    assert run_ids(conn) == [mixed.results[0].id]
    sent = [message.headers["id"] for message in shop.sent()]
    assert set(sent) == {mixed.results[1].id, mixed.results[2].id, linked.parent.id}
    assert len(sent) == 6  # published twice, since the relay died in between, as the same messages


def test_c5_a_member_that_refuses_its_arguments_kills_the_row_with_the_reason(conn: Connection, shop: Shop) -> None:
    shop.durable.outbox.send(group(shop.paid.s("many"), shop.print_label.s(1)))

    shop.relay().run_once()

    (dead,) = shop.durable.outbox.dead()
    assert dead.reason is not None
    assert "InputError" in dead.reason
    assert shop.sent() == []


def test_c5_an_ordinary_task_that_takes_other_arguments_kills_the_event_at_once(conn: Connection, shop: Shop) -> None:
    shop.durable.outbox.route("order.packed", shop.pack, unpack=True)
    packed = shop.durable.outbox.emit("order.packed", {"size": 3})

    shop.relay().run_once()

    assert event(conn, packed)[:2] == ("dead", 1)
    assert "InputError: arguments of pack refused" in event(conn, packed)[4]


def test_what_cannot_be_sent_is_refused_and_nothing_is_written(conn: Connection, shop: Shop) -> None:
    with pytest.raises(InputError, match="arguments of pack refused"):
        shop.durable.outbox.send(shop.pack.s(size=3))
    with pytest.raises(EncodingError, match=r"print_label: \$\.args\[0\]"):
        shop.durable.outbox.send(shop.print_label.s({1, 2}))
    with pytest.raises(DefinitionError, match="signature"):
        shop.durable.outbox.send("print_label")

    assert kit.table(conn, "SELECT id FROM {}.outbox_event") == []
