"""One grant of a run, from its journal to its settlement."""

from __future__ import annotations

import hashlib
import inspect
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from umt_durable import codec, telemetry
from umt_durable.codec import Encoded
from umt_durable.database import Database
from umt_durable.engine import failures
from umt_durable.engine.async_context import AsyncSteps, AsyncTaskContext
from umt_durable.engine.attempt import Attempt
from umt_durable.engine.compensating import undo_all
from umt_durable.engine.context import RunContext, TaskContext, _current
from umt_durable.engine.exits import Abandoned, Canceled, ContinuedAsNew, Exit, Released, Replaced, Suspended, Undecided
from umt_durable.engine.failures import Failure
from umt_durable.engine.loops import drive
from umt_durable.engine.outcomes import Continued, Delivery, Dropped, Finished, Outcome, Parked, Superseded
from umt_durable.engine.passing import LONGEST, Pass
from umt_durable.engine.registry import TaskDefinition, TaskRegistry
from umt_durable.engine.reporting import Reporter
from umt_durable.engine.retry import RetryAfter, RetryPolicy
from umt_durable.engine.steps import Steps
from umt_durable.engine.tokens import Tokens
from umt_durable.errors import (
    DecodingError,
    DefinitionError,
    DurableError,
    EncodingError,
    InputError,
    JournalCorruptError,
    NonDeterminismError,
    PayloadKeyError,
    UncertainOpError,
)
from umt_durable.failpoints import point
from umt_durable.records import Grant, StepEntry, WaitEntry, event_id
from umt_durable.services.lease import Lease
from umt_durable.session import Binding
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, OutboxType, Reason, RunState
from umt_durable.store import journal, ledger, outbox, runs, waits
from umt_durable.store.guard import Guard
from umt_durable.store.ledger import OpName

logger = logging.getLogger(__name__)

MOST_ORPHANS = 10
"""How many orphans of a run are named in its history; the log names all."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an execution needs of its process."""

    database: Database
    settings: Settings
    tasks: TaskRegistry
    bindings: Mapping[str, Binding]
    lease: Lease


def cause(error: Exception) -> Exception | None:
    """Return what a retry is for: of one that a body asks for, what it was asked for about, if anything."""
    if not isinstance(error, RetryAfter):
        return error
    return error.__cause__ if isinstance(error.__cause__, Exception) else None


def _unreadable(error: Exception) -> Reason:
    """Return why a run is parked whose record does not serve: it is not lost, and a person can have it go on."""
    if isinstance(error, PayloadKeyError):
        return Reason.PAYLOAD_KEY
    return Reason.JOURNAL_CORRUPT if isinstance(error, JournalCorruptError) else Reason.NONDETERMINISM


