"""Tokens of begun steps: what they name, how they are signed, and how one that comes back is read.

    base64url( version: 1 byte | JSON of [run, nesting, key of the step, generation] | HMAC-SHA256: 32 bytes )

A token is derived from its step alone, so it is the same however often it is handed out. Nothing in it is believed
before its signature is.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from umt_durable.database import Database
from umt_durable.engine.ids import among_runs
from umt_durable.errors import ConfigurationError, InvalidTokenError
from umt_durable.settings import Settings
from umt_durable.store import settings as store_settings
from umt_durable.store import waits

PREFIX: Final = "umt.begin/"
"""How the names of the facts begin by which begun steps are completed."""
VERSION: Final = b"\1"
LONGEST: Final = 8192
"""More characters than any token of ours has."""
_MAC_BYTES: Final = 32
_DOMAIN: Final = b"umt_durable.begin\0"


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that somebody else completes: a run's, by its key in the journal, in one generation of the run."""

    run: str
    nesting: int
    step: str
    generation: int

    @property
    def address(self) -> str:
        """Return where is said what the step ended in."""
        step = among_runs(self.step, generation=self.generation, nesting=self.nesting)
        return waits.run_address(self.run, f"{PREFIX}{step}")


class Tokens:
    """Signs and reads the tokens of one schema."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._configured = database, settings.signing_keys

    def __repr__(self) -> str:
        return "<Tokens>"

    def keys(self) -> tuple[bytes, ...]:
        """Return the keys that are known, the one to sign with first: those of the settings, else the schema's own.

        Errors: ConfigurationError when there is none; DatabaseUnavailableError.
        """
        if self._configured is not None:
            return tuple(key.encode() for key in self._configured)
        own = self._database.do(store_settings.signing_key)
        if own is None:
            raise ConfigurationError(
                f"there is no key to sign tokens with: schema {self._database.schema!r} has lost its own; set"
                " DURABLE_SIGNING_KEYS (durable_signing_keys) in every process, to one secret text of 16 characters or"
                " more"
            )
        return (own.encode(),)


def sign(begun: Begun, keys: Sequence[bytes]) -> str:
    """Return the token of a step, signed with the first of some keys."""
    named = [begun.run, begun.nesting, begun.step, begun.generation]
    body = VERSION + json.dumps(named, ensure_ascii=False, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(body + _mac(keys[0], body)).decode().rstrip("=")


def read(token: object, keys: Sequence[bytes]) -> Begun:
    """Return which step a token is of, once one of some keys has signed it.

    Errors: InvalidTokenError, which does not show the token.
    """
    if not isinstance(token, str) or not 0 < len(token.strip()) <= LONGEST:
        raise InvalidTokenError("it is not the text of one")
    text = token.strip()
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidTokenError("it is not the text of one") from None
    body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if body[:1] != VERSION:
        raise InvalidTokenError("it is cut, or of another version")
    # Each in constant time, and all of them: neither how far a guess was right nor which key it met must show.
    found = [hmac.compare_digest(_mac(key, body), mac) for key in keys]
    if not any(found):
        raise InvalidTokenError("no key that is known here has signed it")
    run, nesting, step, generation = json.loads(body[1:])
    return Begun(run, nesting, step, generation)


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, _DOMAIN + body, "sha256")
