"""One pass through a body: what it knows of the journal, and how it must end."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, NoReturn, TypeAlias

from umt_durable import telemetry, tracing
from umt_durable.codec import Encoded
from umt_durable.database import Database
from umt_durable.engine import ids
from umt_durable.engine.attempt import Attempt, exit_for
from umt_durable.engine.branch import Blocked, Branch
from umt_durable.engine.exits import Abandoned, Canceled, Exit, Released, Replaced, Suspended, Undecided
from umt_durable.engine.failures import ExceptionRegistry
from umt_durable.engine.loops import Calls
from umt_durable.engine.registry import OnMismatch
from umt_durable.engine.replay import Journal, KeyMaker, branches_of, is_patch
from umt_durable.engine.reporting import Reporter
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.tokens import Tokens
from umt_durable.errors import DurableError, JournalCorruptError, NonDeterminismError, PayloadKeyError
from umt_durable.failpoints import point
from umt_durable.payloads import plain
from umt_durable.records import StepEntry, WaitEntry
from umt_durable.session import Binding
from umt_durable.states import AttemptOutcome, RunState, WaitState
from umt_durable.store import journal, runs, waits
from umt_durable.store import settings as store_settings
from umt_durable.store.guard import Guard

logger = logging.getLogger(__name__)

Successor: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], int | None], Encoded]
"""Encodes the arguments of a run's next generation, for a version of its task; None is the one it has."""

LONGEST = timedelta(days=36_500)
"""The longest sleep, time-out or back-off: what the database's calendar can add to any date of ours."""

IN_PROCESS_SECONDS = 2.0
"""Shorter sleeps and back-offs hold the worker instead of parking the run: parking costs more."""

