"""Which versions of its durable tasks a worker takes, where it was told so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from umt_durable.errors import DefinitionError, UnknownTaskError
from umt_durable.states import OWN

LONGEST_NUMBER: Final = 10
"""How many digits a version has at most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One item of a selection: a name or a pattern of names, with a version or with all of them."""

    text: str
    name: str
    version: int | None

    def covers(self, name: str, version: int) -> bool:
        """Say whether a version of a task is meant."""
        return self.version in (None, version) and fnmatchcase(name, self.name)


@dataclass(frozen=True, slots=True)
class Selection:
    """The versions that a worker takes. The tasks of this package it always takes: answers come by them."""

    choices: tuple[Choice, ...]

    @classmethod
    def parse(cls, texts: Iterable[str], known: Iterable[tuple[str, int]]) -> Selection:
        """Read a selection from texts such as `charge@1`, `charge` and `import_*`, each of which must mean something.

        Shape: `known` are the names and versions that there are.
        Errors: DefinitionError for a selection of nothing; UnknownTaskError for what means no version that there is.
        """
        there = [(name, version) for name, version in known if not name.startswith(OWN)]
        choices = tuple(_choice(text.strip(), there) for text in texts if text.strip())
        if not choices:
            raise DefinitionError(f"versions: name at least one of {', '.join(_texts(there)) or 'none'}")
        return cls(choices)

    def takes(self, name: str, version: int) -> bool:
        """Say whether a version of a task is taken."""
        return name.startswith(OWN) or any(choice.covers(name, version) for choice in self.choices)

    def __str__(self) -> str:
        return ", ".join(choice.text for choice in self.choices)


def _choice(text: str, there: list[tuple[str, int]]) -> Choice:
    name, at, number = text.partition("@")
    is_number = number.isascii() and number.isdigit() and len(number) <= LONGEST_NUMBER
    choice = Choice(text, name, int(number) if is_number else None)
    if (at and not is_number) or not any(choice.covers(*one) for one in there):
        raise UnknownTaskError(text, _texts(there))
    return choice


def _texts(there: Iterable[tuple[str, int]]) -> list[str]:
    return sorted(f"{name}@{version}" for name, version in there)
