"""The loss marker on a real Postgres: a wiped broker is noticed, and refilled once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingBroker, empty_schema  # noqa: F401  a fixture
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.services import redispatch as redispatch_module
from umt_durable.services.redispatch import Redispatch
from umt_durable.settings import Settings
from umt_durable.store import markers, runs


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
