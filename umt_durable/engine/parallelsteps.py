"""The steps that do several things at a time, as a body calls them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload
from uuid import UUID

from umt_durable.engine.functions import check_call, check_function
from umt_durable.engine.parallel import ItemFailure, Parallel, Piece, run_parallel
from umt_durable.engine.passing import Pass
from umt_durable.engine.recording import Recorder, StepOptions
from umt_durable.engine.spreading import Spread, spread
from umt_durable.errors import DefinitionError
from umt_durable.states import StepKind

R = TypeVar("R")
T = TypeVar("T")

Key: TypeAlias = Callable[[T], str | int | UUID]
Call: TypeAlias = Callable[[], Any] | tuple[Any, ...]
Item = TypeVar("Item", contravariant=True)
Returned = TypeVar("Returned", covariant=True)


class DurableFunction(Protocol[Item, Returned]):
    """A durable task that takes one item: what a worker can execute."""

    name: str
    durable_version: int

    def __call__(self, item: Item, /) -> Returned:
        """Execute the body in the calling process."""


class ParallelSteps:
    """The part of the vocabulary that works in parallel."""

    _pass: Pass
    _options: StepOptions
    _recorder: Recorder

    @overload
    def map(
        self,
        name: str,
        fn: Callable[[T], Coroutine[Any, Any, R]],
        items: Iterable[T],
        *,
        key: Key[T],
        concurrency: int | None = None,
        on_error: Literal["fail"] = "fail",
        workers: Literal[False] = False,
    ) -> list[R]: ...

    @overload
    def map(
        self,
        name: str,
        fn: Callable[[T], Coroutine[Any, Any, R]],
        items: Iterable[T],
        *,
        key: Key[T],
        concurrency: int | None = None,
        on_error: Literal["collect"],
        workers: Literal[False] = False,
    ) -> list[R | ItemFailure]: ...

    @overload
    def map(
        self,
        name: str,
        fn: Callable[[T], R],
        items: Iterable[T],
        *,
        key: Key[T],
        concurrency: int | None = None,
        on_error: Literal["fail"] = "fail",
        workers: Literal[False] = False,
    ) -> list[R]: ...

    @overload
    def map(
        self,
        name: str,
        fn: Callable[[T], R],
        items: Iterable[T],
        *,
        key: Key[T],
        concurrency: int | None = None,
        on_error: Literal["collect"],
        workers: Literal[False] = False,
    ) -> list[R | ItemFailure]: ...

    @overload
    def map(
        self,
        name: str,
        fn: DurableFunction[T, R],
        items: Iterable[T],
        *,
        key: Key[T],
        concurrency: int | None = None,
        on_error: Literal["fail"] = "fail",
        workers: Literal[True],
    ) -> list[R]: ...

    @overload
    def map(
        self,
        name: str,
        fn: DurableFunction[T, R],
        items: Iterable[T],
        *,
        key: Key[T],
        concurrency: int | None = None,
        on_error: Literal["collect"],
        workers: Literal[True],
    ) -> list[R | ItemFailure]: ...

    @overload
    def map(
        self,
        name: str,
        fn: str,
        items: Iterable[T],
        *,
        key: Key[T],
        concurrency: int | None = None,
        on_error: Literal["fail", "collect"] = "fail",
        workers: Literal[True],
    ) -> list[Any]: ...

    def map(
        self,
        name: str,
        fn: Callable[[T], Any] | str,
        items: Iterable[T],
        *,
        key: Key[T],
        concurrency: int | None = None,
        on_error: str = "fail",
        workers: bool = False,
    ) -> list[Any]:
        """Execute a function for each item, several at a time, and record each result as a step `name[key]` (I6).

        Shape: results in the order of the items, typed by the function's return annotation. `key` tells the items
        apart, so the order they end in never matters. `concurrency`: how many bodies at a time, 8 by default, in
        threads of this process. Each item is a step: it is tried again by the step's policy, and cannot call steps.
        Results are committed many at a time; a crash repeats the items whose result was not committed yet. After a
        failure no item is begun and those in flight end; the failure of the first item in their order that failed is
        raised, with a note that names it. With `collect` all are executed, and an ItemFailure stands for each that
        failed.
        With `workers=True` each item is a child run of a durable task instead, `fn` being the task or its name: all are
        inserted with the step, at once or in rounds of `concurrency`, on whatever workers take them, and end as
        cancelled with this run. `fail` then waits for all that were started.
        Errors: those of the items, ChildrenFailedError of items on workers; DefinitionError for two items of one key,
        and for what is no durable task, before anything is written.
        """
        check_function(f"step.map {name!r}", "key", key)
        check_call(f"step.map {name!r}", "key", key, None, told="item")
        if not isinstance(items, Iterable):
            raise DefinitionError(f"step.map {name!r}: items are to be gone through, which {items!r:.100} cannot be")
        if workers is True:
            self._options.refuse_for_bodies(f"step.map {name!r} on workers")
            pairs = [(key(item), item) for item in items]
            spreading = Spread(name=name, task=fn, items=pairs, concurrency=concurrency, on_error=on_error)
            return spread(self._pass, self._recorder, spreading)
        if workers is not False:
            raise DefinitionError(f"step.map {name!r}: workers is True or False, not {workers!r}")
        if not callable(fn):
            raise DefinitionError(f"step.map {name!r}: {fn!r} is no function")
        check_call(f"step.map {name!r}", "fn", fn, None, told="item")
        pieces = [Piece(key(item), fn, (item,)) for item in items]
        step = Parallel(
            verb="map", name=name, kind=StepKind.ITEM, pieces=pieces, concurrency=concurrency, on_error=on_error
        )
        return run_parallel(self._pass, self._options, step)

    @overload
    def parallel(
        self,
        branches: Mapping[str, Callable[[], Coroutine[Any, Any, R]]],
        *,
        name: str = "parallel",
        concurrency: int | None = None,
        on_error: Literal["fail"] = "fail",
    ) -> dict[str, R]: ...

    @overload
    def parallel(
        self,
        branches: Mapping[str, Callable[[], R]],
        *,
        name: str = "parallel",
        concurrency: int | None = None,
        on_error: Literal["fail"] = "fail",
    ) -> dict[str, R]: ...

    @overload
    def parallel(
        self,
        branches: Mapping[str, Call],
        *,
        name: str = "parallel",
        concurrency: int | None = None,
        on_error: Literal["fail", "collect"] = "fail",
    ) -> dict[str, Any]: ...

    def parallel(
        self,
        branches: Mapping[str, Any],
        *,
        name: str = "parallel",
        concurrency: int | None = None,
        on_error: str = "fail",
    ) -> dict[str, Any]:
        """Execute several branches of the body at a time; each calls steps of its own: sleeps, waits, branches again.

        Shape: labels to functions, or to tuples of a function and its arguments; the results by the same labels, each
        recorded as `name[label]` and typed by the function's return annotation. A branch that parks holds no thread and
        keeps no other from going on; the run parks when all are parked, until the earliest can go on. `concurrency`:
        how many branches work at a time, all by default. An error that leaves a branch is recorded as its outcome;
        failures are dealt with as in `map`.
        Errors: those of the branches; DefinitionError for what can never work, before anything is written.
        """
        if not isinstance(branches, Mapping):
            raise DefinitionError(f"step.parallel {name!r}: give a mapping of labels to functions, not {branches!r}")
        pieces = [_piece(name, label, call) for label, call in branches.items()]
        step = Parallel(
            verb="parallel",
            name=name,
            kind=StepKind.BRANCH,
            pieces=pieces,
            concurrency=max(1, min(len(pieces), 1000)) if concurrency is None else concurrency,
            on_error=on_error,
        )
        return dict(zip(branches, run_parallel(self._pass, self._options, step), strict=True))


def _piece(name: str, label: object, call: object) -> Piece:
    if not isinstance(label, str):
        raise DefinitionError(f"step.parallel {name!r}: the label of a branch is text, not {label!r}")
    function, *args = call if isinstance(call, tuple) and call else (call,)
    if callable(function):
        check_call(f"step.parallel {name!r}", f"the branch {label!r}", function, *args)
        return Piece(label, function, tuple(args))
    raise DefinitionError(f"step.parallel {name!r}: {label!r} is no function, nor a tuple of one and its arguments")
