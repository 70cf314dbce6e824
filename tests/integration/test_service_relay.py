"""The relay on a real Postgres."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingDispatcher, empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.services.redispatch import Redispatch
from umt_durable.services.relay import Relay
from umt_durable.services.takeover import rehint
from umt_durable.settings import HOLD_SECONDS, Settings
from umt_durable.states import RunState
from umt_durable.store import outbox, runs


@pytest.fixture
def dispatcher() -> RecordingDispatcher:
    return RecordingDispatcher()


@pytest.fixture
def relay(database: Database, settings: Settings, dispatcher: RecordingDispatcher) -> Relay:
    return Relay(database, settings, dispatcher)


@pytest.fixture(autouse=True)
def live(conn: Connection) -> None:
    """Have a worker that can execute everything the tests enqueue."""
    kit.worker(conn, seconds=86_400)


def test_i1_a_committed_run_is_published_once_and_its_row_is_deleted(
    conn: Connection, relay: Relay, dispatcher: RecordingDispatcher
) -> None:
    new = kit.enqueue(conn)

    first, second = relay.run_once(), relay.run_once()

    assert dispatcher.hinted == [kit.number(conn, new.id)]
    assert (first.published, second.claimed) == (1, 0)
    assert kit.events(conn) == []


def test_i2_nothing_leaves_for_a_rolled_back_enqueue(
    conn: Connection, database: Database, relay: Relay, dispatcher: RecordingDispatcher
) -> None:
    with database.connect() as other, other.transaction(force_rollback=True):
        kit.enqueue(other)
        relay.run_once()

    relay.run_once()

    assert dispatcher.hints == []


@pytest.mark.parametrize("at", ["relay.claim.a", "relay.publish.a", "relay.delete.b"])
def test_i1_a_relay_that_dies_between_claim_and_delete_publishes_again_never_zero_times(
    at: str, conn: Connection, database: Database, settings: Settings, clock: Clock
) -> None:
    new = kit.enqueue(conn)
    dying, next_one = RecordingDispatcher(), RecordingDispatcher()
    with kit.failing(f"{at}=raise:RuntimeError"), pytest.raises(RuntimeError):
        Relay(database, settings, dying).run_once()

    early = Relay(database, settings, next_one).run_once()
    clock.advance(seconds=HOLD_SECONDS + 1)
    late = Relay(database, settings, next_one).run_once()

    assert (early.claimed, late.published) == (0, 1)
    assert next_one.hinted == [kit.number(conn, new.id)]
    assert kit.events(conn) == []


def test_c7_of_two_relays_the_slower_one_never_deletes_what_the_other_has_claimed(
    conn: Connection, database: Database, settings: Settings, clock: Clock
) -> None:
    kit.enqueue(conn)
    other = uuid4()

    def be_slow() -> None:
        clock.advance(seconds=HOLD_SECONDS + 1)
        assert len(kit.claimed(conn, other)) == 1

    Relay(database, settings, RecordingDispatcher(during=be_slow)).run_once()

    assert [claim for *_, claim in kit.events(conn)] == [other]


def test_rg15_a_hint_put_back_while_it_is_being_published_is_published_again(
    conn: Connection, database: Database, settings: Settings
) -> None:
    new = kit.enqueue(conn)
    dispatcher = RecordingDispatcher(during=lambda: rehint(database, new.id, 0))
    relay = Relay(database, settings, dispatcher)

    relay.run_once()
    dispatcher.during = lambda: None
    relay.run_once()

    assert len(dispatcher.hints) == 2
    assert kit.events(conn) == []


def test_rg18_a_row_that_commits_late_is_found_whatever_was_published_since(
    conn: Connection, database: Database, relay: Relay, dispatcher: RecordingDispatcher
) -> None:
    with database.connect() as slow:
        with slow.transaction():
            late = kit.enqueue(slow)
            kit.enqueue(conn)
            relay.run_once()
            published = list(dispatcher.hinted)
        relay.run_once()

    assert kit.number(conn, late.id) not in published
    assert dispatcher.hinted[-1] == kit.number(conn, late.id)


def test_i22_an_outage_uses_up_no_attempts_and_what_had_arrived_is_deleted(
    conn: Connection, relay: Relay, dispatcher: RecordingDispatcher
) -> None:
    for _ in range(3):
        kit.enqueue(conn)
    dispatcher.down = 1

    counts = relay.run_once()

    assert (counts.published, counts.returned) == (1, 2)
    assert [(status, attempts, claim) for _, status, attempts, claim in kit.events(conn)] == [("pending", 0, None)] * 2
    assert len({row.id for row in dispatcher.hints}) == 1


def test_a_broker_that_is_away_is_left_alone_for_longer_each_time_and_asked_again_in_the_end(
    conn: Connection, relay: Relay, dispatcher: RecordingDispatcher, clock: Clock
) -> None:
    kit.enqueue(conn)
    dispatcher.down = 0
    rests = []
    for _ in range(7):
        relay._resume_at = 0.0
        clock.advance(seconds=10)
        relay.run_once()
        rests.append(relay.rest_seconds())

    while_resting = relay.run_once()
    relay._resume_at = 0.0
    clock.advance(seconds=10)
    dispatcher.down = None
    relay.run_once()

    assert rests[0] < 0.2 < rests[2] < rests[-1] <= 5.0
    assert while_resting.claimed == 0
    assert (len(dispatcher.hints), relay.recoveries, relay.rest_seconds()) == (1, 1, 0.0)


def test_i26_a_row_refused_for_itself_waits_alone_and_stops_no_other(
    conn: Connection, relay: Relay, dispatcher: RecordingDispatcher, clock: Clock
) -> None:
    bad = kit.number(conn, kit.enqueue(conn).id)
    good = kit.number(conn, kit.enqueue(conn).id)
    dispatcher.refuses = {bad: "no route"}

    counts = relay.run_once()
    at_once = relay.run_once()

    assert dispatcher.hinted == [good]
    assert (counts.refused, at_once.claimed) == (1, 0)
    assert kit.table(conn, "SELECT run, status, attempts, reason, claim FROM {}.outbox_event") == [
        (bad, "pending", 1, "no route", None)
    ]


def test_i26_a_row_refused_too_often_is_dead_with_its_reason_and_its_back_off_is_capped(
    conn: Connection, database: Database, settings: Settings, dispatcher: RecordingDispatcher, clock: Clock
) -> None:
    bad = kit.number(conn, kit.enqueue(conn).id)
    dispatcher.refuses = {bad: "no route"}
    relay = Relay(database, settings, dispatcher)
    delays = []
    with kit.counted(telemetry.Counter.DEAD_EVENT) as dead:
        for _ in range(settings.max_publish_attempts):
            assert relay.run_once().refused == 1
            due = kit.table(conn, "SELECT extract(epoch FROM next_attempt_at - {}.now())::float8 FROM {}.outbox_event")
            delays.append(due[0][0])
            clock.advance(seconds=300)

        assert dead() == 1
    assert relay.run_once().claimed == 0
    assert delays[0] < 1.1 < delays[3] < delays[-1] <= 300
    assert [row[1] for row in kit.events(conn)] == ["dead"]


def test_i1_a_dead_hint_strands_no_run(
    conn: Connection, database: Database, settings: Settings, dispatcher: RecordingDispatcher, clock: Clock
) -> None:
    kit.enqueue(conn)
    kit.table(conn, "UPDATE {}.outbox_event SET status = 'dead', attempts = 20, reason = 'no route'")
    clock.advance(seconds=31)

    Redispatch(database, settings).run_once()
    Relay(database, settings, dispatcher).run_once()

    assert len(dispatcher.hints) == 1


def test_i26_a_row_the_dispatcher_falls_over_is_refused_and_the_rest_of_its_batch_leaves(
    conn: Connection, relay: Relay, dispatcher: RecordingDispatcher
) -> None:
    poison = kit.number(conn, kit.enqueue(conn, priority=9).id)
    good = kit.number(conn, kit.enqueue(conn).id)
    dispatcher.breaks_on = {poison}

    relay.run_once()

    assert dispatcher.hinted == [good]
    assert kit.table(conn, "SELECT run, reason FROM {}.outbox_event") == [
        (poison, f"RuntimeError: cannot make a message of run {poison}")
    ]


def test_hints_leave_in_the_order_of_their_priority(
    conn: Connection, relay: Relay, dispatcher: RecordingDispatcher
) -> None:
    numbers = [kit.number(conn, kit.enqueue(conn, priority=priority).id) for priority in (0, 9, 5)]

    relay.run_once()

    assert dispatcher.hinted == [numbers[1], numbers[2], numbers[0]]


@pytest.mark.parametrize("why", ["claimed", "paused", "an earlier period", "finished", "removed"])
def test_i22_a_hint_of_no_use_is_dropped_without_being_published(
    why: str, conn: Connection, relay: Relay, dispatcher: RecordingDispatcher
) -> None:
    new = kit.enqueue(conn)
    match why:
        case "claimed":
            kit.claim(conn, new.id, kit.worker(conn))
        case "paused":
            kit.table(conn, "UPDATE {}.run SET paused_at = {}.now()")
        case "an earlier period":
            kit.table(conn, "UPDATE {}.run SET fence = 2")
        case "finished":
            kit.finish(conn, kit.claim(conn, new.id, kit.worker(conn)).token)
            kit.table(conn, "DELETE FROM {}.outbox_event WHERE type = 'result'")
        case "removed":
            kit.table(conn, "DELETE FROM {}.run")

    counts = relay.run_once()

    assert (counts.dropped, dispatcher.hints, kit.events(conn)) == (1, [], [])


def test_i19_a_hint_nobody_can_use_is_not_published_and_the_worker_that_can_finds_its_run_at_once(
    conn: Connection, database: Database, settings: Settings, relay: Relay, dispatcher: RecordingDispatcher
) -> None:
    new = kit.enqueue(conn, version=2)

    counts = relay.run_once()
    before = Redispatch(database, settings).run_once()
    kit.worker(conn, versions=[kit.TASK, f"{kit.TASK}@2"])
    runs.bring_versions(conn, [kit.TASK, f"{kit.TASK}@2"], limit=10)
    after = Redispatch(database, settings).run_once()
    relay.run_once()

    assert (counts.shelved, before.hinted, after.hinted) == (1, 0, 1)
    assert dispatcher.hinted == [kit.number(conn, new.id)]


def test_i19_a_hint_claimed_just_before_its_worker_came_is_given_back_not_dropped(
    conn: Connection, database: Database, settings: Settings, dispatcher: RecordingDispatcher, clock: Clock
) -> None:
    kit.enqueue(conn, version=2)
    relay = Relay(database, settings, dispatcher)
    sort = relay._sort

    def come_late(entries: list[object]) -> object:
        kit.worker(conn, versions=[f"{kit.TASK}@2"])
        return sort(entries)  # type: ignore[arg-type]  # handed on as it came

    relay._sort = come_late  # type: ignore[method-assign,assignment]  # the moment between the claim and the look

    counts = relay.run_once()
    clock.advance(seconds=1)
    relay.run_once()

    assert (counts.shelved, counts.returned) == (0, 1)
    assert len(dispatcher.hints) == 1


def test_i13_rows_of_a_finished_run_leave_with_the_run_and_only_after_its_finisher_had_its_time(
    conn: Connection, relay: Relay, dispatcher: RecordingDispatcher, clock: Clock
) -> None:
    new, grant, _ = kit.running(conn)
    kit.finish(conn, grant.token, callbacks=2)

    early = relay.run_once()
    clock.advance(seconds=16)
    relay.run_once()

    assert early.claimed == 0
    assert sorted((entry.type, entry.ordinal) for entry, _ in dispatcher.reports) == [
        ("callback", 0),
        ("callback", 1),
        ("result", 0),
    ]
    assert {(run.id, run.state, run.result) for _, run in dispatcher.reports} == {(new.id, RunState.SUCCEEDED, b"1")}
    assert kit.events(conn, "result") + kit.events(conn, "callback") == []


def test_a_result_row_whose_run_was_removed_is_dropped(
    conn: Connection, relay: Relay, dispatcher: RecordingDispatcher, clock: Clock
) -> None:
    _, grant, _ = kit.running(conn)
    kit.finish(conn, grant.token)
    kit.table(conn, "DELETE FROM {}.run")
    clock.advance(seconds=16)

    counts = relay.run_once()

    assert (counts.dropped, dispatcher.reports) == (1, [])


def test_a_message_of_an_ordinary_task_goes_to_the_dispatcher_as_it_is(
    conn: Connection, relay: Relay, dispatcher: RecordingDispatcher
) -> None:
    kit.table(
        conn,
        "INSERT INTO {}.outbox_event (id, type, payload, next_attempt_at) VALUES (%s, 'celery', %s, {}.now())",
        uuid4(),
        b"{}",
    )

    relay.run_once()

    assert [(row.type, row.payload) for row in dispatcher.others] == [("celery", b"{}")]


@pytest.mark.parametrize("statement", ["relay.claim.r", "relay.delete.r"])
def test_i24_a_lost_reply_of_the_relay_costs_time_and_nothing_else(
    statement: str, conn: Connection, relay: Relay, dispatcher: RecordingDispatcher, clock: Clock
) -> None:
    kit.enqueue(conn)

    with kit.failing(f"{statement}=raise:OperationalError;nth=1"):
        relay.run_once()
    clock.advance(seconds=HOLD_SECONDS + 1)
    relay.run_once()

    assert len(dispatcher.hints) == 1
    assert kit.events(conn) == []


@pytest.mark.parametrize("by", ["delete", "give back", "forget", "refill", "redispatch"])
def test_rg11_whoever_locks_several_outbox_rows_takes_them_in_the_order_of_their_ids(
    by: str, conn: Connection, database: Database, clock: Clock
) -> None:
    """With the lowest row held by somebody else, none of the others may be locked: two such waits would make a ring."""
    for _ in range(6):
        kit.enqueue(conn)
    relay = uuid4()
    ids = sorted(entry.id for entry in kit.claimed(conn, relay))
    if by == "redispatch":
        clock.advance(seconds=31)
        kit.table(conn, "UPDATE {}.outbox_event SET status = 'dead'")
    numbers = [row[0] for row in kit.table(conn, "SELECT no FROM {}.run")]
    works: dict[str, Callable[[Connection], object]] = {
        "delete": lambda own: outbox.delete(own, ids[::-1], relay=relay),
        "give back": lambda own: outbox.give_back(own, ids[::-1], relay=relay, delay_seconds=1),
        "forget": lambda own: outbox.delete_claimed(own, ids[::-1], [relay]),
        "refill": lambda own: runs.rehint_ready(own, after=0, limit=100, deliver_seconds=30),
        "redispatch": lambda own: runs.redispatch(own, numbers, deliver_seconds=30),
    }

    with database.connect() as other, other.transaction():
        kit.table(other, "SELECT 1 FROM {}.outbox_event WHERE id = %s FOR UPDATE", ids[0])
        beside = kit.Beside(lambda: database.do(works[by]))
        until(lambda: kit.lock_waiters(conn) == 1, what="the statement to wait for the lowest row")
        free = kit.table(conn, "SELECT id FROM {}.outbox_event ORDER BY id FOR UPDATE SKIP LOCKED")

    beside.result()
    assert [row[0] for row in free] == ids[1:]


def test_rg5_a_run_keeps_its_row_whatever_state_it_is_in(conn: Connection) -> None:
    partitioned = kit.table(
        conn, "SELECT relname FROM pg_class WHERE relkind = 'p' AND relnamespace = to_regnamespace(%s)", conn.schema
    )

    assert partitioned == []


def test_rg19_the_relay_and_what_it_serves_never_notify_inside_a_transaction(conn: Connection) -> None:
    """NOTIFY takes one lock for the whole server at commit; only a statement of its own may do it."""
    bodies = kit.table(conn, "SELECT prosrc FROM pg_proc WHERE pronamespace = to_regnamespace(%s)", conn.schema)

    assert bodies
    assert not [body for (body,) in bodies if "notify" in body.lower()]
