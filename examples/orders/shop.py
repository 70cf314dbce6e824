"""The shop: one durable Celery task that takes an order from validation to receipt.

    celery -A examples.orders.shop worker

Settings come from the environment: DURABLE_DATABASE_URL, CELERY_BROKER_URL, CELERY_RESULT_BACKEND, SHOP_BANK_URL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from functools import cache
from typing import Any, Literal

from celery import Celery
from psycopg import Connection
from pydantic import BaseModel, ConfigDict

from examples.orders import payments, steplog, tables
from examples.orders.order import Order, Quote, Refusal, quote, read_stock
from examples.orders.payments import Payment
from umt_durable import Durable, RetryPolicy, TaskContext, current_context

app = Celery("shop")
app.conf.task_default_queue = "orders"
app.conf.worker_prefetch_multiplier = 1
durable = Durable(app)


class Receipt(BaseModel):
    """How an order ended. A refusal is a result, not an error: retrying it would not help."""

    model_config = ConfigDict(frozen=True)

    order_id: str
    outcome: Literal["fulfilled", "refused"]
    text: str
    total: Decimal | None = None
    currency: str | None = None
    charge: str | None = None


@durable.task(name="shop.fulfil", version=1, retry=RetryPolicy.NETWORK)
def fulfil(ctx: TaskContext, order: Order) -> Receipt:
    """Take one order from validation to receipt. Killed anywhere, it goes on after its last completed step."""
    quoted = ctx.step.run("validate", validate, order)
    if isinstance(quoted, Refusal):
        return refuse(order, quoted.reason)

    missing = ctx.step.transaction("reserve", reserve, quoted)
    if missing is not None:
        return refuse(order, missing)

    payment = ctx.step.run("charge", charge, quoted)
    if payment.charge is None:
        ctx.step.transaction("release", release, quoted)
        return refuse(order, "the card was declined")

    ctx.step.sleep("cooling-off", timedelta(seconds=2))

    approved_by = None
    if quoted.needs_approval:
        # No approval in time leaves the run failed, with a charge that a person has to look at.
        approval = ctx.step.wait_for_fact("approved", timeout=timedelta(minutes=10))
        approved_by = str(approval.payload["by"])

    ctx.step.transaction("book", book, quoted, payment.charge, approved_by)
    return ctx.step.run("receipt", write_receipt, quoted, payment.charge)


def validate(order: Order) -> Quote | Refusal:
    with entered("validate", order.order_id):
        return quote(order, _catalogue())


def reserve(tx: Connection[Any], quoted: Quote) -> str | None:
    with entered("reserve", quoted.order_id):
        return tables.reserve(tx, quoted)


def charge(quoted: Quote) -> Payment:
    # The key is the same in every attempt. Should this process die after the bank took the money and before the journal
    # knows, the next attempt asks again with the same key, and the bank answers without taking it twice.
    with entered("charge", quoted.order_id) as key:
        return payments.pay(
            os.environ["SHOP_BANK_URL"], key=key, order=quoted.order_id, amount=quoted.total, currency=quoted.currency
        )


def release(tx: Connection[Any], quoted: Quote) -> None:
    with entered("release", quoted.order_id):
        tables.release(tx, quoted)


def book(tx: Connection[Any], quoted: Quote, charge_id: str, approved_by: str | None) -> None:
    with entered("book", quoted.order_id):
        tables.book(tx, quoted, charge_id, approved_by)


def write_receipt(quoted: Quote, charge_id: str) -> Receipt:
    with entered("receipt", quoted.order_id):
        pieces = sum(line.quantity for line in quoted.lines)
        return Receipt(
            order_id=quoted.order_id,
            outcome="fulfilled",
            text=f"{quoted.customer}: {pieces} pieces, {quoted.total} {quoted.currency}, paid with {charge_id}",
            total=quoted.total,
            currency=quoted.currency,
            charge=charge_id,
        )


def refuse(order: Order, reason: str) -> Receipt:
    return Receipt(order_id=order.order_id, outcome="refused", text=reason)


@contextmanager
def entered(step: str, order: str) -> Iterator[str]:
    """Give the key of the step that is being executed, and have the demo's diary say when its body began and ended."""
    context = current_context()
    run, fence = context.attempt_token
    with steplog.recorded(step, order, run=run, fence=fence, key=context.idempotency_key):
        yield context.idempotency_key


@cache
def _catalogue() -> frozenset[str]:
    return frozenset(item.sku for item in read_stock())
