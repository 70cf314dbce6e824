"""What undoes a step: declared once, under a name that the journal keeps, so that any worker can find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, overload

from umt_durable import codec, texts
from umt_durable.engine.functions import check_call
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import DefinitionError


class Undo:
    """A function that undoes a step, given the step's recorded result.

    Shape: called, it is that function. `retry` None is the policy of the run's task; `annotation` types the result.
    """

    def __init__(self, name: str, function: Callable[[Any], Any], retry: RetryPolicy | None) -> None:
        self.name, self.function, self.retry = name, function, retry
        self.annotation = codec.first_annotation(function)

    def __call__(self, result: Any) -> Any:
        return self.function(result)

    def __repr__(self) -> str:
        return f"<undo {self.name}>"


_DECLARED: Final[dict[str, Undo]] = {}


def name_of(undo: Undo | None) -> str | None:
    """Return what the journal keeps of an undo."""
    return None if undo is None else undo.name


def find(name: str) -> Undo | None:
    """Return what was declared in this process under a name."""
    return _DECLARED.get(name)


@overload
def undo(function: Callable[[Any], Any], /) -> Undo: ...
@overload
def undo(*, name: str | None = None, retry: RetryPolicy | None = None) -> Callable[[Callable[[Any], Any]], Undo]: ...
def undo(
    function: Callable[[Any], Any] | None = None, /, *, name: str | None = None, retry: RetryPolicy | None = None
) -> Any:
    """Declare what `step.options(undo=...)` takes: a function, or coroutine function, of a step's recorded result.

    It is executed at least once, like the body of a step, and can use `current_context().idempotency_key`. Declare it
    in a module that workers import: a worker that has none of its name leaves the run to a person.
    Shape: `name`, by default the module and name of the function, is what the journal keeps; `retry` replaces the
    policy of the run's task.
    Errors: DefinitionError for what cannot be called with one argument, a function within another one without `name`,
    a name that another function has, and what is no policy.
    """
    if function is None:
        return lambda given: _declare(given, name, retry)
    return _declare(function, name, retry)


def _declare(function: Callable[[Any], Any], name: str | None, retry: RetryPolicy | None) -> Undo:
    if not callable(function):
        raise DefinitionError(f"undo: a function of one argument, not {function!r:.100}")
    inner = getattr(function, "__qualname__", "<lambda>")
    if name is None and ("<" in inner or not hasattr(function, "__module__")):
        raise DefinitionError(f"undo {inner!r}: a worker could not find it again; declare it at the module's level")
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise DefinitionError(
            f"undo {inner!r}: retry is a RetryPolicy, such as RetryPolicy.NETWORK, not {retry!r:.100}"
        )
    check_call(f"undo {inner!r}", inner, function, "result", told="result")
    chosen = f"{function.__module__}.{inner}" if name is None else name
    texts.check("name of an undo", chosen, least=1)
    known = _DECLARED.get(chosen)
    if known is not None and _home(known.function) != _home(function):
        raise DefinitionError(f"undo {chosen!r} is declared twice, by {known.function!r} and {function!r}")
    found = _DECLARED[chosen] = Undo(chosen, function, retry)
    return found


def _home(function: Callable[..., Any]) -> tuple[object, object]:
    """Return where a function is written: a module that is imported again declares the same ones."""
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)
