"""What a call says beside its arguments, in Celery's names: checked before Celery, which would fail somewhere in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from celery.utils.time import maybe_iso8601
from kombu.entity import Exchange

from umt_durable.engine.passing import LONGEST
from umt_durable.errors import DefinitionError

_MOST: Final = LONGEST.total_seconds()


def check(task: str, options: Mapping[str, Any], app: Any) -> None:
    """Refuse options that no call can have; what only looks odd is Celery's to judge.

    Errors: DefinitionError names the task and the option.
    """
    priority, headers, exchange = options.get("priority"), options.get("headers"), options.get("exchange")
    if priority is not None and (isinstance(priority, bool) or not _is_whole(priority)):
        raise DefinitionError(f"{task}: priority must be a whole number, not {priority!r:.100}")
    if headers and not (isinstance(headers, Mapping) and all(isinstance(name, str) for name in headers)):
        raise DefinitionError(f"{task}: headers must be a dict with text keys, not {headers!r:.100}")
    if exchange is not None and not isinstance(exchange, str | Exchange):
        raise DefinitionError(f"{task}: exchange must be a name or an Exchange, not {exchange!r:.100}")
    if countdown := options.get("countdown"):
        seconds(task, "countdown", countdown)
    if (eta := options.get("eta")) is not None:
        moment(task, "eta", eta, app)
    if (expires := options.get("expires")) is not None:
        seconds(task, "expires", expires) if isinstance(expires, int | float) else moment(task, "expires", expires, app)


def seconds(task: str, name: str, given: object) -> float:
    """Read a time from now, which may be past.

    Errors: DefinitionError names the task and the option.
    """
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or abs(given) > _MOST:
        raise DefinitionError(f"{task}: {name} must be seconds, at most {LONGEST.days} days, not {given!r:.100}")
    return float(given)


def moment(task: str, name: str, given: object, app: Any) -> datetime:
    """Read a point in time; one without a zone is the app's.

    Errors: DefinitionError names the task and the option.
    """
    try:
        found: datetime = maybe_iso8601(given)
        found = found if found.tzinfo is not None else found.replace(tzinfo=app.timezone)
        found.astimezone(UTC)  # at the ends of the calendar there may be no such moment
        return found
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise DefinitionError(f"{task}: {name} must be a datetime or ISO 8601 text, not {given!r:.100}") from error


def _is_whole(given: Any) -> bool:
    """Say whether kombu's transports would read a value as a whole number, as they do with text."""
    try:
        return bool(int(given) == float(given))
    except (OverflowError, TypeError, ValueError):
        return False
