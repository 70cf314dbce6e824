"""Stands in for those outside the shop: the bank that charges cards, and the carrier that sells labels.

Their books are one file, SHOP_BOOKS, with a line of JSON for each deal. A deal is made in the moment of the call and
outlives whoever called. Like real providers both take an idempotency key: a second call with it gets the first deal.
While the file `SHOP_BOOKS.slow-charge` (or `-label`) exists, a call that has made its deal gets no answer: time enough
to kill the one that waits.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path


class BusyError(Exception):
    """The provider has no time; the same call may succeed later."""


def charge(order_id: str, key: str | None = None) -> str:
    """Take the money for an order from its card; return the number of the payment."""
    return _deal("charge", order_id, key)


def label(order_id: str, key: str | None = None) -> str:
    """Buy a label for a parcel; return its number."""
    return _deal("label", order_id, key)


def deals(kind: str, order_id: str) -> list[str]:
    """Return the numbers of all deals of a kind for an order, as its customer would find them on his bill."""
    return [deal["number"] for deal in _read(_books()) if (deal["kind"], deal["order"]) == (kind, order_id)]


def _deal(kind: str, order_id: str, key: str | None) -> str:
    books = _books()
    with books.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made = _read(books)
        number = next((deal["number"] for deal in made if key is not None and deal["key"] == key), None)
        if number is None:
            number = f"{kind}-{len(made) + 1}"
            file.write(json.dumps({"kind": kind, "order": order_id, "key": key, "number": number}) + "\n")
            file.flush()
            os.fsync(file.fileno())
    while books.with_name(f"{books.name}.slow-{kind}").exists():
        time.sleep(0.05)
    return str(number)


def _read(books: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in books.read_text(encoding="utf-8").splitlines()] if books.exists() else []


def _books() -> Path:
    return Path(os.environ["SHOP_BOOKS"])
