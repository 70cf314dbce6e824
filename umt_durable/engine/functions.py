"""What a body gives to its steps as functions: refused where it could not be called, before anything is written."""

from __future__ import annotations

import inspect
from typing import Any

from umt_durable.errors import DefinitionError


def check_call(where: str, label: str, function: Any, *args: Any, told: str = "", **kwargs: Any) -> None:
    """Refuse a function that cannot be called with these arguments; `told` is how they read, if it is called by us.

    Errors: DefinitionError names the step and the function.
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        how = f"is called as {label}({told})" if told else "does not take the arguments that it is given"
        raise DefinitionError(f"{where}: {label} {how}: {error}") from None
    except ValueError:  # a builtin that does not tell what it takes
        return


def is_coroutine_function(function: Any) -> bool:
    """Say whether a call gives a coroutine, also of an object whose `__call__` is one."""
    called = getattr(function, "__call__", None)  # noqa: B004 - of an object that is called, its method
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def check_function(where: str, label: str, function: Any, *, plain: bool = False) -> None:
    """Refuse what cannot be called, and with `plain` a coroutine function, which nobody would await.

    Errors: DefinitionError names the step and the argument.
    """
    if not callable(function):
        raise DefinitionError(f"{where}: {label} must be a function, not {function!r:.100}")
    if plain and is_coroutine_function(function):
        raise DefinitionError(f"{where}: {label} is a coroutine function; give a plain one")
