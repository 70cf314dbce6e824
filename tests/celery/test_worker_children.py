"""The watch on pool children: each that ends is seen at once, reaped by the pool, and reported once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import asynchronous

from tests.support.wait import until
from umt_durable.bridge.children import Children
from umt_durable.bridge.runtime import CancelAsked, Delivery


class Child(subprocess.Popen[bytes]):
    """A process with the names that a billiard process has."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()


class Pool:
    """A pool of real processes that reaps and replaces those that have ended, when it is told to look."""

    def __init__(self, size: int) -> None:
        self.looks = 0
        self._pool = SimpleNamespace(_pool=[self._child() for _ in range(size)])

    @property
    def processes(self) -> list[Child]:
        found: list[Child] = self._pool._pool
        return found

    def maintain_pool(self) -> None:
        self.looks += 1
        self._pool._pool = [child if child.poll() is None else self._child() for child in self.processes]

    def close(self) -> None:
        for child in self.processes:
            child.kill()
            child.wait()

    @staticmethod
    def _child() -> Child:
        return Child([sys.executable, "-c", "import signal; signal.pause()"])


class Seen:
    """Incidents that keeps what it is told."""

    def __init__(self) -> None:
        self.lost: list[tuple[int, int | None]] = []

    def child_lost(self, *, pid: int, status: int | None, delivery: Delivery | None) -> None:
        assert delivery is None
        self.lost.append((pid, status))

    def delivery_ended(
        self, delivery: Delivery, *, known_dead: bool, reason: str, again: bool = True, crashed: bool = True
    ) -> None:
        raise AssertionError("no delivery is known here")

    def hint_refused(self, run: str, nesting: int) -> None:
        raise AssertionError((run, nesting))

    def cancel_asked(self, asked: CancelAsked) -> None:
        raise AssertionError("nobody asks for a cancel here")

    def start(self) -> None: ...

    def stop(self) -> None: ...


def new_hub() -> Any:
    kombu: Any = asynchronous
    return kombu.Hub()


class Watched:
    """A pool, its watch and the loop they live in."""

    def __init__(self) -> None:
        self.pool, self.seen = Pool(2), Seen()
        self.hub: Any = new_hub()
        self.children = Children(self.pool, self.seen)
        self.children.attach(self.hub)
        self.turn()

    def turn(self) -> None:
        self.hub.timer.call_after(0.02, lambda: None)  # the loop polls no longer than to its next timer
        self.hub.run_once()

    def turn_until_lost(self, losses: int) -> None:
        def look() -> bool:
            self.turn()
            return len(self.seen.lost) >= losses

        until(look, what=f"{losses} lost child(ren) to be reported")

    def close(self) -> None:
        self.children.detach()
        self.pool.close()
        self.hub.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.close()


def pidfds(hub: Any) -> int:
    return sum(1 for fd in hub.readers if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[pidfd]")


def kill_one(pool: Pool) -> int:
    victim = pool.processes[0]
    victim.kill()
    return victim.pid


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")
def test_end_of_a_child_wakes_the_loop_and_is_reported_once_with_its_signal(watched: Watched) -> None:
    victim = kill_one(watched.pool)

    watched.turn_until_lost(1)
    watched.turn()

    assert watched.seen.lost == [(victim, -9)]
    assert watched.pool.looks == 1, "the pool is made to look once, and no reader spins"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")
def test_replacement_is_watched_too_and_no_descriptor_is_left_behind(watched: Watched) -> None:
    first = kill_one(watched.pool)
    watched.turn_until_lost(1)
    second = kill_one(watched.pool)
    watched.turn_until_lost(2)
    watched.turn()

    assert watched.seen.lost == [(first, -9), (second, -9)]
    assert pidfds(watched.hub) == 2


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")
def test_watch_goes_on_after_the_loop_was_reset_for_a_lost_broker(watched: Watched) -> None:
    watched.hub.reset()
    watched.hub._loop = None
    assert pidfds(watched.hub) == 0

    watched.children.attach(watched.hub)

    assert pidfds(watched.hub) == 2
    victim = kill_one(watched.pool)
    watched.turn_until_lost(1)
    assert watched.seen.lost == [(victim, -9)]


def test_without_pidfds_the_pool_is_made_to_look_by_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    watched = Watched()
    try:
        victim = kill_one(watched.pool)
        watched.turn_until_lost(1)
        assert watched.seen.lost == [(victim, -9)]
    finally:
        watched.close()


def test_children_that_died_while_the_pool_was_joined_are_reported_once_it_is(watched: Watched) -> None:
    victim, other = watched.pool.processes
    watched.children.detach()
    victim.kill()
    victim.wait()

    watched.children.report_rest()
    watched.children.report_rest()

    assert watched.seen.lost == [(victim.pid, -9)]
    assert other.poll() is None
