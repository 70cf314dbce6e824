"""One attempt: the grant of a run in this process, its proofs, and its fenced writes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.engine.exits import Abandoned, Canceled, Released
from umt_durable.engine.telling import Telling
from umt_durable.errors import DatabaseUnavailableError
from umt_durable.failpoints import point
from umt_durable.records import Grant, Note
from umt_durable.services.lease import Lease
from umt_durable.states import AttemptOutcome
from umt_durable.store import attempts, journal, progress, runs
from umt_durable.store.guard import Guard

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROOF_SECONDS = 0.1
"""How old the database's word may be when a body is entered (I7)."""


class Abort:
    """Tells a body in flight that it should stop, and why: `cancel`, `lease_lost` or `shutdown`.

    An async body can await it: it then goes on once it was asked to stop.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._hooks: list[Callable[[], object]] = []
        self.reason: str | None = None

    def set(self, reason: str) -> None:
        """Ask the body to stop; the first reason stays."""
        if self.reason is None:
            self.reason = reason
        self._event.set()
        for hook in list(self._hooks):
            hook()

    def is_set(self) -> bool:
        """Say whether the body was asked to stop."""
        return self._event.is_set()

    def on_set(self, hook: Callable[[], object]) -> Callable[[], None]:
        """Have a hook called when the body is asked to stop, perhaps twice, and at once if it was.

        The reply forgets the hook.
        """
        self._hooks.append(hook)
        if self._event.is_set():
            hook()

        def forget() -> None:
            if hook in self._hooks:
                self._hooks.remove(hook)

        return forget

    def __await__(self) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        forget = self.on_set(lambda: loop.call_soon_threadsafe(asked.set))
        try:
            yield from asked.wait().__await__()
        finally:
            forget()

    def wait(self, seconds: float) -> bool:
        """Wait up to that long for the request to stop; say whether it came."""
        return self._event.wait(seconds)

    def raise_if_set(self) -> None:
        """Leave the body if it was asked to stop."""
        if self._event.is_set():
            raise exit_for(self.reason or "shutdown")


class HeldLease:
    """The lease under which this process executes the attempt, as its body sees it.

    Once it is lost, `ctx.abort` is set with the reason `lease_lost`, and another process may go on with the run.
    """

    def __init__(self, lease: Lease, signal: Abort) -> None:
        self._lease, self._signal = lease, signal

    @property
    def remaining(self) -> float:
        """For how many seconds it may be relied on if nothing renews it; zero when it is lost."""
        return 0.0 if self.is_lost else self._lease.remaining()

    @property
    def is_lost(self) -> bool:
        """Whether this attempt has lost it for good."""
        return self._signal.reason == "lease_lost" or not self._lease.alive()


def exit_for(reason: str) -> Canceled | Released | Abandoned:
    """Return how a body ends that was asked to stop."""
    match reason:
        case "cancel":
            return Canceled("cancelled")
        case "shutdown":
            return Released("shutdown")
        case _:
            return Abandoned(reason, fenced=False)


class AlreadyRecordedError(Exception):
    """A step that was to be entered has its outcome in the journal. Never reaches a body."""


class _Inside(NamedTuple):
    """The step's body that code is called from, and the one of another attempt around it."""

    attempt: Attempt
    key: str
    outside: _Inside | None


# Of the context, not of the attempt: each branch of a parallel step is inside a body of its own.
_inside: ContextVar[_Inside | None] = ContextVar("umt_durable.step", default=None)


