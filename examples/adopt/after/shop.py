"""A shop as many are: an order is charged, packed and labelled side by side, and shipped."""

from __future__ import annotations

import os
from datetime import timedelta

from celery import Celery, chain, chord
from celery.canvas import Signature

from examples.adopt import provider, store
from umt_durable import Durable, DurableTask, RetryPolicy, TaskContext, current_context

app = Celery("shop")
app.conf.task_default_queue = "shop"
app.conf.beat_schedule = {
    "remind": {"task": "shop.remind", "schedule": float(os.environ.get("SHOP_REMIND_SECONDS", "3600"))},
}
app.conf.result_chord_expires = 0
durable = Durable(app)
BUSY = RetryPolicy(max_attempts=6, retry_on=provider.BusyError)


@durable.task(name="shop.charge", retry=BUSY)
def charge(ctx: TaskContext, order_id: str) -> str:
    payment = ctx.step.run("take the money", take_money, order_id)
    ctx.step.transaction("note it", store.mark_paid, order_id, payment)
    return payment


def take_money(order_id: str) -> str:
    return provider.charge(order_id, key=current_context().idempotency_key)


@app.task(name="shop.pack", base=DurableTask)
def pack(order_id: str) -> str:
    return f"box of {order_id}"


@app.task(name="shop.label", base=DurableTask, durable_retry=BUSY)
def label(order_id: str) -> str:
    return current_context().step.run("buy it", buy_label, order_id)


def buy_label(order_id: str) -> str:
    return provider.label(order_id, key=current_context().idempotency_key)


@app.task(name="shop.ship", base=DurableTask)
def ship(parts: list[str], order_id: str) -> str:
    parcel = " with ".join(parts)
    step = current_context().step
    step.transaction("note it", store.ship, order_id, parcel)
    words = f"{parcel} is on its way"
    step.task("tell the customer", mail.s(order_id, words), timeout=timedelta(hours=1), idempotent=True)
    return parcel


@app.task(name="shop.mail")
def mail(order_id: str, words: str) -> None:
    with store.connect() as conn:
        store.note_mail(conn, order_id, words)


@app.task(name="shop.remind", base=DurableTask)
def remind() -> int:
    with store.connect() as conn:
        return store.note_reminder(conn)


def fulfil(order_id: str) -> Signature:
    """Return the canvas that takes an order from the card to the parcel."""
    parts = chord([pack.si(order_id), label.si(order_id)], ship.s(order_id))
    return chain(charge.si(order_id), parts)


def place_order(order_id: str) -> str:
    """Take in an order and have it fulfilled; return the id of the shipping task."""
    with store.connect() as conn:
        if store.insert_order(conn, order_id):
            durable.outbox.send(mail.s(order_id, "thank you"), conn=conn)
        return str(fulfil(order_id).apply_async(conn=conn, idempotency_key=f"order:{order_id}").id)
