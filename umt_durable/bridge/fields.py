"""Reading the headers of a message that anybody may have sent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from celery.utils.time import maybe_iso8601

from umt_durable import texts
from umt_durable.errors import MessageRefusedError

MAX_ID: Final = 255


def is_name(value: object) -> bool:
    """Say whether a value is text of 1 to 255 characters that Postgres can store: an id, a task's or queue's name."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID and texts.is_storable(value)


class Fields:
    """The headers of one message, each read as the type it must have.

    Errors: MessageRefusedError naming the task and the header, and never what stands in it.
    """

    def __init__(self, task: object, values: Mapping[str, object]) -> None:
        if not isinstance(task, str) or not is_name(task):
            raise MessageRefusedError(f"the message names no task in 1 to {MAX_ID} characters")
        self.task = task
        self.values = values

    def refusal(self, reason: str) -> MessageRefusedError:
        """Build the error for this message."""
        return MessageRefusedError(f"message for {self.task} refused: {reason}")

    def run_id(self) -> str:
        """Read the id, which Postgres must be able to store."""
        found = self.text("id") or ""
        if not is_name(found):
            raise self.refusal(f"its id is no text of 1 to {MAX_ID} characters")
        return found

    def text(self, name: str) -> str | None:
        """Read text, or None."""
        found = self.values.get(name)
        if found is None or isinstance(found, str):
            return found
        raise self.refusal(f"its {name} is no text")

    def number(self, name: str) -> int | None:
        """Read a whole number from 0 up, or None."""
        found = self.values.get(name)
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 2**31:
            raise self.refusal(f"its {name} is no number from 0 up")
        return found

    def flag(self, name: str) -> bool | None:
        """Read yes or no, or None."""
        found = self.values.get(name)
        if found is None or isinstance(found, bool):
            return found
        raise self.refusal(f"its {name} is neither true nor false")

    def moment(self, name: str) -> datetime | None:
        """Read an ISO 8601 time; one without a zone is UTC, as it is for Celery's workers."""
        found = self.values.get(name)
        if not found:
            return None
        try:
            moment: datetime = maybe_iso8601(found)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise self.refusal(f"its {name} is no time") from error

    def limits(self, name: str) -> tuple[float | None, float | None]:
        """Read a pair of time limits in seconds, either of which may be None."""
        found = self.values.get(name) or (None, None)
        if isinstance(found, list | tuple) and len(found) == 2:
            hard, soft = found
            if all(limit is None or (isinstance(limit, int | float) and limit >= 0) for limit in (hard, soft)):
                return hard or None, soft or None
        raise self.refusal(f"its {name} is no pair of seconds")

    def texts(self, name: str) -> list[str]:
        """Read a list of text, empty when there is none."""
        found = self.values.get(name) or ()
        if isinstance(found, list | tuple | set | frozenset) and all(isinstance(item, str) for item in found):
            return list(found)
        raise self.refusal(f"its {name} is no list of text")

    def mapping(self, name: str) -> dict[str, object]:
        """Read an object, empty when there is none."""
        found = self.values.get(name) or {}
        if isinstance(found, Mapping) and all(isinstance(key, str) for key in found):
            return dict(found)
        raise self.refusal(f"its {name} is no object")

    def signatures(self, name: str) -> list[Mapping[str, object]]:
        """Read a list of signatures, empty when there is none."""
        found = self.values.get(name) or ()
        if isinstance(found, list | tuple) and all(_is_signature(item) for item in found):
            return list(found)
        raise self.refusal(f"its {name} is no list of signatures")

    def signature(self, name: str) -> Mapping[str, object] | None:
        """Read a signature, or None."""
        found = self.values.get(name)
        if not found:
            return None
        if isinstance(found, Mapping) and _is_signature(found):
            return found
        raise self.refusal(f"its {name} is no signature")


def _is_signature(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("task"), str)
