"""Messages of awaited tasks on their way: those that may leave once never twice, none after its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.integration import service_kit as kit
from tests.integration.awaiting_kit import TIMEOUT, Play, make_play  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.engine import Engine, dying_at
from tests.support.proxy import Proxy
from umt_durable import StepTimeoutError
from umt_durable.database import Connection, Database
from umt_durable.engine.answers import Answer
from umt_durable.engine.outbox import OutboxClient
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.errors import BrokerUnavailableError
from umt_durable.records import FinishedRun, OutboxEntry, OutboxEvent
from umt_durable.services.relay import Relay, RelayCounts
from umt_durable.settings import HOLD_SECONDS, Settings
from umt_durable.states import OutboxStatus, RunState
from umt_durable.store import outbox


@dataclass
class Wire:
    """A dispatcher that keeps what leaves; `silent`: the broker takes it and does not answer; `breaks`: it raises."""

    sent: list[OutboxEntry] = field(default_factory=list)
    silent: bool = False
    down: bool = False
    breaks: bool = False
    refuses: str = ""

    def dispatch(
        self,
        hints: Sequence[OutboxEntry],
        reports: Sequence[tuple[OutboxEntry, FinishedRun]],
        others: Sequence[OutboxEntry],
    ) -> kit.Report:
        """Take what is to leave."""
        ids = frozenset(entry.id for entry in [*hints, *others])
        if self.down:
            raise BrokerUnavailableError("connection refused")
        if self.refuses:
            return kit.Report(frozenset(), dict.fromkeys(ids, self.refuses))
        self.sent += others
        if self.breaks:
            raise RuntimeError("a defect")
        if self.silent:
            raise BrokerUnavailableError("connection reset", (), [others[0].id] if others else ())
        return kit.Report(ids, {})


@pytest.fixture
def wire() -> Wire:
    """Return what leaves."""
    return Wire()


@pytest.fixture
def relay(database: Database, settings: Settings, wire: Wire) -> Relay:
    """Return a relay."""
    return Relay(database, settings, wire)


def row_of(play: Play) -> UUID:
    """Return the id of the message's row."""
    return play.outside.sent[0][1].row


def parked(play: Play, conn: Connection, **options: Any) -> UUID:
    """Have the run await its task, with nothing else in the outbox; return the id of the message's row."""
    play.options = options
    assert isinstance(play.deliver(), Parked)
    kit.table(conn, "DELETE FROM {}.outbox_event WHERE type <> 'celery'")
    return row_of(play)


def die_while_publishing(conn: Connection, clock: Clock, row: UUID) -> UUID:
    """Claim a row, note that it leaves, and be heard of no more, for as long as a relay holds a row."""
    relay = uuid4()
    assert [entry.id for entry in outbox.claim(conn, relay=relay, limit=10, hold_seconds=HOLD_SECONDS)] == [row]
    assert outbox.leave(conn, [row], relay=relay, hold_seconds=HOLD_SECONDS) == {row}
    clock.advance(seconds=HOLD_SECONDS + 1)
    return relay


def event(play: Play, row: UUID) -> OutboxEvent:
    """Read a row."""
    return OutboxClient(play.engine.database, play.engine.settings).get(row)


def rows(conn: Connection) -> list[tuple[Any, ...]]:
    """Return (status, step, once) of the messages in the outbox."""
    return kit.table(conn, "SELECT status, step, once FROM {}.outbox_event WHERE type = 'celery'")


def uncertain(play: Play) -> str:
    """Assert that the run is left to a person, and return what that person is told."""
    found = play.engine.client.get(play.run)
    assert (found.state, found.reason) == (RunState.QUARANTINED, "uncertain_op")
    failure = play.engine.client.failure(found)
    assert failure is not None
    return failure.message


def test_a_message_that_may_leave_once_is_not_published_by_a_second_relay(
    play: Play, relay: Relay, wire: Wire, conn: Connection, clock: Clock
) -> None:
    row = parked(play, conn, timeout=TIMEOUT)
    die_while_publishing(conn, clock, row)

    counts = relay.run_once()

    assert (counts.claimed, counts.doubted, counts.published) == (1, 1, 0)
    assert wire.sent == []
    found = event(play, row)
    assert found.status is OutboxStatus.DEAD
    assert f"`umt-durable resolve {play.run} label --result JSON`" in str(found.reason)
    assert f"`umt-durable outbox replay {row}`" in str(found.reason)
    assert relay.run_once().claimed == 0


def test_its_step_goes_on_waiting_until_its_time_out_and_is_uncertain_then(
    play: Play, relay: Relay, conn: Connection, clock: Clock
) -> None:
    row = parked(play, conn, timeout=TIMEOUT)
    die_while_publishing(conn, clock, row)
    relay.run_once()
    assert play.engine.state(play.run) is RunState.WAITING

    play.pass_time(clock, seconds=241)
    assert isinstance(play.deliver(), Parked)

    assert "gave no answer in time" in uncertain(play)
    assert play.outside.looks == 1


