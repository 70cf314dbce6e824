"""The two threads of a worker's main process: what they try again, what they give up, what they never mix up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest
from billiard.exceptions import WorkerLostError

from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.bridge.incidents import IncidentThread
from umt_durable.bridge.intake import WAITING, Arrival, Inquiry, Intake, pause
from umt_durable.bridge.request import exit_status
from umt_durable.bridge.runtime import ChildLost, Delivery, DeliveryEnded, DurableRuntime, Incident
from umt_durable.errors import DatabaseUnavailableError, EncodingError, SchemaError

OUTAGES = [psycopg.OperationalError("gone"), psycopg.InterfaceError("closed"), DatabaseUnavailableError("away")]
REFUSALS = [psycopg.DataError("a NUL"), psycopg.IntegrityError("a check"), EncodingError("arguments", "$", "a set")]
PUZZLES = [RuntimeError("a bug"), psycopg.ProgrammingError("no such table"), SchemaError("behind")]


@dataclass(frozen=True)
class Message:
    """What the intake needs of a foreign message."""

    id: str
    task: str = "t"


@dataclass
class Store:
    """A runtime that commits every batch it can: `trouble` maps an id to the error that it causes."""

    trouble: dict[str, Exception] = field(default_factory=dict)
    away: Exception | None = None
    known: set[str] = field(default_factory=set)
    batches: list[list[str]] = field(default_factory=list)

    def take_in(self, batch: Sequence[Any]) -> None:
        ids = [message.id for message in batch]
        if self.away is not None:
            self.batches.append(["away"])
            raise self.away
        for run in ids:
            if run in self.trouble:
                raise self.trouble[run]
        self.batches.append(ids)

    def has_run(self, run_id: str) -> bool:
        if self.away is not None:
            raise self.away
        return run_id in self.known


class Desk:
    """An intake over a store, and the answers it gave."""

    def __init__(self) -> None:
        self.store = Store()
        self.intake = Intake(cast(DurableRuntime, self.store))
        self.answers: SimpleQueue[tuple[str, bool]] = SimpleQueue()

    def arrive(self, *runs: str) -> None:
        for run in runs:
            assert self.intake.offer(Arrival(cast(Any, Message(run)), self._settle(run)))

    def ask(self, run: str) -> None:
        assert self.intake.offer(Inquiry(run, self._settle(run)))

    def answers_to(self, number: int) -> dict[str, bool]:
        return dict(self.answers.get(timeout=20) for _ in range(number))

    def _settle(self, run: str) -> Callable[[bool], None]:
        return lambda answer: self.answers.put((run, answer))


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.intake.stop()


def test_messages_that_wait_together_are_committed_together(desk: Desk) -> None:
    runs = [f"r{number}" for number in range(60)]
    desk.arrive(*runs)

    desk.intake.start()

    assert desk.answers_to(60) == dict.fromkeys(runs, True)
    assert desk.store.batches == [runs[:50], runs[50:]]


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda error: type(error).__name__)
def test_outage_settles_nothing_and_everything_is_taken_in_after_it(desk: Desk, outage: Exception) -> None:
    desk.store.away = outage
    desk.store.known = {"asked"}
    desk.arrive("a", "b")
    desk.ask("asked")
    desk.intake.start()
    until(lambda: len(desk.store.batches) >= 2, what="a second try")

    assert desk.answers.empty()
    desk.store.away = None

    assert desk.answers_to(3) == {"a": True, "b": True, "asked": True}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
def test_message_that_cannot_be_stored_is_refused_and_its_batch_is_not(desk: Desk, refusal: Exception) -> None:
    before = telemetry.snapshot()["message_refused"]
    desk.store.trouble = {"bad": refusal}
    desk.arrive("a", "bad", "b")

    desk.intake.start()

    assert desk.answers_to(3) == {"a": True, "bad": False, "b": True}
    assert telemetry.snapshot()["message_refused"] == before + 1


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda error: type(error).__name__)
def test_message_that_nobody_understands_waits_and_holds_up_no_other(desk: Desk, puzzle: Exception) -> None:
    desk.store.trouble = {"odd": puzzle}
    desk.arrive("odd", "a")
    desk.intake.start()
    assert desk.answers_to(1) == {"a": True}

    desk.arrive("b")
    assert desk.answers_to(1) == {"b": True}
    desk.store.trouble = {}

    assert desk.answers_to(1) == {"odd": True}


def test_settling_that_fails_does_not_end_the_thread(desk: Desk) -> None:
    def broken(answer: bool) -> None:
        raise ConnectionResetError("the consumer is gone")

    assert desk.intake.offer(Arrival(cast(Any, Message("first")), broken))
    desk.intake.start()

    desk.arrive("second")

    assert desk.answers_to(1) == {"second": True}


def test_inquiries_are_answered_by_the_database(desk: Desk) -> None:
    desk.store.known = {"known"}
    desk.ask("known")
    desk.ask("strange")

    desk.intake.start()

    assert desk.answers_to(2) == {"known": True, "strange": False}


def test_full_intake_says_so(desk: Desk) -> None:
    desk.arrive(*map(str, range(WAITING)))

    assert not desk.intake.offer(Inquiry("one more", lambda answer: None))
    assert desk.intake.waiting == WAITING


def test_pauses_grow_from_a_quarter_of_a_second_to_four() -> None:
    assert [pause(failures) for failures in range(1, 8)] == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


class Handler:
    """Handles incidents, and fails first as it is told."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.handled: SimpleQueue[Incident] = SimpleQueue()

    def __call__(self, incident: Incident) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.handled.put(incident)


DELIVERY = Delivery(uuid4(), "run", 0)


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda error: type(error).__name__)
def test_incidents_are_handled_in_order_and_again_after_an_outage(outage: Exception) -> None:
    handler = Handler(outage, outage)
    thread = IncidentThread(handler)
    thread.child_lost(pid=7, status=-9, delivery=DELIVERY)
    thread.delivery_ended(DELIVERY, known_dead=False, reason="why")

    thread.start()

    assert handler.handled.get(timeout=20) == ChildLost(7, -9, DELIVERY)
    assert handler.handled.get(timeout=20) == DeliveryEnded(DELIVERY, False, "why")
    thread.stop()


def test_incident_that_cannot_be_handled_is_left_to_the_sweeper_and_the_next_is_not() -> None:
    handler = Handler(RuntimeError("a bug"))
    thread = IncidentThread(handler)
    thread.child_lost(pid=1, status=0, delivery=None)
    thread.child_lost(pid=2, status=0, delivery=None)

    thread.start()

    assert handler.handled.get(timeout=20) == ChildLost(2, 0, None)
    thread.stop()


def test_stopping_handles_what_was_queued_before_it() -> None:
    handler = Handler()
    thread = IncidentThread(handler)
    thread.start()

    for pid in range(100):
        thread.child_lost(pid=pid, status=0, delivery=None)
    thread.stop()

    assert handler.handled.qsize() == 100


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Worker exited prematurely: signal 9 (SIGKILL) Job: 0.", -9),
        ("Worker exited prematurely: signal 35 Job: 0.", -35),
        ("Worker exited prematurely: exitcode 155 Job: 0.", 155),
        ("Could not start worker processes", None),
    ],
)
def test_exit_status_is_read_from_what_the_pool_says(text: str, status: int | None) -> None:
    assert exit_status(WorkerLostError(text)) == status
