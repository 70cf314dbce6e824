"""Judge a finished demo from what four independent witnesses left behind. Pure: no file, no database, no clock.

the bank's log      every call, on disk before its answer
the shop's tables   bookings, reservations, stock
the diary           every step body that was entered, on disk before its first instruction
the journal         every step that completed, and under which fence
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

from examples.orders.bank import Call
from examples.orders.order import Quote, Refusal, StockItem
from examples.orders.steplog import Entry
from examples.orders.tables import Booking, StockLevel

# A body may be entered this long after the database confirmed that its step is not done (invariant I7).
CONFIRMATION_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Ended:
    """How the run of one order ended; `outcome`, `total` and `charge` are those of its receipt, if it has one."""

    order: str
    run: str
    state: str
    outcome: str | None = None
    total: Decimal | None = None
    charge: str | None = None


@dataclass(frozen=True)
class Completed:
    """A step that the journal has as done. Units: `finished_at` in seconds since the epoch, by the diary's clock."""

    run: str
    step: str
    fence: int
    finished_at: float


@dataclass(frozen=True)
class Evidence:
    """All that the witnesses say. `quotes` is what each submitted order is worth, worked out from the CSV file."""

    quotes: Mapping[str, Quote | Refusal]
    ended: Sequence[Ended]
    calls: Sequence[Call] = ()
    bookings: Sequence[Booking] = ()
    entries: Sequence[Entry] = ()
    journal: Sequence[Completed] = ()
    stock: Sequence[StockItem] = ()
    levels: Sequence[StockLevel] = ()


@dataclass(frozen=True)
class Verdict:
    """What follows from the evidence. `lost`, `charged_twice`, `booked_twice` and `reexecuted` must be zero."""

    succeeded: int
    refused: int
    lost: int
    charged_twice: int
    booked_twice: int
    reexecuted: int
    bodies: int
    interrupted: tuple[Entry, ...]
    asked_again: tuple[Call, ...]
    problems: tuple[str, ...] = field(default=())

    @property
    def holds(self) -> bool:
        return not (self.lost or self.charged_twice or self.booked_twice or self.reexecuted or self.problems)


def judge(evidence: Evidence) -> Verdict:
    """Check every promise of the demo against the evidence.

    Shape: `problems` has one sentence for each thing that is not as promised, also for those that are counted.
    """
    ended = {end.order: end for end in evidence.ended}
    charges = Counter(call.order for call in evidence.calls if call.outcome == "charged")
    booked = Counter(booking.order_id for booking in evidence.bookings)
    fulfilled = {order for order, end in ended.items() if end.state == "succeeded" and end.outcome == "fulfilled"}
    refused = {order for order, end in ended.items() if end.state == "succeeded" and end.outcome == "refused"}
    complete = refused | (fulfilled & charges.keys() & booked.keys())
    lost = [order for order in evidence.quotes if order not in complete]
    again = reexecutions(evidence.entries, evidence.journal)
    problems = [
        *(f"{order} is lost: {_describe(ended.get(order), charges[order], booked[order])}" for order in lost),
        *(f"{order} was charged {times(n)}" for order, n in charges.items() if n > (order in fulfilled)),
        *(f"{order} was booked {times(n)}" for order, n in booked.items() if n > (order in fulfilled)),
        *(f"{entry.step} of {entry.order} was entered again under fence {entry.fence}" for entry in again),
        *_wrong_outcomes(evidence, fulfilled, refused),
        *_wrong_money(evidence, fulfilled),
        *_wrong_keys(evidence),
        *_wrong_stock(evidence),
    ]
    return Verdict(
        succeeded=len(fulfilled),
        refused=len(refused),
        lost=len(lost),
        charged_twice=_surplus(charges, fulfilled),
        booked_twice=_surplus(booked, fulfilled),
        reexecuted=len(again),
        bodies=sum(entry.event == "enter" for entry in evidence.entries),
        interrupted=tuple(interruptions(evidence.entries)),
        asked_again=tuple(call for call in evidence.calls if call.outcome == "repeat"),
        problems=tuple(problems),
    )


