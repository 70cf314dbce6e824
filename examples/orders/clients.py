"""Everything that comes to the shop from outside: orders, double clicks and approvals."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from psycopg import Connection

from examples.orders import shop, tables
from examples.orders.order import Order, Quote, Refusal
from examples.orders.proof import Ended

SUBMITTED_TWICE: Final = 12
SIGNED_EARLY: Final = 1 / 3
PATIENCE_SECONDS: Final = (0.3, 2.0)


class DoubleRunError(Exception):
    """One order got two runs."""


class Clients:
    """The customers, who submit orders, and Ann, who approves the large ones.

    Shape: `quotes` has an entry for each order; `runs` maps the orders submitted so far to their run ids.
    """

    def __init__(
        self, conn: Connection[Any], orders: Sequence[Order], quotes: Mapping[str, Quote | Refusal], seed: int
    ) -> None:
        self._conn = conn
        self._orders = orders
        self._quotes = quotes
        self._chance = random.Random(seed)
        self._approved: set[str] = set()
        self._seen_waiting: dict[str, float] = {}
        self.runs: dict[str, str] = {}

    @property
    def orders(self) -> int:
        """Count the orders there are in all."""
        return len(self._orders)

    def submit(self, upto: int) -> None:
        """Have the first `upto` orders submitted. Some customers click twice, which must make no second run."""
        for number in range(len(self.runs), min(upto, len(self._orders))):
            order = self._orders[number]
            run = self._enqueue(order)
            if number % SUBMITTED_TWICE == 0 and self._enqueue(order) != run:
                raise DoubleRunError(order.order_id)
            self.runs[order.order_id] = run
            quoted = self._quotes[order.order_id]
            if isinstance(quoted, Quote) and quoted.needs_approval and self._chance.random() < SIGNED_EARLY:
                self._approve(order.order_id)

    def approve(self, states: Mapping[str, str], now: float) -> None:
        """Approve the orders that have been waiting for as long as Ann lets them wait. Units: `now` in seconds."""
        for order, run in self.runs.items():
            if states.get(run) == "waiting" and order not in self._approved:
                if order not in self._seen_waiting:
                    self._seen_waiting[order] = now + self._chance.uniform(*PATIENCE_SECONDS)
                if now >= self._seen_waiting[order]:
                    self._approve(order)

    def ended(self) -> list[Ended]:
        """Look up every run of the shop and how it ended; runs that nobody here started show too."""
        found: list[Ended] = []
        before: int | None = None
        while page := shop.durable.list(task=shop.fulfil.name, before=before):
            found += [_ended(run.id) for run in page]
            before = page[-1].no
        return found

    def _enqueue(self, order: Order) -> str:
        # One transaction: the run exists if and only if the shop's own row does.
        with self._conn.transaction():
            tables.receive(self._conn, order.order_id)
            key = f"order:{order.order_id}"
            run = shop.fulfil.enqueue(order, conn=self._conn, idempotency_key=key, ref=order.order_id)
        return str(run.id)

    def _approve(self, order: str) -> None:
        shop.durable.signal(self.runs[order], "approved", {"by": "ann"})
        self._approved.add(order)


def _ended(run_id: str) -> Ended:
    run = shop.durable.get(run_id)
    receipt = shop.durable.client.result(run, shop.Receipt) if run.state == "succeeded" else None
    if receipt is None:
        return Ended(run.ref or run.id, run.id, run.state)
    return Ended(run.ref or run.id, run.id, run.state, receipt.outcome, receipt.total, receipt.charge)