def test_a_step_without_a_time_out_is_left_to_a_person_at_once(
    play: Play, relay: Relay, wire: Wire, conn: Connection, clock: Clock
) -> None:
    row = parked(play, conn)
    die_while_publishing(conn, clock, row)

    relay.run_once()
    assert play.engine.state(play.run) is RunState.READY
    assert isinstance(play.deliver(), Parked)

    assert "may not have been sent" in uncertain(play)
    assert play.outside.looks == 1
    assert wire.sent == []


def test_a_step_without_a_time_out_whose_task_is_known_to_have_ended_takes_its_result(
    play: Play, relay: Relay, conn: Connection, clock: Clock
) -> None:
    row = parked(play, conn)
    die_while_publishing(conn, clock, row)
    play.outside.known = Answer("seen")

    relay.run_once()
    outcome = play.deliver()

    assert isinstance(outcome, Finished)
    assert outcome.value == "seen"


def test_a_late_answer_releases_the_run_and_the_message_that_was_put_aside_goes(
    play: Play, relay: Relay, conn: Connection, clock: Clock, database: Database, settings: Settings, wire: Wire
) -> None:
    row = parked(play, conn)
    die_while_publishing(conn, clock, row)
    relay.run_once()
    play.deliver()
    assert rows(conn) == [("dead", "label", True)]

    assert play.bring(Answer("late"))
    outcome = play.deliver()
    Relay(database, settings, wire).run_once()

    assert isinstance(outcome, Finished)
    assert outcome.value == "late"
    assert rows(conn) == []
    assert wire.sent == []


def test_a_person_who_found_that_it_did_not_leave_sends_it(
    play: Play, relay: Relay, wire: Wire, conn: Connection, clock: Clock
) -> None:
    row = parked(play, conn)
    die_while_publishing(conn, clock, row)
    relay.run_once()
    play.deliver()
    uncertain(play)

    client = OutboxClient(play.engine.database, play.engine.settings)
    assert client.replay(type="celery") == 0, "whoever puts back all of a type has not looked at this one"
    assert client.replay(row) == 1
    relay.run_once()

    assert [entry.id for entry in wire.sent] == [row]
    assert play.bring(Answer("sent"))
    outcome = play.deliver()
    assert isinstance(outcome, Finished)
    assert outcome.value == "sent"


def test_a_message_of_an_idempotent_task_is_published_again(
    play: Play, relay: Relay, wire: Wire, conn: Connection, clock: Clock
) -> None:
    row = parked(play, conn, idempotent=True)
    die_while_publishing(conn, clock, row)

    assert relay.run_once().published == 1
    assert [entry.id for entry in wire.sent] == [row]
    assert rows(conn) == []


def test_a_relay_that_died_before_it_began_to_publish_leaves_the_message_to_the_next(
    play: Play, relay: Relay, wire: Wire, conn: Connection, clock: Clock
) -> None:
    row = parked(play, conn)
    dead = uuid4()
    assert len(outbox.claim(conn, relay=dead, limit=10, hold_seconds=HOLD_SECONDS)) == 1
    clock.advance(seconds=HOLD_SECONDS + 1)

    assert relay.run_once().published == 1

    assert [entry.id for entry in wire.sent] == [row]
    assert outbox.leave(conn, [row], relay=dead, hold_seconds=HOLD_SECONDS) == set(), "one that froze publishes nothing"


def test_a_relay_that_froze_and_did_publish_clears_the_row_that_was_put_aside(
    play: Play, relay: Relay, conn: Connection, clock: Clock
) -> None:
    row = parked(play, conn, timeout=TIMEOUT)
    die_while_publishing(conn, clock, row)
    relay.run_once()

    assert outbox.drop_left(conn, [row]) == 1

    assert rows(conn) == []


def test_a_broker_that_does_not_answer_leaves_only_what_it_was_given_in_doubt(
    database: Database, settings: Settings, relay: Relay, wire: Wire, conn: Connection
) -> None:
    engine = Engine(database, settings)
    first, second = Play(engine), Play(engine, "awaits-2")
    parked(first, conn, timeout=TIMEOUT)
    parked(second, conn, timeout=TIMEOUT)
    wire.silent = True

    counts = relay.run_once()

    assert (counts.doubted, counts.returned) == (1, 1)
    assert sorted(rows(conn)) == [("dead", "label", True), ("pending", "label", True)]
    engine.close()


@pytest.mark.parametrize("trouble", ["down", "refuses"])
def test_a_message_that_certainly_did_not_leave_is_tried_again(
    play: Play, relay: Relay, wire: Wire, conn: Connection, clock: Clock, trouble: str
) -> None:
    row = parked(play, conn)
    wire.down, wire.refuses = trouble == "down", "no such queue" if trouble == "refuses" else ""
    assert relay.run_once().published == 0

    wire.down, wire.refuses = False, ""
    clock.advance(seconds=HOLD_SECONDS + 1)
    published = look_again(relay)

    assert published.published == 1
    assert [entry.id for entry in wire.sent] == [row]