def reexecutions(entries: Iterable[Entry], journal: Iterable[Completed]) -> list[Entry]:
    """Find the bodies that were entered although their step had completed.

    Such a body was entered under a higher fence than the one that completed the step, or later than the completion by
    more than the time for which a confirmation of the database holds.
    """
    done = {(step.run, step.step): step for step in journal}
    found: list[Entry] = []
    for entry in entries:
        step = done.get((entry.run, entry.step))
        if entry.event != "enter" or step is None:
            continue
        if entry.fence > step.fence or entry.at > step.finished_at + CONFIRMATION_SECONDS:
            found.append(entry)
    return found


def interruptions(entries: Iterable[Entry]) -> list[Entry]:
    """Find the bodies that were entered and never left: their process died inside."""
    inside: dict[tuple[int, str, str, int], Entry] = {}
    for entry in entries:
        where = (entry.pid, entry.run, entry.step, entry.fence)
        if entry.event == "enter":
            inside[where] = entry
        else:
            inside.pop(where, None)
    return list(inside.values())


def times(number: int) -> str:
    """Return how often something happened, as people say it."""
    return "once" if number == 1 else f"{number} times"


def _surplus(counts: Counter[str], fulfilled: set[str]) -> int:
    return sum(max(0, n - (order in fulfilled)) for order, n in counts.items())


def _describe(end: Ended | None, charges: int, bookings: int) -> str:
    state = "it has no run" if end is None else f"its run is {end.state}"
    return f"{state}, charged {times(charges)}, booked {times(bookings)}"


def _wrong_outcomes(evidence: Evidence, fulfilled: set[str], refused: set[str]) -> Iterator[str]:
    for order, quoted in evidence.quotes.items():
        if isinstance(quoted, Refusal) and order in fulfilled:
            yield f"{order} was fulfilled although {quoted.reason}"
    for order in sorted((fulfilled | refused) - evidence.quotes.keys()):
        yield f"{order} was never submitted"
    runs = Counter(end.order for end in evidence.ended)
    for order, n in runs.items():
        if n > 1:
            yield f"{order} has {n} runs"


def _wrong_money(evidence: Evidence, fulfilled: set[str]) -> Iterator[str]:
    charged = {call.order: call for call in evidence.calls if call.outcome == "charged"}
    booked = {booking.order_id: booking for booking in evidence.bookings}
    receipts = {end.order: end for end in evidence.ended}
    for order in sorted(fulfilled & charged.keys() & booked.keys()):
        quoted, call, booking, end = evidence.quotes.get(order), charged[order], booked[order], receipts[order]
        if not isinstance(quoted, Quote):
            continue
        currencies = {quoted.currency, call.currency, booking.currency}
        amounts = {quoted.total, Decimal(call.amount), booking.amount, end.total}
        if len(amounts) > 1 or len(currencies) > 1:
            yield f"{order}: quoted {quoted.total}, charged {call.amount}, booked {booking.amount}, receipt {end.total}"
        if len({call.charge, booking.charge, end.charge}) > 1:
            yield f"{order}: charge {call.charge} is {booking.charge} in the books and {end.charge} on the receipt"


def _wrong_keys(evidence: Evidence) -> Iterator[str]:
    keys: dict[tuple[str, str], set[str]] = defaultdict(set)
    owners: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for entry in evidence.entries:
        keys[entry.run, entry.step].add(entry.key)
        owners[entry.key].add((entry.run, entry.step))
    for (run, step), values in keys.items():
        if len(values) > 1:
            yield f"{step} of run {run} had {len(values)} idempotency keys"
    for key, steps in owners.items():
        if len(steps) > 1:
            yield f"idempotency key {key} was given to {len(steps)} steps"
    for call in evidence.calls:
        if call.outcome == "conflict":
            yield f"{call.order} asked the bank for another amount with the same key"
        if call.key not in owners:
            yield f"{call.order} was charged with a key that no step had"


def _wrong_stock(evidence: Evidence) -> Iterator[str]:
    at_start = {item.sku: item.on_hand for item in evidence.stock}
    for level in evidence.levels:
        if at_start[level.sku] - level.on_hand != level.reserved:
            yield f"{level.sku}: {at_start[level.sku]} at the start, {level.on_hand} left, {level.reserved} reserved"
