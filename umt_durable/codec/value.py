"""One value at a time: to bytes with a digest, and back."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from umt_durable.codec import plain, typed
from umt_durable.codec.refusal import MAX_BYTES, Refusal
from umt_durable.errors import DecodingError, DefinitionError
from umt_durable.payloads import plain as opened

if TYPE_CHECKING:
    from pydantic import TypeAdapter

EMPTY: Final = inspect.Parameter.empty

_UNTYPED: Final = (EMPTY, Any, object)


class Codec(IntEnum):
    """How stored bytes are to be read; kept beside them."""

    JSON = 1


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value as it is stored: the bytes, how to read them, and their SHA-256 (32 bytes)."""

    data: bytes
    codec: int
    digest: bytes


def encode(value: object, annotation: object = EMPTY, *, where: str) -> Encoded:
    """Turn a value into bytes that come back as the same value.

    Errors: EncodingError, naming `where` and the path, when they would not.
    """
    return round_trip(value, annotation, where=where)[0]


def round_trip(value: object, annotation: object = EMPTY, *, where: str) -> tuple[Encoded, object]:
    """Encode a value, and give what decoding it gives: a fresh, equal value of the same type.

    Shape: with an annotation the types are pydantic's; without one JSON's, and datetime, date, time, timedelta, UUID,
    Decimal and bytes.
    Errors: EncodingError, naming `where` and the path, for what would come back different, or is over a limit.
    """
    try:
        data, back = write(value, annotation)
        return seal(data), back
    except Refusal as refusal:
        raise refusal.located(where) from refusal.__cause__


def decode(data: bytes, annotation: object = EMPTY, codec: int = Codec.JSON) -> object:
    """Turn stored bytes back into the value.

    Errors: DecodingError when they are not of this codec, or do not fit the annotation; PayloadKeyError when they are
    sealed with a key that is not known here.
    """
    check_codec(codec)
    data = opened(data)
    adapter = adapter_or_none(annotation)
    return plain.read(data) if adapter is None else typed.read(data, adapter)


def write(value: object, annotation: object) -> tuple[bytes, object]:
    """Give the bytes of a value and what they decode to.

    Errors: Refusal.
    """
    if annotation in _UNTYPED:
        return plain.round_trip(value)
    try:
        adapter = typed.adapter_of(annotation)
    except DefinitionError as error:
        raise Refusal(str(error)) from error
    if not isinstance(adapter, str):
        return typed.round_trip(value, adapter)
    try:
        return plain.round_trip(value)
    except Refusal as refusal:
        refusal.reason += f" (its annotation does not help: {adapter})"
        raise


def seal(data: bytes) -> Encoded:
    """Add the codec and the digest.

    Errors: Refusal when the bytes are over the limit.
    """
    if len(data) > MAX_BYTES:
        raise Refusal(f"it takes {len(data)} bytes, more than the {MAX_BYTES} allowed")
    return Encoded(data, Codec.JSON, hashlib.sha256(data).digest())


def check_codec(codec: int) -> None:
    """Refuse bytes of a codec this code does not know."""
    if codec != Codec.JSON:
        raise DecodingError(f"the stored value has codec {codec}, which is not known here")


def check_annotation(annotation: object, *, where: str) -> None:
    """Refuse an annotation that no value can be read as.

    Errors: DefinitionError.
    """
    if isinstance(annotation, str):
        raise DefinitionError(f"{where}: a type is given itself, not by a name such as {annotation!r:.100}")
    try:
        reason = None if annotation in _UNTYPED else typed.adapter_of(annotation)
    except (DefinitionError, SyntaxError) as error:
        raise DefinitionError(f"{where}: {error}") from None
    if isinstance(reason, str):
        raise DefinitionError(f"{where}: no payload can be read as {annotation!r:.100}: {reason}")


def adapter_or_none(annotation: object) -> TypeAdapter[Any] | None:
    """Give the pydantic adapter for an annotation, None when there is nothing to go by.

    Errors: DefinitionError when the annotation names a class that is not defined.
    """
    if annotation in _UNTYPED:
        return None
    adapter = typed.adapter_of(annotation)
    return None if isinstance(adapter, str) else adapter
