"""The demo's proof: it accepts a clean story and finds each planted fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

import pytest

from examples.orders.bank import Call, Outcome
from examples.orders.order import Quote, QuotedLine, Refusal, StockItem
from examples.orders.proof import Completed, Ended, Evidence, interruptions, judge
from examples.orders.steplog import Entry, Event
from examples.orders.tables import Booking, StockLevel

GOOD = Quote(
    order_id="A-1",
    customer="Ann",
    currency="EUR",
    total=Decimal("77.80"),
    lines=(QuotedLine(sku="KET-010", quantity=2, unit_price=Decimal("38.90")),),
)


def call(number: int, outcome: Outcome, *, key: str = "k1", order: str = "A-1", charge: str = "ch_1") -> Call:
    return Call(number, 100.0, key, order, "77.80", "EUR", outcome, charge)


def entry(event: Event, at: float, *, fence: int = 1, pid: int = 11, step: str = "charge", key: str = "k1") -> Entry:
    return Entry(at, event, "r1", "A-1", step, key, fence, pid)


CLEAN = Evidence(
    quotes={"A-1": GOOD, "A-2": Refusal(reason="no customer")},
    ended=(
        Ended("A-1", "r1", "succeeded", "fulfilled", Decimal("77.80"), "ch_1"),
        Ended("A-2", "r2", "succeeded", "refused"),
    ),
    calls=(call(1, "charged"),),
    bookings=(Booking("A-1", "EUR", Decimal("77.80"), "ch_1"),),
    entries=(entry("enter", 100.0), entry("leave", 100.2)),
    journal=(Completed("r1", "charge", 1, 100.3),),
    stock=(StockItem(sku="KET-010", description="Kettle", on_hand=10),),
    levels=(StockLevel("KET-010", 8, 2),),
)


def problems(evidence: Evidence) -> Sequence[str]:
    verdict = judge(evidence)
    assert verdict.holds is not bool(verdict.problems)
    return verdict.problems


def test_a_clean_story_holds() -> None:
    verdict = judge(CLEAN)

    assert verdict.holds
    assert (verdict.succeeded, verdict.refused, verdict.bodies) == (1, 1, 1)
    assert (verdict.lost, verdict.charged_twice, verdict.booked_twice, verdict.reexecuted) == (0, 0, 0, 0)


def test_a_call_repeated_after_a_death_in_flight_holds_and_is_reported() -> None:
    entries = (
        entry("enter", 100.0, fence=1, pid=11),
        entry("enter", 104.0, fence=3, pid=12),
        entry("leave", 104.2, fence=3, pid=12),
    )

    verdict = judge(
        replace(
            CLEAN,
            calls=(call(1, "charged"), call(2, "repeat")),
            entries=entries,
            journal=(Completed("r1", "charge", 3, 104.3),),
        )
    )

    assert verdict.holds
    assert [again.number for again in verdict.asked_again] == [2]
    assert [dead.pid for dead in verdict.interrupted] == [11]


def test_a_second_charge_is_found() -> None:
    verdict = judge(replace(CLEAN, calls=(call(1, "charged"), call(2, "charged", key="k1"))))

    assert verdict.charged_twice == 1
    assert verdict.problems == ("A-1 was charged 2 times",)


def test_a_charge_for_a_refused_order_is_found() -> None:
    entries = (*CLEAN.entries, Entry(100.0, "enter", "r2", "A-2", "charge", "k2", 1, 12))

    verdict = judge(replace(CLEAN, calls=(*CLEAN.calls, call(2, "charged", key="k2", order="A-2")), entries=entries))

    assert verdict.charged_twice == 1
    assert verdict.problems == ("A-2 was charged once",)


def test_a_second_booking_is_found() -> None:
    verdict = judge(replace(CLEAN, bookings=[*CLEAN.bookings, *CLEAN.bookings]))

    assert verdict.booked_twice == 1


@pytest.mark.parametrize(
    "evidence",
    [
        replace(CLEAN, ended=CLEAN.ended[1:]),
        replace(CLEAN, ended=(Ended("A-1", "r1", "failed"), CLEAN.ended[1]), calls=(), bookings=()),
        replace(CLEAN, ended=(Ended("A-1", "r1", "waiting"), CLEAN.ended[1]), calls=(), bookings=()),
        replace(CLEAN, calls=()),
        replace(CLEAN, bookings=()),
    ],
    ids=["no run", "failed", "not ended", "not charged", "not booked"],
)
def test_an_order_that_is_neither_refused_nor_charged_and_booked_is_lost(evidence: Evidence) -> None:
    verdict = judge(evidence)

    assert verdict.lost == 1
    assert not verdict.holds


def test_a_body_entered_under_a_later_fence_than_its_completion_is_found() -> None:
    again = entry("enter", 100.1, fence=2, pid=12)

    verdict = judge(replace(CLEAN, entries=(*CLEAN.entries, again)))

    assert verdict.reexecuted == 1
    assert verdict.problems == ("charge of A-1 was entered again under fence 2",)


def test_a_body_entered_by_a_late_zombie_is_found() -> None:
    zombie = entry("enter", 103.0, fence=1, pid=11)

    verdict = judge(replace(CLEAN, entries=(zombie,), journal=(Completed("r1", "charge", 2, 102.0),)))

    assert verdict.reexecuted == 1


def test_a_body_entered_within_the_confirmation_window_is_no_violation() -> None:
    late = entry("enter", 102.09, fence=1, pid=11)

    verdict = judge(replace(CLEAN, entries=(late,), journal=(Completed("r1", "charge", 2, 102.0),)))

    assert verdict.reexecuted == 0


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (replace(CLEAN, ended=(replace(CLEAN.ended[0], order="A-2"), CLEAN.ended[1])), "A-1 is lost"),
        (replace(CLEAN, ended=(*CLEAN.ended, replace(CLEAN.ended[0], run="r9"))), "A-1 has 2 runs"),
        (replace(CLEAN, ended=(*CLEAN.ended, Ended("A-9", "r9", "succeeded", "refused"))), "A-9 was never submitted"),
        (
            replace(CLEAN, quotes={"A-1": Refusal(reason="no customer")}, ended=CLEAN.ended[:1]),
            "was fulfilled although",
        ),
        (replace(CLEAN, bookings=(replace(CLEAN.bookings[0], amount=Decimal("77.81")),)), "A-1: quoted 77.80"),
        (replace(CLEAN, bookings=(replace(CLEAN.bookings[0], charge="ch_2"),)), "charge ch_1 is ch_2 in the books"),
        (replace(CLEAN, calls=(*CLEAN.calls, call(2, "conflict"))), "another amount with the same key"),
        (replace(CLEAN, calls=(call(1, "charged", key="k7"),)), "a key that no step had"),
        (replace(CLEAN, entries=(*CLEAN.entries, entry("enter", 100.1, key="k2"))), "had 2 idempotency keys"),
        (replace(CLEAN, entries=(*CLEAN.entries, entry("enter", 100.1, step="book"))), "was given to 2 steps"),
        (replace(CLEAN, levels=(StockLevel("KET-010", 7, 2),)), "KET-010: 10 at the start, 7 left, 2 reserved"),
    ],
)
def test_each_other_fault_has_its_sentence(evidence: Evidence, words: str) -> None:
    assert any(words in problem for problem in problems(evidence))


def test_only_a_body_without_an_end_counts_as_interrupted() -> None:
    entries = [
        entry("enter", 1.0, pid=11),
        entry("fail", 1.1, pid=11),
        entry("enter", 1.2, pid=12, step="reserve"),
        entry("enter", 1.3, pid=11, fence=2),
        entry("leave", 1.4, pid=11, fence=2),
    ]

    assert [(dead.pid, dead.step) for dead in interruptions(entries)] == [(12, "reserve")]
