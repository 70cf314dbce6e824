"""Values of existing tasks, as Celery's own messages and results carry them.

A task written for Celery returns tuples and results of other tasks, and is called with them; Celery makes lists of
these on their way. They are stored in that form: there is no other that bodies and callers have ever seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from celery.result import ResultBase
from kombu.utils import json as kombu_json

from umt_durable import codec
from umt_durable.errors import DurableError

if TYPE_CHECKING:
    from umt_durable.engine.registry import TaskDefinition

_dumps: Final[Callable[[Any], str]] = kombu_json.dumps
_loads: Final[Callable[[str], Any]] = kombu_json.loads
_SIMPLE: Final = (str, int, float, bool, type(None))


def as_celery_carries(value: Any) -> Any:
    """Return a value as it comes out of Celery's JSON.

    Errors: whatever its parts raise that have no form there.
    """
    if type(value) in _SIMPLE:
        return value
    return _loads(_dumps(value.as_tuple() if isinstance(value, ResultBase) else value))


def result_of(definition: TaskDefinition, value: Any) -> Any:
    """Return the result of an existing task as its callers get it.

    Celery never looked at the annotation of its return; it is asked only about what Celery cannot carry at all. What
    neither can is returned as it is: the codec says what cannot be stored, and where in it.
    """
    try:
        return as_celery_carries(value)
    except Exception:  # noqa: BLE001 - Celery has no form for it
        try:
            typed = codec.encode(value, codec.return_annotation(definition.function), where="the result")
        except DurableError:
            return value
        return json.loads(typed.data)


def argument(value: Any) -> Any:
    """Return an argument of an existing task as its body gets it: what Celery makes of it on its way."""
    try:
        return as_celery_carries(value)
    except Exception:  # noqa: BLE001 - as with results
        return value
