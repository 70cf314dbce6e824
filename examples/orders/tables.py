"""The shop's own tables, in its own schema and in the same database as the journal, so that one commit can cover both.

None but `stock` has a unique constraint: were anything booked or reserved twice, it would show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from psycopg import Connection
from psycopg.rows import class_row

from examples.orders.order import Quote, StockItem

SCHEMA: Final = """
CREATE SCHEMA shop;
CREATE TABLE shop.received (
    order_id text NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE shop.stock (
    sku text PRIMARY KEY,
    description text NOT NULL,
    on_hand integer NOT NULL CONSTRAINT never_below_zero CHECK (on_hand >= 0)
);
CREATE TABLE shop.reservation (
    order_id text NOT NULL,
    sku text NOT NULL,
    quantity integer NOT NULL
);
CREATE TABLE shop.booking (
    order_id text NOT NULL,
    currency text NOT NULL,
    amount numeric NOT NULL,
    charge text NOT NULL,
    approved_by text,
    booked_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
"""


@dataclass(frozen=True)
class Booking:
    """One row of `shop.booking`."""

    order_id: str
    currency: str
    amount: Decimal
    charge: str


@dataclass(frozen=True)
class StockLevel:
    """How many pieces are left of one item, and how many the reservations in the table hold."""

    sku: str
    on_hand: int
    reserved: int


def create(conn: Connection[Any], stock: Iterable[StockItem]) -> None:
    """Make the shop's tables and fill its shelves."""
    conn.execute(SCHEMA)
    with conn.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO shop.stock (sku, description, on_hand) VALUES (%s, %s, %s)",
            [(item.sku, item.description, item.on_hand) for item in stock],
        )


def receive(conn: Connection[Any], order_id: str) -> None:
    """Note that an order came in."""
    conn.execute("INSERT INTO shop.received (order_id) VALUES (%s)", (order_id,))


def reserve(conn: Connection[Any], quote: Quote) -> str | None:
    """Take the pieces of an order off the shelf, all or none.

    Shape: None when they are reserved, else what is missing.
    """
    wanted = _pieces(quote)
    # In the order of the primary key, so that two orders for the same items cannot deadlock.
    rows = conn.execute(
        "SELECT sku, on_hand FROM shop.stock WHERE sku = ANY(%s) ORDER BY sku FOR UPDATE", (list(wanted),)
    ).fetchall()
    for sku, on_hand in rows:
        if on_hand < wanted[sku]:
            return f"{wanted[sku]} of {sku} wanted, {on_hand} in stock"
    for sku, quantity in wanted.items():
        conn.execute("UPDATE shop.stock SET on_hand = on_hand - %s WHERE sku = %s", (quantity, sku))
        conn.execute(
            "INSERT INTO shop.reservation (order_id, sku, quantity) VALUES (%s, %s, %s)",
            (quote.order_id, sku, quantity),
        )
    return None


def release(conn: Connection[Any], quote: Quote) -> None:
    """Put the pieces of an order back on the shelf."""
    for sku, quantity in sorted(_pieces(quote).items()):
        conn.execute("UPDATE shop.stock SET on_hand = on_hand + %s WHERE sku = %s", (quantity, sku))
    conn.execute("DELETE FROM shop.reservation WHERE order_id = %s", (quote.order_id,))


def book(conn: Connection[Any], quote: Quote, charge: str, approved_by: str | None) -> None:
    """Write an order into the books."""
    conn.execute(
        "INSERT INTO shop.booking (order_id, currency, amount, charge, approved_by) VALUES (%s, %s, %s, %s, %s)",
        (quote.order_id, quote.currency, quote.total, charge, approved_by),
    )


def bookings(conn: Connection[Any]) -> Sequence[Booking]:
    """Read the books."""
    with conn.cursor(row_factory=class_row(Booking)) as cursor:
        return cursor.execute("SELECT order_id, currency, amount, charge FROM shop.booking").fetchall()


def stock_levels(conn: Connection[Any]) -> Sequence[StockLevel]:
    """Count what is on the shelves and what is reserved."""
    with conn.cursor(row_factory=class_row(StockLevel)) as cursor:
        return cursor.execute(
            """
            SELECT stock.sku, stock.on_hand, coalesce(sum(reservation.quantity), 0)::int AS reserved
              FROM shop.stock
              LEFT JOIN shop.reservation USING (sku)
             GROUP BY stock.sku, stock.on_hand
             ORDER BY stock.sku
            """
        ).fetchall()


def _pieces(quote: Quote) -> Counter[str]:
    pieces: Counter[str] = Counter()
    for line in quote.lines:
        pieces[line.sku] += line.quantity
    return pieces
