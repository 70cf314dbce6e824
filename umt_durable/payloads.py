"""Payloads as the database holds them: as they are, or sealed by the application's payload codec.

A sealed payload is one frame, which no JSON begins like:

    00 01 | mark: 16 bytes | n: 1 byte | id of the key: n bytes | what the codec made

The id of the key is in clear, so that anyone who may read the rows can tell which keys they need. The mark is zero but
for facts and events, of which the database has to say whether two of them are the same; without one it does not say.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from umt_durable.errors import ConfigurationError, JournalCorruptError, PayloadKeyError

MAGIC: Final = b"\0\1"
MARK_BYTES: Final = 16
HASH_BYTES: Final = 20
"""How long a keyed hash is: unlike the plain ones, of 16 and 32 bytes, so that those two kinds are never compared."""
MAX_KEY_BYTES: Final = 255
TEXT: Final = "sealed:"

_HEAD: Final = len(MAGIC) + MARK_BYTES + 1
_UNMARKED: Final = bytes(MARK_BYTES)

# The parameters of our statements that hold users' values, alone or as lists of them.
VALUES: Final = frozenset(
    {"args", "envelope", "result", "error", "payload", "payloads", "envelopes", "results", "errors"}
)
TEXTS: Final = frozenset({"summary", "statuses"})
HASHES: Final = frozenset({"key_hash", "key_given"})
IN_CLEAR: Final = frozenset({"umt.cancel", "umt.retry", "umt.pause", "umt.resume"})
"""Facts by which people ask something of a run. Their one value, the reason, stands in the audit in clear as well."""
_DIGESTS: Final = {"result": "digest", "results": "digests", "args": "digest"}

T = TypeVar("T")


@runtime_checkable
class PayloadCodec(Protocol):
    """Seals payloads before they are stored, and opens them again.

    Its methods are called from several threads, and after forks.
    """

    def seal(self, data: bytes, /) -> tuple[str, bytes] | None:
        """Return the id of the key in use (1 to 255 bytes) and the sealed data; None: the value is stored as it is."""

    def open(self, key: str, data: bytes, /) -> bytes:
        """Return what was sealed.

        Errors: PayloadKeyError for a key that is not known here; any other says that the data was changed.
        """

    def mark(self, data: bytes, /) -> bytes:
        """Return a hash (20 bytes or more) of some data that only holders of its key can make, the same for ever."""


class Sealed(bytes):
    """A frame as a connection has read it, with what can open it."""

    vault: Vault


class Vault:
    """How one process stores payloads: through a codec, or as they are."""

    def __init__(self, codec: PayloadCodec | None = None) -> None:
        """Store through a codec.

        Errors: ConfigurationError for something that is none.
        """
        if codec is not None and not isinstance(codec, PayloadCodec):
            raise ConfigurationError(f"payload_codec must have seal, open and mark: {type(codec).__name__} has not")
        self._codec = codec

    def __repr__(self) -> str:
        return f"<Vault {type(self._codec).__name__}>"

    @property
    def is_plain(self) -> bool:
        """Whether payloads are stored as they are."""
        return self._codec is None

    # -- on the way in -------------------------------------------------------------------------------------------------

    def seal(self, data: bytes, *, mark: bytes | None = None) -> bytes:
        """Return the frame of a payload. What is a frame already, or is to be stored as it is, comes back unchanged.

        Shape: `mark` is what, together with the payload, decides whether two are the same.
        """
        if self._codec is None or is_sealed(data):
            return data
        done = self._codec.seal(data)
        if done is None:
            return data
        key = done[0].encode()
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise ConfigurationError(f"the id of a payload key must have 1 to {MAX_KEY_BYTES} bytes: {done[0]!r:.80}")
        marked = _UNMARKED if mark is None else self._codec.mark(b"\0".join((b"payload", mark, data)))[:MARK_BYTES]
        return b"".join((MAGIC, marked, bytes((len(key),)), key, done[1]))

    def hash(self, plain: bytes) -> bytes:
        """Return a hash as it is stored: keyed, so that nobody can find what it is of by trying values."""
        if self._codec is None or len(plain) == HASH_BYTES:
            return plain
        return self._codec.mark(b"\0".join((b"hash", plain)))[:HASH_BYTES]

    def text(self, plain: str | None) -> str | None:
        """Return a text for people, such as that of an exception, as it is stored."""
        if self._codec is None or plain is None:
            return plain
        frame = self.seal(plain.encode("utf-8", "replace"))
        return TEXT + base64.b64encode(frame).decode() if is_sealed(frame) else plain

    def headline(self, text: str) -> str:
        """Return what may stand in clear of a text "ErrorClass: message": with a codec, the class alone."""
        return text if self._codec is None else f"{text.partition(':')[0]}: (sealed payloads: see the log)"

    def sealed(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters of one of our statements as they are to be sent.

        Shape: digests are of what is stored, so that they tell nothing of what it says.
        """
        if self._codec is None:
            return params
        out = dict(params)
        mark = _mark_of(params)
        for name in VALUES & out.keys() if params.get("name") not in IN_CLEAR else ():
            given = out[name]
            digest = _DIGESTS.get(name)
            if isinstance(given, list):
                out[name] = kept = [_maybe(self.seal, one) for one in given]
                if "digests" in out and name in ("args", "results"):
                    out["digests"] = [_digest(*three) for three in zip(given, kept, out["digests"], strict=True)]
            elif isinstance(given, bytes):
                out[name] = stored = self.seal(given, mark=mark if name == "payload" else None)
                if digest in out:
                    out[digest] = _digest(given, stored, out[digest])
        for name in TEXTS & out.keys():
            given = out[name]
            out[name] = [self.text(one) for one in given] if isinstance(given, list) else self.text(given)
        for name in HASHES & out.keys():
            out[name] = _maybe(self.hash, out[name])
        return out

    # -- on the way out ------------------------------------------------------------------------------------------------

    def hold(self, data: bytes) -> bytes:
        """Return stored bytes so that `plain` can open them, later and elsewhere."""
        if self._codec is None or not is_sealed(data):
            return data
        held = Sealed(data)
        held.vault = self
        return held

    def open(self, frame: bytes) -> bytes:
        """Return what a frame holds.

        Errors: PayloadKeyError; JournalCorruptError when it is not what was sealed.
        """
        key, start = _key_of(frame)
        if self._codec is None:
            raise PayloadKeyError(key, has_codec=False)
        try:
            return self._codec.open(key, frame[start:])
        except PayloadKeyError:
            raise
        except Exception as error:  # noqa: BLE001 - each codec has its own; all say that it is not what was sealed
            raise JournalCorruptError(
                f"a stored value that was sealed with the key {key!r} cannot be opened: {type(error).__name__}"
            ) from None

    def readable(self, text: str | None) -> str | None:
        """Return a stored text for people; what cannot be opened here says so instead of what it hides."""
        if text is None or not text.startswith(TEXT):
            return text
        try:
            return self.open(base64.b64decode(text[len(TEXT) :])).decode()
        except (PayloadKeyError, JournalCorruptError, ValueError) as error:
            return f"({error})"


