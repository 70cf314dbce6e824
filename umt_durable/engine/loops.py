"""Coroutines of bodies and steps: they run on one event loop per process, whatever pool the process has.

A body that is a coroutine function is delivered to a thread of the pool as any other. Its code runs on the loop, so
that clients and connection pools of the user's are shared by all bodies of the process; what it asks of its context is
done in the thread it was delivered to, one thing after the other, by the same code as for plain bodies.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar
from weakref import WeakSet

from umt_durable import native
from umt_durable.errors import DefinitionError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLEAN_UP_SECONDS: Final = 5.0
"""How long the tasks that a body leaves behind are given to end when they are cancelled."""

_family: ContextVar[WeakSet[asyncio.Task[Any]] | None] = ContextVar("umt_durable.family", default=None)
_owner: ContextVar[_Owner | None] = ContextVar("umt_durable.owner", default=None)

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_thread: int | None = None


def drive(body: Coroutine[Any, Any, T]) -> T:
    """Run an async body on the loop until it has ended, and do in this thread what it asks for.

    Errors: whatever leaves the body; what interrupts this thread, such as a soft time limit, cancels the body and is
    raised when that has ended. Tasks that the body leaves behind are cancelled.
    """
    owner = _Owner()
    token = _owner.set(owner)
    try:
        flight = _Flight(body, on_end=lambda: owner.jobs.put(None))
    finally:
        _owner.reset(token)
    interruption = owner.work()
    if interruption is not None:
        flight.cancel()
        while owner.work() is not None:
            pass  # interrupted again: what it wants is under way
        raise interruption
    value: T = flight.result()
    return value


def run(body: Coroutine[Any, Any, T], *, on_start: Callable[[Callable[[], None]], object] | None = None) -> T:
    """Run one coroutine on the loop and wait here for its end.

    Shape: `on_start` is given a function that cancels the coroutine, from any thread.
    Errors: whatever leaves the coroutine; Cancelled when it was cancelled.
    """
    ended = threading.Event()
    flight = _Flight(body, on_end=ended.set)
    if on_start is not None:
        on_start(flight.cancel)
    try:
        ended.wait()
    except BaseException:
        flight.cancel()  # a soft time limit or a signal that came while this thread waited
        ended.wait()
        raise
    value: T = flight.result()
    return value


class Calls:
    """The calls of one async body to its context, so that one which it never awaits is known."""

    def __init__(self) -> None:
        self._made: list[tuple[str, Coroutine[Any, Any, Any]]] = []

    def note(self, what: str, call: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Keep a call until it has begun, and return it."""
        self._made = [kept for kept in self._made if _is_unbegun(kept[1])]
        self._made.append((what, call))
        return call

    def check(self) -> None:
        """Refuse the end of a body that left a call behind which it never awaited.

        Errors: DefinitionError.
        """
        forgotten = [(what, call) for what, call in self._made if _is_unbegun(call)]
        for _, call in forgotten:
            call.close()  # said below, and not by a warning as well
        if forgotten:
            raise DefinitionError(f"{forgotten[0][0]} was called and never awaited, so nothing was done; `await` it")


def _is_unbegun(call: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(call) == inspect.CORO_CREATED


def is_here() -> bool:
    """Say whether this code runs on the loop, where nothing may wait."""
    return threading.get_ident() == _thread


async def in_owner(work: Callable[[], T]) -> T:
    """Do something in the thread that the running body was delivered to.

    Errors: DefinitionError outside an async body; whatever the work raises.
    """
    owner = _owner.get()
    if owner is None:
        raise DefinitionError("only the body of an async durable task, and the tasks it makes, can await its context")
    return await owner.call(work)


class Cancelled(Exception):
    """A coroutine of a body or step ended because it was cancelled."""


class _Flight:
    """A coroutine on the loop.

    Shape: `on_end` is called on the loop, once the coroutine and the tasks it left behind have ended.
    """

    def __init__(self, body: Coroutine[Any, Any, Any], *, on_end: Callable[[], None]) -> None:
        self._body, self._on_end = body, on_end
        self._task: asyncio.Task[None] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._loop = _loop()
        self._loop.call_soon_threadsafe(self._start)  # in a copy of this thread's context

    def cancel(self) -> None:
        """Ask the coroutine to end. Called from any thread; after its end it changes nothing."""
        self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())

    def result(self) -> Any:
        """Return what the coroutine returned, or raise what left it."""
        if self._error is not None:
            raise self._error
        return self._value

    def _start(self) -> None:
        self._task = self._loop.create_task(self._contained())

    async def _contained(self) -> None:
        """Keep the outcome. Nothing is raised for the loop: `SystemExit` would end its thread."""
        family: WeakSet[asyncio.Task[Any]] = WeakSet()
        _family.set(family)
        try:
            self._value = await self._body
        except asyncio.CancelledError:
            self._error = Cancelled("it was cancelled")
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
            self._error = error
        try:
            await _clean_up([task for task in family if not task.done()])
        finally:
            self._on_end()


async def _clean_up(left: list[asyncio.Task[Any]]) -> None:
    for task in left:
        task.cancel()
    if left:
        _, stubborn = await asyncio.wait(left, timeout=CLEAN_UP_SECONDS)
        if stubborn:
            logger.warning("%d task(s) of a body go on after its end, though they were cancelled", len(stubborn))


class _Owner:
    """The thread a body was delivered to, while it waits for the body's end."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def work(self) -> BaseException | None:
        """Do what the body asks for until it has ended; return what interrupted this thread, at once."""
        try:
            while (job := self.jobs.get()) is not None:
                job()
        except BaseException as interruption:  # noqa: BLE001 - raised once the body has ended
            return interruption
        return None

    async def call(self, work: Callable[[], T]) -> T:
        """Have this thread do something, and return what it returns."""
        loop, context = asyncio.get_running_loop(), copy_context()
        context.run(_owner.set, None)  # a step's coroutine must not wait for the thread that waits for it
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                value = context.run(work)
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                loop.call_soon_threadsafe(_settle, future, value, None)

        self.jobs.put(job)
        return await future


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():  # cancelled meanwhile
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process; a forked child has its own.

    Errors: DefinitionError in a gevent process, whose hub and an event loop would stop each other.
    """
    if native.is_patched():
        raise DefinitionError(
            "async bodies and steps need the prefork, threads or solo pool: gevent has a loop of its own"
        )
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            _loops.clear()
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            loop.set_task_factory(_make_task)
            threading.Thread(target=_serve, args=(loop,), name="umt_durable loop", daemon=True).start()
        return loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    global _thread
    _thread = threading.get_ident()
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # raised in a task that a body has made: no reason to end the loop
            logger.exception("a task asked this process to exit; the event loop goes on")


def _make_task(loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None, **options: Any) -> Any:
    """Make a task that is known to the body it is made in."""
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context, **options)
    family = _family.get() if context is None else context.get(_family)
    if family is not None:
        family.add(task)
    return task


def _forget() -> None:
    global _lock, _thread
    _lock, _thread = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
