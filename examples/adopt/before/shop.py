"""A shop as many are: an order is charged, packed and labelled side by side, and shipped."""

from __future__ import annotations

import os

from celery import Celery, chain, chord
from celery.canvas import Signature

from examples.adopt import provider, store

app = Celery("shop")
app.conf.task_default_queue = "shop"
app.conf.beat_schedule = {
    "remind": {"task": "shop.remind", "schedule": float(os.environ.get("SHOP_REMIND_SECONDS", "3600"))},
}


@app.task(
    name="shop.charge",
    acks_late=True,
    reject_on_worker_lost=True,
    autoretry_for=(provider.BusyError,),
    retry_backoff=True,
    max_retries=5,
)
def charge(order_id: str) -> str:
    payment = provider.charge(order_id)
    with store.connect() as conn:
        store.mark_paid(conn, order_id, payment)
    return payment


@app.task(name="shop.pack")
def pack(order_id: str) -> str:
    return f"box of {order_id}"


@app.task(name="shop.label", autoretry_for=(provider.BusyError,), retry_backoff=True, max_retries=5)
def label(order_id: str) -> str:
    return provider.label(order_id)


@app.task(name="shop.ship")
def ship(parts: list[str], order_id: str) -> str:
    parcel = " with ".join(parts)
    with store.connect() as conn:
        store.ship(conn, order_id, parcel)
    mail.delay(order_id, f"{parcel} is on its way")
    return parcel


@app.task(name="shop.mail")
def mail(order_id: str, words: str) -> None:
    with store.connect() as conn:
        store.note_mail(conn, order_id, words)


@app.task(name="shop.remind")
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
        is_new = store.insert_order(conn, order_id)
    if is_new:
        mail.delay(order_id, "thank you")
    return str(fulfil(order_id).apply_async().id)
