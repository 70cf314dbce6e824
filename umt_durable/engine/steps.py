"""The steps a body can call. Each is one journal entry: recorded once, given back at every replay."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NoReturn, ParamSpec, TypeVar
from uuid import UUID

from umt_durable import codec, telemetry
from umt_durable.clock import boottime
from umt_durable.engine import failures
from umt_durable.engine.attempt import AlreadyRecordedError
from umt_durable.engine.exits import Canceled, Exit
from umt_durable.engine.passing import IN_PROCESS_SECONDS, LONGEST, Pass
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.txstep import run_in_transaction
from umt_durable.engine.waiting import MISSING, Fact, Wait, wait_for_fact
from umt_durable.errors import DefinitionError, EncodingError, JournalCorruptError, NonDeterminismError
from umt_durable.failpoints import point
from umt_durable.records import StepEntry
from umt_durable.session import Binding
from umt_durable.states import RunState, StepKind, StepState
from umt_durable.store import journal
from umt_durable.store.guard import Guard

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What `step.options(...)` sets for the next step: its explicit key, and its own retry policy."""

    key: str | int | UUID | None = None
    retry: RetryPolicy | None = None


class Steps:
    """The vocabulary of a durable body."""

    def __init__(self, the_pass: Pass, options: StepOptions | None = None) -> None:
        self._pass = the_pass
        self._options = options or StepOptions()

    def options(self, *, key: str | int | UUID | None = None, retry: RetryPolicy | None = None) -> Steps:
        """Return these steps with options for the call that follows.

        Shape: `key` tells same-named steps apart whatever their order; `retry` replaces the task's policy.
        """
        return Steps(self._pass, replace(self._options, key=key, retry=retry))

    def run(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Execute a function once and record its result; at every replay give that result back instead (I6).

        The result is what would be read back: typed by the function's return annotation, also on the first pass.
        Errors: whatever the function raises when its retries are used up, recorded too; EncodingError, without a retry,
        for a result that cannot be stored; NonDeterminismError when the journal holds something else here.
        """
        annotation = codec.return_annotation(fn)
        if inspect.iscoroutinefunction(fn):
            raise DefinitionError(
                f"step {name!r}: {fn.__qualname__} is a coroutine function; steps are plain functions"
            )
        entry, recorded = self._identify(name, StepKind.RUN, args, kwargs)
        if recorded is not None and recorded.state is not StepState.STARTED:
            result: R = self._replay(recorded, annotation)
            return result
        body = _Body(lambda: fn(*args, **kwargs), annotation, name)
        value: R = self._execute(entry, recorded, body)
        return value

    def transaction(
        self, name: str, fn: Callable[..., R], /, *args: Any, on: Binding | str | None = None, **kwargs: Any
    ) -> R:
        """Execute `fn(tx, ...)` in one transaction with the record of its result and the check of the fence (I16).

        Shape: `tx` is a SQLAlchemy Session or a psycopg Connection, after the binding named in the settings or given
        as `on`; without one, a psycopg Connection to our own database. Whatever `fn` writes through it is committed
        with the result or not at all, so the step is exactly once.
        Errors: as `run`; FencingError from the database ends the attempt quietly.
        """
        annotation = codec.return_annotation(fn)
        entry, recorded = self._identify(name, StepKind.TRANSACTION, args, kwargs)
        if recorded is not None and recorded.state is not StepState.STARTED:
            result: R = self._replay(recorded, annotation)
            return result
        binding = self._binding(on)

        def body() -> object:
            return run_in_transaction(
                self._pass, entry, binding, lambda tx: fn(tx, *args, **kwargs), annotation, where=f"step {name!r}"
            )

        value: R = self._execute(entry, recorded, _Body(body, annotation, name, commits=True), explicit=True)
        return value

    def sleep(self, name: str, duration: timedelta) -> None:
        """Park the run until a time from now, fixed once; replays and crashes do not prolong it (I10).

        Errors: DefinitionError for anything but a timedelta that is not negative.
        """
        if not isinstance(duration, timedelta) or not timedelta(0) <= duration <= LONGEST:
            raise DefinitionError(
                f"step {name!r}: a sleep is a timedelta from 0 to {LONGEST.days} days, not {duration!r}"
            )
        self._sleep(name, f"for {duration}", duration=duration)

    def sleep_until(self, name: str, moment: datetime) -> None:
        """Park the run until a moment; one that has passed does not park it.

        Errors: DefinitionError for a datetime without a zone.
        """
        if not isinstance(moment, datetime) or moment.tzinfo is None:
            raise DefinitionError(f"step {name!r}: sleep_until needs a datetime with a time zone, not {moment!r}")
        self._sleep(name, f"until {moment.isoformat()}", until=moment)

    def wait_for_fact(
        self,
        name: str,
        *,
        key: str | None = None,
        check: Callable[[], Any] | None = None,
        timeout: timedelta | None = None,
        poll: timedelta | None = None,
        mode: str = "first",
        default: Any = MISSING,
    ) -> Fact:
        """Park the run until a fact of this name was said to it, or with `key` was emitted under that key (I8).

        Shape: `check` is asked after the wait is registered, with no lock held, and again every `poll` (default a
        minute); its first true answer settles the wait and is the payload. `mode`: `first` or `latest` fact. With
        `default` a time-out gives a Fact with that payload instead of the error.
        Errors: FactTimeoutError after `timeout`; this outcome is recorded and never changes.
        """
        self._pass.check()
        wait = Wait(name=name, key=key, check=check, timeout=timeout, poll=poll, mode=mode, default=default)
        return wait_for_fact(self._pass, wait, step_key=self._options.key)

    def value(self, name: str, make: Callable[[], R], annotation: Any) -> R:
        """Record a value made by the engine itself, such as the time."""
        entry, recorded = self._identify(name, StepKind.VALUE, (), {})
        if recorded is not None and recorded.state is not StepState.STARTED:
            result: R = self._replay(recorded, annotation)
            return result
        value: R = self._execute(entry, recorded, _Body(make, annotation, name))
        return value

    def _identify(
        self, name: str, kind: StepKind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[journal.Entry, StepEntry | None]:
        """Find the place of a call in the journal, and what is recorded there."""
        the_pass, key = self._pass, self._options.key
        the_pass.check()
        text = the_pass.keys.make(name, key)
        fingerprint: bytes | None
        try:
            fingerprint = codec.fingerprint(args, kwargs)
        except EncodingError as error:
            if key is None:
                raise EncodingError(
                    f"step {name!r}", error.path, f"{error.reason}; pass a key to tell its calls apart"
                ) from None
            fingerprint = None
        try:
            if text in the_pass.waits:
                raise NonDeterminismError(f"a wait {text!r}", f"the {kind} step {text!r}")
            recorded = the_pass.journal.lookup(text, kind, fingerprint)
        except (NonDeterminismError, JournalCorruptError) as error:
            the_pass.condemn(error)
        the_pass.saw(text)
        if recorded is None:
            return journal.Entry(text, the_pass.next_seq(), kind, fingerprint), None
        return journal.Entry(text, recorded.seq, kind, fingerprint, recorded.failures), recorded

    def _replay(self, recorded: StepEntry, annotation: Any) -> Any:
        telemetry.count(telemetry.Counter.REPLAYED_STEP)
        if recorded.state is StepState.FAILED:
            assert recorded.error is not None
            raise self._pass.exceptions.rebuild(failures.from_bytes(recorded.error))
        assert recorded.result is not None
        return codec.decode(recorded.result, annotation)

    def _execute(self, entry: journal.Entry, recorded: StepEntry | None, body: _Body, *, explicit: bool = False) -> Any:
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
                value = body.call()
            except AlreadyRecordedError:
                the_pass.attempt.leave()
                return self._replay(self._reread(entry.key), body.annotation)
            except Exception as error:  # noqa: BLE001 - whatever left the body is its outcome
                the_pass.attempt.leave()
                entry = self._failed(entry, body.name, error, elapsed=earlier + boottime() - began)
                continue
            except Exit as how:
                the_pass.attempt.leave()
                the_pass.leave(how)
            finally:
                the_pass.attempt.leave()
            return value if body.commits else self._commit(entry, body, value)

    def _reread(self, key: str) -> StepEntry:
        """Read one entry again, which this grant has recorded by a commit whose reply was lost."""
        run = self._pass.attempt.token.run
        entries = self._guarded(lambda: self._pass.attempt.read(lambda guard: journal.read(guard.conn, run)))
        return next(entry for entry in entries if entry.key == key)

    def _enter(self, entry: journal.Entry, *, explicit: bool) -> None:
        self._guarded(lambda: self._pass.attempt.enter(entry, explicit=explicit))

    def _commit(self, entry: journal.Entry, body: _Body, value: Any) -> Any:
        point("step.body.a")
        try:
            encoded, decoded = codec.round_trip(value, body.annotation, where=f"step {body.name!r}")
        except EncodingError as error:
            self._record_failure(entry, body.name, error)
        point("step.encode.a")
        point("step.commit.b")
        self._guarded(
            lambda: self._pass.attempt.commit(
                lambda guard: journal.commit(
                    guard, entry, state=StepState.DONE, result=encoded.data, digest=encoded.digest
                ),
                entry.key,
            )
        )
        point("step.commit.a")
        return decoded

    def _failed(self, entry: journal.Entry, name: str, error: Exception, *, elapsed: float) -> journal.Entry:
        """Record a failed try and return when the next one is due; raise when there is none."""
        the_pass = self._pass
        policy = self._options.retry or the_pass.retry
        tried = replace(entry, failures=entry.failures + 1)
        delay = policy.next_delay(tried.failures, random.random, error=error, elapsed=timedelta(seconds=elapsed))
        if delay is None:
            self._record_failure(tried, name, error)
        delay = min(delay, LONGEST)
        telemetry.count(telemetry.Counter.STEP_RETRY)
        kept = failures.capture(error, step=name).to_bytes()
        due = self._guarded(
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
        self._guarded(lambda: self._pass.suspend(RunState.RETRYING, steps=[entry.key], until=until))

    def _record_failure(self, entry: journal.Entry, name: str, error: Exception) -> NoReturn:
        """Record a failure as the final outcome of a step and raise it as every replay will."""
        failure = failures.capture(error, step=name)
        self._guarded(
            lambda: self._pass.attempt.commit(
                lambda guard: journal.commit(guard, entry, state=StepState.FAILED, error=failure.to_bytes()), entry.key
            )
        )
        raise self._pass.exceptions.rebuild(failure) from error

    def _sleep(self, name: str, text: str, *, duration: timedelta | None = None, until: datetime | None = None) -> None:
        entry, recorded = self._identify(name, StepKind.SLEEP, (text,), {})
        if recorded is not None and recorded.state is StepState.DONE:
            telemetry.count(telemetry.Counter.REPLAYED_STEP)
            return
        if recorded is None:
            self._check_sleep(duration, until)
        # Of a sleep of just that long, a part has passed when the reply comes; it parks all the same.
        long = recorded is None and duration is not None and duration.total_seconds() >= IN_PROCESS_SECONDS
        # The end of a sleep is recorded before anything follows it: a clock that jumps back cannot begin it again.
        ended = recorded is not None and recorded.due
        while True:
            due = self._ask_sleep(entry, ended=ended, duration=duration, until=until)
            if due.cancel:
                self._pass.leave(Canceled("cancelled"))
            if due.seconds is None or (ended and due.seconds <= 0.0):
                return
            if long or due.seconds > IN_PROCESS_SECONDS:
                self._guarded(
                    lambda: self._pass.suspend(RunState.SLEEPING, steps=[entry.key], until=f"sleep {name} {text}")
                )
            if self._pass.attempt.signal.wait(max(due.seconds, 0.0)):
                self._pass.check()
            ended = True

    def _ask_sleep(
        self, entry: journal.Entry, *, ended: bool, duration: timedelta | None, until: datetime | None
    ) -> journal.Due:
        """Fix when a sleep ends, or record that it has; say when that is."""

        def ask(guard: Guard) -> journal.Due | None:
            if ended:
                return journal.end_sleep(guard, entry.key)
            return journal.start_sleep(guard, entry, duration=duration, until=until)

        due = self._guarded(lambda: self._pass.attempt.write(ask, cancel=_cancel))
        assert due is not None
        return due

    def _check_sleep(self, duration: timedelta | None, until: datetime | None) -> None:
        """Have the queue in front of us refuse a sleep that what waits for this run would not outlive."""
        lasts = duration if until is None else until - self._pass.database_now()
        if lasts is not None:
            self._pass.reporter.check_sleep(lasts.total_seconds())

    def _guarded(self, work: Callable[[], R]) -> R:
        """Run a piece of the engine; an exit it takes is taken for good."""
        try:
            return work()
        except Exit as how:
            self._pass.leave(how)

    def _binding(self, on: Binding | str | None) -> Binding:
        bindings = self._pass.bindings
        if on is None or (isinstance(on, str) and "://" not in on):
            name = on or "default"
            if name not in bindings:
                raise DefinitionError(f"no binding named {name!r} is configured (known: {', '.join(sorted(bindings))})")
            return bindings[name]
        return on


@dataclass(frozen=True, slots=True)
class _Body:
    """A step's body without its arguments. `commits`: it records its own outcome, in its own transaction."""

    call: Callable[[], Any]
    annotation: Any
    name: str
    commits: bool = False


def _cancel(reply: journal.Due | None) -> bool:
    return reply is not None and reply.cancel
