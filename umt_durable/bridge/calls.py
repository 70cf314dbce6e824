"""Calls of ordinary tasks: whether those that are registered here take the arguments they are to get."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from umt_durable.errors import InputError

if TYPE_CHECKING:
    from celery import Celery

Call: TypeAlias = tuple[str, Sequence[Any], Mapping[str, Any]]

_NAMED: Final = re.compile(r"'(\w+)'")
_RESULT: Final = object()
"""Stands for the result of the task before, which Celery puts in front of the arguments."""


def check(app: Celery, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, step: str | None = None) -> None:
    """Refuse what Celery would refuse of a task that is registered here, before anything is kept.

    Errors: InputError naming the argument, and the step if one is given.
    """
    task = app.tasks.get(name)
    if task is None or not task.typing:
        return
    try:
        task.__header__(*args, **kwargs)
    except TypeError as error:
        field = ", ".join(_NAMED.findall(str(error))) or "arguments"
        raise InputError(name, [(field, str(error))], step=step) from None


def check_all(app: Celery, signature: Mapping[str, Any], *, step: str) -> None:
    """Do the same for each task of a signature, a chain, a group or a chord.

    Errors: InputError naming the step, the task and the argument.
    """
    for name, args, kwargs in _calls(signature, ()):
        check(app, name, args, kwargs, step=step)


def _calls(signature: Mapping[str, Any], before: Sequence[Any]) -> Iterator[Call]:
    """Give each call that a signature leads to, with a stand-in for what comes from the task before it."""
    kwargs = signature.get("kwargs") or {}
    match signature.get("subtask_type"):
        case None:
            first = () if signature.get("immutable") else before
            yield signature["task"], [*first, *(signature.get("args") or ())], kwargs
        case "chain":
            for member in _members(kwargs.get("tasks")):
                yield from _calls(member, before)
                before = (_RESULT,)
        case "group":
            for member in _members(kwargs.get("tasks")):
                yield from _calls(member, before)
        case "chord":
            for member in _members(kwargs.get("header")):
                yield from _calls(member, before)
            for member in _members(kwargs.get("body")):
                yield from _calls(member, (_RESULT,))


def _members(found: Any) -> list[Mapping[str, Any]]:
    return [one for one in (found if isinstance(found, list | tuple) else [found]) if isinstance(one, Mapping)]