class Attempt:
    """The grant of one run.

    Keeps: I5 (every write goes through the store's fenced statements), I7 (no body is entered without a proof younger
    than PROOF_SECONDS, its age counted from before its statement was sent).
    """

    def __init__(
        self,
        database: Database,
        lease: Lease,
        grant: Grant,
        *,
        sent: float,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin an attempt; `is_leaving` says whether this process shuts down, asked before each step."""
        self.token = grant.token
        self._is_leaving = is_leaving
        self.signal = Abort()
        self.held = HeldLease(lease, self.signal)
        self.is_paused = False
        self._database = database
        self._lease = lease
        # After a crash without progress the step that kills must be named, so each body asks for its grant first.
        self._explicit = grant.crashes > 0
        self._proof: float | None = None if grant.cancel else sent
        self._bodies: dict[str, tuple[journal.Entry, float]] = {}
        self.ops: set[UUID] = set()
        """The tokens under which effects are being executed now, by whatever thread."""
        self.telling = Telling(lambda: lease.notes.hear(self))
        """What its bodies say of how far they are."""

    def abort(self, reason: str) -> None:
        """Ask the body to stop; called by the thread that renews the lease. A pause lets the step in flight end."""
        if reason == "pause":
            self.is_paused = True
        else:
            self.signal.set(reason)

    def must_stop(self) -> bool:
        """Say whether the body is to be left at this call of the context."""
        if not self.signal.is_set() and self._is_leaving():
            self.signal.set("shutdown")
        return self.signal.is_set()

    def running(self) -> journal.Entry | None:
        """Return the step whose body this code is called from."""
        inside = _inside.get()
        body = self._bodies.get(inside.key) if inside is not None and inside.attempt is self else None
        return None if body is None else body[0]

    def bodies(self) -> list[tuple[journal.Entry, float]]:
        """Return the steps whose bodies are being executed and since when, by `boottime`."""
        return list(self._bodies.values())

    def notes(self) -> list[Note]:
        """Return what the bodies have said and nobody has written yet."""
        return self.telling.unwritten()

    def wrote(self, notes: Sequence[Note]) -> None:
        """Take note of what was written of it."""
        self.telling.wrote(notes)

    def is_fresh(self) -> bool:
        """Say whether the last proof still allows a body to be entered or an interim state to be stored."""
        return (
            self._proof is not None
            and boottime() - self._proof <= PROOF_SECONDS
            and self._lease.alive()
            and not self.signal.is_set()
        )

    def write(self, work: Callable[[Guard], T], *, cancel: Callable[[T], bool], lost: str | None = None) -> T:
        """Run one fenced statement whose reply says whether a cancel is pending, and take it as the new proof.

        Shape: `lost` is the fail point at which the reply is lost.
        Errors: Abandoned when the reply is None, the fenced answer; Canceled is left to the caller.
        """
        sent, reply = self._ask(work, lost)
        if reply is None:
            telemetry.count(telemetry.Counter.FENCED_WRITE)
            raise Abandoned("the grant of this run has ended", fenced=True)
        self._proof = None if cancel(reply) else sent
        return reply

    def prove(self, *, anew: bool = False) -> None:
        """Ask until a fresh proof is in hand; with `anew` one that was asked for by this call.

        Errors: Canceled, Abandoned.
        """
        asked = not anew
        while not (asked and self.is_fresh()):
            self.signal.raise_if_set()
            self._must_be_alive()
            if self.write(runs.prove, cancel=bool):
                raise Canceled("cancelled")
            asked = True

    def confirm(self, otherwise: str) -> None:
        """Return when the grant still holds, after a write of it was refused for a reason of its own.

        Errors: Canceled; Abandoned, with the given text, when it does not.
        """
        sent, cancel = self._ask(runs.prove)
        if cancel is None:
            telemetry.count(telemetry.Counter.FENCED_WRITE)
            raise Abandoned(otherwise, fenced=True)
        self._proof = None if cancel else sent
        if cancel:
            raise Canceled("cancelled")

    def enter(self, entry: journal.Entry, *, explicit: bool = False) -> None:
        """Return with the right to enter the body of a step now.

        Errors: Canceled, Abandoned; AlreadyRecordedError when a commit of this grant, thought lost, has arrived since.
        """
        asked = not (explicit or self._explicit)
        while not (asked and self.is_fresh()):
            self.signal.raise_if_set()
            self._must_be_alive()
            point("step.grant.b")
            reply = self.write(lambda guard: journal.start(guard, entry), cancel=_is_cancel, lost="step.grant.r")
            point("step.grant.a")
            assert reply is not None
            if reply.cancel:
                raise Canceled("cancelled")
            if not reply.granted:
                raise AlreadyRecordedError(entry.key)
            asked = True
        self._bodies[entry.key] = (entry, boottime())
        inside = _inside.get()
        if inside is None or inside.attempt is not self or inside.key != entry.key:
            _inside.set(_Inside(self, entry.key, inside))

    def progressed(self) -> None:
        """Note that a step was committed by other means; its reply was no proof."""
        self._proof, self._explicit = None, False

    def leave(self) -> None:
        """Record that this code is in no step's body any more."""
        inside = _inside.get()
        if inside is not None and inside.attempt is self:
            self._bodies.pop(inside.key, None)
            _inside.set(inside.outside)

    def commit(self, work: Callable[[Guard], bool | None], key: str, *, lost: str = "step.commit.r") -> None:
        """Commit the outcome of a step by a fenced statement; after a lost reply look whether it was ours (I24).

        Shape: `lost` is the fail point at which the reply is lost.
        Errors: Abandoned when the grant had ended: nothing was written.
        """
        sent, reply = self._ask(work, lost)
        if reply is None:
            if self.read(lambda guard: journal.look(guard, key)) is None:
                telemetry.count(telemetry.Counter.FENCED_WRITE)
                raise Abandoned("the outcome of a step was refused: the grant of this run has ended", fenced=True)
            self._proof = None
        else:
            self._proof = None if reply else sent
        self._explicit = False
        self.telling.forget(key)

    def commit_many(self, outcomes: Sequence[journal.Written]) -> None:
        """Commit the outcomes of several steps by one fenced statement; see `commit`.

        Errors: Abandoned when the grant had ended: nothing was written.
        """
        sent, reply = self._ask(lambda guard: journal.commit_many(guard, outcomes), "items.commit.r")
        written = set() if reply is None else set(reply[1])
        left = [one.entry.key for one in outcomes if one.entry.key not in written]
        if left and len(self.read(lambda guard: journal.look_many(guard, left))) < len(left):
            telemetry.count(telemetry.Counter.FENCED_WRITE)
            raise Abandoned("the outcomes of steps were refused: the grant of this run has ended", fenced=True)
        self._proof = None if left or reply is None or reply[0] else sent
        self._explicit = False
        self.telling.forget(*(one.entry.key for one in outcomes))

    def end(self, work: Callable[[Guard], T], *, ended_as: tuple[AttemptOutcome, ...], at: str) -> T | None:
        """End the grant by a fenced statement: its reply, or None when a lost reply turns out to have been ours.

        Shape: `at` is the prefix of the fail points around it.
        Errors: Canceled when a cancel is pending, Abandoned when the grant had ended otherwise.
        """
        self._write_notes()
        point(f"{at}.b")
        _, reply = self._ask(work, f"{at}.r")
        if reply is not None and reply is not False:
            point(f"{at}.a")
            return reply
        is_there, outcome = self.read(attempts.look)
        if outcome in ended_as or not is_there:
            point(f"{at}.a")
            return None
        if outcome is None and self.write(runs.prove, cancel=bool):
            raise Canceled("cancelled")
        telemetry.count(telemetry.Counter.FENCED_WRITE)
        raise Abandoned("the grant of this run has ended", fenced=True)

    def _write_notes(self) -> None:
        """Write what is left of what the bodies said. It is for people: no end of a run fails for it."""
        self._lease.notes.forget(self)
        notes = self.notes()
        if notes:
            try:
                self._ask(lambda guard: progress.note(guard, notes))
            except Exception as error:  # noqa: BLE001 - a codec's, the server's
                logger.warning("what a body said of how far it is could not be kept: %s", error)
            self.wrote(notes)

    def read(self, work: Callable[[Guard], T]) -> T:
        """Run a query of this attempt; its answer is no proof.

        Errors: Abandoned when the database does not answer: an outage is no failure of the body.
        """
        return self._ask(work)[1]

    def _ask(self, work: Callable[[Guard], T], lost: str | None = None) -> tuple[float, T]:
        def once(conn: Connection) -> tuple[float, T]:
            sent = boottime()  # a repeat is sent anew, and its reply is a proof of its own age
            reply = work(Guard(conn, self.token))
            if lost is not None:
                point(lost)
            return sent, reply

        try:
            return self._database.do(once)
        except DatabaseUnavailableError as error:
            raise Abandoned(str(error), fenced=False) from error

    def _must_be_alive(self) -> None:
        if not self._lease.alive():
            raise Abandoned("lease_lost", fenced=False)


def _is_cancel(reply: journal.Started | None) -> bool:
    return reply is not None and reply.cancel
