"""Payloads as they are stored: frames, what is sealed of a statement's parameters, and what opens them again."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.support.sealing import BOTH, CANARY, HASH, IN_CLEAR, OLD, ONLY_OLD
from umt_durable import codec, payloads
from umt_durable.bridge.sealing import vault_of
from umt_durable.contrib.encryption import Encryption
from umt_durable.errors import ConfigurationError, JournalCorruptError, PayloadKeyError
from umt_durable.payloads import PLAIN, Vault

DATA = b'"tiger-in-the-journal"'
VAULT = Vault(BOTH)


def test_a_frame_names_its_key_and_hides_its_value() -> None:
    frame = VAULT.seal(DATA)

    assert payloads.is_sealed(frame)
    assert b"new" in frame
    assert CANARY.encode() not in frame
    assert payloads.plain(VAULT.hold(frame)) == DATA


def test_values_without_a_codec_are_stored_as_they_are() -> None:
    parameters: dict[str, Any] = {"result": DATA, "digest": b"d", "key_hash": b"h", "summary": "ValueError: x"}

    assert PLAIN.sealed(parameters) is parameters
    assert PLAIN.hold(DATA) is DATA
    assert Vault(IN_CLEAR).seal(DATA) == DATA
    assert Vault(IN_CLEAR).sealed(parameters)["digest"] == b"d"


def test_a_plain_value_from_before_is_read_as_it_is() -> None:
    assert payloads.plain(VAULT.hold(DATA)) == DATA
    assert codec.decode(DATA) == CANARY


def test_a_frame_is_not_sealed_twice() -> None:
    frame = VAULT.seal(DATA)

    assert VAULT.sealed({"result": frame, "digest": b"d"}) == {"result": frame, "digest": b"d"}


@pytest.mark.parametrize(
    ("read", "has_codec"), [(lambda frame: frame, False), (lambda frame: Vault(ONLY_OLD).hold(frame), True)]
)
def test_what_cannot_be_opened_here_names_the_key(read: Any, has_codec: bool) -> None:
    frame = read(VAULT.seal(DATA))

    with pytest.raises(PayloadKeyError, match="'new'") as caught:
        codec.decode(frame)

    assert caught.value.has_codec is has_codec
    assert payloads.opened(frame) == frame


@pytest.mark.parametrize("broken", [b"\0", b"\0\2tiger", b"\0\1" + bytes(16) + b"\xff\xff"])
def test_bytes_that_are_no_frame_are_never_taken_for_a_value(broken: bytes) -> None:
    for vault in (PLAIN, VAULT):
        with pytest.raises((JournalCorruptError, PayloadKeyError)):
            payloads.plain(vault.hold(broken))


def test_a_changed_frame_is_corrupt() -> None:
    frame = VAULT.seal(DATA)

    with pytest.raises(JournalCorruptError, match="'new'"):
        payloads.plain(VAULT.hold(frame[:-1] + bytes((frame[-1] ^ 1,))))


def test_all_that_users_say_is_sealed_and_digests_are_of_what_is_stored() -> None:
    lists = {"results": [DATA, None], "digests": [hashlib.sha256(DATA).digest(), None], "errors": [None, DATA]}
    one = VAULT.sealed({"result": DATA, "digest": hashlib.sha256(DATA).digest(), "error": None, "run": 1})
    many = VAULT.sealed(lists)

    assert one["digest"] == hashlib.sha256(one["result"]).digest()
    assert many["digests"] == [hashlib.sha256(many["results"][0]).digest(), None]
    assert (one["error"], one["run"], many["errors"][0]) == (None, 1, None)
    assert CANARY.encode() not in b"".join(filter(None, [one["result"], *many["results"], *many["errors"]]))


def test_hashes_are_keyed_and_outlive_a_rotation() -> None:
    plain = hashlib.sha256(DATA).digest()
    keyed = VAULT.sealed({"key_hash": plain})["key_hash"]

    assert keyed == Vault(ONLY_OLD).hash(plain) != plain
    assert len(keyed) == payloads.HASH_BYTES
    assert Vault(Encryption({"old": OLD}, hash_key=b"i" * 32)).hash(plain) != keyed


def test_facts_are_marked_where_they_are_said_and_nothing_else_is() -> None:
    def mark(**parameters: Any) -> bytes:
        frame = VAULT.sealed({"payload": DATA, **parameters})["payload"]
        return bytes(frame[2:18])

    here = mark(fact=1, run="a", name="n")
    assert here == mark(fact=2, run="a", name="n")
    assert here != mark(fact=1, run="b", name="n")
    assert mark() == bytes(16)


def test_what_people_ask_of_runs_stays_in_clear_like_the_audit() -> None:
    asked = {"payload": b'{"reason": "late"}', "name": "umt.cancel", "fact": 1, "run": "a"}

    assert VAULT.sealed(asked)["payload"] == asked["payload"]


def test_texts_for_people_are_sealed_and_shown_only_with_the_key() -> None:
    stored = VAULT.sealed({"summary": f"ValueError: {CANARY}"})["summary"]

    assert CANARY not in stored
    assert VAULT.readable(stored) == f"ValueError: {CANARY}"
    for vault in (PLAIN, Vault(ONLY_OLD)):
        told = vault.readable(stored)
        assert told is not None
        assert "'new'" in told
    assert PLAIN.readable("ValueError: x") == "ValueError: x"
    assert VAULT.headline(f"ValueError: {CANARY}").startswith("ValueError:")
    assert CANARY not in VAULT.headline(f"ValueError: {CANARY}")


def test_the_setting_names_a_codec_or_is_one() -> None:
    for given in (BOTH, "tests.support.sealing:BOTH"):
        assert payloads.is_sealed(vault_of(given).seal(DATA))
    assert vault_of(None).is_plain


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("tests.support.sealing", "module:name"),
        ("tests.support.sealing:NOTHING", "cannot be loaded"),
        ("tests.nowhere:BOTH", "cannot be loaded"),
        (object(), "seal, open and mark"),
        ("tests.support.sealing:CANARY", "seal, open and mark"),
    ],
)
def test_a_wrong_setting_is_refused(setting: object, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        vault_of(setting)


def test_an_id_of_a_key_that_no_frame_can_hold_is_refused() -> None:
    class Odd:
        def seal(self, data: bytes, /) -> tuple[str, bytes]:
            return "k" * 300, data

        def open(self, key: str, data: bytes, /) -> bytes:
            return data

        def mark(self, data: bytes, /) -> bytes:
            return HASH

    with pytest.raises(ConfigurationError, match="1 to 255 bytes"):
        Vault(Odd()).seal(DATA)
