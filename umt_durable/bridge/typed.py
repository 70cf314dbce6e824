"""A declared task as its callers' type checker sees it. At run time it is a `DurableTask`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from umt_durable.engine.async_context import AsyncTaskContext
from umt_durable.engine.context import TaskContext

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context
    from celery.canvas import Signature
    from celery.result import AsyncResult, EagerResult

P = ParamSpec("P")
R = TypeVar("R")
Result = TypeVar("Result")
Returned = TypeVar("Returned", covariant=True)

Body: TypeAlias = Callable[Concatenate[TaskContext, P], R]
"""A durable body: the context comes first, and callers do not pass it."""

AsyncBody: TypeAlias = Callable[Concatenate[AsyncTaskContext, P], Coroutine[Any, Any, R]]
"""An async durable body."""


class DurableTaskOf(Protocol[P, Returned]):
    """A durable task called with `P` whose body returns `Returned`.

    Shape: `delay`, `enqueue`, `si` and a direct call are checked against the body's parameters. Where Celery takes a
    part of the arguments (`s`) or a container of them (`apply_async`, `map`), and beside the options of `enqueue`, that
    cannot be said in types: these are checked when the run is started, which names the field.
    """

    name: str
    app: Celery
    backend: Any
    ignore_result: bool
    durable_version: int

    @property
    def request(self) -> Context: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Returned:
        """Execute the body in the calling process; see `DurableTask.__call__`."""

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult:
        """Start a run with these arguments."""

    @overload
    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult: ...
    @overload
    def enqueue(
        self,
        *args: Any,
        conn: object,
        idempotency_key: str | None = None,
        idempotency_ttl: float | timedelta | None = None,
        idempotency_policy: Literal["attach", "reject"] = "attach",
        ref: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncResult: ...
    @overload
    def enqueue(
        self,
        *args: Any,
        idempotency_key: str | None,
        idempotency_ttl: float | timedelta | None = None,
        idempotency_policy: Literal["attach", "reject"] = "attach",
        ref: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncResult: ...
    @overload
    def enqueue(
        self, *args: Any, ref: str | None, attributes: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> AsyncResult: ...
    @overload
    def enqueue(self, *args: Any, attributes: Mapping[str, Any] | None, **kwargs: Any) -> AsyncResult: ...
    def enqueue(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Start a run with these arguments; see `DurableTask.enqueue` for the options."""

    @overload
    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult: ...
    @overload
    async def aenqueue(
        self,
        *args: Any,
        conn: object,
        idempotency_key: str | None = None,
        idempotency_ttl: float | timedelta | None = None,
        idempotency_policy: Literal["attach", "reject"] = "attach",
        ref: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncResult: ...
    @overload
    async def aenqueue(
        self,
        *args: Any,
        idempotency_key: str | None,
        idempotency_ttl: float | timedelta | None = None,
        idempotency_policy: Literal["attach", "reject"] = "attach",
        ref: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncResult: ...
    @overload
    async def aenqueue(
        self, *args: Any, ref: str | None, attributes: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> AsyncResult: ...
    @overload
    async def aenqueue(self, *args: Any, attributes: Mapping[str, Any] | None, **kwargs: Any) -> AsyncResult: ...
    async def aenqueue(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Start a run from an asyncio program; see `DurableTask.aenqueue`."""

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Start a run as Celery's `apply_async` does; see `DurableTask.apply_async`."""

    def apply(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> EagerResult:
        """Execute a run in the calling process."""

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """Return a signature; what comes before in a chain is put in front of its arguments."""

    def si(self, *args: P.args, **kwargs: P.kwargs) -> Signature:
        """Return a signature that takes nothing from what comes before it in a chain."""

    def signature(self, args: Sequence[Any] | None = None, *starargs: Any, **starkwargs: Any) -> Signature:
        """Return a signature with options."""

    def map(self, it: Sequence[Any]) -> Signature:
        """Return a signature that starts a run for each item."""

    def starmap(self, it: Sequence[Any]) -> Signature:
        """Return a signature that starts a run for each list of arguments."""

    def chunks(self, it: Sequence[Any], n: int) -> Signature:
        """Return a signature that starts runs in groups of `n`."""

    def replace(self, sig: Any) -> Any:
        """End the current run, from its body, in favour of a signature."""

    def AsyncResult(self, task_id: str, **kwargs: Any) -> AsyncResult:
        """Return the result of a run by its id."""


class TaskMaker(Protocol):
    """What `durable.task(...)` returns: a decorator for plain and async bodies."""

    @overload
    def __call__(self, function: AsyncBody[P, Result], /) -> DurableTaskOf[P, Result]: ...
    @overload
    def __call__(self, function: Body[P, Result], /) -> DurableTaskOf[P, Result]: ...
