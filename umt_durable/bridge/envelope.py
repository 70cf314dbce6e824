"""What a run remembers of its Celery message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from kombu.utils import json as kombu_json

from umt_durable.errors import DecodingError, EncodingError
from umt_durable.payloads import plain

Signature = Mapping[str, object]

_dumps: Final[Callable[..., str]] = kombu_json.dumps
_loads: Final[Callable[[bytes], object]] = kombu_json.loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The parts of a Celery message that differ from what the relay would make up by itself.

    Shape: stored as one JSON object, without the fields that are at their default. Values that kombu's JSON knows
    (datetime, UUID, Decimal, bytes, …) come back as they were, tuples as lists. `headers` holds those that are not
    Celery's own, `properties` those of AMQP that tell of the sender; `exchange` and `routing_key` are set
    together, where the message did not go the plain way of its queue; `delivery_mode` is 1 (transient) or nothing.
    Units: `timelimit` is (hard, soft) in seconds; `eta` and `expires` are ISO 8601 as the caller's Celery wrote them.
    """

    root_id: str | None = None
    parent_id: str | None = None
    group: str | None = None
    group_index: int | None = None
    shadow: str | None = None
    origin: str | None = None
    argsrepr: str | None = None
    kwargsrepr: str | None = None
    retries: int = 0
    ignore_result: bool | None = None
    timelimit: Sequence[float | None] | None = None
    eta: str | None = None
    expires: str | None = None
    stamped_headers: Sequence[str] = ()
    stamps: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, object] = field(default_factory=dict)
    properties: Mapping[str, object] = field(default_factory=dict)
    reply_to: str | None = None
    correlation_id: str | None = None
    delivery_mode: int | None = None
    content_type: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    callbacks: Sequence[Signature] = ()
    errbacks: Sequence[Signature] = ()
    chain: Sequence[Signature] = ()
    chord: Signature | None = None

    def to_bytes(self) -> bytes | None:
        """Give the stored form, or None when there is nothing to remember.

        Errors: EncodingError when a signature, stamp or header holds what JSON cannot.
        """
        kept = {
            name: value
            for name, unset in _UNSET.items()
            if (value := getattr(self, name)) is not None and (value or unset is None)
        }
        if not kept:
            return None
        try:
            return _dumps(kept, separators=(",", ":")).encode()
        except Exception as error:
            raise EncodingError("the Celery message", _culprit(kept), str(error)[:200]) from error

    @classmethod
    def from_bytes(cls, stored: bytes | memoryview | None) -> Envelope:
        """Read the stored form; nothing stored gives the empty envelope. What a later version added is passed over.

        Errors: DecodingError when it is not what `to_bytes` makes; PayloadKeyError.
        """
        if not stored:
            return EMPTY
        data = plain(stored if isinstance(stored, bytes) else bytes(stored))
        try:
            found = _loads(data)
        except Exception as error:
            raise DecodingError(f"the stored Celery message cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise DecodingError("the stored Celery message is no object")
        known: dict[str, Any] = {name: value for name, value in found.items() if name in _UNSET}
        return cls(**known)


def _culprit(kept: Mapping[str, object]) -> str:
    """Name the field that cannot be stored."""
    for name, value in kept.items():
        try:
            _dumps(value)
        except Exception:  # noqa: BLE001 - the caller raises it, naming this field
            return f"$.{name}"
    return "$"


EMPTY: Final = Envelope()
_UNSET: Final[Mapping[str, object]] = {part.name: getattr(EMPTY, part.name) for part in fields(Envelope)}