PLAIN: Final = Vault()


def is_sealed(data: bytes) -> bool:
    """Say whether stored bytes are a frame."""
    return data[:1] == MAGIC[:1]


def plain(data: bytes) -> bytes:
    """Return a stored payload as it was before it was sealed, if it was.

    Errors: PayloadKeyError, naming the key, when it cannot be opened here; JournalCorruptError when it was changed.
    """
    if not is_sealed(data):
        return data
    return (data.vault if isinstance(data, Sealed) else PLAIN).open(data)


def opened(data: bytes | None) -> bytes | None:
    """Return a stored payload as it was where it can be opened here, else as it is stored."""
    try:
        return None if data is None else plain(data)
    except (PayloadKeyError, JournalCorruptError):
        return data


def key_of(frame: bytes) -> str:
    """Return the id of the key that a frame is sealed with.

    Errors: JournalCorruptError for what is no frame.
    """
    return _key_of(frame)[0]


def _key_of(frame: bytes) -> tuple[str, int]:
    """Return the id of the key of a frame, and where its data begins."""
    try:
        if not frame.startswith(MAGIC):
            raise ValueError("of another version")
        end = _HEAD + frame[_HEAD - 1]
        return frame[_HEAD:end].decode(), end
    except (IndexError, ValueError):
        raise JournalCorruptError("a stored value is no payload of this version") from None


def _mark_of(params: Mapping[str, Any]) -> bytes | None:
    """Return where a fact or event is said: only there is it compared with others."""
    if "fact" not in params and "event" not in params:
        return None
    place: Sequence[object] = [params.get(name) for name in ("run", "name", "type", "key")]
    return repr(place).encode("utf-8", "surrogatepass")


def _digest(given: bytes | None, stored: bytes | None, digest: bytes | None) -> bytes | None:
    return digest if digest is None or stored is None or stored is given else hashlib.sha256(stored).digest()


def _maybe(work: Callable[[bytes], bytes], value: bytes | None) -> bytes | None:
    return None if value is None else work(value)
