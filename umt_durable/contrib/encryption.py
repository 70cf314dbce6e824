"""Payloads encrypted in the database: AES-GCM with a ring of keys, of which one seals and all open.

    from umt_durable.contrib.encryption import Encryption

    durable = Durable(app, payload_codec=Encryption({"2026-11": key}, hash_key=other_key))

Needs the extra `encryption`. Each value has a nonce of its own, chosen at random, and the id of its key beside it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from umt_durable.errors import ConfigurationError, PayloadKeyError
from umt_durable.payloads import MAX_KEY_BYTES

NONCE_BYTES: Final = 12
KEY_BYTES: Final = (16, 24, 32)
MIN_HASH_KEY_BYTES: Final = 16
NEWEST: Final = object()
_CONTEXT: Final = b"umt_durable payload 1\0"


def new_key() -> str:
    """Return a new random key of 256 bits, in base64, for a ring or for `hash_key`."""
    return base64.b64encode(os.urandom(32)).decode()


class Encryption:
    """A payload codec that encrypts with one key of a ring and decrypts with each of them."""

    def __init__(
        self,
        keys: Mapping[str, bytes | str],
        *,
        hash_key: bytes | str,
        encrypt_with: object = NEWEST,
    ) -> None:
        """Make the codec of a ring of keys by their ids.

        Shape: keys are bytes, or text in base64. The last of `keys` encrypts, unless `encrypt_with` names another;
        None stores new values in clear and opens the old ones. `hash_key` is for the hashes by which inputs are
        compared: it stays the same for ever, and opens nothing.
        Units: keys have 16, 24 or 32 bytes, `hash_key` at least 16, ids at most 255.
        Errors: ConfigurationError, without a word of any key.
        """
        self._ciphers = {key: AESGCM(_key_of(key, data)) for key, data in keys.items()}
        if not self._ciphers:
            raise ConfigurationError("the ring of payload keys is empty")
        current = next(reversed(self._ciphers)) if encrypt_with is NEWEST else encrypt_with
        if current is not None and current not in self._ciphers:
            raise ConfigurationError(f"encrypt_with names the key {current!r}, which is not in the ring")
        self._current = None if current is None else str(current)
        self._hash_key = _decoded("hash_key", hash_key)
        if len(self._hash_key) < MIN_HASH_KEY_BYTES:
            raise ConfigurationError(f"hash_key must have at least {MIN_HASH_KEY_BYTES} bytes")

    @classmethod
    def from_environment(cls, prefix: str = "DURABLE_PAYLOAD_", environ: Mapping[str, str] | None = None) -> Encryption:
        """Make the codec of what stands in the environment.

        Shape: `DURABLE_PAYLOAD_KEYS` is a JSON object of ids and keys in base64, the newest last;
        `DURABLE_PAYLOAD_HASH_KEY` is in base64; `DURABLE_PAYLOAD_ENCRYPT_WITH`, where it is there, is an id, or empty
        to store new values in clear.
        Errors: ConfigurationError, naming the variable.
        """
        environ = os.environ if environ is None else environ
        try:
            keys, hash_key = environ[f"{prefix}KEYS"], environ[f"{prefix}HASH_KEY"]
        except KeyError as error:
            raise ConfigurationError(f"{error.args[0]} is not set") from None
        try:
            ring = json.loads(keys)
        except ValueError:
            ring = None
        if not isinstance(ring, dict) or not all(isinstance(value, str) for value in ring.values()):
            raise ConfigurationError(f"{prefix}KEYS must be a JSON object of ids and keys in base64")
        chosen = environ.get(f"{prefix}ENCRYPT_WITH")
        return cls(ring, hash_key=hash_key, encrypt_with=NEWEST if chosen is None else chosen or None)

    def __repr__(self) -> str:
        return f"<Encryption with {self._current!r} of {sorted(self._ciphers)}>"

    def seal(self, data: bytes, /) -> tuple[str, bytes] | None:
        """Encrypt some data with the current key."""
        key = self._current
        if key is None:
            return None
        nonce = os.urandom(NONCE_BYTES)
        return key, nonce + self._ciphers[key].encrypt(nonce, data, _CONTEXT + key.encode())

    def open(self, key: str, data: bytes, /) -> bytes:
        """Decrypt what any key of the ring has encrypted.

        Errors: PayloadKeyError for another key; cryptography's InvalidTag when the data or its key's id was changed.
        """
        cipher = self._ciphers.get(key)
        if cipher is None:
            raise PayloadKeyError(key)
        return cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], _CONTEXT + key.encode())

    def mark(self, data: bytes, /) -> bytes:
        """Return the HMAC-SHA256 of some data under `hash_key`."""
        return hmac.new(self._hash_key, data, hashlib.sha256).digest()


def _key_of(id: str, given: bytes | str) -> bytes:
    if not isinstance(id, str) or not 0 < len(id.encode()) <= MAX_KEY_BYTES:
        raise ConfigurationError(f"the id of a payload key must be text of 1 to {MAX_KEY_BYTES} bytes")
    key = _decoded(f"the payload key {id!r}", given)
    if len(key) not in KEY_BYTES:
        raise ConfigurationError(f"the payload key {id!r} must have 16, 24 or 32 bytes, not {len(key)}")
    return key


def _decoded(what: str, given: bytes | str) -> bytes:
    if isinstance(given, bytes):
        return given
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise ConfigurationError(f"{what} is no base64") from None
