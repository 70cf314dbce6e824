"""Durations of a fixed length, read from text and written as ISO 8601.

Two spellings are read: ISO 8601 from weeks to seconds (`P1DT2H`, `PT15M`, `P2W`, `PT0.5S`) and a short one (`2d`,
`1h30m`, `15m`, `0.5s`). Months and years are refused in both: how long they are depends on where they begin.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta

from umt_durable.errors import DurationError

_NUMBER = r"[0-9]{1,15}"
_SECONDS = rf"{_NUMBER}(?:\.[0-9]{{1,6}})?"
_ISO = re.compile(
    rf"P(?:(?P<weeks>{_NUMBER})W)?(?:(?P<days>{_NUMBER})D)?"
    rf"(?P<time>T(?:(?P<hours>{_NUMBER})H)?(?:(?P<minutes>{_NUMBER})M)?(?:(?P<seconds>{_SECONDS})S)?)?"
)
_SHORT = re.compile(
    rf"(?:(?P<weeks>{_NUMBER})w)?(?:(?P<days>{_NUMBER})d)?"
    rf"(?:(?P<hours>{_NUMBER})h)?(?:(?P<minutes>{_NUMBER})m)?(?:(?P<seconds>{_SECONDS})s)?"
)
_CALENDAR = re.compile(r"P?(?:[0-9.]+[WD])*[0-9.]+[YM].*|[0-9.]+(?:mo|y).*", re.DOTALL)
_UNITS = ("weeks", "days", "hours", "minutes", "seconds")
_HINT = "write for example PT15M, P1DT2H, P2W, 15m or 1h30m"


def parse_duration(value: str | timedelta | float) -> timedelta:
    """Read a duration that is zero or longer.

    Units: a number without a unit is seconds; seconds take up to six decimals.
    Errors: DurationError for months and years, negative or empty values, and anything else that is not read exactly.
    """
    match value:
        case bool():
            raise DurationError(f"a duration cannot be a bool; {_HINT}")
        case timedelta():
            found = value
        case str():
            found = _from_text(value)
        case int() | float():
            found = _from_seconds(value)
        case _:
            raise DurationError(f"a duration cannot be a {type(value).__name__}; {_HINT}")
    if found < timedelta(0):
        raise DurationError("a duration cannot be negative")
    return found


def format_duration(value: timedelta) -> str:
    """Write a duration as ISO 8601, so that `parse_duration` gives back the same value.

    Errors: DurationError when it is negative.
    """
    if value < timedelta(0):
        raise DurationError("a duration cannot be negative")
    minutes, seconds = divmod(value.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{value.microseconds:06d}".rstrip("0") if value.microseconds else ""
    date = f"{value.days}D" if value.days else ""
    time = (f"{hours}H" if hours else "") + (f"{minutes}M" if minutes else "")
    if seconds or fraction or not (date or time):
        time += f"{seconds}{fraction}S"
    return f"P{date}T{time}" if time else f"P{date}"


def _from_text(text: str) -> timedelta:
    shown = repr(text if len(text) <= 40 else text[:40] + "…")
    if not text.strip():
        raise DurationError(f"a duration cannot be empty; {_HINT}")
    if text.lstrip().startswith("-"):
        raise DurationError(f"the duration {shown} is negative")
    found = (_ISO if text.startswith("P") else _SHORT).fullmatch(text)
    if found is None:
        if _CALENDAR.fullmatch(text):
            raise DurationError(f"the duration {shown} has months or years, whose length varies; use weeks or days")
        raise DurationError(f"the duration {shown} is not read; {_HINT}")
    parts = found.groupdict()
    if parts.get("time") == "T" or not any(parts[unit] for unit in _UNITS):
        raise DurationError(f"the duration {shown} names no amount; {_HINT}")
    return _sum(shown, parts)


def _sum(shown: str, parts: dict[str, str | None]) -> timedelta:
    """Add the parts in whole microseconds: floating-point seconds would not be exact."""
    whole, _, fraction = (parts["seconds"] or "0").partition(".")
    try:
        return timedelta(
            weeks=int(parts["weeks"] or 0),
            days=int(parts["days"] or 0),
            hours=int(parts["hours"] or 0),
            minutes=int(parts["minutes"] or 0),
            seconds=int(whole),
            microseconds=int(fraction.ljust(6, "0")),
        )
    except OverflowError as error:
        raise DurationError(f"the duration {shown} is too long") from error


def _from_seconds(value: float) -> timedelta:
    if not math.isfinite(value):
        raise DurationError("a duration must be finite")
    try:
        return timedelta(seconds=value)
    except OverflowError as error:
        raise DurationError("the duration is too long") from error
