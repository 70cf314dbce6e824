"""The arguments of a run or step: stored as one value, and fingerprinted.

    {"args": [...], "kwargs": {...}}

Each argument is encoded on its own, with the annotation of its parameter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from umt_durable.codec import plain, typed
from umt_durable.codec.refusal import Refusal, name_of
from umt_durable.codec.value import EMPTY, Codec, Encoded, adapter_or_none, check_codec, seal, write
from umt_durable.errors import DecodingError
from umt_durable.payloads import plain as opened

FINGERPRINT_BYTES: Final = 16

Annotations = Mapping[str, object]
Arguments = tuple[tuple[object, ...], dict[str, object]]


def encode_arguments(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    annotations: Annotations | None = None,
    *,
    where: str = "the arguments",
) -> Encoded:
    """Turn arguments into bytes that come back as the same arguments.

    Shape: `annotations` has the parameters by name in their order; the i-th positional argument has the i-th one, and
    arguments beyond them are encoded without an annotation.
    Errors: EncodingError, naming the argument by its path, such as `$.kwargs.order.lines[3]`.
    """
    of_index, of_name = _lookups(annotations)
    return encode_each(args, kwargs, of_index, of_name, where=where)


def decode_arguments(data: bytes, annotations: Annotations | None = None, codec: int = Codec.JSON) -> Arguments:
    """Turn stored bytes back into positional and keyword arguments.

    Errors: DecodingError when they are no arguments, or do not fit the annotations.
    """
    of_index, of_name = _lookups(annotations)
    args, kwargs = split(data, codec)
    return (
        tuple(_read_member(item, of_index(index)) for index, item in enumerate(args)),
        {name: _read_member(item, of_name(name)) for name, item in kwargs.items()},
    )


def encode_each(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    of_index: Callable[[int], object],
    of_name: Callable[[str], object],
    *,
    where: str,
) -> Encoded:
    """Encode arguments whose annotations are found by position and by name.

    Errors: EncodingError.
    """
    try:
        items = [_write(value, of_index(index), index, "args") for index, value in enumerate(args)]
        members = [_write_key(name) + _write(value, of_name(name), name, "kwargs") for name, value in kwargs.items()]
        return seal(b'{"args":[' + b",".join(items) + b'],"kwargs":{' + b",".join(members) + b"}}")
    except Refusal as refusal:
        raise refusal.located(where) from refusal.__cause__


def fingerprint(args: Sequence[object], kwargs: Mapping[str, object], *, where: str = "the inputs of a step") -> bytes:
    """Give 16 bytes that differ when the inputs of a step differ.

    Shape: dict and set order do not count. Tuples count as lists, enum members as their values, dataclasses and models
    as dicts of their fields: so a class may be moved or renamed.
    Errors: EncodingError for an argument that has no stored form, such as a connection or a function.
    """
    if not args and not kwargs:
        return _NO_INPUTS
    return _hash(_canonical(args, kwargs, where))[:FINGERPRINT_BYTES]


def hash_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    """Give the SHA-256 of arguments in their stored form, with all keys sorted."""
    return _hash(plain.dumps_sorted({"args": args, "kwargs": kwargs}))


def split(data: bytes, codec: int) -> tuple[list[object], dict[str, object]]:
    """Take stored arguments apart; the members are still in their stored form.

    Errors: DecodingError when the bytes do not hold arguments; PayloadKeyError.
    """
    check_codec(codec)
    match plain.loads(opened(data)):
        case {"args": list() as args, "kwargs": dict() as kwargs, **rest} if not rest:
            return args, kwargs
        case _:
            raise DecodingError('the stored arguments are not {"args": [...], "kwargs": {...}}')


def parse_member(stored: object, annotation: object) -> object:
    """Read one argument from its stored form.

    Errors: those of pydantic (`typed.problems` reads them), DecodingError when a tag is wrong.
    """
    adapter = adapter_or_none(annotation)
    if adapter is None:
        return plain.unpack(stored)[0]
    return typed.parse(plain.dumps(stored).encode(), adapter)


def _read_member(stored: object, annotation: object) -> object:
    adapter = adapter_or_none(annotation)
    if adapter is None:
        return plain.unpack(stored)[0]
    return typed.read(plain.dumps(stored).encode(), adapter)


def _write(value: object, annotation: object, place: int | str, part: str) -> bytes:
    try:
        return write(value, annotation)[0]
    except Refusal as refusal:
        raise refusal.under(place).under(part) from refusal.__cause__


def _write_key(name: str) -> bytes:
    return plain.write_packed(plain.Packer().pack(name)) + b":"


def _lookups(annotations: Annotations | None) -> tuple[Callable[[int], object], Callable[[str], object]]:
    known = {} if annotations is None else annotations
    positional = list(known.values())
    return (
        lambda index: positional[index] if index < len(positional) else EMPTY,
        lambda name: known.get(name, EMPTY),
    )


def _canonical(args: Sequence[object], kwargs: Mapping[str, object], where: str) -> str:
    try:
        return plain.dumps_sorted([args, kwargs])
    except (TypeError, ValueError, RecursionError):
        pass  # Values JSON has no word for; the slow way says which it cannot take.
    packed = []
    for part, inputs in (("args", list(args)), ("kwargs", dict(kwargs))):
        try:
            packed.append(_ComparingPacker().pack(inputs))
        except Refusal as refusal:
            refusal.reason += "; give the step a key= of its own"
            raise refusal.under(part).located(where) from refusal.__cause__
    return plain.dumps_sorted(packed)


def _hash(text: str) -> bytes:
    # Lone surrogates are refused where a value is stored; here they only have to differ.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class _ComparingPacker(plain.LoosePacker):
    """Gives forms that are compared and never read."""

    def _tuple(self, items: list[object]) -> object:
        return items

    def _object(self, value: object, depth: int) -> object:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return self.pack({name: getattr(value, name) for name in names}, depth)
        dump = getattr(value, "model_dump", None) if hasattr(type(value), "__pydantic_fields__") else None
        if dump is not None:
            return self.pack(dump(round_trip=True, warnings="none"), depth)
        if isinstance(value, os.PathLike):
            return self.pack(os.fspath(value), depth)
        raise Refusal(f"objects of type {name_of(type(value))} have no stored form")


_NO_INPUTS: Final = _hash(plain.dumps_sorted([[], {}]))[:FINGERPRINT_BYTES]
