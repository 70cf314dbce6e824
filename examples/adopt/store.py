"""The shop's own tables, in the database SHOP_DATABASE_URL.

    python -m examples.adopt.store

makes them. They have nothing to do with Celery, and adopting durable tasks does not touch them.
"""

from __future__ import annotations

import os
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]

TABLES = """
CREATE SCHEMA IF NOT EXISTS adopt;
CREATE TABLE IF NOT EXISTS adopt.orders (
    id      text PRIMARY KEY,
    payment text,
    parcel  text,
    state   text NOT NULL DEFAULT 'new' CHECK (state IN ('new', 'paid', 'shipped')));
CREATE TABLE IF NOT EXISTS adopt.mail (
    at       timestamptz NOT NULL DEFAULT now(),
    order_id text NOT NULL,
    words    text NOT NULL);
CREATE TABLE IF NOT EXISTS adopt.reminder (at timestamptz NOT NULL DEFAULT now(), unpaid int NOT NULL);
"""


def connect() -> Connection:
    """Return a connection; as a context manager it commits at the end of its block."""
    return psycopg.connect(os.environ["SHOP_DATABASE_URL"])


def create() -> None:
    """Make the tables where they are missing."""
    with connect() as conn:
        conn.execute(TABLES)


def insert_order(conn: Connection, order_id: str) -> bool:
    """Take in an order; say whether it is new: a customer who clicks twice still has one."""
    return conn.execute("INSERT INTO adopt.orders (id) VALUES (%s) ON CONFLICT DO NOTHING", [order_id]).rowcount == 1


def mark_paid(conn: Connection, order_id: str, payment: str) -> None:
    """Note the payment of an order."""
    conn.execute("UPDATE adopt.orders SET payment = %s, state = 'paid' WHERE id = %s", [payment, order_id])


def ship(conn: Connection, order_id: str, parcel: str) -> None:
    """Note that an order has left."""
    conn.execute("UPDATE adopt.orders SET parcel = %s, state = 'shipped' WHERE id = %s", [parcel, order_id])


def note_mail(conn: Connection, order_id: str, words: str) -> None:
    """Note what the customer of an order was told."""
    conn.execute("INSERT INTO adopt.mail (order_id, words) VALUES (%s, %s)", [order_id, words])


def note_reminder(conn: Connection) -> int:
    """Count the orders that are not paid, and note the count."""
    row = conn.execute(
        "INSERT INTO adopt.reminder (unpaid) SELECT count(*) FROM adopt.orders WHERE state = 'new' RETURNING unpaid"
    ).fetchone()
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    create()
