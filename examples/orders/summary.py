"""The last page of the demo: what happened, in numbers, and what it proves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.orders.faults import Kill, Kind
from examples.orders.journal import Totals
from examples.orders.proof import Verdict, times

PROBLEMS_SHOWN: Final = 20


@dataclass(frozen=True)
class Report:
    """All numbers of one demo. `missing` names the faults that were planned and did not happen."""

    verdict: Verdict
    totals: Totals
    kills: Sequence[Kill]
    freezes: int
    wipes: int
    calls: int
    missing: Sequence[str]
    runs: int
    seconds: float

    @property
    def holds(self) -> bool:
        return self.verdict.holds and not self.missing

    def json(self) -> str:
        """The line that a program reads."""
        return json.dumps(
            {
                "command": "demo",
                "runs": self.runs,
                "succeeded": self.verdict.succeeded,
                "refused": self.verdict.refused,
                "kills": len(self.kills),
                "steps_executed": self.verdict.bodies,
                "completed_steps_reexecuted": self.verdict.reexecuted,
                "charged_twice": self.verdict.charged_twice,
                "booked_twice": self.verdict.booked_twice,
                "lost": self.verdict.lost,
                "seconds": round(self.seconds, 1),
            }
        )


def show(report: Report, console: Console) -> None:
    """Print the table, the story of the repeated calls, and the verdict."""
    console.print(_table(report))
    for paragraph in (*_repeats(report), *_verdict(report)):
        console.print(paragraph)


def _table(report: Report) -> Table:
    verdict, totals = report.verdict, report.totals
    children = sum(kill.kind is not Kind.WORKER for kill in report.kills)
    rows: list[tuple[str, int, str]] = [
        ("orders", report.runs, f"{verdict.succeeded} fulfilled, {verdict.refused} refused, {verdict.lost} lost"),
        ("steps executed", verdict.bodies, f"bodies entered; {len(verdict.interrupted)} of them died inside"),
        ("steps replayed", totals.of("replayed_step"), "gave back their recorded result instead of running again"),
        ("bank calls", report.calls, f"{len(verdict.asked_again)} of them with a key that had been used before"),
        ("kills", len(report.kills), f"{children} pool children, {len(report.kills) - children} whole worker"),
        ("freezes", report.freezes, "a pool child stopped for longer than its lease, then let go on"),
        ("broker losses", report.wipes, "stopped, all its data deleted, started again"),
        ("take-overs", totals.take_overs, "runs that another process went on with"),
        ("redeliveries", _redeliveries(totals), "hints sent anew, and hints that came twice and were dropped"),
        ("fenced writes", totals.of("fenced_write"), "writes refused since their process had lost the run"),
    ]
    table = Table(title="the demo in numbers")
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_column("meaning")
    for what, count, meaning in rows:
        table.add_row(what, str(count), meaning)
    return table


def _redeliveries(totals: Totals) -> int:
    return totals.of("redispatch") + totals.of("duplicate_delivery")


def _repeats(report: Report) -> list[Text]:
    again = report.verdict.asked_again
    if not again:
        return [Text("The bank was asked once for each charge.")]
    orders = [f"{call.order} ({call.amount} {call.currency})" for call in again[:4]]
    examples = ", ".join([*orders, "..."] if len(again) > len(orders) else orders)
    return [
        Text(
            f"The bank was called again {times(len(again))}: {examples}. Each time the money had been taken and the"
            " process had died (or frozen) before the journal knew. No system can tell that from a call that never"
            " arrived, so the step runs again: a step in flight is executed at least once."
        ),
        Text(
            "The bank took no money twice because the step's idempotency key (ctx.idempotency_key) is the same in every"
            " attempt. With a fresh key for each call, these orders would have been charged twice."
        ),
    ]


def _verdict(report: Report) -> list[Text]:
    verdict = report.verdict
    if report.holds:
        return [
            Text(
                f"Proved from the bank's log and the table shop.booking: {verdict.succeeded} orders were charged once"
                f" and booked once, {verdict.refused} were refused and never charged, none is lost.",
                style="green",
            ),
            Text(
                "Proved from the diary of step bodies and the journal: no completed step was entered again.",
                style="green",
            ),
        ]
    found = [*(f"planned but not done: {fault}" for fault in report.missing), *verdict.problems]
    shown = (
        found if len(found) <= PROBLEMS_SHOWN else [*found[:PROBLEMS_SHOWN], f"and {len(found) - PROBLEMS_SHOWN} more"]
    )
    return [Text("NOT AS PROMISED:", style="bold red"), *(Text(f"  {line}", style="red") for line in shown)]
