"""The demo's bank: one charge per key, and a log that tells every call, also after a crash."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import pytest

from examples.orders import bank, payments


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "bank.log"


def start(log: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, bank.__file__, "--log", str(log), "--latency", "0", "0.01", "--until-stdin-closes"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.fixture
def url(log: Path) -> Iterator[str]:
    process, address = start(log)
    yield address
    process.communicate("", timeout=10)


def pay(url: str, key: str, amount: str = "12.30", currency: str = "EUR") -> payments.Payment:
    return payments.pay(url, key=key, order="A-1", amount=Decimal(amount), currency=currency)


def test_calls_side_by_side_with_one_key_move_the_money_once(url: str, log: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        charges = {payment.charge for payment in pool.map(lambda _: pay(url, "k"), range(48))}

    assert charges == {"ch_000001"}
    assert Counter(call.outcome for call in bank.read_log(log)) == {"charged": 1, "repeat": 47}


def test_a_killed_bank_remembers_its_charges_and_drops_a_torn_line(log: Path) -> None:
    process, url = start(log)
    first = pay(url, "k")
    process.kill()
    process.communicate()
    with log.open("ab") as file:
        file.write(b'{"number": 2, "at"')

    process, url = start(log)
    again, other = pay(url, "k"), pay(url, "k2")
    process.communicate("", timeout=10)

    assert again == first
    assert other != first
    assert [(call.number, call.key, call.outcome) for call in bank.read_log(log)] == [
        (1, "k", "charged"),
        (2, "k", "repeat"),
        (3, "k2", "charged"),
    ]


def test_a_declined_card_is_declined_again_and_never_charged(url: str, log: Path) -> None:
    answers = [pay(url, "k", "25000.01").charge for _ in range(2)]

    assert answers == [None, None]
    assert [(call.outcome, call.declined) for call in bank.read_log(log)] == [("declined", True), ("repeat", True)]


@pytest.mark.parametrize(("amount", "currency"), [("NaN", "EUR"), ("0", "EUR"), ("-1", "EUR"), ("1", "XBT")])
def test_a_request_without_a_usable_amount_is_refused_and_moves_nothing(
    url: str, log: Path, amount: str, currency: str
) -> None:
    with pytest.raises(payments.BankError, match="400"):
        pay(url, "k", amount, currency)

    assert bank.read_log(log) == []


def test_the_same_key_with_another_amount_is_a_conflict(url: str, log: Path) -> None:
    pay(url, "k")

    with pytest.raises(payments.BankError, match="409"):
        pay(url, "k", "12.31")

    assert [call.outcome for call in bank.read_log(log)] == ["charged", "conflict"]
