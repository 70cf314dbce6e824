"""What a body gives to its steps as functions: refused where it could not be called, before anything is written."""

from __future__ import annotations

import inspect
from typing import Any

from umt_durable.errors import DefinitionError


def check_function(where: str, label: str, function: Any, *, plain: bool = False) -> None:
    """Refuse what cannot be called, and with `plain` a coroutine function, which nobody would await.

    Errors: DefinitionError names the step and the argument.
    """
    if not callable(function):
        raise DefinitionError(f"{where}: {label} must be a function, not {function!r:.100}")
    called = getattr(function, "__call__", None)  # noqa: B004 - of an object that is called, its method
    if plain and (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)):
        raise DefinitionError(f"{where}: {label} is a coroutine function; give a plain one")
