"""Values with an annotation: pydantic writes and reads them, our own forms help where its JSON would lose something.

A value is written as pydantic's JSON first. Where that does not come back the same (bytes that are not text, a fold, a
date beside a datetime in a union), its Python form is written with the tags of `plain`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from umt_durable.codec import plain
from umt_durable.codec.refusal import Refusal
from umt_durable.codec.same import check_same
from umt_durable.errors import DecodingError, DefinitionError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_MAX_CACHED: Final = 2000
# What serialisers and validators of users' classes raise; pydantic wraps ValueError and AssertionError only.
FOREIGN_ERRORS: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)

# By identity first: annotations live with their functions, and hashing a union costs more than encoding a small value.
_by_identity: dict[int, tuple[object, TypeAdapter[Any] | str]] = {}
# With the text: `int | str` and `str | int` are equal, but a value that fits both is read by their order.
_by_meaning: dict[tuple[object, str], TypeAdapter[Any] | str] = {}


def adapter_of(annotation: object) -> TypeAdapter[Any] | str:
    """Give the adapter of an annotation, or the reason why pydantic has none for it.

    Errors: DefinitionError when it names a class that is not defined (yet).
    """
    cached = _by_identity.get(id(annotation))
    if cached is not None and cached[0] is annotation:
        return cached[1]
    adapter = _by_text(annotation)
    if len(_by_identity) >= _MAX_CACHED:
        _by_identity.clear()
    _by_identity[id(annotation)] = (annotation, adapter)
    return adapter


def round_trip(value: object, adapter: TypeAdapter[Any]) -> tuple[bytes, object]:
    """Write a value and read it again.

    Errors: Refusal when no form of it comes back the same.
    """
    try:
        data = adapter.dump_json(value, round_trip=True, warnings="none", by_alias=False)
        back = parse(data, adapter)
        check_same(value, back)
    except (Refusal, DecodingError, *FOREIGN_ERRORS):
        return _round_trip_tagged(value, adapter)
    return data, back


def read(data: bytes, adapter: TypeAdapter[Any]) -> object:
    """Read a value that was written in either form, or by someone else as plain JSON.

    Errors: DecodingError, naming the places that do not fit, without their values.
    """
    try:
        return parse(data, adapter)
    except FOREIGN_ERRORS as error:
        listed = "; ".join(f"${path_of(place)}: {reason}" for place, reason in problems(error))
        raise DecodingError(f"the stored value does not fit its annotation: {listed}") from None


def parse(data: bytes, adapter: TypeAdapter[Any]) -> object:
    """Read a value as `read` does, with pydantic's own error.

    Errors: FOREIGN_ERRORS, see `problems`; DecodingError when a tag in it is wrong.
    """
    if plain.MARK in data:
        value, tagged = plain.unpack(plain.loads(data))
        if tagged:
            return validate(value, adapter)
    return adapter.validate_json(data, by_alias=True, by_name=True)


def validate(value: object, adapter: TypeAdapter[Any]) -> object:
    """Give the value as its annotation has it.

    Errors: FOREIGN_ERRORS; see `problems`.
    """
    return adapter.validate_python(value, by_alias=True, by_name=True)


def problems(error: Exception) -> list[tuple[tuple[int | str, ...], str]]:
    """Give the places a validation refused, at most ten, each with the reason; never with the value."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return [((), f"a validator raised {type(error).__name__}")]
    found = error.errors(include_url=False, include_context=False, include_input=False)[:10]
    return [(item["loc"], item["msg"]) for item in found]


def path_of(place: tuple[int | str, ...]) -> str:
    """Write a place below a field as people do: `.lines[3].price`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)


def _round_trip_tagged(value: object, adapter: TypeAdapter[Any]) -> tuple[bytes, object]:
    try:
        python = adapter.dump_python(value, round_trip=True, warnings="none", by_alias=False)
    except FOREIGN_ERRORS as error:
        raise Refusal(f"writing it raised {type(error).__name__}") from error
    # Within the tag even plain JSON is read as Python values: text that looks like a UUID stays text in `UUID | str`.
    data = plain.write_packed({f"{plain.TAG}value": plain.LoosePacker().pack(python)})
    try:
        back = parse(data, adapter)
    except FOREIGN_ERRORS as error:
        place, reason = problems(error)[0]
        refusal = Refusal(f"it does not fit its annotation: {reason}")
        refusal.places.extend(reversed(place))
        raise refusal from None
    check_same(value, back)
    return data, back


def _by_text(annotation: object) -> TypeAdapter[Any] | str:
    try:
        return _by_meaning[annotation, repr(annotation)]
    except KeyError:
        adapter = _build(annotation)
    except TypeError:
        return _build(annotation)  # not hashable, such as Annotated[int, {}]
    if len(_by_meaning) >= _MAX_CACHED:
        _by_meaning.clear()
    _by_meaning[annotation, repr(annotation)] = adapter
    return adapter


def _build(annotation: Any) -> TypeAdapter[Any] | str:
    from pydantic import PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        if not adapter.pydantic_complete:
            adapter.rebuild(raise_errors=True)
    except PydanticUndefinedAnnotation as error:
        raise DefinitionError(f"the annotation {annotation!r} names {error.name!r}, which is not defined") from error
    except (PydanticUserError, TypeError) as error:
        return re.split(r"\. |\.?\n", str(error), maxsplit=1)[0]
    return adapter
