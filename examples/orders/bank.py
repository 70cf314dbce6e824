"""A bank that charges cards, as a process of its own: `python bank.py --log bank.log`.

    POST /charges   Idempotency-Key: <key>   {"order": "...", "amount": "12.30", "currency": "EUR"}

    201 charged now   200 charged before under this key, nothing moved   402 declined
    409 this key had another amount   400 malformed

It is the outside world of the demo, so it imports nothing of the shop. Every call is one line of JSON in an append-only
file, on disk before the answer leaves. Money moves at most once per key; a key that comes again gets the first answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Final, Literal

Outcome = Literal["charged", "repeat", "declined", "conflict"]

STATUS: Final[dict[Outcome, int]] = {"charged": 201, "repeat": 200, "declined": 402, "conflict": 409}

# What one card can pay; about 25,000 euros each.
LIMITS: Final = {
    "EUR": Decimal(25_000),
    "USD": Decimal(28_000),
    "GBP": Decimal(21_750),
    "CHF": Decimal(23_750),
    "SEK": Decimal(277_500),
    "PLN": Decimal(107_000),
    "JPY": Decimal(4_400_000),
}
MAX_BODY: Final = 10_000


@dataclass(frozen=True)
class Call:
    """One call as the log keeps it. `number` counts from 1, `charge` is empty where no money ever moved for the key."""

    number: int
    at: float
    key: str
    order: str
    amount: str
    currency: str
    outcome: Outcome
    charge: str

    @classmethod
    def parse(cls, line: bytes) -> Call:
        """Read one line of the log."""
        return cls(**json.loads(line))

    @property
    def declined(self) -> bool:
        """Whether the answer is that the card cannot pay, now or when the key came first."""
        return self.outcome in ("declined", "repeat") and not self.charge


class RequestError(Exception):
    """The request is not one that a bank can act on."""


def read_log(path: Path) -> list[Call]:
    """Read all whole lines of a bank's log. A line cut short by a crash was never answered and counts for nothing."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [Call.parse(line) for line in lines]


class Ledger:
    """The bank's book: an append-only file and, in memory, the first call of each key.

    Keeps: at most one line `charged` per key, whatever calls come side by side and whenever the process dies.
    """

    def __init__(self, path: Path) -> None:
        calls = read_log(path)
        self._first: dict[str, Call] = {}
        for call in calls:
            self._first.setdefault(call.key, call)
        self._count = len(calls)
        self._lock = threading.Lock()
        self._file = path.open("ab")
        _drop_torn_line(path)

    def charge(self, key: str, order: str, amount: str, currency: str) -> Call:
        """Move the money unless this key moved it before, and log the call before returning."""
        with self._lock:
            first = self._first.get(key)
            outcome, charge = self._judge(first, amount, currency)
            self._count += 1
            call = Call(self._count, time.time(), key, order, amount, currency, outcome, charge)
            self._file.write(json.dumps(asdict(call)).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._first.setdefault(key, call)
            return call

    def close(self) -> None:
        self._file.close()

    def _judge(self, first: Call | None, amount: str, currency: str) -> tuple[Outcome, str]:
        if first is None:
            if Decimal(amount) > LIMITS[currency]:
                return "declined", ""
            return "charged", f"ch_{len(self._first) + 1:06d}"
        if (first.amount, first.currency) != (amount, currency):
            return "conflict", ""
        return "repeat", first.charge


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


class Bank(ThreadingMixIn, TCPServer):
    """The listening server: one thread per connection, on loopback only.

    Units: `latency` is the range of seconds, drawn anew for each call, between the line in the log and the answer.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128  # the default of five resets calls that come at once

    def __init__(self, port: int, ledger: Ledger, latency: tuple[float, float], seed: int | None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.ledger = ledger
        self._latency = latency
        self._random = random.Random(seed)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def think(self) -> None:
        """Take the time that a bank takes."""
        time.sleep(self._random.uniform(*self._latency))


class _Handler(BaseHTTPRequestHandler):
    server: Bank
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_POST(self) -> None:
        try:
            key, order, amount, currency = self._read()
        except RequestError as error:
            self._answer(400, {"error": str(error)})
            return
        call = self.server.ledger.charge(key, order, amount, currency)
        self.server.think()
        status = 402 if call.declined else STATUS[call.outcome]
        self._answer(status, {"outcome": call.outcome, "charge": call.charge})

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the ledger is the log."""

    def _read(self) -> tuple[str, str, str, str]:
        if self.path != "/charges":
            raise RequestError("there is only /charges")
        key = self.headers.get("Idempotency-Key", "")
        length = self.headers.get("Content-Length", "")
        if not key:
            raise RequestError("no Idempotency-Key")
        if not length.isdecimal() or int(length) > MAX_BODY:
            raise RequestError("no usable Content-Length")
        try:
            body = json.loads(self.rfile.read(int(length)))
            order, amount, currency = str(body["order"]), str(body["amount"]), str(body["currency"])
            positive = Decimal(amount).is_finite() and Decimal(amount) > 0
        except (ValueError, KeyError, TypeError, InvalidOperation) as error:
            raise RequestError("order, amount and currency are needed") from error
        if not positive or currency not in LIMITS:
            raise RequestError(f"cannot charge {amount} {currency}")
        return key, order, amount, currency

    def _answer(self, status: int, body: dict[str, str]) -> None:
        content = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            # The caller was killed while it waited; its charge stands in the log, which is the point of the demo.
            self.close_connection = True


def main() -> None:
    """Run the bank until it is told to stop; the first line of its output is its address."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--log", type=Path, required=True, help="file that every call is appended to")
    parser.add_argument("--port", type=int, default=0, help="port on loopback; 0 takes a free one")
    parser.add_argument("--latency", type=float, nargs=2, default=(0.005, 0.030), help="least and most seconds")
    parser.add_argument("--seed", type=int, default=None, help="makes the latencies repeatable")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the process that started it")
    arguments = parser.parse_args()
    ledger = Ledger(arguments.log)
    with Bank(arguments.port, ledger, tuple(arguments.latency), arguments.seed) as bank:
        print(bank.url, flush=True)
        if arguments.until_stdin_closes:
            threading.Thread(target=bank.serve_forever, daemon=True).start()
            sys.stdin.read()
        else:
            bank.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
