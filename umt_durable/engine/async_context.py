"""The context of an async body: the same steps, awaited."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, Unpack, overload

from umt_durable import codec
from umt_durable.engine.changing import continue_as_new, patched
from umt_durable.engine.context import RunContext
from umt_durable.engine.loops import in_owner
from umt_durable.engine.parallel import ItemFailure
from umt_durable.engine.parallelsteps import Call, DurableFunction, Key
from umt_durable.engine.passing import Pass
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.steps import Steps
from umt_durable.engine.undoing import Undo
from umt_durable.engine.waitables import Fact, Waitable
from umt_durable.engine.waitsteps import GroupOptions, WaitOptions
from umt_durable.errors import DurableError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V")


def _awaited(
    method: Callable[Concatenate[Steps, P], R],
) -> Callable[Concatenate[AsyncSteps, P], Coroutine[Any, Any, R]]:
    """Return a step that is done in the thread of its body while the body awaits it."""

    @wraps(method)
    async def call(self: AsyncSteps, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._do(lambda: method(self._steps, *args, **kwargs))

    return call


class AsyncSteps:
    """The vocabulary of an async durable body: `Steps`, each to be awaited.

    They are done one after the other, also those that are awaited together by `asyncio.gather`; `parallel` and `map`
    are what does several at a time.
    """

    def __init__(self, the_pass: Pass, steps: Steps) -> None:
        self._pass = the_pass
        self._steps = steps

    def options(
        self,
        *,
        key: str | int | uuid.UUID | None = None,
        retry: RetryPolicy | None = None,
        preemptible: bool = False,
        renamed_from: str | Sequence[str] | None = None,
        undo: Undo | None = None,
    ) -> AsyncSteps:
        """Return these steps with options for the call that follows; see `Steps.options`."""
        steps = self._steps.options(key=key, retry=retry, preemptible=preemptible, renamed_from=renamed_from, undo=undo)
        return AsyncSteps(self._pass, steps)

    @overload
    async def run(
        self, name: str, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def run(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def run(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Execute a function or coroutine function once and record its result; see `Steps.run`."""
        return await self._do(lambda: self._steps.run(name, fn, *args, **kwargs))

    transaction = _awaited(Steps.transaction)
    effect = _awaited(Steps.effect)
    sleep = _awaited(Steps.sleep)
    sleep_until = _awaited(Steps.sleep_until)
    task = _awaited(Steps.task)
    call = _awaited(Steps.call)
    gather = _awaited(Steps.gather)
    spawn = _awaited(Steps.spawn)
    wait_any = _awaited(Steps.wait_any)
    wait_quorum = _awaited(Steps.wait_quorum)

    @overload
    async def wait_for_fact(self, name: str, *, type: type[V], **options: Unpack[WaitOptions]) -> Fact[V]: ...
    @overload
    async def wait_for_fact(
        self, name: str, *, type: Any = codec.EMPTY, **options: Unpack[WaitOptions]
    ) -> Fact[Any]: ...
    async def wait_for_fact(self, name: str, *, type: Any = codec.EMPTY, **options: Unpack[WaitOptions]) -> Fact[Any]:
        """Park the run until a fact; see `Steps.wait_for_fact`."""
        return await self._do(lambda: self._steps.wait_for_fact(name, type=type, **options))

    @overload
    async def begin(
        self,
        name: str,
        *,
        type: type[V],
        on_created: Callable[[str], object],
        timeout: timedelta | None = None,
    ) -> V: ...
    @overload
    async def begin(
        self,
        name: str,
        *,
        type: Any = codec.EMPTY,
        on_created: Callable[[str], object],
        timeout: timedelta | None = None,
    ) -> Any: ...
    async def begin(
        self,
        name: str,
        *,
        type: Any = codec.EMPTY,
        on_created: Callable[[str], object],
        timeout: timedelta | None = None,
    ) -> Any:
        """Begin a step that somebody else completes; see `Steps.begin`."""
        return await self._do(lambda: self._steps.begin(name, type=type, on_created=on_created, timeout=timeout))

    @overload
    async def wait_all(
        self, waits: Mapping[str, Waitable], **options: Unpack[GroupOptions]
    ) -> dict[str, Fact[Any]]: ...
    @overload
    async def wait_all(self, waits: Sequence[Waitable], **options: Unpack[GroupOptions]) -> list[Fact[Any]]: ...
    async def wait_all(self, waits: Any, **options: Unpack[GroupOptions]) -> Any:
        """Park the run until all of several facts and timers have come; see `Steps.wait_all`."""
        return await self._do(lambda: self._steps.wait_all(waits, **options))

    @overload
    async def map(
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
    async def map(
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
    async def map(
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
    async def map(
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
    async def map(
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
    async def map(
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
    async def map(
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
    async def map(self, name: str, fn: Any, items: Iterable[T], **options: Any) -> list[Any]:
        """Execute a function, coroutine function or durable task for each item; see `Steps.map`."""
        return await self._do(lambda: self._steps.map(name, fn, items, **options))

    @overload
    async def parallel(
        self,
        branches: Mapping[str, Callable[[], Coroutine[Any, Any, R]]],
        *,
        name: str = ...,
        concurrency: int | None = ...,
    ) -> dict[str, R]: ...
    @overload
    async def parallel(self, branches: Mapping[str, Call], **options: Any) -> dict[str, Any]: ...
    async def parallel(self, branches: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Execute several branches of the body, each a coroutine function that awaits steps; see `Steps.parallel`."""
        return await self._do(lambda: self._steps.parallel(branches, **options))

    async def value(self, name: str, make: Callable[[], R], annotation: Any) -> R:
        """Record a value made by the engine itself, such as the time."""
        return await self._do(lambda: self._steps.value(name, make, annotation))

    async def _do(self, work: Callable[[], R]) -> R:
        return await do(self._pass, work)


async def do(the_pass: Pass, work: Callable[[], R]) -> R:
    """Do something of the context in the thread of its body."""
    the_pass.check()  # before the thread is asked: inside a step's body it is waiting for that step
    return await in_owner(work)


class Answer(Awaitable[bool]):
    """A yes or no that has to be awaited: a coroutine forgotten in an `if` would count as yes."""

    def __init__(self, call: Coroutine[Any, Any, bool]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, bool]:
        return self._call.__await__()

    def __bool__(self) -> bool:
        self._call.close()
        raise DurableError("ctx.patched of an async body has to be awaited: `if await ctx.patched(…)`")


class AsyncTaskContext(RunContext):
    """The context of one pass through an async durable body."""

    def __init__(self, the_pass: Pass, steps: AsyncSteps) -> None:
        super().__init__(the_pass)
        self.step = steps
        """The steps this body can await."""

    async def now(self) -> datetime:
        """Return the database's time, the same at each replay."""
        value: datetime = await self.step.value("ctx.now", self._pass.database_now, datetime)
        return value

    async def uuid(self) -> uuid.UUID:
        """Return a random UUID, the same at each replay."""
        value: uuid.UUID = await self.step.value("ctx.uuid", uuid.uuid4, uuid.UUID)
        return value

    async def random(self) -> float:
        """Return a random number from 0 to 1, the same at each replay."""
        value: float = await self.step.value("ctx.random", random.random, float)
        return value

    @overload
    async def last_heartbeat(self, type: type[V]) -> V | None: ...
    @overload
    async def last_heartbeat(self) -> Any: ...
    async def last_heartbeat(self, type: Any = None) -> Any:
        """Return what the last heartbeat of this step was given; see `TaskContext.last_heartbeat`."""
        # In a thread of its own: that of the body may be waiting for the step that asks.
        return await asyncio.to_thread(self._read_heartbeat, self._beating(), type)

    def patched(self, patch: str) -> Answer:
        """Say whether this run takes the new way at a place where the code was changed, once awaited.

        See `TaskContext.patched`. It has no truth before it is awaited: `if ctx.patched(…)` raises a DurableError.
        """
        call = do(self._pass, lambda: patched(self._pass, patch))
        return Answer(self._pass.calls.note(f"ctx.patched({patch!r})", call))

    async def continue_as_new(self, *args: Any, version: int | None = None, **kwargs: Any) -> NoReturn:
        """End this generation of the run: it begins anew; see `TaskContext.continue_as_new`."""
        await do(self._pass, lambda: continue_as_new(self._pass, args, kwargs, version))
        raise AssertionError("a body went on that was continued as new")


def _noted(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a method whose calls the pass knows of, so that one which is never awaited fails the run."""

    @wraps(method)
    def call(self: AsyncSteps | AsyncTaskContext, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        what = f"step.{method.__name__}" if isinstance(self, AsyncSteps) else f"ctx.{method.__name__}"
        given = f"{what}({args[0]!r}, …)" if args and isinstance(args[0], str) else f"{what}(…)"
        return self._pass.calls.note(given, method(self, *args, **kwargs))

    return call


for _class, _names in (
    (AsyncSteps, set(vars(AsyncSteps)) - {"options"}),
    (AsyncTaskContext, {"now", "uuid", "random", "last_heartbeat", "continue_as_new"}),
):
    for _name in sorted(_names):
        if not _name.startswith("_"):
            setattr(_class, _name, _noted(getattr(_class, _name)))
