"""Steps whose work is an ordinary Celery task: sent once through the outbox, awaited without holding a worker.

Step, wait and message are written in one fenced transaction. The task's end comes back as a fact at an address of this
step; what the fact says is recorded as the step's outcome. The message belongs to the step: it leaves only while that
waits, and twice only if the task is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NoReturn
from uuid import UUID, uuid4

from umt_durable import codec, telemetry, tracing
from umt_durable.engine import failures
from umt_durable.engine.answers import Answer, Place
from umt_durable.engine.effects import Done, NotDone, Reconciled, Unknown
from umt_durable.engine.exits import Canceled
from umt_durable.engine.functions import check_call, check_function
from umt_durable.engine.passing import LONGEST, Pass
from umt_durable.engine.recording import Recorder
from umt_durable.engine.reporting import Described, Message
from umt_durable.errors import DefinitionError, StepTimeoutError, UncertainStepError
from umt_durable.failpoints import point
from umt_durable.records import StepEntry, StepMessage, WaitEntry
from umt_durable.states import RunState, StepKind, StepState, WaitState
from umt_durable.store import journal, outbox, waits
from umt_durable.store.guard import Guard

DEFAULT_RESEND: Final = timedelta(hours=1)
LONGEST_DOUBLING: Final = 10


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What a `reconcile=` function is told: the id of the Celery task, its name, and how often it was sent."""

    task_id: str
    task: str
    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCall:
    """A task to be awaited, and what is done when its answer does not come.

    Shape: `idempotent` None leaves that to the task's own class; `resend` None is a quarter of the time-out.
    """

    name: str
    signature: Any
    timeout: timedelta | None = None
    reconcile: Callable[[TaskInfo], Reconciled[Any]] | None = None
    idempotent: bool | None = None
    resend: timedelta | None = None

    def __post_init__(self) -> None:
        for label, value in (("timeout", self.timeout), ("resend", self.resend)):
            if value is not None and (not isinstance(value, timedelta) or not timedelta(0) < value <= LONGEST):
                raise DefinitionError(
                    f"step {self.name!r}: {label} must be a timedelta of more than 0 and up to {LONGEST.days} days"
                )
        if self.reconcile is not None:
            check_function(f"step {self.name!r}", "reconcile", self.reconcile, plain=True)
            check_call(f"step {self.name!r}", "reconcile", self.reconcile, None, told="info")
        if self.idempotent not in (None, True, False):
            raise DefinitionError(f"step {self.name!r}: idempotent is True or False, not {self.idempotent!r:.100}")
        if self.reconcile is not None and self.timeout is None:
            raise DefinitionError(f"step {self.name!r}: reconcile is asked at the time-out, so it needs timeout=")

    def again(self, sent: int) -> timedelta:
        """Return after how long without an answer a message counts as lost: twice as long each time."""
        first = self.resend or (DEFAULT_RESEND if self.timeout is None else self.timeout / 4)
        return min(LONGEST, first * float(2 ** min(sent - 1, LONGEST_DOUBLING)))


def await_task(the_pass: Pass, recorder: Recorder, call: TaskCall) -> Any:
    """Return the result of the task, or raise what it failed with, now or when the run is woken."""
    described = the_pass.reporter.ordinary.describe(call.signature, call.name)
    entry, recorded = recorder.identify(call.name, StepKind.TASK, described.identity, {})
    if recorded is not None and recorded.state is not StepState.STARTED:
        the_pass.saw(Place(the_pass.run_id, the_pass.nesting, entry.key, the_pass.generation).wait)
        return recorder.replay(recorded, codec.EMPTY)
    if recorded is None:  # later the code may have changed, and what was sent stays sent
        the_pass.reporter.ordinary.check(call.signature, call.name)
    return _Awaiting(the_pass, recorder, call, described, entry).outcome(recorded)


