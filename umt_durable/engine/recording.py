"""How a step becomes a journal entry: identified, replayed or executed with retries, its outcome recorded once."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeVar
from uuid import UUID

from umt_durable import codec, telemetry
from umt_durable.clock import boottime
from umt_durable.engine import failures, loops
from umt_durable.engine.attempt import AlreadyRecordedError
from umt_durable.engine.exits import Canceled, Exit
from umt_durable.engine.failures import Failure
from umt_durable.engine.passing import IN_PROCESS_SECONDS, LONGEST, Pass
from umt_durable.engine.replay import beside, check_digest, undo_key
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.undoing import Undo, name_of
from umt_durable.errors import DefinitionError, DurableError, EncodingError, JournalCorruptError, NonDeterminismError
from umt_durable.failpoints import point
from umt_durable.records import StepEntry
from umt_durable.states import RunState, StepKind, StepState
from umt_durable.store import journal
from umt_durable.store.guard import Guard

WITH_BODY: Final = frozenset(
    {StepKind.RUN, StepKind.TRANSACTION, StepKind.EFFECT, StepKind.ITEM, StepKind.VALUE, StepKind.UNDO}
)
"""The steps that execute a function of their own: of others a retry says nothing."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What `step.options(...)` sets for the next step: its explicit key, its retry policy, how its coroutine ends,
    what it was called before, and what undoes it.
    """

    key: str | int | UUID | None = None
    retry: RetryPolicy | None = None
    preemptible: bool = False
    renamed_from: tuple[str, ...] = ()
    undo: Undo | None = None

    def refuse_undo(self, what: str) -> None:
        """Refuse `undo=` for a step that cannot have it.

        Errors: DefinitionError.
        """
        if self.undo is not None:
            raise DefinitionError(f"{what}: undo= is for step.run and step.transaction alone")

    def refuse_for_bodies(self, what: str) -> None:
        """Refuse what is said of a body, `retry=` and `preemptible=`, for a step that has none.

        Errors: DefinitionError.
        """
        for name, is_given in (("retry", self.retry is not None), ("preemptible", self.preemptible)):
            if is_given:
                raise DefinitionError(f"{what}: {name}= is for steps with a function of their own")

    def refuse_renaming(self, what: str, why: str) -> None:
        """Refuse `renamed_from=` for a step that cannot have it.

        Errors: DefinitionError.
        """
        if self.renamed_from:
            raise DefinitionError(f"{what}: renamed_from= is not for it: {why}")


@dataclass(frozen=True, slots=True)
class Body:
    """A step's body without its arguments.

    Shape: `commits`: it records its own outcome, in its own transaction. `on_final` is called with the failure after
    which there is no further try, before that is recorded.
    """

    call: Callable[[], Any]
    annotation: Any
    name: str
    commits: bool = False
    on_final: Callable[[Exception], None] | None = None


class Recorder:
    """Takes the calls of one pass to their places in the journal."""

    def __init__(
        self, the_pass: Pass, options: StepOptions, *, keep: Callable[[journal.Written], None] | None = None
    ) -> None:
        """Record for a pass; `keep` takes the outcomes instead of a commit of their own."""
        self._pass = the_pass
        self._options = options
        self._keep = keep or self._commit_one

    def identify(
        self, name: str, kind: StepKind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[journal.Entry, StepEntry | None]:
        """Find the place of a call in the journal, and what is recorded there."""
        the_pass, key = self._pass, self._options.key
        the_pass.check()
        text = the_pass.keys.make(name, key)
        former = the_pass.keys.former(name, self._options.renamed_from, key)
        text = next((one for one in (text, *former) if one in the_pass.journal), text)
        return self.recall(text, name, kind, args, kwargs, is_keyed=key is not None)

    def recall(
        self,
        text: str,
        name: str,
        kind: StepKind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_keyed: bool,
    ) -> tuple[journal.Entry, StepEntry | None]:
        """Find what is recorded at a place in the journal; inputs of which no fingerprint can be made need a key."""
        the_pass = self._pass
        fingerprint: bytes | None
        try:
            fingerprint = the_pass.database.vault.hash(codec.fingerprint(args, kwargs))
        except EncodingError as error:
            if not is_keyed:
                raise EncodingError(
                    f"step {name!r}", error.path, f"{error.reason}; pass a key to tell its calls apart"
                ) from None
            fingerprint = None
        try:
            text, recorded = self._look_up(text, kind, fingerprint)
        except JournalCorruptError as error:
            the_pass.condemn(error)
        if kind not in WITH_BODY:
            self._options.refuse_for_bodies(f"step {name!r}")
        undo = self._options.undo
        if undo is not None:
            if kind not in (StepKind.RUN, StepKind.TRANSACTION):
                self._options.refuse_undo(f"step {name!r}")
            undo_key(text)  # its own key must fit too
        if kind is not StepKind.BRANCH or (recorded is not None and recorded.state is not StepState.STARTED):
            the_pass.saw(text)  # what a branch did that has not ended still lies ahead
        if recorded is None:
            return journal.Entry(text, the_pass.next_seq(), kind, fingerprint, undo=name_of(undo)), None
        return journal.Entry(text, recorded.seq, kind, fingerprint, recorded.failures, name_of(undo)), recorded

    def _look_up(self, text: str, kind: StepKind, fingerprint: bytes | None) -> tuple[str, StepEntry | None]:
        """Find what is recorded under a key, or beside it, where the run goes on past another step under that key."""
        the_pass = self._pass
        try:
            if text in the_pass.waits:
                raise NonDeterminismError(f"a wait {text!r}", f"the {kind} step {text!r}")
            return text, the_pass.journal.lookup(text, kind, fingerprint)
        except NonDeterminismError as error:
            the_pass.differs(error, [text])
        text = beside(text, kind, fingerprint)
        return text, the_pass.journal.lookup(text, kind, fingerprint)

    def replay(self, recorded: StepEntry, annotation: Any) -> Any:
        """Return the recorded result of a step, or raise its recorded failure."""
        self.show_replay(recorded)
        if recorded.state is StepState.FAILED:
            assert recorded.error is not None
            error = self._pass.opened(recorded.error)
            raise self._pass.exceptions.rebuild(failures.from_bytes(error))
        return codec.decode(self._pass.opened(self._result_of(recorded)), annotation)

    def _result_of(self, recorded: StepEntry) -> bytes:
        """Return a recorded result as it is stored; a large one is read only now."""
        if recorded.result is not None:
            return recorded.result
        run, key = self._pass.attempt.token.run, recorded.key
        found = self.guarded(lambda: self._pass.attempt.read(lambda guard: journal.result(guard.conn, run, key)))
        try:
            check_digest(key, found, recorded.digest)
        except JournalCorruptError as error:
            self._pass.condemn(error)
        return found

    def show_replay(self, recorded: StepEntry) -> None:
        """Count that a step gave its outcome back, and show it in the application's tracers."""
        telemetry.count(telemetry.Counter.REPLAYED_STEP)
        with self._pass.span(recorded.key, recorded.kind, tries=recorded.failures, replayed=True):
            pass

    def execute(self, entry: journal.Entry, recorded: StepEntry | None, body: Body, *, explicit: bool = False) -> Any:
        """Enter a body, with retries, until its outcome is recorded."""
        the_pass, began = self._pass, boottime()
        earlier = (recorded.age_seconds or 0.0) if recorded is not None else 0.0
        if recorded is not None and recorded.wake_at is not None and not recorded.due:
            # Woken by something else, or taken over: the back-off is not prolonged, nor cut short.
            self._park_for_retry(entry, f"retry of step {body.name} at {recorded.wake_at.isoformat()}")
        while True:
            try:
                self._enter(entry, explicit=explicit)
                point("step.body.b")
                telemetry.count(telemetry.Counter.EXECUTED_STEP)
                with the_pass.span(entry.key, entry.kind, tries=entry.failures):
                    value = body.call()
            except AlreadyRecordedError:
                the_pass.attempt.leave()
                return self.replay(self._reread(entry.key), body.annotation)
            except Exception as error:
                the_pass.attempt.leave()
                if the_pass.is_fatal(error):
                    raise
                entry = self._failed(entry, body, error, elapsed=earlier + boottime() - began)
                continue
            except Exit as how:
                the_pass.attempt.leave()
                the_pass.leave(how)
            finally:
                the_pass.attempt.leave()
            if not body.commits:
                return self.commit(entry, body, value)
            the_pass.attempt.telling.forget(entry.key)  # its own commit has recorded it
            return value

    def _reread(self, key: str) -> StepEntry:
        """Read one entry again, which this grant has recorded by a commit whose reply was lost."""
        run = self._pass.attempt.token.run
        entries = self.guarded(lambda: self._pass.attempt.read(lambda guard: journal.read(guard.conn, run)))
        return next(entry for entry in entries if entry.key == key)

    def _enter(self, entry: journal.Entry, *, explicit: bool) -> None:
        self.guarded(lambda: self._pass.attempt.enter(entry, explicit=explicit))

    def commit(self, entry: journal.Entry, body: Body, value: Any) -> Any:
        """Record the value of a body; return it as it would be read back."""
        point("step.body.a")
        try:
            encoded, decoded = codec.round_trip(value, body.annotation, where=f"step {body.name!r}")
        except EncodingError as error:
            self.record_failure(entry, body.name, error)
        point("step.encode.a")
        self._keep(journal.Written(entry, StepState.DONE, result=encoded.data, digest=encoded.digest))
        return decoded

    def _commit_one(self, outcome: journal.Written) -> None:
        def commit(guard: Guard) -> bool | None:
            return journal.commit(
                guard,
                outcome.entry,
                state=outcome.state,
                result=outcome.result,
                digest=outcome.digest,
                error=outcome.error,
            )

        point("step.commit.b")
        self.guarded(lambda: self._pass.attempt.commit(commit, outcome.entry.key))
        point("step.commit.a")

    def _failed(self, entry: journal.Entry, body: Body, error: Exception, *, elapsed: float) -> journal.Entry:
        """Record a failed try and return when the next one is due; raise when there is none."""
        the_pass, name = self._pass, body.name
        policy = self._options.retry or the_pass.retry
        tried = replace(entry, failures=entry.failures + 1)
        delay = policy.next_delay(tried.failures, random.random, error=error, elapsed=timedelta(seconds=elapsed))
        if delay is None:
            if body.on_final is not None:
                final = body.on_final
                self.guarded(lambda: final(error))
            self.record_failure(tried, name, error)
        delay = min(delay, LONGEST)
        telemetry.count(telemetry.Counter.STEP_RETRY)
        kept = failures.capture(error, step=name).to_bytes()
        due = self.guarded(
            lambda: the_pass.attempt.write(
                lambda guard: journal.record_try(
                    guard, tried, delay_seconds=delay.total_seconds(), error=kept, age_seconds=elapsed
                ),
                cancel=lambda reply: reply is not None and reply.cancel,
            )
        )
        assert due is not None
        if due.cancel:
            the_pass.leave(Canceled("cancelled"))
        seconds = due.seconds or 0.0
        if seconds > IN_PROCESS_SECONDS:
            self._park_for_retry(entry, f"retry of step {name} in {delay}")
        elif the_pass.attempt.signal.wait(seconds):
            the_pass.check()
        return tried

    def _park_for_retry(self, entry: journal.Entry, until: str) -> None:
        self.guarded(lambda: self._pass.suspend(RunState.RETRYING, steps=[entry.key], until=until))

    def record(self, entry: journal.Entry, name: str, value: Any, annotation: Any = codec.EMPTY) -> Any:
        """Record a value that came from outside as the outcome of a step, and return it as every replay will."""
        return self.commit(entry, Body(lambda: value, annotation, name), value)

    def record_known_failure(self, entry: journal.Entry, failure: Failure) -> NoReturn:
        """Record a failure that happened elsewhere as the outcome of a step and raise it as every replay will."""
        self._keep(journal.Written(entry, StepState.FAILED, error=failure.to_bytes()))
        raise self._pass.exceptions.rebuild(failure)

    def record_failure(self, entry: journal.Entry, name: str, error: Exception) -> NoReturn:
        """Record a failure as the final outcome of a step and raise it as every replay will."""
        failure = failures.capture(error, step=name)
        self._keep(journal.Written(entry, StepState.FAILED, error=failure.to_bytes()))
        # Not from the original: code that looks at the cause finds the same at every replay.
        raise self._pass.exceptions.rebuild(failure).with_traceback(error.__traceback__)

    def guarded(self, work: Callable[[], R]) -> R:
        """Run a piece of the engine; an exit it takes is taken for good."""
        try:
            return work()
        except Exit as how:
            self._pass.leave(how)


def run_coroutine(the_pass: Pass, coroutine: Coroutine[Any, Any, R], *, preemptible: bool) -> R:
    """Run the coroutine of a step on the event loop of this process, and wait for its end.

    Errors: what leaves it; the pass's exit when it was cancelled because the body should stop; DurableError when it was
    cancelled otherwise.
    """
    signal = the_pass.attempt.signal
    try:
        if not preemptible:
            return loops.run(coroutine)
        with ExitStack() as stack:
            return loops.run(coroutine, on_start=lambda cancel: stack.callback(signal.on_set(cancel)))
    except loops.Cancelled:
        signal.raise_if_set()
        raise DurableError("the coroutine of a step was cancelled, though nobody asked for that") from None


def awaited(the_pass: Pass, value: Any, *, preemptible: bool = False) -> Any:
    """Return what a function of the body's gave; of a coroutine what it gives, as `run_coroutine` has it."""
    return run_coroutine(the_pass, value, preemptible=preemptible) if inspect.iscoroutine(value) else value
