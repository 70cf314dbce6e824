"""Orders as customers send them, and what the shop makes of them: a quote or a refusal.

Nothing here does I/O but `read_orders` and `read_stock`. Money is `Decimal` from the first character to the last.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

HERE: Final = Path(__file__).parent
ORDERS: Final = HERE / "orders.csv"
STOCK: Final = HERE / "stock.csv"

DECIMALS: Final[Mapping[str, int]] = {"EUR": 2, "USD": 2, "GBP": 2, "CHF": 2, "SEK": 2, "PLN": 2, "JPY": 0}
COUNTRIES: Final = frozenset({"AT", "CH", "DE", "ES", "FI", "FR", "GB", "IE", "IT", "JP", "NL", "PL", "PT", "SE", "US"})

# From this total on a person has to approve; about 1,000 euros each.
APPROVAL_FROM: Final[Mapping[str, Decimal]] = {
    "EUR": Decimal(1_000),
    "USD": Decimal(1_120),
    "GBP": Decimal(870),
    "CHF": Decimal(950),
    "SEK": Decimal(11_100),
    "PLN": Decimal(4_280),
    "JPY": Decimal(176_000),
}

_QUANTITY: Final = re.compile(r"-?[0-9]{1,6}", re.ASCII)
_PRICE: Final = re.compile(r"[0-9]{1,9}(?:\.([0-9]+))?", re.ASCII)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OrderLine(_Frozen):
    """One line as it was written: all text, nothing checked."""

    currency: str
    sku: str
    description: str
    quantity: str
    unit_price: str


class Order(_Frozen):
    """One order as it came in."""

    order_id: str
    customer: str
    country: str
    lines: tuple[OrderLine, ...]


class QuotedLine(_Frozen):
    sku: str
    quantity: int
    unit_price: Decimal


class Quote(_Frozen):
    """A valid order with its price. `total` has exactly the decimals of `currency`."""

    order_id: str
    customer: str
    currency: str
    total: Decimal
    lines: tuple[QuotedLine, ...]

    @property
    def needs_approval(self) -> bool:
        return self.total >= APPROVAL_FROM[self.currency]


class Refusal(_Frozen):
    """Why an order is not fulfilled. A refused order is never charged."""

    reason: str


class StockItem(_Frozen):
    sku: str
    description: str
    on_hand: int


def read_orders(path: Path = ORDERS) -> tuple[list[Order], list[int]]:
    """Read the orders of a CSV file.

    Shape: orders in the order of their first line, each with its lines wherever in the file they stand, and the numbers
    (as an editor counts them) of rows that belong to no order.
    """
    found: dict[str, list[dict[str, str]]] = {}
    stray: list[int] = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if row["order_id"]:
                found.setdefault(row["order_id"], []).append(row)
            else:
                stray.append(reader.line_num)
    return [_order(order_id, rows) for order_id, rows in found.items()], stray


def read_stock(path: Path = STOCK) -> list[StockItem]:
    """Read what the shop sells and how many pieces of each it has at the start."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            StockItem(sku=row["sku"], description=row["description"], on_hand=int(row["on_hand"]))
            for row in csv.DictReader(file)
        ]


def quote(order: Order, catalogue: Iterable[str]) -> Quote | Refusal:
    """Price an order, or say why it is refused.

    Shape: `catalogue` holds the SKUs that are sold; how many are left is not looked at here.
    """
    known = frozenset(catalogue)
    refusal = _header_problem(order)
    if refusal is not None:
        return Refusal(reason=refusal)
    currency = order.lines[0].currency
    lines: list[QuotedLine] = []
    for number, line in enumerate(order.lines, start=1):
        problem = _line_problem(line, currency, known)
        if problem is not None:
            return Refusal(reason=f"line {number}: {problem}")
        lines.append(QuotedLine(sku=line.sku, quantity=int(line.quantity), unit_price=Decimal(line.unit_price)))
    total = sum((line.unit_price * line.quantity for line in lines), start=Decimal(0))
    total = total.quantize(Decimal(1).scaleb(-DECIMALS[currency]))
    return Quote(order_id=order.order_id, customer=order.customer, currency=currency, total=total, lines=tuple(lines))


def _order(order_id: str, rows: list[dict[str, str]]) -> Order:
    first = rows[0]
    lines = tuple(
        OrderLine(
            currency=row["currency"],
            sku=row["sku"],
            description=row["description"],
            quantity=row["quantity"],
            unit_price=row["unit_price"],
        )
        for row in rows
    )
    return Order(order_id=order_id, customer=first["customer"], country=first["country"], lines=lines)


def _header_problem(order: Order) -> str | None:
    if not order.customer.strip():
        return "no customer"
    if order.country not in COUNTRIES:
        return f"country {order.country!r} is not delivered to"
    if not order.lines:
        return "no lines"
    currency = order.lines[0].currency
    if currency not in DECIMALS:
        return f"currency {currency!r} is unknown"
    return None


def _line_problem(line: OrderLine, currency: str, known: frozenset[str]) -> str | None:
    if not (line.sku or line.description or line.quantity or line.unit_price):
        return "empty"
    if line.sku not in known:
        return f"item {line.sku!r} is unknown"
    if line.currency != currency:
        return f"priced in {line.currency}, the order in {currency}"
    if _QUANTITY.fullmatch(line.quantity) is None:
        return f"quantity {line.quantity!r} is not a whole number"
    if int(line.quantity) <= 0:
        return f"quantity {line.quantity} is not positive"
    price = _PRICE.fullmatch(line.unit_price)
    if price is None:
        return f"price {line.unit_price!r} is malformed"
    if len(price.group(1) or "") > DECIMALS[currency]:
        return f"price {line.unit_price} has more decimals than {currency}"
    return None
