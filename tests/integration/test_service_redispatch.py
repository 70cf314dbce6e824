"""Redispatch on a real Postgres: lost hints come back, a backlog makes no copies, a wiped broker is refilled."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingBroker, empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.records import NewRun
from umt_durable.services import redispatch as redispatch_module
from umt_durable.services.intake import take_in
from umt_durable.services.redispatch import Redispatch
from umt_durable.settings import Settings
from umt_durable.store import markers, runs, workers


@pytest.fixture
def broker() -> RecordingBroker:
    return RecordingBroker()


@pytest.fixture
def redispatch(database: Database, settings: Settings, broker: RecordingBroker) -> Redispatch:
    return Redispatch(database, settings, broker)


@pytest.fixture(autouse=True)
def live(conn: Connection) -> Any:
    """Have a worker that can execute everything the tests enqueue, and return its id."""
    return kit.worker(conn, seconds=864_000)


def published(conn: Connection, count: int = 1, **given: Any) -> list[str]:
    """Insert ready runs whose hints have left."""
    ids = [kit.enqueue(conn, **given).id for _ in range(count)]
    kit.drop_hints(conn)
    return ids


def seconds_left(conn: Connection) -> float:
    return float(kit.table(conn, "SELECT extract(epoch FROM deliver_by - {}.now())::float8 FROM {}.run")[0][0])


# -- overdue runs ---------------------------------------------------------------------------------------------------


def test_i21_a_lost_hint_is_written_again_within_its_delivery_deadline_and_not_before(
    conn: Connection, redispatch: Redispatch, clock: Clock
) -> None:
    [run_id] = published(conn)
    clock.advance(seconds=29)
    early = redispatch.run_once()

    clock.advance(seconds=2)
    late = redispatch.run_once()

    assert (early.hinted, late.hinted) == (0, 1)
    assert [event[:2] for event in kit.events(conn)] == [(kit.number(conn, run_id), "pending")]


def test_i22_the_time_a_hint_may_take_doubles_each_time_up_to_an_hour(
    conn: Connection, redispatch: Redispatch, clock: Clock
) -> None:
    published(conn)
    given = []
    for _ in range(9):
        clock.advance(seconds=3601)
        assert redispatch.run_once().hinted == 1
        given.append(round(seconds_left(conn)))
        kit.drop_hints(conn)

    assert given[:4] == [60, 120, 240, 480]
    assert given[-1] == 3600


def test_i22_a_hint_that_is_still_in_the_outbox_is_never_written_twice(
    conn: Connection, redispatch: Redispatch, clock: Clock
) -> None:
    kit.enqueue(conn)
    clock.advance(seconds=31)

    assert redispatch.run_once().work == 0
    assert len(kit.events(conn)) == 1


def test_i22_a_deep_backlog_gets_more_time_and_no_copies(
    conn: Connection, redispatch: Redispatch, broker: RecordingBroker, clock: Clock
) -> None:
    published(conn, 20)
    broker.depths = {"q": 18}
    for _ in range(5):
        clock.advance(seconds=3601)
        counts = redispatch.run_once()

        assert (counts.hinted, counts.postponed) == (0, 20)
    assert kit.events(conn) == []


def test_i22_hints_in_the_hands_of_live_workers_are_not_missing_but_those_of_dead_ones_are(
    conn: Connection, redispatch: Redispatch, broker: RecordingBroker, clock: Clock, live: Any
) -> None:
    published(conn, 10)
    broker.depths = {"q": 4}
    workers.renew(conn, live, lease_seconds=864_000, reserved={"q": 5}, counters={}, claimed=False)
    clock.advance(seconds=31)
    with_live = redispatch.run_once()
    kit.table(conn, "UPDATE {}.worker SET lease_until = '-infinity'")
    kit.worker(conn, seconds=864_000)
    clock.advance(seconds=3601)

    with_dead = redispatch.run_once()

    assert (with_live.hinted, with_live.postponed) == (0, 10)
    assert with_dead.hinted == 10


def test_i22_what_was_never_sent_does_not_make_a_queue_look_empty(
    conn: Connection, redispatch: Redispatch, broker: RecordingBroker, clock: Clock
) -> None:
    """Runs that nobody can take, that are paused, or whose hints wait in the outbox should not be with the broker."""
    published(conn, 10)
    published(conn, 10, version=9)
    [paused] = published(conn)
    kit.table(conn, "UPDATE {}.run SET paused_at = {}.now() WHERE id = %s", paused)
    for _ in range(10):
        kit.enqueue(conn)
    broker.depths = {"q": 10}
    clock.advance(seconds=31)

    counts = redispatch.run_once()

    assert (counts.hinted, counts.postponed) == (0, 20)


def test_each_queue_is_judged_by_itself(
    conn: Connection, redispatch: Redispatch, broker: RecordingBroker, clock: Clock
) -> None:
    published(conn, 3, queue="full")
    empty = published(conn, 2, queue="empty")
    broker.depths = {"full": 3, "empty": 0}
    clock.advance(seconds=31)

    counts = redispatch.run_once()

    assert (counts.hinted, counts.postponed) == (2, 3)
    assert {event[0] for event in kit.events(conn)} == {kit.number(conn, run_id) for run_id in empty}
    assert sorted(broker.asked) == ["empty", "full"]


def test_a_run_without_a_queue_is_judged_by_the_queue_of_its_task(
    conn: Connection, database: Database, settings: Settings, broker: RecordingBroker, clock: Clock
) -> None:
    published(conn, 2, queue=None)
    published(conn, 2, queue="celery")
    broker.depths = {"celery": 4}
    clock.advance(seconds=31)

    counts = Redispatch(database, settings, broker, default_queue=lambda task: "celery").run_once()

    assert (counts.hinted, counts.postponed) == (0, 4)


@pytest.mark.parametrize("why", ["shared queues", "no such queue", "no broker"])
def test_where_the_depth_says_nothing_only_the_doubling_bounds_redispatch(
    why: str, conn: Connection, database: Database, settings: Settings, broker: RecordingBroker, clock: Clock
) -> None:
    published(conn, 2)
    broker.depths = {"q": None if why == "no such queue" else 2}
    if why == "shared queues":
        settings = Settings(database_url=settings.database_url, schema=settings.schema, strict_queues=False)
    clock.advance(seconds=31)

    assert Redispatch(database, settings, None if why == "no broker" else broker).run_once().hinted == 2


def test_nothing_is_written_while_the_broker_does_not_answer(
    conn: Connection, redispatch: Redispatch, broker: RecordingBroker, clock: Clock
) -> None:
    published(conn)
    broker.up = False
    clock.advance(seconds=31)
    away = redispatch.run_once()

    broker.up = True

    assert (away.unavailable, away.work) == (True, 0)
    assert redispatch.run_once().hinted == 1


def test_i19_runs_that_nobody_can_take_get_no_hints_only_time(
    conn: Connection, redispatch: Redispatch, clock: Clock
) -> None:
    published(conn, version=9)
    clock.advance(seconds=31)

    counts = redispatch.run_once()

    assert (counts.hinted, counts.postponed, kit.events(conn)) == (0, 1, [])


def test_rg2_more_than_one_batch_is_dealt_with_in_one_look(
    conn: Connection, redispatch: Redispatch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redispatch_module, "BATCH", 2)
    published(conn, 3, version=9)
    published(conn, 4)
    clock.advance(seconds=31)

    counts = redispatch.run_once()

    assert (counts.hinted, counts.postponed) == (4, 3)


def test_i24_a_lost_reply_writes_one_hint_and_doubles_once(
    conn: Connection, redispatch: Redispatch, clock: Clock
) -> None:
    published(conn)
    clock.advance(seconds=31)

    with kit.failing("redispatch.commit.r=raise:OperationalError;nth=1"):
        redispatch.run_once()

    assert kit.table(conn, "SELECT redelivers FROM {}.run") == [(1,)]
    assert len(kit.events(conn)) == 1


# -- the loss marker ------------------------------------------------------------------------------------------------


def settle(redispatch: Redispatch) -> int:
    """Look at the broker until there is nothing more to do, and return how many hints that gave."""
    hinted = 0
    for _ in range(50):
        hinted += redispatch.watch_broker().hinted
        if not (redispatch.refilling or redispatch.suspects_loss):
            return hinted
    raise AssertionError("the refill does not end")


def test_a_broker_seen_for_the_first_time_is_marked_and_remembered(
    conn: Connection, redispatch: Redispatch, broker: RecordingBroker
) -> None:
    published(conn, 2)

    assert settle(redispatch) == 0
    assert markers.read(conn, "default") in broker.markers
    assert settle(redispatch) == 0
    assert kit.events(conn) == []


def test_i1_after_the_broker_lost_everything_every_ready_run_gets_one_fresh_hint(
    conn: Connection, redispatch: Redispatch, broker: RecordingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redispatch_module, "REFILL_BATCH", 3)
    settle(redispatch)
    old = markers.read(conn, "default")
    ready = published(conn, 7)
    kit.running(conn)
    broker.wipe()

    with kit.counted(telemetry.Counter.BROKER_LOSS) as losses:
        first_look = redispatch.watch_broker().hinted
        hinted = settle(redispatch)

        assert losses() == 1
    new = markers.read(conn, "default")
    assert (first_look, hinted) == (0, 7)
    assert [event[0] for event in kit.events(conn)] == sorted(kit.number(conn, run_id) for run_id in ready)
    assert new != old
    assert new in broker.markers
    assert settle(redispatch) == 0


def test_i22_a_marker_missed_once_is_a_moment_s_trouble(
    conn: Connection, redispatch: Redispatch, broker: RecordingBroker
) -> None:
    settle(redispatch)
    published(conn, 2)
    kept = set(broker.markers)

    broker.markers.clear()
    redispatch.watch_broker()
    broker.markers |= kept

    assert settle(redispatch) == 0
    assert kit.events(conn) == []


def test_another_broker_in_its_place_is_a_loss_at_once(
    conn: Connection, database: Database, settings: Settings
) -> None:
    class Foreign(RecordingBroker):
        def incarnation(self, expected: str) -> str | None:
            return next(iter(self.markers))

    published(conn)
    kit.table(conn, "INSERT INTO {}.broker_marker (broker, incarnation) VALUES ('default', 'mine')")
    broker = Foreign(markers={"theirs"})

    assert Redispatch(database, settings, broker).watch_broker().hinted == 1


def test_i22_of_several_processes_that_see_a_loss_one_refills(
    conn: Connection, database: Database, settings: Settings, broker: RecordingBroker
) -> None:
    first, second = (Redispatch(database, settings, broker) for _ in range(2))
    settle(first)
    published(conn, 5)
    broker.wipe()
    for one in (first, second, first, second):
        one.watch_broker()

    settle(first)
    settle(second)

    with kit.counted(telemetry.Counter.REDISPATCH) as more:
        settle(first)
        settle(second)

        assert more() == 0
    assert len(kit.events(conn)) == 5


@pytest.mark.parametrize("at", ["relay.marker.b", "redispatch.commit.b", "redispatch.commit.a"])
def test_i1_a_refill_whose_process_died_is_finished_by_another(
    at: str,
    conn: Connection,
    database: Database,
    settings: Settings,
    broker: RecordingBroker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redispatch_module, "REFILL_BATCH", 2)
    dying, other = (Redispatch(database, settings, broker) for _ in range(2))
    settle(dying)
    published(conn, 5)
    broker.wipe()
    dying.watch_broker()
    with kit.failing(f"{at}=raise:RuntimeError"), pytest.raises(RuntimeError):
        dying.watch_broker()

    settle(other)

    assert len(kit.events(conn)) == 5
    assert markers.read(conn, "default") in broker.markers


def test_i22_a_process_that_was_overtaken_in_a_refill_takes_its_hints_back(
    conn: Connection,
    database: Database,
    settings: Settings,
    broker: RecordingBroker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, fast = (Redispatch(database, settings, broker) for _ in range(2))
    settle(slow)
    published(conn, 3)
    broker.wipe()
    slow.watch_broker()
    write_hints = runs.rehint_ready

    def be_overtaken(own: Connection, **given: Any) -> list[int]:
        monkeypatch.setattr(runs, "rehint_ready", write_hints)
        known = markers.read(conn, "default")
        assert known is not None
        assert fast._refill(known) == 3
        kit.drop_hints(conn)  # they have left
        return write_hints(own, **given)

    monkeypatch.setattr(runs, "rehint_ready", be_overtaken)

    assert slow.watch_broker().hinted == 0
    assert kit.events(conn) == []


def test_nothing_is_concluded_from_a_broker_that_does_not_answer(
    conn: Connection, redispatch: Redispatch, broker: RecordingBroker
) -> None:
    settle(redispatch)
    known = markers.read(conn, "default")
    published(conn, 2)
    broker.up = False
    for _ in range(5):
        assert redispatch.watch_broker().unavailable

    broker.up = True

    assert settle(redispatch) == 0
    assert markers.read(conn, "default") == known


# -- intake ---------------------------------------------------------------------------------------------------------


def test_i3_a_foreign_message_makes_one_run_however_often_it_comes(
    conn: Connection, database: Database, settings: Settings
) -> None:
    batch = [NewRun(id=name, task=kit.TASK, queue="q", args=b"[]") for name in ("b", "a")]

    with kit.counted(telemetry.Counter.FOREIGN_INTAKE) as taken:
        take_in(database, settings, batch)
        take_in(database, settings, [*batch, NewRun(id="a", nesting=1, task=kit.TASK)])

        assert taken() == 3
    assert kit.table(conn, "SELECT id, nesting, state FROM {}.run ORDER BY id, nesting") == [
        ("a", 0, "ready"),
        ("a", 1, "ready"),
        ("b", 0, "ready"),
    ]
    assert kit.events(conn) == []  # the message in hand is the hint


@pytest.mark.parametrize("at", ["intake.insert.a", "intake.commit.b"])
def test_i3_a_batch_is_taken_in_whole_or_not_at_all(
    at: str, conn: Connection, database: Database, settings: Settings
) -> None:
    batch = [NewRun(id=name, task=kit.TASK) for name in ("a", "b")]

    with kit.failing(f"{at}=raise:RuntimeError"), pytest.raises(RuntimeError):
        take_in(database, settings, batch)
    with pytest.raises(psycopg.DataError):
        take_in(database, settings, [*batch, NewRun(id="c\0", task=kit.TASK)])

    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(0,)]


def test_i23_batches_with_the_same_messages_in_another_order_never_wait_in_a_ring(
    conn: Connection, database: Database, settings: Settings
) -> None:
    batch = [NewRun(id=f"r{n}", task=kit.TASK) for n in range(30)]

    with kit.counted(telemetry.Counter.SYSTEM_RETRY) as defects:
        beside = kit.Beside(lambda: take_in(database, settings, batch))
        take_in(database, settings, batch[::-1])
        beside.result()

        assert defects() == 0
    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(30,)]