def look_again(relay: Relay) -> RelayCounts:
    """Run a relay whose broker is back: it may still leave it alone for a moment."""
    relay._resume_at = 0.0
    return relay.run_once()


def test_a_defect_while_publishing_publishes_nothing_a_second_time(
    play: Play, relay: Relay, wire: Wire, conn: Connection
) -> None:
    row = parked(play, conn, timeout=TIMEOUT)
    wire.breaks = True

    assert relay.run_once().doubted == 1

    assert [entry.id for entry in wire.sent] == [row]
    assert rows(conn) == [("dead", "label", True)]


@pytest.mark.parametrize("point", ["doubt.commit.b", "doubt.commit.a"])
def test_a_relay_that_dies_while_it_puts_a_message_aside_leaves_that_to_the_next(
    play: Play, relay: Relay, wire: Wire, conn: Connection, clock: Clock, point: str
) -> None:
    row = parked(play, conn)
    die_while_publishing(conn, clock, row)
    with dying_at(point), pytest.raises(KeyboardInterrupt):
        relay.run_once()
    assert rows(conn) == [("pending" if point == "doubt.commit.b" else "dead", "label", True)]
    clock.advance(seconds=HOLD_SECONDS + 1)

    relay.run_once()

    assert rows(conn) == [("dead", "label", True)]
    assert play.engine.state(play.run) is RunState.READY
    assert wire.sent == []


@pytest.mark.parametrize("how", ["cancelled", "resolved", "failed"])
@pytest.mark.parametrize("idempotent", [False, True])
def test_a_message_does_not_leave_after_its_step(
    play: Play, relay: Relay, wire: Wire, conn: Connection, how: str, idempotent: bool
) -> None:
    parked(play, conn, idempotent=idempotent)
    match how:
        case "cancelled":
            play.engine.client.cancel(play.run)
        case "resolved":
            play.engine.client.resolve_step(play.run, "label", result=1)
        case _:
            kit.table(conn, "UPDATE {}.run SET state = 'failed', wake_at = NULL, finished_at = {}.now()")

    relay.run_once()

    assert wire.sent == []
    assert rows(conn) == []


def test_a_message_that_has_not_left_by_the_time_out_is_taken_back_and_certainly_not_executed(
    play: Play, relay: Relay, wire: Wire, conn: Connection, clock: Clock
) -> None:
    parked(play, conn, timeout=TIMEOUT)
    assert len(outbox.claim(conn, relay=uuid4(), limit=10, hold_seconds=HOLD_SECONDS)) == 1
    play.pass_time(clock, seconds=241)

    outcome = play.deliver()

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, StepTimeoutError)
    assert "did not leave within 0:04:00" in str(outcome.error)
    assert play.outside.looks == 0
    relay.run_once()
    assert (wire.sent, rows(conn)) == ([], [])


@pytest.mark.parametrize("statement", ["withdraw_message", "settle_wait_by_check", "COMMIT"])
def test_i24_a_lost_reply_while_a_message_is_taken_back_changes_nothing(
    proxied_url: str,
    database_proxy: Proxy,
    schema: str,
    settings: Settings,
    conn: Connection,
    clock: Clock,
    statement: str,
) -> None:
    through = Settings(database_url=proxied_url, schema=schema, embedded=False, lease_seconds=settings.lease_seconds)
    database = Database(through)
    engine = Engine(database, through)
    play = Play(engine)
    parked(play, conn, timeout=TIMEOUT)
    play.pass_time(clock, seconds=241)
    commit = statement == "COMMIT"
    cut = database_proxy.cut_after_commit(match=b"withdraw_message") if commit else database_proxy.cut_reply(statement)

    outcome = play.deliver()

    assert cut.fired == 1
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, StepTimeoutError)
    assert rows(conn) == []
    engine.close()
    database.close()


@pytest.mark.parametrize("statement", ["leave_events", "doubt_event", "give_up_answer", "drop_left"])
def test_i24_a_lost_reply_of_the_relay_puts_nothing_aside_that_is_not_in_doubt(
    proxied_url: str,
    database_proxy: Proxy,
    schema: str,
    settings: Settings,
    play: Play,
    conn: Connection,
    clock: Clock,
    statement: str,
) -> None:
    through = Settings(database_url=proxied_url, schema=schema, embedded=False, lease_seconds=settings.lease_seconds)
    database, wire = Database(through), Wire()
    row = parked(play, conn)
    doubted = statement in ("doubt_event", "give_up_answer")
    if doubted:
        die_while_publishing(conn, clock, row)
    cut = database_proxy.cut_reply(statement)

    counts = Relay(database, through, wire).run_once()

    assert cut.fired == 1
    assert (counts.doubted, counts.published) == ((1, 0) if doubted else (0, 1))
    assert [entry.id for entry in wire.sent] == ([] if doubted else [row])
    assert rows(conn) == ([("dead", "label", True)] if doubted else [])
    assert play.engine.state(play.run) is (RunState.READY if doubted else RunState.WAITING)
    database.close()
