"""Threads that go on while everything else of a gevent process stands still.

Where gevent has patched `threading`, a thread is a greenlet: a body that computes for long, or blocks in C, would keep
it from renewing a lease. What is started here runs in a thread of the system there too, with an event loop of its own.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

JOIN_LOOKS_SECONDS = 0.01


class Thread(Protocol):
    """What is used of a thread."""

    def start(self) -> None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...


class Lock(Protocol):
    """What is used of a lock."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *args: Any) -> Any: ...


class Event(Protocol):
    """What is used of an event that one thread waits for."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


def daemon(target: Callable[[], None], *, name: str) -> Thread:
    """Make a daemon thread of the system, whatever has been patched."""
    start = _original("start_new_thread")
    return threading.Thread(target=target, name=name, daemon=True) if start is None else _Native(target, start)


def lock() -> Lock:
    """Make a lock between such a thread and greenlets; whoever holds it must not give way."""
    allocate = _original("allocate_lock")
    made: Lock = threading.Lock() if allocate is None else allocate()
    return made


def event() -> Event:
    """Make an event that one such thread waits for and anybody sets.

    Not gevent's: its loop ends with an error when it waits for nothing but another thread.
    """
    allocate = _original("allocate_lock")
    return threading.Event() if allocate is None else _NativeEvent(allocate())


def is_patched() -> bool:
    """Say whether threads are greenlets in this process."""
    return _original("start_new_thread") is not None


def _original(name: str) -> Any:
    """Return a function of `_thread` as it was before gevent patched it, or None where it has not."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return None
    return monkey.get_original("_thread", name)


class _NativeEvent:
    """An event made of one lock, which is free once the event is set."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._lock.acquire()
        self._is_set = False

    def set(self) -> None:
        """Let the waiting thread go on."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # it was set already
            self._lock.release()

    def clear(self) -> None:
        """Forget that it was set."""
        self._is_set = False
        self._lock.acquire(False)

    def wait(self, timeout: float | None = None) -> bool:
        """Return once it is set, or the time is over; say whether it is set."""
        if not self._is_set:
            self._lock.acquire(True, -1 if timeout is None else max(0.0, timeout))
        return self._is_set


class _Native:
    """A thread of the system in a process where threads are greenlets."""

    def __init__(self, target: Callable[[], None], start_new_thread: Callable[..., Any]) -> None:
        self._target = target
        self._start_new_thread = start_new_thread
        self._state = "new"

    def start(self) -> None:
        """Start it."""
        self._state = "alive"
        self._start_new_thread(self._run, ())

    def is_alive(self) -> bool:
        """Say whether it has not ended."""
        return self._state == "alive"

    def join(self, timeout: float | None = None) -> None:
        """Return once it has ended, or the time is over; other greenlets go on meanwhile."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (end is None or time.monotonic() < end):
            time.sleep(JOIN_LOOKS_SECONDS)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._state = "ended"
