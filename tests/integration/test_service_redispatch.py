"""Redispatch on a real Postgres: lost hints come back, and a backlog makes no copies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingBroker, empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.services import redispatch as redispatch_module
from umt_durable.services.redispatch import Redispatch
from umt_durable.settings import Settings
from umt_durable.store import workers


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


def test_f5_i19_runs_that_nobody_can_take_get_no_hints_only_time(
    conn: Connection, redispatch: Redispatch, clock: Clock
) -> None:
    published(conn, version=9)
    clock.advance(seconds=31)

    with kit.counted(telemetry.Counter.BLOCKED_RUN) as blocked:
        counts = redispatch.run_once()

    assert (counts.hinted, counts.postponed, kit.events(conn)) == (0, 1, [])
    assert blocked() == 1


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
