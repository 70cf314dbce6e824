"""What the shop knows of its bank: one call."""

from __future__ import annotations

import http.client
import json
from decimal import Decimal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict


class BankError(Exception):
    """There is no answer that says whether money moved. Asking again with the same key is safe."""


class Payment(BaseModel):
    """What the bank said. `charge` names the charge; it is None where the card was declined and no money moved."""

    model_config = ConfigDict(frozen=True)

    charge: str | None


def pay(url: str, *, key: str, order: str, amount: Decimal, currency: str, timeout_seconds: float = 5.0) -> Payment:
    """Have the card charged once for `key`, however often this is called.

    Errors: BankError when there was no usable answer.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_seconds)
    body = json.dumps({"order": order, "amount": str(amount), "currency": currency})
    try:
        connection.request("POST", "/charges", body, {"Idempotency-Key": key, "Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BankError(f"no answer from the bank: {error}") from error
    finally:
        connection.close()
    match response.status:
        case 200 | 201:
            return Payment(charge=answer["charge"])
        case 402:
            return Payment(charge=None)
        case status:
            raise BankError(f"the bank answered {status}: {answer}")
