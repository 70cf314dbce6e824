"""The reading of the Postgres protocol that lets the proxy lose one chosen reply. Bytes in, bytes out."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pgwire import Cut, Link, Loss


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def startup(code: int = 196608, body: bytes = b"user\0postgres\0\0") -> bytes:
    return struct.pack("!II", len(body) + 8, code) + body


def query(sql: bytes) -> bytes:
    return message(b"Q", sql + b"\0")


def parse(sql: bytes, name: bytes = b"") -> bytes:
    return message(b"P", name + b"\0" + sql + b"\0\0\0")


def bind(name: bytes = b"", portal: bytes = b"") -> bytes:
    return message(b"B", portal + b"\0" + name + b"\0\0\0\0\0\0\0")


def execute(portal: bytes = b"") -> bytes:
    return message(b"E", portal + b"\0\0\0\0\0")


def extended(sql: bytes) -> bytes:
    return parse(sql) + bind() + execute() + SYNC


def complete(tag: bytes) -> bytes:
    return message(b"C", tag + b"\0")


SYNC = message(b"S")
FLUSH = message(b"H")
PARSED, BOUND = message(b"1"), message(b"2")
ROW = message(b"D", b"\0\0")
IDLE, IN_TRANSACTION = message(b"Z", b"I"), message(b"Z", b"T")
ERROR = message(b"E", b"SERROR\0\0")
COMMIT_STEP = b"/* commit_step */ INSERT INTO step VALUES (1)"


def opened(*cuts: Cut) -> Link:
    link = Link(cuts)
    link.from_client(startup())
    link.from_server(message(b"R", b"\0\0\0\0") + IDLE)
    return link


def reply_cut(times: int = 1) -> Cut:
    return Cut(Loss.REPLY, b"/* commit_step */", times)


def test_requests_for_encryption_are_refused_and_never_forwarded() -> None:
    link = Link([])

    first = link.from_client(startup(80877103, b""))
    second = link.from_client(startup(80877104, b"") + startup())

    assert first == (b"", False)
    assert second == (startup(), False)
    assert link.refusals == 2


def test_a_cancel_request_passes_as_it_is() -> None:
    link = Link([reply_cut()])

    sent, cut = link.from_client(startup(80877102, b"\0\0\0\1\0\0\0\2"))

    assert (sent, cut) == (startup(80877102, b"\0\0\0\1\0\0\0\2"), False)
    assert link.from_server(b"anything") == (b"anything", False)


@given(st.lists(st.integers(1, 40), min_size=1))
def test_traffic_that_fits_no_rule_passes_byte_for_byte_however_it_is_cut_up(sizes: list[int]) -> None:
    link = Link([Cut(Loss.REPLY, b"never", 1), Cut(Loss.COMMIT, b"never", 1)])
    asked = startup() + extended(b"SELECT 1") + query(b"BEGIN") + query(b"SELECT 2") + query(b"COMMIT")
    answered = message(b"R", b"\0\0\0\0") + IDLE + PARSED + BOUND + ROW + complete(b"SELECT 1") + IDLE
    answered += complete(b"BEGIN") + IN_TRANSACTION + ERROR + IDLE + complete(b"ROLLBACK") + IDLE

    to_server, to_client, start = bytearray(), bytearray(), 0
    for size in [*sizes, 10_000]:
        to_server += link.from_client(asked[start : start + size])[0]
        to_client += link.from_server(answered[start : start + size])[0]
        start += size

    assert (bytes(to_server), bytes(to_client)) == (asked, answered)


@pytest.mark.parametrize("send", [extended, query])
def test_the_reply_of_a_chosen_statement_is_lost_once_the_server_is_ready(send: object) -> None:
    assert callable(send)
    rule = reply_cut()
    link = opened(rule)
    link.from_client(send(COMMIT_STEP))

    early = link.from_server(PARSED + BOUND + ROW + complete(b"INSERT 0 1"))
    fired_early = rule.fired
    last = link.from_server(IDLE)

    assert early == (b"", False)
    assert fired_early == 0
    assert last == (b"", True)
    assert rule.fired == 1


def test_a_statement_prepared_long_ago_is_known_by_its_name() -> None:
    rule = reply_cut()
    link = opened(rule)
    rule.times = 0
    link.from_client(parse(COMMIT_STEP, b"s1") + bind(b"s1") + execute() + SYNC)
    link.from_server(PARSED + BOUND + complete(b"INSERT 0 1") + IDLE)

    rule.times = 1
    link.from_client(bind(b"s1", b"p") + execute(b"p") + SYNC)

    assert link.from_server(BOUND + complete(b"INSERT 0 1") + IDLE) == (b"", True)


def test_a_rule_cuts_as_often_as_it_says_over_all_connections() -> None:
    rule = reply_cut(times=2)

    cuts = []
    for _ in range(3):
        link = opened(rule)
        link.from_client(query(COMMIT_STEP))
        cuts.append(link.from_server(complete(b"INSERT 0 1") + IDLE)[1])

    assert cuts == [True, True, False]
    assert rule.fired == 2


def test_what_came_before_in_the_pipeline_is_delivered() -> None:
    rule = reply_cut()
    link = opened(rule)
    link.from_client(extended(b"SELECT 1") + extended(COMMIT_STEP) + extended(b"SELECT 2"))
    first = PARSED + BOUND + ROW + complete(b"SELECT 1") + IDLE

    out, cut = link.from_server(first + PARSED + BOUND + complete(b"INSERT 0 1") + IDLE)

    assert (out, cut) == (first, True)


def test_an_error_of_the_chosen_statement_is_delivered_and_the_rule_stays() -> None:
    rule = reply_cut()
    link = opened(rule)
    link.from_client(extended(COMMIT_STEP))

    failed = link.from_server(PARSED + BOUND + ERROR + IDLE)
    link.from_client(extended(COMMIT_STEP))
    again = link.from_server(PARSED + BOUND + complete(b"INSERT 0 1") + IDLE)

    assert failed == (PARSED + BOUND + ERROR + IDLE, False)
    assert again == (b"", True)


def test_an_error_at_the_commit_of_an_autocommit_statement_is_delivered() -> None:
    rule = reply_cut()
    link = opened(rule)
    link.from_client(extended(COMMIT_STEP))
    link.from_server(PARSED + BOUND + complete(b"INSERT 0 1"))

    out, cut = link.from_server(ERROR + IDLE)

    assert (out, cut) == (PARSED + BOUND + complete(b"INSERT 0 1") + ERROR + IDLE, False)
    assert rule.fired == 0


def test_statements_that_the_server_skips_after_an_error_get_no_reply_of_others() -> None:
    rule = reply_cut()
    link = opened(rule)
    link.from_client(parse(b"SELEC") + FLUSH)
    link.from_server(ERROR)

    link.from_client(bind() + execute() + SYNC + extended(COMMIT_STEP))

    assert link.from_server(IDLE) == (IDLE, False)
    assert link.from_server(PARSED + BOUND + complete(b"INSERT 0 1") + IDLE) == (b"", True)


def test_a_client_that_flushes_without_sync_loses_the_reply_when_the_statement_ends() -> None:
    rule = reply_cut()
    link = opened(rule)
    link.from_client(parse(COMMIT_STEP) + bind() + execute() + FLUSH)

    assert link.from_server(PARSED + BOUND + complete(b"INSERT 0 1")) == (b"", True)


def test_a_chosen_statement_never_reaches_the_server() -> None:
    rule = Cut(Loss.STATEMENT, b"/* commit_step */", 1)
    link = opened(rule)

    out, cut = link.from_client(query(b"SELECT 1") + extended(COMMIT_STEP))

    assert cut
    assert out == query(b"SELECT 1") + parse(COMMIT_STEP) + bind()
    assert rule.fired == 1


@pytest.mark.parametrize(
    ("marker", "tag", "expected"),
    [(b"", b"COMMIT", True), (b"ledger", b"COMMIT", True), (b"other", b"COMMIT", False), (b"", b"ROLLBACK", False)],
)
def test_the_reply_of_a_commit_is_lost_only_when_its_transaction_fits(
    marker: bytes, tag: bytes, expected: bool
) -> None:
    link = opened(Cut(Loss.COMMIT, marker, 1))
    link.from_client(query(b"SELECT 'other'") + query(b"BEGIN"))
    link.from_server(complete(b"SELECT 1") + IDLE + complete(b"BEGIN") + IN_TRANSACTION)
    link.from_client(query(b"INSERT INTO ledger VALUES (1)"))
    link.from_server(complete(b"INSERT 0 1") + IN_TRANSACTION)

    link.from_client(query(b"/* end_it */ commit"))

    assert link.from_server(complete(tag) + IDLE) == ((b"", True) if expected else (complete(tag) + IDLE, False))


def test_a_client_that_leaves_before_the_reply_gives_the_cut_back() -> None:
    rule = reply_cut()
    gone = opened(rule)
    gone.from_client(extended(COMMIT_STEP))

    gone.close()

    link = opened(rule)
    link.from_client(extended(COMMIT_STEP))
    assert link.from_server(PARSED + BOUND + complete(b"INSERT 0 1") + IDLE) == (b"", True)


def test_waiting_for_a_cut_that_does_not_come_says_which() -> None:
    with pytest.raises(AssertionError, match=r"commit_step.*fired 0 of 1"):
        reply_cut().wait(timeout=0.01)
