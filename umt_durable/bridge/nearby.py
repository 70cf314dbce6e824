"""Celery apps in the folder of a command that names none: who forgets `-A` is told, not led to another app."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final

_MADE: Final = re.compile(rb"^\w+ *(?::[^=\n]+)?= *(?:celery\.)?Celery\(", re.MULTILINE)
_FILES: Final = 300
_BYTES: Final = 200_000


def apps_near(folder: Path) -> list[str]:
    """Name the modules of a folder, and of the packages in it, whose text makes a Celery app, as `-A` takes them.

    Nothing is imported. A folder of very many files is looked at in part.
    """
    return [_module(path, folder) for path in islice(_sources(folder), _FILES) if _makes_app(path)]


def _sources(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(
            chain(folder.glob("*.py"), folder.glob("[!.]*/*.py")), key=lambda path: (len(path.parts), path)
        )
    except OSError:  # a folder that may not be read has no app for us
        return


def _makes_app(path: Path) -> bool:
    try:
        with path.open("rb") as source:
            return _MADE.search(source.read(_BYTES)) is not None
    except OSError:
        return False


def _module(path: Path, folder: Path) -> str:
    """Return the name of a module; that of its package where Celery finds the app by the package."""
    package = path.relative_to(folder).parent.parts
    return ".".join(package if package and path.stem in ("celery", "__init__") else (*package, path.stem))