class _Awaiting:
    """One step on its way from sent to recorded."""

    def __init__(
        self, the_pass: Pass, recorder: Recorder, call: TaskCall, described: Described, entry: journal.Entry
    ) -> None:
        self._pass, self._recorder, self._call, self._entry = the_pass, recorder, call, entry
        self._task = described.task
        self._idempotent = described.idempotent if call.idempotent is None else call.idempotent
        self._place = Place(the_pass.run_id, the_pass.nesting, entry.key, the_pass.generation)
        the_pass.saw(self._place.wait)

    def outcome(self, recorded: StepEntry | None) -> Any:
        """Wait for the answer, record it, and give it to the body."""
        wait = self._recorder.guarded(lambda: self._answered(recorded))
        payload = self._pass.payload_of(wait)
        assert payload is not None
        answer = Answer.from_bytes(payload)
        if answer.failure is not None:
            self._record_failure(answer)
        return self._recorder.record(self._entry, self._call.name, answer.result)

    def _answered(self, recorded: StepEntry | None) -> WaitEntry:
        """Return the wait once it is settled; leave the body until then."""
        sent, again_due = self._entry.failures + 1, recorded is not None and recorded.due
        wait = self._send() if recorded is None else self._read()
        while wait.state is WaitState.PENDING:
            if wait.due:
                self._overdue(sent)
            elif again_due:
                self._resend(sent)
                sent, again_due = sent + 1, False
            else:
                until = f"for the task {self._task}"
                steps = [self._entry.key]
                self._pass.suspend(RunState.WAITING, steps=steps, waits=[self._place.wait], until=until)
            wait = self._read()
        return wait

    def _send(self) -> WaitEntry:
        """Write step, wait and message in one transaction; a repeat after a lost reply writes no second message."""
        token = uuid4()
        message = self._pack(token)
        again = self._call.again(1) if self._idempotent else None
        seq = self._pass.next_seq()

        def send(guard: Guard) -> journal.Started | None:
            with guard.conn.transaction():
                started = journal.send(guard, self._entry, again=again)
                if started is None or not started.granted:
                    return started
                waits.await_answer(
                    guard,
                    key=self._place.wait,
                    seq=seq,
                    name=self._call.name,
                    address=self._place.address,
                    timeout=self._call.timeout,
                    token=token,
                )
                outbox.keep_for_step(guard, message)
                point("task.send.b")
            return started

        self._written(send)
        point("task.send.a")
        telemetry.count(telemetry.Counter.SENT_TASK)
        return self._read()

    def _resend(self, sent: int) -> None:
        """Send the message of an idempotent task again, under the same id, as lost."""
        token = self._pass.attempt.read(
            lambda guard: waits.awaited(guard.conn, self._place.run, self._place.nesting, self._place.wait)
        )
        assert token is not None
        message = self._pack(token.token)
        entry = journal.Entry(self._entry.key, self._entry.seq, self._entry.kind, self._entry.fingerprint, sent - 1)

        def resend(guard: Guard) -> journal.Started | None:
            with guard.conn.transaction():
                started = journal.resend(guard, entry, again=self._call.again(sent + 1))
                if started is not None and started.granted:
                    outbox.keep_for_step(guard, message)
            return started

        self._written(resend)
        self._entry = journal.Entry(entry.key, entry.seq, entry.kind, entry.fingerprint, sent)
        telemetry.count(telemetry.Counter.RESENT_TASK)

    def _written(self, work: Callable[[Guard], journal.Started | None]) -> None:
        reply = self._pass.attempt.write(work, cancel=lambda started: started is not None and started.cancel)
        assert reply is not None
        if reply.cancel:
            raise Canceled("cancelled")

    def _pack(self, token: UUID) -> StepMessage:
        made: Message = self._pass.reporter.ordinary.pack(self._call.signature, self._place, token, self._pass.queue)
        return StepMessage(
            self._place.row,
            self._entry.key,
            made.payload,
            once=not self._idempotent,
            due=made.due,
            delay=made.delay,
            trace=tracing.current(),
        )

    def _overdue(self, sent: int) -> None:
        """Settle a step whose answer has not come in time, by whatever is known; leave it to a person otherwise."""
        if self._withdraw(sent):
            return
        answer = self._pass.reporter.ordinary.look(str(self._place.task_id))
        if answer is None and self._call.reconcile is not None:
            answer = self._reconcile(self._call.reconcile, sent)
        elif answer is None and self._idempotent:
            answer = self._late()
        if answer is None:
            self._ask_a_person()
        payload = answer.to_bytes(f"step {self._call.name!r}")
        settle = self._pass.attempt.write(
            lambda guard: waits.settle_by_check(guard, self._place.wait, payload=payload), cancel=bool
        )
        if settle:
            raise Canceled("cancelled")

    def _withdraw(self, sent: int) -> bool:
        """Take back a message that has not left by the time-out; say whether that settles the step.

        It does if no other was sent: the task is then certainly not executed. Both are one commit, so that a repeat
        after a lost reply finds what the first one did.
        """
        said = f"step {self._call.name!r}: the message of {self._task} did not leave within {self._call.timeout}"
        answer = Answer(failure=failures.capture(StepTimeoutError(said), step=self._call.name))
        payload = answer.to_bytes(f"step {self._call.name!r}")

        def withdraw(guard: Guard) -> tuple[bool, bool] | None:
            with guard.conn.transaction():
                reply = outbox.withdraw(guard, self._place.row)
                if reply == (False, True) and sent == 1:
                    waits.settle_by_check(guard, self._place.wait, payload=payload)
            return reply

        reply = self._pass.attempt.write(withdraw, cancel=lambda reply: reply is not None and reply[0])
        assert reply is not None
        if reply[0]:
            raise Canceled("cancelled")
        return self._read().state is not WaitState.PENDING

    def _ask_a_person(self) -> NoReturn:
        """Leave the run to a person, or to the answer that may still come."""
        why = "gave no answer in time" if self._call.timeout else "may not have been sent, and its answer does not come"
        error = UncertainStepError(self._pass.run_id, self._entry.key, self._task, str(self._place.task_id), why)
        self._pass.ask_a_person(error, waits=[self._place.wait])

    def _reconcile(self, reconcile: Callable[[TaskInfo], Reconciled[Any]], sent: int) -> Answer | None:
        self._pass.attempt.prove()  # user code is entered: the run must still be ours, and not cancelled
        verdict = reconcile(TaskInfo(str(self._place.task_id), self._task, sent))
        match verdict() if verdict in (NotDone, Unknown) else verdict:
            case Done(result=result):
                return Answer(result)
            case NotDone():
                return self._late()
            case Unknown():
                return None
            case other:
                raise DefinitionError(
                    f"step {self._call.name!r}: reconcile must return Done, NotDone or Unknown, not {other!r}"
                )

    def _late(self) -> Answer:
        said = f"step {self._call.name!r}: {self._task} did not end within {self._call.timeout}"
        return Answer(failure=failures.capture(StepTimeoutError(said), step=self._call.name))

    def _record_failure(self, answer: Answer) -> None:
        assert answer.failure is not None
        self._recorder.record_known_failure(self._entry, answer.failure.of_step(self._call.name))

    def _read(self) -> WaitEntry:
        run = self._pass.attempt.token.run
        entries = {entry.key: entry for entry in self._pass.attempt.read(lambda guard: waits.of_run(guard.conn, run))}
        self._pass.waits.update(entries)
        return entries[self._place.wait]
