"""The shipped payload codec: its ring of keys, its refusals, and what it shows of them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag

from tests.support.sealing import BOTH, HASH, IN_CLEAR, NEW, OLD, ONLY_NEW, ONLY_OLD
from umt_durable.contrib.encryption import Encryption, new_key
from umt_durable.errors import ConfigurationError, PayloadKeyError

DATA = b'{"card": "4111"}'


def test_the_last_key_encrypts_and_each_decrypts() -> None:
    of_old, of_new = ONLY_OLD.seal(DATA), BOTH.seal(DATA)
    assert of_old is not None
    assert of_new is not None

    assert (of_old[0], of_new[0]) == ("old", "new")
    assert BOTH.open(*of_old) == BOTH.open(*of_new) == DATA
    assert DATA not in of_new[1]


def test_no_two_values_are_encrypted_alike() -> None:
    assert BOTH.seal(DATA) != BOTH.seal(DATA)


def test_an_unknown_key_is_named() -> None:
    sealed = BOTH.seal(DATA)
    assert sealed is not None

    with pytest.raises(PayloadKeyError, match="'new'") as caught:
        ONLY_OLD.open(*sealed)

    assert (caught.value.key, caught.value.has_codec) == ("new", True)


@pytest.mark.parametrize("place", [0, 12, -1])
def test_a_changed_value_is_refused(place: int) -> None:
    key, data = BOTH.seal(DATA) or ("", b"")
    broken = bytearray(data)
    broken[place] ^= 1

    with pytest.raises(InvalidTag):
        BOTH.open(key, bytes(broken))


def test_the_id_of_the_key_is_part_of_what_is_sealed() -> None:
    twice = Encryption({"a": OLD, "b": OLD}, hash_key=HASH)
    _, data = twice.seal(DATA) or ("", b"")

    with pytest.raises(InvalidTag):
        twice.open("a", data)


def test_marks_stay_the_same_when_keys_are_rotated() -> None:
    assert ONLY_OLD.mark(DATA) == BOTH.mark(DATA) == ONLY_NEW.mark(DATA)
    assert BOTH.mark(DATA) != Encryption({"old": OLD}, hash_key=b"i" * 32).mark(DATA)


def test_a_key_may_be_given_before_it_encrypts() -> None:
    waiting = Encryption({"old": OLD, "new": NEW}, hash_key=HASH, encrypt_with="old")

    assert (waiting.seal(DATA) or ("",))[0] == "old"
    assert IN_CLEAR.seal(DATA) is None


def test_keys_are_read_from_the_environment() -> None:
    environ = {
        "DURABLE_PAYLOAD_KEYS": json.dumps({"old": base64.b64encode(OLD).decode(), "new": new_key()}),
        "DURABLE_PAYLOAD_HASH_KEY": new_key(),
    }

    ring = Encryption.from_environment(environ=environ)

    assert (ring.seal(DATA) or ("",))[0] == "new"
    assert ring.open(*(ONLY_OLD.seal(DATA) or ("", b""))) == DATA
    for chosen, key in (("old", "old"), ("", None)):
        one = Encryption.from_environment(environ={**environ, "DURABLE_PAYLOAD_ENCRYPT_WITH": chosen})
        assert (one.seal(DATA) or (None,))[0] == key


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "DURABLE_PAYLOAD_KEYS is not set"),
        ({"DURABLE_PAYLOAD_KEYS": "{}"}, "DURABLE_PAYLOAD_HASH_KEY is not set"),
        ({"DURABLE_PAYLOAD_KEYS": "tiger", "DURABLE_PAYLOAD_HASH_KEY": ""}, "must be a JSON object"),
        ({"DURABLE_PAYLOAD_KEYS": '{"a": 1}', "DURABLE_PAYLOAD_HASH_KEY": ""}, "must be a JSON object"),
        ({"DURABLE_PAYLOAD_KEYS": '{"a": "tiger"}', "DURABLE_PAYLOAD_HASH_KEY": ""}, "'a' is no base64"),
    ],
)
def test_a_wrong_environment_is_refused_without_its_values(environ: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        Encryption.from_environment(environ=environ)

    assert "tiger" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keys": {}}, "is empty"),
        ({"keys": {"a": b"short"}}, "'a' must have 16, 24 or 32 bytes, not 5"),
        ({"keys": {"": OLD}}, "1 to 255 bytes"),
        ({"keys": {"k" * 256: OLD}}, "1 to 255 bytes"),
        ({"keys": {"a": OLD}, "encrypt_with": "b"}, "'b', which is not in the ring"),
        ({"keys": {"a": OLD}, "hash_key": b"short"}, "at least 16 bytes"),
        ({"keys": {"a": "not base64!"}}, "no base64"),
    ],
)
def test_a_wrong_ring_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Encryption(**{"hash_key": HASH, **options})


def test_no_key_is_shown() -> None:
    assert repr(BOTH) == "<Encryption with 'new' of ['new', 'old']>"