class Execution:
    """One grant from its journal to its settlement."""

    def __init__(self, parts: Parts, delivery: Delivery, grant: Grant, attempt: Attempt, reporter: Reporter) -> None:
        self._database, self._settings, self._tasks = parts.database, parts.settings, parts.tasks
        self._bindings, self._lease = parts.bindings, parts.lease
        self._delivery, self._grant, self._attempt, self._reporter = delivery, grant, attempt, reporter
        self._definition: TaskDefinition = self._tasks.get(delivery.task, grant.version)

    def run(self) -> Outcome:
        """Execute what was granted, or hand it over when this process shuts down."""
        try:
            return self._run_or_hand_over()
        except Canceled:
            return self._begin_undoing()

    def _run_or_hand_over(self) -> Outcome:
        try:
            return self._run()
        except Released as how:
            return self._hand_over(str(how))

    def _run(self) -> Outcome:
        try:
            self._reporter.claimed(self._grant)
        except (PayloadKeyError, JournalCorruptError) as error:
            return self._quarantine(_unreadable(error), error)
        if self._grant.cancel:
            return self._finish(RunState.CANCELLED)
        if self._attempt.is_fresh():
            self._reporter.started()
        try:
            args, kwargs = self._definition.schema.decode(self._grant.args, self._grant.codec)
            if self._grant.digest is None:
                self._pin_input(args, kwargs)
        except (PayloadKeyError, JournalCorruptError) as error:
            return self._quarantine(_unreadable(error), error)
        except (DecodingError, EncodingError, InputError) as error:
            is_plain = not (self._definition.checks_calls or self._grant.compensates)
            if isinstance(error, InputError) and is_plain:
                return self._fail(TypeError(str(error)))  # as of the call itself, a class that any caller can rebuild
            return self._quarantine(Reason.BAD_INPUT, error)
        the_pass = self._prepare(args, kwargs)
        if self._grant.compensates:
            return self._undo(the_pass)
        try:
            self._attempt.prove()  # a body without steps is one step: it is entered on a proof as young as any
        except Canceled:
            return self._finish(RunState.CANCELLED)
        try:
            value = self._call(the_pass, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever left the body is its outcome
            return self._settle(the_pass, error)
        except Exit as how:
            return self._left(the_pass, how)
        return self._settle(the_pass, None, value)

    def _undo(self, the_pass: Pass) -> Outcome:
        """Undo what this run has done, instead of going on with it; then end it as cancelled."""
        token = _current.set(TaskContext(the_pass, Steps(the_pass)))
        try:
            undo_all(the_pass, the_pass.journal.entries)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run must not end before it is undone
            reason = Reason.UNDO if the_pass.fatal is None else _unreadable(the_pass.fatal)
            return self._quarantine(reason, error)
        except Exit as how:
            return self._left(the_pass, how)
        finally:
            _current.reset(token)
        return self._finish(RunState.CANCELLED)

    def _begin_undoing(self) -> Outcome:
        """End the grant of a run that was cancelled and has something to undo, with the run ready for that.

        The cancel is no part of this grant any more: whoever claims the run next does nothing but undo.
        """
        token, deliver = self._grant.token, self._settings.deliver_seconds

        def begin(guard: Guard) -> bool | None:
            with guard.conn.transaction():
                if runs.lock_grant(guard) is None:
                    return None
                begun = runs.compensate(
                    guard.conn, token.run, deliver_seconds=deliver, outcome=AttemptOutcome.CANCELLED
                )
            return begun or None

        try:
            self._attempt.end(begin, ended_as=(AttemptOutcome.CANCELLED,), at="undo.commit")
        except Canceled:  # there was nothing to undo after all: whoever takes the run over ends it
            raise Abandoned("its cancel could not be applied", fenced=False) from None
        self._database.notify()
        return Dropped("the run is cancelled; what it has done is undone first")

    def _pin_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Settle what a run that SQL started with a key was given, as its task reads it: starts are compared to that.

        Errors: EncodingError for what no start from Python could have given.
        """
        schema = self._definition.schema
        if self._definition.checks_calls:
            encoded = schema.encode(args, kwargs)
        else:
            encoded = codec.encode_arguments(args, kwargs, where=f"the arguments of {self._definition.name}")
        digest, key_hash = hashlib.sha256(self._grant.args).digest(), schema.input_hash(encoded.data)
        self._attempt.read(lambda guard: runs.pin_input(guard, digest=digest, key_hash=key_hash))

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
        """Read the journal and make the pass. Only after the claim: before it, a zombie's last commit can be missed."""
        entries: list[StepEntry] = []
        wait_entries: list[WaitEntry] = []
        if self._grant.token.fence > 1:  # a first grant has nothing to read
            point("claim.journal_read.b")
            run = self._grant.token.run
            entries, wait_entries = self._database.do(lambda conn: (journal.read(conn, run), waits.of_run(conn, run)))
            point("claim.journal_read.a")
        return Pass(
            attempt=self._attempt,
            database=self._database,
            reporter=self._reporter,
            exceptions=self._tasks.exceptions,
            retry=self._definition.retry,
            run_id=self._delivery.run_id,
            nesting=self._delivery.nesting,
            queue=self._grant.queue,
            deliver_seconds=self._settings.deliver_seconds,
            version=self._grant.version,
            generation=self._grant.generation,
            priority=self._grant.priority,
            failures=self._grant.failures,
            input=self._definition.schema.by_name(args, kwargs),
            on_mismatch=self._definition.on_mismatch,
            successor=self._encode_successor,
            entries=entries,
            wait_entries=wait_entries,
            bindings={"default": self._database.url, **self._bindings},
            op_namespace=self._settings.op_namespace,
            tokens=Tokens(self._database, self._settings),
        )

    def _call(self, the_pass: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        steps = Steps(the_pass)
        plain = TaskContext(the_pass, steps)
        context: RunContext = plain
        before = _current.set(plain)
        if inspect.iscoroutinefunction(self._definition.function):
            context = AsyncTaskContext(the_pass, AsyncSteps(the_pass, steps))
        try:
            first = (context,) if self._definition.takes_context else ()
            value = self._definition.body(*first, *args, **kwargs)
            if inspect.iscoroutine(value):
                value = drive(value)
                the_pass.calls.check()
            return value
        finally:
            _current.reset(before)

    def _settle(self, the_pass: Pass, error: Exception | None, value: Any = None) -> Outcome:
        """Decide what the end of a body means, whatever it swallowed on its way."""
        if isinstance(the_pass.exit, Canceled) and error is not None:
            return self._finish(RunState.CANCELLED, said=failures.capture(error).summary)
        if the_pass.exit is not None:
            return self._left(the_pass, the_pass.exit)
        if isinstance(the_pass.fatal, UncertainOpError):
            op = OpName(self._settings.op_namespace, the_pass.fatal.op_key)
            return self._ask_a_person(
                the_pass.fatal, lambda guard: ledger.wait_for_person(guard.conn, op, guard.token.run)
            )
        if isinstance(the_pass.fatal, NonDeterminismError) and self._definition.on_mismatch == "fail":
            return self._fail(the_pass.fatal)
        if the_pass.fatal is not None:
            return self._quarantine(_unreadable(the_pass.fatal), the_pass.fatal)
        if error is None:
            orphans = self._report_orphans(the_pass)
            try:
                where = f"the result of {self._definition.name}"
                encoded, decoded = codec.round_trip(value, self._definition.result, where=where)
            except EncodingError as refused:
                return self._fail(refused)
            return self._finish(RunState.SUCCEEDED, value=decoded, data=encoded.data, said=orphans)
        return self._retry(error, the_pass.next_input) or self._fail(error)

    def _report_orphans(self, the_pass: Pass) -> str | None:
        """Tell of recorded steps and waits that the code did not ask for; return what the attempt's row says of it."""
        orphans = the_pass.orphans()
        for key in orphans:
            telemetry.count(telemetry.Counter.ORPHAN_STEP)
            logger.warning("%r is in the journal but was not asked for", key, extra={"run": the_pass.run_id})
        shown = ", ".join(map(repr, orphans[:MOST_ORPHANS]))
        more = f" and {len(orphans) - MOST_ORPHANS} more" if len(orphans) > MOST_ORPHANS else ""
        return f"recorded, but not asked for: {shown}{more}" if orphans else None

    def _left(self, the_pass: Pass, how: Exit) -> Outcome:
        if isinstance(how, Suspended):
            return Parked(how.state, how.until)
        if isinstance(how, Canceled):
            return self._finish(RunState.CANCELLED)
        if isinstance(how, Replaced):
            return self._supersede(how)
        if isinstance(how, ContinuedAsNew):
            return self._continue(how, the_pass.unread_waits())
        if isinstance(how, Undecided):
            keys = how.waits
            return self._ask_a_person(
                how.error, lambda guard: not waits.count_settled(guard.conn, guard.token.run, keys)
            )
        raise how

    def _supersede(self, how: Replaced) -> Outcome:
        """End the run and begin what takes its place in one transaction; a cancel that came before ends both."""
        token = self._grant.token

        def supersede(guard: Guard) -> RunState | None:
            with guard.conn.transaction():
                ended = runs.finish(
                    guard,
                    state=RunState.SUCCEEDED,
                    report=False,
                    callbacks=0,
                    hold_seconds=self._settings.hold_seconds,
                    repair_seconds=2 * self._settings.lease_seconds,
                )
                if ended is RunState.CANCELLED:
                    outbox.report_again(guard.conn, token.run)
                elif ended is not None and how.run is not None:
                    runs.enqueue(guard.conn, how.run, deliver_seconds=self._settings.deliver_seconds)
                    runs.hand_on_parent(guard.conn, token.run, how.run.id, how.run.nesting)
                elif ended is not None and how.message is not None:
                    outbox.keep_callback(guard, payload=how.message, hold_seconds=self._settings.hold_seconds)
            return ended

        ended = self._attempt.end(
            supersede, ended_as=(AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED), at="finish.commit"
        )
        if ended is None:  # a lost reply: the run row says how it ended
            found = self._database.do(lambda conn: runs.for_report(conn, token.run))
            ended = RunState.SUCCEEDED if found is None else found.state
        telemetry.count(telemetry.Counter.FINISHED_RUN)
        if ended is RunState.CANCELLED:
            return Finished(ended, token, self._grant.version)
        row = (event_id(token.run, token.fence + 1, OutboxType.CALLBACK, 0),)
        return Superseded(token, how.message, () if how.message is None else row)

    def _encode_successor(self, args: tuple[Any, ...], kwargs: dict[str, Any], version: int | None) -> Encoded:
        """Encode the arguments of the next generation, as the version it will have takes them."""
        if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
            raise DefinitionError(f"ctx.continue_as_new: a version is a whole number, not {version!r}")
        definition = self._definition if version is None else self._tasks.get(self._definition.name, version)
        return definition.encode_call(args, kwargs)

    def _continue(self, how: ContinuedAsNew, unread: Sequence[str]) -> Outcome:
        """Begin the run anew in one transaction; its lock comes first, so that what was settled meanwhile is seen."""

        def go_on(guard: Guard) -> int | None:
            with guard.conn.transaction():
                if runs.lock_grant(guard) is not False:
                    return None
                return runs.continue_as_new(
                    guard,
                    arguments=how.arguments,
                    version=how.version,
                    unread=unread,
                    deliver_seconds=self._settings.deliver_seconds,
                )

        try:
            generation = self._attempt.end(go_on, ended_as=(AttemptOutcome.SUSPENDED,), at="continue.commit")
        except Canceled:
            return self._finish(RunState.CANCELLED)
        telemetry.count(telemetry.Counter.CONTINUED_RUN)
        self._database.notify()
        return Continued(generation or self._grant.generation + 1)

    def _hand_over(self, why: str) -> Outcome:
        """Make the run ready for another process; no crash is counted, and its journal stays as it is."""
        try:
            self._attempt.end(
                lambda guard: runs.hand_over(guard, deliver_seconds=self._settings.deliver_seconds) or None,
                ended_as=(AttemptOutcome.SUSPENDED,),
                at="handover.commit",
            )
        except Canceled:
            return self._finish(RunState.CANCELLED)
        telemetry.count(telemetry.Counter.HANDED_OVER_RUN)
        self._database.notify()
        why = "this process shuts down; the run goes on elsewhere" if why == "shutdown" else why
        return Dropped(why)

    def _retry(self, error: Exception, changed: Encoded | None) -> Parked | None:
        """Park the run for its next attempt, if its policy allows one and the error is not in the journal for good.

        The attempt has other arguments where the body asked for that.
        """
        if failures.is_recorded(error):
            return None
        count = self._grant.failures + 1
        policy: RetryPolicy = self._definition.retry
        elapsed = timedelta(seconds=self._grant.generation_seconds)
        delay = policy.next_delay(count, random.random, error=error, elapsed=elapsed)
        if delay is None:
            return None
        delay = min(delay, LONGEST)
        until = f"retry {count} in {delay}"
        kept = failures.capture(error)
        try:
            self._attempt.prove()
            self._reporter.suspending(RunState.RETRYING, until, cause(error))
            self._attempt.end(
                lambda guard: (
                    runs.retry(
                        guard,
                        delay_seconds=delay.total_seconds(),
                        error=kept.to_bytes(),
                        summary=kept.summary,
                        changed=changed,
                    )
                    or None
                ),
                ended_as=(AttemptOutcome.FAILED,),
                at="retry.commit",
            )
        except Canceled:
            return None
        telemetry.count(telemetry.Counter.RUN_RETRY)
        return Parked(RunState.RETRYING, until, error, delay.total_seconds())

    def _fail(self, error: Exception) -> Finished:
        return self._finish(RunState.FAILED, error=error, failure=failures.capture(error))

    def _quarantine(self, reason: Reason, error: Exception) -> Outcome:
        kept = failures.capture(error)
        try:
            self._attempt.prove()
            self._reporter.suspending(RunState.QUARANTINED, reason)
            self._attempt.end(
                lambda guard: (
                    runs.quarantine(guard, reason=reason, error=kept.to_bytes(), summary=kept.summary) or None
                ),
                ended_as=(AttemptOutcome.FAILED,),
                at="quarantine.commit",
            )
        except Canceled:
            return self._finish(RunState.CANCELLED)
        telemetry.count(telemetry.Counter.QUARANTINED_RUN)
        logger.error(
            "a run of %s is quarantined: %s", self._definition.name, kept.summary, extra={"run": self._delivery.run_id}
        )
        return Parked(RunState.QUARANTINED, reason)

    def _ask_a_person(self, error: DurableError, is_open: Callable[[Guard], bool]) -> Outcome:
        """Park the run until a person has said how an effect or a step ended, unless that is known by now.

        Whether it is open is asked under the run's lock: a decision comes before, and is seen, or after, and finds the
        run parked.
        """
        kept = failures.capture(error)

        def park(guard: Guard) -> str | None:
            with guard.conn.transaction():
                if runs.lock_grant(guard) is not False:
                    return None
                if not is_open(guard):
                    return "decided"
                runs.quarantine(guard, reason=Reason.UNCERTAIN_OP, error=kept.to_bytes(), summary=kept.summary)
            return "parked"

        try:
            self._attempt.prove()
            self._reporter.suspending(RunState.QUARANTINED, Reason.UNCERTAIN_OP)
            if self._attempt.end(park, ended_as=(AttemptOutcome.FAILED,), at="quarantine.commit") == "decided":
                return self._hand_over("what was uncertain is decided; the run goes on")
        except Canceled:
            return self._finish(RunState.CANCELLED)
        telemetry.count(telemetry.Counter.QUARANTINED_RUN)
        run = {"run": self._delivery.run_id}
        logger.error("a run of %s waits for a person: %s", self._definition.name, error, extra=run)
        return Parked(RunState.QUARANTINED, Reason.UNCERTAIN_OP)

    def _finish(
        self,
        state: RunState,
        *,
        value: Any = None,
        data: bytes | None = None,
        error: Exception | None = None,
        failure: Failure | None = None,
        said: str | None = None,
    ) -> Finished:
        """End the run in one statement, with everything that has to leave (I12, I13)."""
        token, reports = self._grant.token, self._reporter.reports
        callbacks = 0 if state is RunState.CANCELLED else self._reporter.callbacks(state)
        ended = self._attempt.end(
            lambda guard: runs.finish(
                guard,
                state=state,
                result=data,
                error=None if failure is None else failure.to_bytes(),
                summary=said if failure is None else failure.summary,
                report=reports,
                callbacks=callbacks,
                hold_seconds=self._settings.hold_seconds,
                repair_seconds=2 * self._settings.lease_seconds,
            ),
            ended_as=(AttemptOutcome.COMPLETED, AttemptOutcome.FAILED, AttemptOutcome.CANCELLED),
            at="finish.commit",
        )
        if ended is None:  # a lost reply: the run row says how it ended
            found = self._database.do(lambda conn: runs.for_report(conn, token.run))
            ended = state if found is None else found.state
        telemetry.count(telemetry.Counter.FINISHED_RUN)
        if ended is RunState.CANCELLED:
            value = data = error = failure = None
            callbacks = 0
        kinds = [(OutboxType.RESULT, 0)] * reports + [(OutboxType.CALLBACK, n) for n in range(callbacks)]
        events = tuple(event_id(token.run, token.fence + 1, kind, ordinal) for kind, ordinal in kinds)
        return Finished(ended, token, self._grant.version, value, data, error, failure, events)