_here: ContextVar[tuple[Pass, Branch] | None] = ContextVar("umt_durable.branch", default=None)


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
        queue: str | None,
        deliver_seconds: float,
        version: int,
        generation: int,
        priority: int | None,
        failures: int,
        input: Mapping[str, Any],
        on_mismatch: OnMismatch,
        successor: Successor,
        entries: Sequence[StepEntry],
        wait_entries: Sequence[WaitEntry],
        bindings: Mapping[str, Binding],
        op_namespace: str,
        tokens: Tokens,
    ) -> None:
        self.attempt = attempt
        self.database = database
        self.reporter = reporter
        self.exceptions = exceptions
        self.retry = retry
        self.run_id = run_id
        self.nesting = nesting
        self.queue = queue
        self.deliver_seconds = deliver_seconds
        self.version = version
        self.generation = generation
        self.priority = priority
        self.failures = failures
        self.input = input
        self.on_mismatch = on_mismatch
        self.successor = successor
        self.bindings = bindings
        self.op_namespace = op_namespace
        self.tokens = tokens
        self.journal = Journal(entries)
        self.waits = {entry.key: entry for entry in wait_entries}
        self._body = Branch()
        self._unseen: defaultdict[str, set[str]] = defaultdict(set)
        # The wait of a step that awaits others is no entry of its own: it is behind with the step.
        # Nor is a patch's answer still ahead: the code may have stopped asking.
        self._expect([entry.key for entry in entries if not is_patch(entry.key)])
        self._expect(entry.key for entry in wait_entries if entry.mode not in ("join", "task"))
        seqs = [entry.seq for entry in entries] + [entry.seq for entry in wait_entries]
        self._seqs = itertools.count(max(seqs, default=0) + 1)
        self._exit: Exit | None = None
        self.calls = Calls()
        self._condemned: list[DurableError] = []
        self._passed_over: list[str] = []
        self.patches: dict[tuple[str, str], bool] = {}
        """What was answered to `ctx.patched` in this pass, by the prefix of the branch that asked, and the patch."""
        self.next_input: Encoded | None = None
        """The arguments of the next attempt, where the body asked to be tried again with others."""

    @property
    def branch(self) -> Branch:
        """Where this code is executed: in the body itself, or in a branch of it."""
        here = _here.get()
        return here[1] if here is not None and here[0] is self else self._body

    @property
    def keys(self) -> KeyMaker:
        """What gives the calls made here their keys."""
        return self.branch.keys

    def within(self, branch: Branch) -> None:
        """Have this context execute a branch from now on."""
        _here.set((self, branch))

    @property
    def exit(self) -> Exit | None:
        """The exit this pass took, even if the body swallowed it."""
        return self._exit

    @property
    def fatal(self) -> DurableError | None:
        """The error that makes this pass worthless, even if the body swallowed it."""
        return self._condemned[0] if self._condemned else None

    @property
    def is_left(self) -> bool:
        """Whether no branch may go on any more."""
        return self._exit is not None or bool(self._condemned)

    @property
    def is_replaying(self) -> bool:
        """Whether recorded steps lie ahead, of the branch that asks."""
        return bool(self._unseen.get(self.branch.prefix))

    @property
    def is_in_branch(self) -> bool:
        """Whether the code that asks is in a branch of a parallel step."""
        return self.branch is not self._body

    def in_generation(self, key: str) -> str:
        """Return a text that stands for a step of this run, and for no step of an earlier generation of it."""
        return ids.among_runs(key, generation=self.generation)

    def among_runs(self, key: str) -> str:
        """Return the same where steps are told apart by the run's id, which it may share with one that it replaced."""
        return ids.among_runs(key, generation=self.generation, nesting=self.nesting)

    def next_seq(self) -> int:
        """Return the place of a new journal entry in its run."""
        return next(self._seqs)

    def saw(self, key: str) -> None:
        """Note that the body has come to a recorded entry; what a branch did is behind it with the branch itself."""
        places = ["", *branches_of(key)]
        for inner in (key, *self._unseen.pop(f"{key}/", ())):
            for place in places:
                if place in self._unseen:
                    self._unseen[place].discard(inner)

    def _expect(self, keys: Iterable[str]) -> None:
        for key in keys:
            for place in ("", *branches_of(key)):
                self._unseen[place].add(key)

    def check(self) -> None:
        """Leave the body again if it was left before, or if it was asked to stop."""
        self.check_left()
        if self.attempt.running() is not None:
            raise DurableError("a step's body cannot call the context's steps: call them from the task's body")
        if self.attempt.must_stop():
            self.leave(exit_for(self.attempt.signal.reason or "shutdown"))
        if self.attempt.is_paused:
            self.leave(Released("the run is paused"))

    def span(self, key: str, kind: str, *, tries: int = 0, replayed: bool = False) -> AbstractContextManager[None]:
        """Show one step in the tracers of the application: what its body does inside belongs to it."""
        attempt = self.failures + 1
        return tracing.step(
            key,
            {"run_id": self.run_id, "kind": str(kind), "attempt": attempt, "try": tries + 1, "replayed": replayed},
        )

    def check_left(self) -> None:
        """Leave the body again if it was left before, or its branch was."""
        parked = self.branch.exit
        if parked is not None:
            raise parked
        if self._exit is not None:
            raise self._exit
        if self.fatal is not None:
            raise self.fatal

    def leave(self, how: Exit) -> NoReturn:
        """Leave the body, for good. A branch that parks leaves alone; any other exit is that of all branches."""
        branch = self.branch
        if branch is self._body:
            self._exit = how
        elif isinstance(how, Suspended):
            branch.exit = how
        elif self._exit is None:
            self._exit = how
            if not isinstance(how, (Replaced, Undecided)):
                paused = isinstance(how, Released) and self.attempt.is_paused
                self.attempt.abort("pause" if paused else _reason(how))
        raise how

    def condemn(self, error: DurableError) -> NoReturn:
        """Raise an error that no `except` of the body can make good."""
        self._condemned.append(error)
        raise error

    def differs(self, error: NonDeterminismError, keys: Iterable[str]) -> None:
        """Take note that the code asks for another step than is recorded under some keys.

        Returns only where that is to be gone on with: these entries are then orphans.
        Errors: the error, which no `except` of the body can make good.
        """
        telemetry.count(telemetry.Counter.NONDETERMINISM)
        if self.on_mismatch != "warn":
            self.condemn(error)
        logger.warning("%s; it is executed beside what is recorded", error, extra={"run": self.run_id})
        for key in keys:
            self.journal.disown(key)
            self.saw(key)
            self._passed_over.append(key)

    def has_under(self, key: str) -> bool:
        """Say whether an item or a branch of the step of this key has recorded anything, a wait perhaps."""
        return self.journal.has_under(key) or any(wait.startswith(f"{key}[") for wait in self.waits)

    def orphans(self) -> list[str]:
        """Return the keys of the recorded steps and waits that this pass has not asked for, or passed over."""
        steps = [entry.key for entry in self.journal.orphans()]
        ahead = [key for key in self._unseen[""] if key in self.waits]
        found = dict.fromkeys([*steps, *sorted(ahead), *self._passed_over])
        return [key for key in found if key not in self.waits or self.waits[key].part_of is None]

    def unread_waits(self) -> list[str]:
        """Return the waits of which this pass does not know that they are settled: whatever settles them is unread."""
        return [entry.key for entry in self.waits.values() if entry.state is WaitState.PENDING]

    def opened(self, data: bytes) -> bytes:
        """Return a stored value as it was before it was sealed; one that cannot be opened condemns the pass."""
        try:
            return plain(data)
        except (PayloadKeyError, JournalCorruptError) as error:
            self.condemn(error)

    def payload_of(self, wait: WaitEntry) -> bytes | None:
        """Return the payload that settled a wait; a large one is read only now."""
        data, run = wait.payload, self.attempt.token.run
        if data is None and wait.size is not None:
            try:
                data = self.attempt.read(lambda guard: waits.payload(guard.conn, run, wait.key))
            except Exit as how:
                self.leave(how)
        return None if data is None else self.opened(data)

    def is_fatal(self, error: BaseException) -> bool:
        """Say whether this pass was condemned by an error; branches may be so at the same time, each by its own."""
        return any(error is one for one in self._condemned)

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

        A branch only says what it is blocked on: the run parks when all of them are. The interim state is stored before
        the commit that makes a wake-up possible, on a fresh proof: stored later, it could hide the outcome of a faster
        next attempt.
        """
        attempt, branch = self.attempt, self.branch
        if branch is not self._body:
            branch.blocked = Blocked(state, until, tuple(steps), tuple(waits), poll)
            self.leave(Suspended(state, until))
        attempt.prove()
        self.reporter.suspending(state, until)
        if not waits:
            attempt.end(
                lambda guard: runs.suspend(guard, state=state, steps=steps, waits=(), poll=poll) or None,
                ended_as=(AttemptOutcome.SUSPENDED,),
                at="sleep.suspend",
            )
        elif not self._park(state, steps, waits, poll):
            return
        telemetry.count(telemetry.Counter.SUSPENDED_RUN)
        self.leave(Suspended(state, until))

    def ripe(self, blocked: Blocked) -> list[str]:
        """List the steps that are due and the waits that are due or settled, of those that a branch is blocked on."""
        run, steps, keys = self.attempt.token.run, blocked.steps, blocked.waits
        return self.attempt.read(lambda guard: runs.ripe(guard.conn, run, steps=steps, waits=keys))

    def reread(self, keys: Sequence[str]) -> None:
        """Read again what is recorded for some items or branches of a step, and for all that was done within them."""
        run = self.attempt.token.run
        steps = self.attempt.read(lambda guard: journal.read_under(guard.conn, run, keys))
        found = self.attempt.read(lambda guard: waits.of_run(guard.conn, run))
        for step in steps:
            self.journal.add(step)
        self.waits.update((entry.key, entry) for entry in found)
        inner = {f"{key}/" for key in keys}
        recorded = [entry.key for entry in steps] + [entry.key for entry in found]
        self._expect(key for key in recorded if not inner.isdisjoint(branches_of(key)))

    def ask_a_person(self, error: DurableError, *, waits: Sequence[str]) -> NoReturn:
        """Leave the body, and all branches, so that the run is quarantined until one of the waits is settled."""
        self.leave(Undecided(error, waits))

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

        reply = self.attempt.end(park, ended_as=(AttemptOutcome.SUSPENDED,), at="sleep.suspend")
        if reply == "cancel":
            self.leave(Canceled("cancelled"))
        return reply != "settled"


def _reason(how: Exit) -> str:
    """Return why the other branches are asked to stop."""
    if isinstance(how, Canceled):
        return "cancel"
    return "lease_lost" if isinstance(how, Abandoned) else "shutdown"
