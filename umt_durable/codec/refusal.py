"""Why a value is refused and where in it, and the limits it is held to."""

from __future__ import annotations

import json
import re
from typing import Final

from umt_durable.errors import EncodingError

MAX_DEPTH: Final = 100
MAX_DIGITS: Final = 4300
MAX_BYTES: Final = 16 * 1024 * 1024

_MAX_SHOWN: Final = 20

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Refusal(Exception):
    """A value cannot be stored; an EncodingError at the edge, where the step or argument is known.

    Each container it passes on its way out adds the place it held the value at.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.places: list[object] = []

    def under(self, place: object) -> Refusal:
        """Add the index, key or field of the enclosing container."""
        self.places.append(place)
        return self

    def located(self, where: str) -> EncodingError:
        """Give the public error, which names the step or argument and the path."""
        shown = [_segment(place) for place in self.places[: -_MAX_SHOWN - 1 : -1]]
        cut = "…" if len(self.places) > _MAX_SHOWN else ""
        return EncodingError(where, "$" + "".join(shown) + cut, self.reason)


def name_of(kind: type) -> str:
    """Give the name of a type as people write it."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def too_deep() -> Refusal:
    """Give the refusal of a value nested below the limit."""
    return Refusal(f"it is nested more than {MAX_DEPTH} levels deep")


def _segment(place: object) -> str:
    match place:
        case bool() | None:
            return f"[{place}]"
        case int():
            return f"[{place}]" if place.bit_length() < 64 else "[a large int]"
        case str() if _PLAIN_NAME.fullmatch(place) and len(place) <= 60:
            return f".{place}"
        case str():
            return f"[{json.dumps(str(place[:60]))}]"
        case _:
            return f"[a {name_of(type(place))}]"
