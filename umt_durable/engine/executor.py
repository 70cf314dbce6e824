"""One delivery of a run: claim, replay, go on, settle."""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

from umt_durable import codec, telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.engine import failures
from umt_durable.engine.attempt import Attempt
from umt_durable.engine.context import TaskContext, _current
from umt_durable.engine.exits import Abandoned, Canceled, Exit, Released, Replaced, Suspended
from umt_durable.engine.failures import Failure
from umt_durable.engine.passing import LONGEST, Pass
from umt_durable.engine.registry import TaskDefinition, TaskRegistry
from umt_durable.engine.reporting import Reporter
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.steps import Steps
from umt_durable.errors import (
    DatabaseUnavailableError,
    DecodingError,
    EncodingError,
    InputError,
    JournalCorruptError,
)
from umt_durable.failpoints import point
from umt_durable.records import Grant, StepEntry, Token, WaitEntry, event_id
from umt_durable.services import takeover
from umt_durable.services.lease import Lease
from umt_durable.session import Binding
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, OutboxType, Reason, RunState
from umt_durable.store import journal, outbox, runs, waits, workers
from umt_durable.store.guard import Guard

logger = logging.getLogger(__name__)

FINISH_HOLD_SECONDS = 15.0
"""How long the finisher keeps the rows it publishes itself, before a relay takes them."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What is believed of a message: which run it is about. `claim` is made by whoever received it."""

    run_id: str
    nesting: int
    task: str
    claim: UUID


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is terminal; what has to leave is in the outbox, claimed by this delivery.

    Shape: `version` is the one that ran, `value` the result as read back, `data` its stored bytes; `error` what the
    body raised, and `failure` what is kept of it; `events` are the ids of the outbox rows to forget once they have
    been published.
    """

    state: RunState
    token: Token
    version: int
    value: Any = None
    data: bytes | None = None
    error: Exception | None = None
    failure: Failure | None = None
    events: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Parked:
    """The run waits for time, a fact, a retry or a person; this worker is free."""

    state: RunState
    until: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """The run is terminal without a result or callbacks of its own: another task has its id, and its callers.

    Shape: `message` is what has to be published for that task, if anything; `events` are the outbox rows that hold it.
    """

    token: Token
    message: bytes | None
    events: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nothing was done: the run was claimed, parked or finished before, or this process may not go on with it."""

    reason: str


Outcome: TypeAlias = Finished | Superseded | Parked | Dropped


