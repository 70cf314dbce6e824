"""The demo's plan of faults, its picture and its last page."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from examples.orders.arrival import Arrival
from examples.orders.bank import Call
from examples.orders.display import Display, Progress
from examples.orders.faults import SCHEDULE, Kill, Kind, plan
from examples.orders.journal import Totals, step_name
from examples.orders.proof import Verdict
from examples.orders.steplog import Entry
from examples.orders.summary import Report, show

BODY = Entry(1.0, "enter", "r1", "A-1", "charge", "k1", 1, 11)
AGAIN = Call(2, 1.0, "k1", "A-1", "77.80", "EUR", "repeat", "ch_1")
REPORT = Report(
    verdict=Verdict(
        succeeded=2,
        refused=1,
        lost=0,
        charged_twice=0,
        booked_twice=0,
        reexecuted=0,
        bodies=11,
        interrupted=(BODY,),
        asked_again=(AGAIN,),
    ),
    totals=Totals(take_overs=2, grants=9, counters={"replayed_step": 5, "redispatch": 1, "duplicate_delivery": 2}),
    kills=[Kill(Kind.CHARGE, 11, BODY, paid=True), Kill(Kind.WORKER, 20, None)],
    freezes=1,
    wipes=1,
    calls=3,
    missing=(),
    runs=3,
    seconds=12.34,
)


def test_a_plan_kills_children_and_one_worker_and_wipes_the_broker_once() -> None:
    kinds = [fault.kind for fault in plan(seed=1, seconds=16.0)]

    assert kinds.count(Kind.WORKER) == kinds.count(Kind.BROKER) == 1
    assert kinds.count(Kind.CHARGE) >= 1
    assert kinds.count(Kind.CHILD) + kinds.count(Kind.CHARGE) >= 3


@pytest.mark.parametrize("seed", range(50))
def test_a_plan_is_the_same_for_the_same_seed_and_stays_within_its_time_and_order(seed: int) -> None:
    faults = plan(seed, seconds=16.0)

    moments = [fault.after for fault in faults]
    assert faults == plan(seed, seconds=16.0)
    assert moments == sorted(moments)
    assert len(faults) == len(SCHEDULE)
    assert 0 <= moments[0] <= moments[-1] <= 16.0


@pytest.mark.parametrize("orders", [20, 40, 143])
def test_orders_are_kept_back_while_faults_are_to_come_and_all_come_in_at_last(orders: int) -> None:
    arrival = Arrival(orders)
    tenths = [tenth / 10 for tenth in range(600)]

    disturbed = [arrival.due(now, faults_to_come=True) for now in tenths]

    assert arrival.due(0.0, faults_to_come=True) == 1
    assert disturbed == sorted(disturbed)
    assert disturbed[-1] == orders
    assert arrival.due(arrival.seconds, faults_to_come=True) < orders
    assert arrival.due(arrival.seconds, faults_to_come=False) == orders


def test_the_last_line_is_one_json_object_with_exactly_the_promised_names() -> None:
    line = REPORT.json()

    assert "\n" not in line
    assert json.loads(line) == {
        "command": "demo",
        "runs": 3,
        "succeeded": 2,
        "refused": 1,
        "kills": 2,
        "steps_executed": 11,
        "completed_steps_reexecuted": 0,
        "charged_twice": 0,
        "booked_twice": 0,
        "lost": 0,
        "seconds": 12.3,
    }


def test_a_fault_that_did_not_happen_or_a_count_that_is_not_zero_is_no_success() -> None:
    assert REPORT.holds
    assert not replace(REPORT, missing=("broker: 0 of 1",)).holds
    for verdict in (
        replace(REPORT.verdict, lost=1),
        replace(REPORT.verdict, charged_twice=1),
        replace(REPORT.verdict, booked_twice=1),
        replace(REPORT.verdict, reexecuted=1),
    ):
        assert not replace(REPORT, verdict=verdict).holds
    assert not replace(REPORT, verdict=replace(REPORT.verdict, problems=("A-1: wrong amount",))).holds


def page(report: Report) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=120))
    return " ".join(out.getvalue().split())


def test_the_last_page_names_the_calls_that_came_again_and_why_the_key_matters() -> None:
    text = page(REPORT)

    for words in ("called again once", "A-1 (77.80 EUR)", "ctx.idempotency_key", "charged once and booked once"):
        assert words in text


def test_the_last_page_names_what_is_not_as_promised() -> None:
    text = page(replace(REPORT, missing=("broker: 0 of 1",)))

    assert "NOT AS PROMISED" in text
    assert "broker: 0 of 1" in text
    assert "charged once and booked once" not in text


def test_without_a_terminal_progress_is_plain_lines_no_more_often_than_every_two_seconds() -> None:
    out = io.StringIO()
    display = Display(console=Console(file=out, width=100))

    with display.running():
        for tenth in range(45):
            display.show(Progress(tenth / 10, 3, 9, {"running": 2, "succeeded": 1}, bodies=4, kills=1))
        display.say("kill -9 11")

    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "  0.0s  3/9 orders in: running 2, succeeded 1; kills 1"
    assert lines[-1] == "kill -9 11"


def test_on_a_terminal_the_picture_shows_states_and_events() -> None:
    out = io.StringIO()
    display = Display(console=Console(file=out, width=100, force_terminal=True, color_system=None))

    with display.running():
        display.show(Progress(1.0, 3, 9, {"running": 2}, bodies=4, kills=1))
        display.say("kill -9 11")

    assert "orders 3/9" in out.getvalue()
    assert "kill -9 11" in out.getvalue()


def test_a_small_terminal_shows_the_newest_events() -> None:
    out = io.StringIO()
    display = Display(console=Console(file=out, width=80, height=24, force_terminal=True, color_system=None))

    with display.running():
        display.show(Progress(1.0, 3, 9, {"running": 2, "failed": 1, "retrying": 3}, bodies=4, kills=1))
        for number in range(12):
            display.say(f"event {number} " + "of many words " * (number % 3 * 6))

    last = out.getvalue().rpartition("orders 3/9")[2]
    assert "event 11 " in last
    assert "event 10 " in last
    assert len(last.splitlines()) <= 24


@pytest.mark.parametrize(("key", "name"), [("charge", "charge"), ("charge#2", "charge")])
def test_a_step_key_begins_with_the_name_of_the_step(key: str, name: str) -> None:
    assert step_name(key) == name
