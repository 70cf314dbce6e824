"""One pass through a body: what it knows of the journal, and how it must end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any, NoReturn

from umt_durable import telemetry, tracing
from umt_durable.database import Database
from umt_durable.engine.attempt import Attempt, exit_for
from umt_durable.engine.exits import Canceled, Exit, Suspended
from umt_durable.engine.failures import ExceptionRegistry
from umt_durable.engine.replay import Journal, KeyMaker
from umt_durable.engine.reporting import Reporter
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import DurableError
from umt_durable.failpoints import point
from umt_durable.records import StepEntry, WaitEntry
from umt_durable.session import Binding
from umt_durable.states import AttemptOutcome, RunState
from umt_durable.store import runs, waits
from umt_durable.store import settings as store_settings
from umt_durable.store.guard import Guard

LONGEST = timedelta(days=36_500)
"""The longest sleep, time-out or back-off: what the database's calendar can add to any date of ours."""

IN_PROCESS_SECONDS = 2.0
"""Shorter sleeps and back-offs hold the worker instead of parking the run: parking costs more."""


class Pass:
    """What one execution of a body shares between its context and its steps."""

    def __init__(
        self,
        *,
        attempt: Attempt,
        database: Database,
        reporter: Reporter,
        exceptions: ExceptionRegistry,
        retry: RetryPolicy,
        run_id: str,
        nesting: int,
        version: int,
        priority: int | None,
        failures: int,
        input: Mapping[str, Any],
        entries: Sequence[StepEntry],
        wait_entries: Sequence[WaitEntry],
        bindings: Mapping[str, Binding],
        op_namespace: str,
    ) -> None:
        self.attempt = attempt
        self.database = database
        self.reporter = reporter
        self.exceptions = exceptions
        self.retry = retry
        self.run_id = run_id
        self.nesting = nesting
        self.version = version
        self.priority = priority
        self.failures = failures
        self.input = input
        self.bindings = bindings
        self.op_namespace = op_namespace
        self.keys = KeyMaker()
        self.journal = Journal(entries)
        self.waits = {entry.key: entry for entry in wait_entries}
        self._unseen = {entry.key for entry in entries} | set(self.waits)
        seqs = [entry.seq for entry in entries] + [entry.seq for entry in wait_entries]
        self._seq = max(seqs, default=0)
        self._exit: Exit | None = None
        self._fatal: DurableError | None = None

    @property
    def exit(self) -> Exit | None:
        """The exit this pass took, even if the body swallowed it."""
        return self._exit

    @property
    def fatal(self) -> DurableError | None:
        """The error that makes this pass worthless, even if the body swallowed it."""
        return self._fatal

    @property
    def is_replaying(self) -> bool:
        """Whether recorded steps lie ahead."""
        return bool(self._unseen)

    def next_seq(self) -> int:
        """Return the place of a new journal entry in its run."""
        self._seq += 1
        return self._seq

    def saw(self, key: str) -> None:
        """Note that the body has come to a recorded entry."""
        self._unseen.discard(key)

    def check(self) -> None:
        """Leave the body again if it was left before, or if it was asked to stop."""
        if self._exit is not None:
            raise self._exit
        if self._fatal is not None:
            raise self._fatal
        if self.attempt.running() is not None:
            raise DurableError("a step's body cannot call the context's steps: call them from the task's body")
        if self.attempt.must_stop():
            self.leave(exit_for(self.attempt.signal.reason or "shutdown"))

    def span(self, key: str, kind: str, *, tries: int = 0, replayed: bool = False) -> AbstractContextManager[None]:
        """Show one step in the tracers of the application: what its body does inside belongs to it."""
        attempt = self.failures + 1
        return tracing.step(
            key,
            {"run_id": self.run_id, "kind": str(kind), "attempt": attempt, "try": tries + 1, "replayed": replayed},
        )

    def leave(self, how: Exit) -> NoReturn:
        """Leave the body, for good."""
        self._exit = how
        raise how

    def condemn(self, error: DurableError) -> NoReturn:
        """Raise an error that no `except` of the body can make good."""
        self._fatal = error
        raise error

    def database_now(self) -> datetime:
        """Return the time of the clock that decides."""
        return self.attempt.read(lambda guard: store_settings.now(guard.conn))

    def suspend(
        self,
        state: RunState,
        *,
        steps: Sequence[str] = (),
        waits: Sequence[str] = (),
        poll: timedelta | None = None,
        until: str,
    ) -> None:
        """Park the run and leave the body; return only when a wait was settled meanwhile, so that the body can go on.

        The interim state is stored before the commit that makes a wake-up possible, on a fresh proof: stored later, it
        could hide the outcome of a faster next attempt.
        """
        attempt = self.attempt
        attempt.prove()
        self.reporter.suspending(state, until)
        point("sleep.suspend.b")
        if not waits:
            attempt.end(
                lambda guard: runs.suspend(guard, state=state, steps=steps, waits=(), poll=poll) or None,
                ended_as=(AttemptOutcome.SUSPENDED,),
            )
        elif not self._park(state, steps, waits, poll):
            return
        point("sleep.suspend.a")
        telemetry.count(telemetry.Counter.SUSPENDED_RUN)
        self.leave(Suspended(state, until))

    def _park(self, state: RunState, steps: Sequence[str], keys: Sequence[str], poll: timedelta | None) -> bool:
        """Park under the run's lock, unless a wait was settled since this pass read it (RG-9)."""

        def park(guard: Guard) -> str | None:
            with guard.conn.transaction():
                cancel = runs.lock_grant(guard)
                point("wait.run_lock.a")
                if cancel is None:
                    return None
                if cancel:
                    return "cancel"
                if waits.count_settled(guard.conn, guard.token.run, keys):
                    return "settled"
                runs.suspend(guard, state=state, steps=steps, waits=keys, poll=poll)
                return "parked"

        reply = self.attempt.end(park, ended_as=(AttemptOutcome.SUSPENDED,))
        if reply == "cancel":
            self.leave(Canceled("cancelled"))
        return reply != "settled"
