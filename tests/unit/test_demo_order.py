"""The demo's orders: what the CSV file holds, and what the shop makes of each kind of order."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest

from examples.orders.order import DECIMALS, Order, OrderLine, Quote, Refusal, quote, read_orders, read_stock

CATALOGUE = ("KET-010", "FLT-002")


def line(
    sku: str = "KET-010",
    quantity: str = "1",
    unit_price: str = "38.90",
    currency: str = "EUR",
    description: str = "Kettle",
) -> OrderLine:
    return OrderLine(sku=sku, quantity=quantity, unit_price=unit_price, currency=currency, description=description)


def order(*lines: OrderLine, customer: str = "Ann", country: str = "DE") -> Order:
    return Order(order_id="A-1", customer=customer, country=country, lines=lines)


def test_the_file_holds_a_few_hundred_lines_in_several_currencies() -> None:
    orders, stray = read_orders()

    lines = [line for order in orders for line in order.lines]
    currencies = Counter(line.currency for line in lines)
    assert len(orders) == len({order.order_id for order in orders}) == 143
    assert len(lines) == 348
    assert stray == [99, 213]
    assert all(currencies[currency] > 0 for currency in DECIMALS)
    assert sum(len(order.lines) > 1 for order in orders) > len(orders) / 2


def test_some_orders_of_the_file_are_refused_for_every_reason_there_is() -> None:
    orders, _ = read_orders()
    catalogue = [item.sku for item in read_stock()]

    reasons = " | ".join(result.reason for o in orders if isinstance(result := quote(o, catalogue), Refusal))

    for words in (
        "is unknown",
        "no customer",
        "is not delivered to",
        "empty",
        "is not a whole number",
        "is not positive",
        "is malformed",
        "more decimals than JPY",
        "priced in",
    ):
        assert words in reasons


def test_a_total_is_exact_to_the_last_decimal_of_its_currency() -> None:
    euros = quote(order(line(quantity="3", unit_price="0.10"), line("FLT-002", "12", "5.4")), CATALOGUE)
    yen = quote(order(line(quantity="3", unit_price="6850", currency="JPY")), CATALOGUE)

    assert isinstance(euros, Quote)
    assert isinstance(yen, Quote)
    assert str(euros.total) == "65.10"
    assert str(yen.total) == "20550"


def test_an_order_needs_approval_from_the_threshold_of_its_currency_on() -> None:
    below = quote(order(line(unit_price="999.99")), CATALOGUE)
    at = quote(order(line(unit_price="1000.00")), CATALOGUE)

    assert isinstance(below, Quote)
    assert isinstance(at, Quote)
    assert (below.needs_approval, at.needs_approval) == (False, True)
    assert at.total == Decimal("1000.00")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (order(line(), customer=" "), "no customer"),
        (order(line(), country="ZZ"), "country 'ZZ' is not delivered to"),
        (order(), "no lines"),
        (order(line(currency="XBT")), "currency 'XBT' is unknown"),
        (order(line(), line("", "", "", description="")), "line 2: empty"),
        (order(line("KTE-010")), "line 1: item 'KTE-010' is unknown"),
        (order(line(), line(currency="USD")), "line 2: priced in USD, the order in EUR"),
        (order(line(quantity="-1")), "line 1: quantity -1 is not positive"),
        (order(line(quantity="0")), "line 1: quantity 0 is not positive"),
        (order(line(quantity="2.5")), "line 1: quantity '2.5' is not a whole number"),
        (order(line(quantity="٣")), "line 1: quantity '٣' is not a whole number"),
        (order(line(unit_price="12,50")), "line 1: price '12,50' is malformed"),
        (order(line(unit_price="NaN")), "line 1: price 'NaN' is malformed"),
        (order(line(unit_price="1e3")), "line 1: price '1e3' is malformed"),
        (order(line(unit_price="-4.00")), "line 1: price '-4.00' is malformed"),
        (order(line(unit_price="7.199")), "line 1: price 7.199 has more decimals than EUR"),
        (order(line(unit_price="7.5", currency="JPY")), "line 1: price 7.5 has more decimals than JPY"),
    ],
)
def test_a_bad_order_is_refused_with_the_line_and_the_value(bad: Order, reason: str) -> None:
    assert quote(bad, CATALOGUE) == Refusal(reason=reason)
