"""Several pieces of one step at a time, in threads of this process, each in a branch of its own.

Threads are those of the pool in force: greenlets where gevent has patched them. The thread of the body coordinates: it
commits the outcomes that have gathered in one statement each time, and parks the run when nothing can go on.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from umt_durable.clock import boottime
from umt_durable.engine.branch import Blocked, Branch
from umt_durable.engine.exits import Abandoned, Exit
from umt_durable.engine.passing import Pass
from umt_durable.failpoints import point
from umt_durable.session import leave_thread
from umt_durable.store import journal

BATCH: Final = 500
"""How many outcomes one statement records at most."""
BATCH_BYTES: Final = 4 * 1024 * 1024
BACKLOG: Final = 1000
"""How many outcomes may wait for their commit before those who bring more have to wait."""
LOOK_SECONDS: Final = 1.0
"""How often is looked for what parked branches wait for while others still work."""


@dataclass(eq=False, slots=True)
class Job:
    """One item or branch: the key of its outcome, where its own steps stand, and what it does."""

    key: str
    work: Callable[[], Any]
    value: Any = None
    error: Exception | None = None
    is_over: bool = False


@dataclass(slots=True)
class _Parked:
    job: Job
    blocked: Blocked
    since: float = field(default_factory=boottime)

    def is_ripe(self, ripe: set[str]) -> bool:
        """Say whether the branch can go on, given the steps and waits that are over or due."""
        poll = self.blocked.poll
        if poll is not None and boottime() >= self.since + poll.total_seconds():
            return True
        return not ripe.isdisjoint((*self.blocked.steps, *self.blocked.waits))


class Fan:
    """Executes jobs, so many at a time, until each has an outcome.

    Keeps: the run parks only when every branch is parked and no wait was settled meanwhile; whoever leaves has no
    thread behind it and, unless the grant is gone, no outcome that is not committed.
    """

    def __init__(self, the_pass: Pass, *, concurrency: int, stop_at_failure: bool) -> None:
        self._pass = the_pass
        self._concurrency, self._stop_at_failure = concurrency, stop_at_failure
        self._context = contextvars.copy_context()
        self._changed = threading.Condition()
        self._ready: deque[Job] = deque()
        self._parked: list[_Parked] = []
        self._kept: list[journal.Written] = []
        self._active = 0
        self._closed = False
        self._crash: BaseException | None = None
        self._looked = boottime()

    def keep(self, outcome: journal.Written) -> None:
        """Take an outcome to be committed with the next ones."""
        with self._changed:
            while len(self._kept) >= BACKLOG and not self._must_stop():
                self._changed.wait(LOOK_SECONDS)
            self._kept.append(outcome)
            self._changed.notify_all()

    def run(self, jobs: Iterable[Job]) -> None:
        """Return once no job can go on any more: all have ended, or one failed and that is the end of it.

        Errors: the exits of the pass.
        """
        self._ready.extend(jobs)
        try:
            while self._go_on():
                pass
        except (Exit, Exception) as how:
            self._drain(commit=not isinstance(how, Abandoned))
            raise
        except BaseException:
            self._drain(commit=False)
            raise
        self._drain(commit=self._crash is None and not isinstance(self._pass.exit, Abandoned))
        if self._crash is not None:
            raise self._crash
        self._pass.check_left()

    # -- the coordinator ----------------------------------------------------------------------------------------------

    def _go_on(self) -> bool:
        """Do what is to be done now; say whether there is more."""
        with self._changed:
            self._employ()
            if self._active and not self._kept:
                self._changed.wait(LOOK_SECONDS)
            is_idle = not (self._active or self._kept or self._ready)
        self._commit()
        if self._must_stop():
            return False
        if self._parked and is_idle:
            self._guarded(self._park)
        elif self._parked and boottime() >= self._looked + LOOK_SECONDS:
            self._guarded(self._wake)
        return bool(self._parked) or not is_idle

    def _must_stop(self) -> bool:
        return self._closed or self._crash is not None or self._pass.is_left

    def _commit(self) -> None:
        """Record what has gathered, in one statement for many."""
        with self._changed:
            batch: list[journal.Written] = []
            size = 0
            for outcome in self._kept[:BATCH]:
                size += len(outcome.result or b"")
                if batch and size > BATCH_BYTES:
                    break
                batch.append(outcome)
        if batch:
            point("items.commit.b")
            self._guarded(lambda: self._pass.attempt.commit_many(batch))
            point("items.commit.a")
            with self._changed:
                del self._kept[: len(batch)]
                self._changed.notify_all()

    def _park(self) -> None:
        """Leave until something can go on; return when it can already."""
        blocked = Blocked.on_any([one.blocked for one in self._parked])
        self._pass.suspend(
            blocked.state, steps=blocked.steps, waits=blocked.waits, poll=blocked.poll, until=blocked.until
        )
        self._wake()

    def _wake(self) -> None:
        """Make those parked branches ready whose time has come, or whose wait was settled."""
        self._looked = boottime()
        ripe = set(self._pass.ripe(Blocked.on_any([one.blocked for one in self._parked])))
        going = [one for one in self._parked if one.is_ripe(ripe)]
        if going:
            self._pass.reread([one.job.key for one in going])
            gone = {one.job for one in going}
            with self._changed:
                self._parked = [one for one in self._parked if one.job not in gone]
                self._ready.extend(one.job for one in going)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exit as how:
            self._pass.leave(how)

    def _drain(self, *, commit: bool) -> None:
        """Begin nothing more, wait for the bodies in flight, and record what they brought."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
            while self._active:
                self._changed.wait(LOOK_SECONDS)
        while commit and self._kept:
            self._commit()

    # -- the threads --------------------------------------------------------------------------------------------------

    def _employ(self) -> None:
        """Start as many threads as there is work for. Called with the lock."""
        for _ in range(min(self._concurrency - self._active, len(self._ready))):
            self._active += 1
            target = self._context.copy().run
            threading.Thread(target=target, args=(self._work,), name="umt-durable-branch", daemon=True).start()

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                contextvars.copy_context().run(self._execute, job)
        finally:
            leave_thread()

    def _next(self) -> Job | None:
        with self._changed:
            if self._ready and not self._must_stop():
                return self._ready.popleft()
            self._active -= 1
            self._changed.notify_all()
            return None

    def _execute(self, job: Job) -> None:
        branch = Branch(f"{job.key}/")
        self._pass.within(branch)
        ended = False
        try:
            job.value = job.work()
            ended = True
        except Exit:
            pass  # of the branch, which says what it is blocked on, or of the pass
        except Exception as error:  # noqa: BLE001 - whatever left the job is its outcome
            job.error = error
            ended = True
        except BaseException as error:  # noqa: BLE001 - not for us: it goes on in the thread of the body
            self._crash = error
        with self._changed:
            if ended and branch.exit is None and not self._pass.is_left:
                job.is_over = True
                self._closed = self._closed or (job.error is not None and self._stop_at_failure)
            elif branch.blocked is not None:
                self._parked.append(_Parked(job, branch.blocked))
            self._changed.notify_all()
