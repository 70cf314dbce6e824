"""What `durable doctor` finds: one line for each thing that was looked at, and the fix where something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Level(StrEnum):
    """How bad a finding is. `fail`: runs can be lost, stand still, or not be started."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `fix` is empty where nothing needs one."""

    level: Level
    check: str
    what: str
    fix: str = ""


Findings: TypeAlias = Iterator[Finding]


def ok(check: str, what: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(Level.OK, check, what)


def warn(check: str, what: str, fix: str) -> Finding:
    """Return a finding that costs something, but loses no run."""
    return Finding(Level.WARN, check, what, fix)


def fail(check: str, what: str, fix: str) -> Finding:
    """Return a finding under which runs can be lost, stand still, or not be started."""
    return Finding(Level.FAIL, check, what, fix)


def counted(number: int, one: str, more: str) -> str:
    """Return a number with what is counted, in the grammar that fits it: `1 run is`, `2 runs are`."""
    return f"{number} {one if number == 1 else more}"


def many(names: list[str], limit: int = 3) -> str:
    """Return some names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
