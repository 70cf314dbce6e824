"""Text as Postgres can hold it: without NUL, without lone surrogates, and short where an index holds it."""

from __future__ import annotations

from typing import Any, Final, overload

from umt_durable.errors import DefinitionError

LONGEST: Final = 255
MOST_BYTES: Final = 3 * LONGEST
"""What a name or key may take in UTF-8: three of them fit into one entry of an index, which holds 2704 bytes."""


def is_storable(text: str) -> bool:
    """Say whether Postgres can store text and give it back unchanged."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


@overload
def storable(text: str) -> str: ...
@overload
def storable(text: None) -> None: ...
def storable(text: str | None) -> str | None:
    """Return text with whatever Postgres cannot store replaced by `?`."""
    if text is None or is_storable(text):
        return text
    return text.replace("\0", "?").encode("utf-8", "replace").decode()


def check(field: str, value: object, *, least: int = 1) -> None:
    """Refuse a value that is no text of `least` to 255 characters which Postgres can store; None passes.

    Errors: DefinitionError names the field.
    """
    if value is None:
        return
    if not isinstance(value, str):
        raise DefinitionError(f"{field} must be text, not {type(value).__name__}")
    if not least <= len(value) <= LONGEST:
        raise DefinitionError(f"{field} must have {least} to {LONGEST} characters, not {len(value)}")
    if not is_storable(value):
        raise DefinitionError(f"{field} holds a NUL or half of a surrogate pair, which cannot be stored")
    if len(value.encode()) > MOST_BYTES:
        raise DefinitionError(f"{field} must have at most {MOST_BYTES} bytes in UTF-8, not {len(value.encode())}")


def check_json(field: str, value: Any) -> None:
    """Refuse a JSON value with text in it that Postgres cannot store as `jsonb`.

    Errors: DefinitionError names the field.
    """
    match value:
        case str():
            if not is_storable(value):
                raise DefinitionError(f"{field} hold a NUL or half of a surrogate pair, which cannot be stored")
        case dict():
            for name, inner in value.items():
                check_json(field, name)
                check_json(field, inner)
        case list():
            for inner in value:
                check_json(field, inner)
        case _:
            return