class Executor:
    """Executes deliveries in one process."""

    def __init__(
        self,
        database: Database,
        lease: Lease,
        settings: Settings,
        tasks: TaskRegistry,
        bindings: Mapping[str, Binding] | None = None,
        *,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the executor of a process; `is_leaving` says whether it shuts down: runs are then handed over."""
        self._is_leaving = is_leaving
        self._database = database
        self._lease = lease
        self._settings = settings
        self._tasks = tasks
        self._bindings = dict(bindings or {})

    def execute(self, delivery: Delivery, reporter: Reporter) -> Outcome:
        """Execute one delivery of a run up to its end, its next wait, or the loss of its grant.

        Errors: DatabaseUnavailableError when the claim could not be asked for; a grant it may have got is given up.
        Keeps: I4 (nothing runs that was not claimed), I24 (claim, step, suspend and finish may be repeated).
        """
        worker = self._lease.ensure()
        sent, grant = self._claim(delivery, worker)
        if grant is None and not self._database.do(lambda conn: workers.is_live(conn, worker)):
            # The database's clock has jumped past our lease; the run may be had under another.
            self._lease.lose()
            worker = self._lease.ensure()
            sent, grant = self._claim(delivery, worker)
        if grant is None:
            telemetry.count(telemetry.Counter.DUPLICATE_DELIVERY)
            return Dropped("nothing to claim: the run is being executed, parked or finished")
        point("claim.a")
        telemetry.count(telemetry.Counter.CLAIMED_RUN)
        attempt = Attempt(self._database, self._lease, grant, sent=sent, is_leaving=self._is_leaving)
        self._lease.hold(attempt, worker)
        try:
            return _Execution(self, delivery, grant, attempt, reporter).run()
        except Abandoned as how:
            return self._abandoned(how, attempt, reporter)
        except DatabaseUnavailableError as error:
            return self._abandoned(Abandoned(str(error), fenced=False), attempt, reporter)
        except BaseException as error:
            # sys.exit() in a body, a cancelled greenlet, a defect of ours: neither outcome nor suspension.
            self._give_up(grant.token, f"{type(error).__name__} left the body")
            raise
        finally:
            self._lease.release(attempt)

    def _claim(self, delivery: Delivery, worker: UUID) -> tuple[float, Grant | None]:
        """Ask for the grant; return it with the `boottime` at which its statement was sent."""
        task = self._tasks.get(delivery.task)
        versions = self._tasks.versions(delivery.task)

        def ask(conn: Connection) -> tuple[float, Grant | None]:
            sent = boottime()
            grant = runs.claim(
                conn,
                id=delivery.run_id,
                nesting=delivery.nesting,
                task=delivery.task,
                claim=delivery.claim,
                worker=worker,
                versions=versions,
                limit_seconds=task.limit_seconds,
            )
            return sent, grant

        point("claim.b")
        try:
            return self._database.do(ask)
        except DatabaseUnavailableError:
            # The claim may have been granted, or be so yet: under a lost lease it cannot, and nobody would execute it.
            self._lease.lose()
            raise

    def _abandoned(self, how: Abandoned, attempt: Attempt, reporter: Reporter) -> Dropped:
        """Leave the run to whoever has it, or give it up, and repair an interim state that may hide its outcome."""
        logger.warning("run no. %s is left: %s", attempt.token.run, how.reason, extra={"run": attempt.token.run})
        if not how.fenced:
            self._give_up(attempt.token, how.reason)
        if reporter.wrote:
            with contextlib.suppress(DatabaseUnavailableError):  # then the second result row of the finish repairs it
                self._database.do(lambda conn: outbox.report_again(conn, attempt.token.run), seconds=5.0)
        return Dropped(how.reason)

    def _give_up(self, token: Token, reason: str) -> None:
        """End a grant that nobody will use; where that fails, end this process's lease, which has the same effect."""
        try:
            takeover.end_delivery(
                self._database, claim=token.claim, known_dead=False, reason=reason, settings=self._settings
            )
        except DatabaseUnavailableError:
            self._lease.lose()

    @property
    def parts(self) -> tuple[Database, Settings, TaskRegistry, Mapping[str, Binding], Lease]:
        """Return what an execution needs of its process."""
        return self._database, self._settings, self._tasks, self._bindings, self._lease


class _Execution:
    """One grant from its journal to its settlement."""

    def __init__(
        self, executor: Executor, delivery: Delivery, grant: Grant, attempt: Attempt, reporter: Reporter
    ) -> None:
        self._database, self._settings, self._tasks, self._bindings, self._lease = executor.parts
        self._delivery, self._grant, self._attempt, self._reporter = delivery, grant, attempt, reporter
        self._definition: TaskDefinition = self._tasks.get(delivery.task, grant.version)

    def run(self) -> Outcome:
        """Execute what was granted, or hand it over when this process shuts down."""
        try:
            return self._run()
        except Released:
            return self._hand_over()

    def _run(self) -> Outcome:
        self._reporter.claimed(self._grant)
        if self._grant.cancel:
            return self._finish(RunState.CANCELLED)
        if self._attempt.is_fresh():
            self._reporter.started()
        try:
            args, kwargs = self._definition.schema.decode(self._grant.args, self._grant.codec)
        except (DecodingError, InputError) as error:
            return self._quarantine(Reason.BAD_INPUT, error)
        the_pass = self._prepare(args, kwargs)
        try:
            self._attempt.prove()  # a body without steps is one step: it is entered on a proof as young as any
        except Canceled:
            return self._finish(RunState.CANCELLED)
        try:
            value = self._call(the_pass, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever left the body is its outcome
            return self._settle(the_pass, error)
        except Exit as how:
            return self._left(how)
        return self._settle(the_pass, None, value)

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
            version=self._grant.version,
            priority=self._grant.priority,
            failures=self._grant.failures,
            input=self._definition.schema.by_name(args, kwargs),
            entries=entries,
            wait_entries=wait_entries,
            bindings={"default": self._database.url, **self._bindings},
        )

    def _call(self, the_pass: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = TaskContext(the_pass, Steps(the_pass))
        before = _current.set(context)
        try:
            if self._definition.takes_context:
                return self._definition.body(context, *args, **kwargs)
            return self._definition.body(*args, **kwargs)
        finally:
            _current.reset(before)

    def _settle(self, the_pass: Pass, error: Exception | None, value: Any = None) -> Outcome:
        """Decide what the end of a body means, whatever it swallowed on its way."""
        if the_pass.exit is not None:
            return self._left(the_pass.exit)
        if the_pass.fatal is not None:
            corrupt = isinstance(the_pass.fatal, JournalCorruptError)
            return self._quarantine(Reason.JOURNAL_CORRUPT if corrupt else Reason.NONDETERMINISM, the_pass.fatal)
        for entry in the_pass.journal.orphans() if error is None else ():
            telemetry.count(telemetry.Counter.ORPHAN_STEP)
            logger.warning("step %r is in the journal but was not asked for", entry.key, extra={"run": the_pass.run_id})
        if error is None:
            try:
                where = f"the result of {self._definition.name}"
                encoded, decoded = codec.round_trip(value, self._definition.result, where=where)
            except EncodingError as refused:
                return self._fail(refused)
            return self._finish(RunState.SUCCEEDED, value=decoded, data=encoded.data)
        return self._retry(error) or self._fail(error)

    def _left(self, how: Exit) -> Outcome:
        if isinstance(how, Suspended):
            return Parked(how.state, how.until)
        if isinstance(how, Canceled):
            return self._finish(RunState.CANCELLED)
        if isinstance(how, Replaced):
            return self._supersede(how)
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
                    hold_seconds=FINISH_HOLD_SECONDS,
                    repair_seconds=2 * self._settings.lease_seconds,
                )
                if ended is RunState.CANCELLED:
                    outbox.report_again(guard.conn, token.run)
                elif ended is not None and how.run is not None:
                    runs.enqueue(guard.conn, how.run, deliver_seconds=self._settings.deliver_seconds)
                elif ended is not None and how.message is not None:
                    outbox.keep_callback(guard, payload=how.message, hold_seconds=FINISH_HOLD_SECONDS)
            return ended

        point("finish.commit.b")
        ended = self._attempt.end(supersede, ended_as=(AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED))
        point("finish.commit.a")
        if ended is None:  # a lost reply: the run row says how it ended
            found = self._database.do(lambda conn: runs.for_report(conn, token.run))
            ended = RunState.SUCCEEDED if found is None else found.state
        telemetry.count(telemetry.Counter.FINISHED_RUN)
        if ended is RunState.CANCELLED:
            return Finished(ended, token, self._grant.version)
        row = (event_id(token.run, token.fence + 1, OutboxType.CALLBACK, 0),)
        return Superseded(token, how.message, () if how.message is None else row)

    def _hand_over(self) -> Outcome:
        """Make the run ready for another process; no crash is counted, and its journal stays as it is."""
        try:
            self._attempt.end(
                lambda guard: runs.hand_over(guard, deliver_seconds=self._settings.deliver_seconds) or None,
                ended_as=(AttemptOutcome.SUSPENDED,),
            )
        except Canceled:
            return self._finish(RunState.CANCELLED)
        telemetry.count(telemetry.Counter.HANDED_OVER_RUN)
        self._database.notify()
        return Dropped("this process shuts down; the run goes on elsewhere")

    def _retry(self, error: Exception) -> Parked | None:
        """Park the run for its next attempt, if its policy allows one and the error is not in the journal for good."""
        if failures.is_recorded(error):
            return None
        count = self._grant.failures + 1
        policy: RetryPolicy = self._definition.retry
        elapsed = timedelta(seconds=self._grant.age_seconds)
        delay = policy.next_delay(count, random.random, error=error, elapsed=elapsed)
        if delay is None:
            return None
        delay = min(delay, LONGEST)
        until = f"retry {count} in {delay}"
        kept = failures.capture(error)
        try:
            self._attempt.prove()
            self._reporter.suspending(RunState.RETRYING, until)
            point("retry.commit.b")
            self._attempt.end(
                lambda guard: (
                    runs.retry(guard, delay_seconds=delay.total_seconds(), error=kept.to_bytes(), summary=kept.summary)
                    or None
                ),
                ended_as=(AttemptOutcome.FAILED,),
            )
        except Canceled:
            return None
        point("retry.commit.a")
        telemetry.count(telemetry.Counter.RUN_RETRY)
        return Parked(RunState.RETRYING, until)

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
            )
        except Canceled:
            return self._finish(RunState.CANCELLED)
        telemetry.count(telemetry.Counter.QUARANTINED_RUN)
        logger.error(
            "a run of %s is quarantined: %s", self._definition.name, kept.summary, extra={"run": self._delivery.run_id}
        )
        return Parked(RunState.QUARANTINED, reason)

    def _finish(
        self,
        state: RunState,
        *,
        value: Any = None,
        data: bytes | None = None,
        error: Exception | None = None,
        failure: Failure | None = None,
    ) -> Finished:
        """End the run in one statement, with everything that has to leave (I12, I13)."""
        token, reports = self._grant.token, self._reporter.reports
        callbacks = 0 if state is RunState.CANCELLED else self._reporter.callbacks(state)
        point("finish.commit.b")
        ended = self._attempt.end(
            lambda guard: runs.finish(
                guard,
                state=state,
                result=data,
                error=None if failure is None else failure.to_bytes(),
                summary=None if failure is None else failure.summary,
                report=reports,
                callbacks=callbacks,
                hold_seconds=FINISH_HOLD_SECONDS,
                repair_seconds=2 * self._settings.lease_seconds,
            ),
            ended_as=(AttemptOutcome.COMPLETED, AttemptOutcome.FAILED, AttemptOutcome.CANCELLED),
        )
        point("finish.commit.a")
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


def cancel_payload(reason: str | None) -> bytes:
    """Return the payload of a cancel fact."""
    return json.dumps({"reason": reason}).encode()
