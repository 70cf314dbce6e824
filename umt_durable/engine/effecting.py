"""External effects: begun in the ledger, called, and done in one commit with what belongs to them.

An open row of a grant that has ended says that nobody knows whether the provider has applied the effect. Only what the
caller declared decides then: a stable idempotency key, a look-up that carries the turn, a plain look-up, or a person.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from uuid import UUID, uuid4

from umt_durable import codec, telemetry
from umt_durable.engine import failures
from umt_durable.engine.attempt import AlreadyRecordedError, exit_for
from umt_durable.engine.context import AttemptToken
from umt_durable.engine.effects import Done, Effect, NotDone, OpInfo, Unknown
from umt_durable.engine.exits import Canceled
from umt_durable.engine.ids import op_idempotency_key
from umt_durable.engine.passing import Pass
from umt_durable.engine.recording import Body, Recorder
from umt_durable.engine.replay import differ
from umt_durable.engine.txstep import NotMineError, Record, run_in_transaction
from umt_durable.errors import (
    DecodingError,
    DefinitionError,
    EncodingError,
    JournalCorruptError,
    OpConflictError,
    UncertainOpError,
)
from umt_durable.failpoints import point
from umt_durable.records import Op
from umt_durable.states import OpState, RunState, StepKind, StepState
from umt_durable.store import journal, ledger
from umt_durable.store.guard import Guard
from umt_durable.store.ledger import OpName

BUSY_PAUSE_SECONDS, BUSY_LOOKS = 0.25, 4
"""How long, and how often, a worker is held for an op that another run is executing, before this run is parked."""
SHORTEST_PARK_SECONDS, LONGEST_PARK_SECONDS = 5.0, 60.0


def run_effect(the_pass: Pass, recorder: Recorder, effect: Effect) -> Any:
    """Return the answer of an effect: recorded in this run, or by another one, or got now."""
    annotation = codec.return_annotation(effect.do)
    try:
        entry, recorded = recorder.identify(effect.op_key, StepKind.EFFECT, effect.inputs, {})
    except EncodingError as error:
        where = f"effect {effect.op_key!r}"
        raise EncodingError(where, error.path, f"{error.reason}; or say with request= what is asked for") from None
    if recorded is not None and recorded.state is not StepState.STARTED:
        return recorder.replay(recorded, annotation)
    if not effect.inputs:
        entry = replace(entry, fingerprint=None)
    call = _Call(the_pass, entry, effect, annotation)
    age = 0.0 if recorded is None else recorded.age_seconds or 0.0
    body = Body(lambda: call.once(age), annotation, effect.op_key, commits=True, on_final=call.finally_failed)
    return recorder.execute(entry, recorded, body, explicit=True)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What this process holds of the row: which turn it is, and whether an earlier one may have applied the effect."""

    turn: int
    resumed: bool


class _RecordedError(Exception):
    """The ledger has the answer; never leaves this module."""

    def __init__(self, op: Op) -> None:
        self.op = op
        super().__init__(op.op_key)


class _UndecidedError(Exception):
    """A look-up could not say whether the effect was applied; kept as the failure of a try."""


class _Call:
    """One call of `step.effect` in one pass, over all its tries in this process."""

    def __init__(self, the_pass: Pass, entry: journal.Entry, effect: Effect, annotation: Any) -> None:
        self._pass, self._attempt, self._entry, self._effect = the_pass, the_pass.attempt, entry, effect
        self._annotation = annotation
        self._op = OpName(the_pass.op_namespace, effect.op_key)
        self._where = f"effect {effect.op_key!r}"
        self._token = uuid4()
        self._is_clear = False
        self._holds = False
        self._answer: tuple[codec.Encoded, Any] | None = None

    # -- one try ---------------------------------------------------------------------------------------------------

    def once(self, age_seconds: float) -> Any:
        """Be one try: hold the row, find out or call, record the answer and the step; return the answer.

        Errors: what `do` raised, for the step's policy; AlreadyRecordedError when the step has a final failure.
        """
        while True:
            if self._answer is None:  # else the answer is known, and what failed was its record
                self._token, self._is_clear, self._holds = uuid4(), False, False
            self._attempt.ops.add(self._token)
            try:
                return self._try(age_seconds)
            except NotMineError:  # somebody was faster: back to the start
                self._answer = None
            finally:
                self._attempt.ops.discard(self._token)

    def _try(self, age_seconds: float) -> Any:
        if self._answer is None:
            try:
                turn = self._hold(age_seconds)
            except _RecordedError as found:
                return self._adopt(found.op)
            self._holds = True
            self._answer = self._ask(turn) or self._call(turn)
        return self._settle()

    def finally_failed(self, error: Exception) -> None:
        """Decide what the last failure means for the effect: not applied, or a matter for a person."""
        if not self._holds:  # it failed before the ledger was asked, or at another one's row
            return
        if not self._is_clear:
            self._doubt(error)
        kept = failures.capture(error, step=self._effect.op_key).to_bytes()
        self._fenced(lambda guard: ledger.fail(guard, self._op, token=self._token, error=kept))

    # -- the row ---------------------------------------------------------------------------------------------------

    def _hold(self, age_seconds: float) -> _Turn:
        """Begin the effect, or take its row from a grant that has ended; wait while another run executes it."""
        digest, resumed, looks = self._entry.fingerprint, False, 0
        key = UUID(op_idempotency_key(self._op.namespace, self._op.op_key))

        def begin(guard: Guard) -> ledger.Begun | None:
            return ledger.begin(guard, self._op, token=self._token, idem_key=key, request_digest=digest)

        point("op.begin.b")
        turn = self._begun(begin)
        while turn is None:
            row = self._attempt.read(lambda guard: ledger.read(guard.conn, self._op))
            if row is None:
                turn = self._begun(begin)
                continue
            self._check_request(row)
            if row.token == self._token:  # the reply to it was lost
                turn = row.turn
                break
            if self._is_busy(row):
                looks = self._wait_for(row, looks, age_seconds)
                continue
            match row.state:
                case OpState.DONE | OpState.FAILED:
                    raise _RecordedError(row)
                case OpState.UNCERTAIN:
                    self._pass.condemn(UncertainOpError(self._op.op_key, self._reason_of(row)))
            resumed, held = not row.is_clear, row.token
            turn = self._begun(
                lambda guard, held=held: ledger.take(  # type: ignore[misc]  # the default binds it now
                    guard, self._op, held=held, token=self._token, request_digest=digest
                )
            )
        point("op.begin.a")
        return _Turn(turn, resumed)

    def _begun(self, work: Callable[[Guard], ledger.Begun | None]) -> int | None:
        reply = self._attempt.write(work, cancel=lambda reply: reply is not None and reply.cancel, lost="op.begin.r")
        assert reply is not None
        if reply.cancel:
            raise Canceled("cancelled")
        return reply.turn

    def _check_request(self, row: Op) -> None:
        mine, theirs = self._entry.fingerprint, row.request_digest
        if mine is not None and theirs is not None and differ(theirs, mine):
            raise OpConflictError(self._op.op_key, row.run_id, theirs.hex()[:12], mine.hex()[:12])

    def _is_busy(self, row: Op) -> bool:
        """Say whether somebody may be calling now: another run's grant, or another branch under our own."""
        if row.state is not OpState.OPEN or not row.busy:
            return False
        ours = (row.run, row.fence) == (self._attempt.token.run, self._attempt.token.fence)
        return not ours or row.token in self._attempt.ops

    def _wait_for(self, row: Op, looks: int, age_seconds: float) -> int:
        """Wait a little for whoever executes the effect; then park the run. No attempt is used."""
        if looks < BUSY_LOOKS:
            if self._attempt.signal.wait(BUSY_PAUSE_SECONDS):
                self._pass.leave(exit_for(self._attempt.signal.reason or "shutdown"))
            return looks + 1
        seconds = min(max(age_seconds / 4, SHORTEST_PARK_SECONDS), LONGEST_PARK_SECONDS)
        text = f"op {self._op.op_key!r} is being executed by run {row.run_id}"
        kept = failures.capture(_UndecidedError(text)).to_bytes()
        telemetry.count(telemetry.Counter.BUSY_OP)
        due = self._attempt.write(
            lambda guard: journal.record_try(
                guard, self._entry, delay_seconds=seconds, error=kept, age_seconds=age_seconds
            ),
            cancel=lambda reply: reply is not None and reply.cancel,
        )
        if due is not None and due.cancel:
            raise Canceled("cancelled")
        self._pass.suspend(RunState.RETRYING, steps=[self._entry.key], until=text)
        return 0

    # -- what is known, and the call -------------------------------------------------------------------------------

    def _info(self, turn: _Turn) -> OpInfo:
        return OpInfo(
            op_key=self._op.op_key,
            namespace=self._op.namespace,
            resumed=turn.resumed,
            idempotency_key=op_idempotency_key(self._op.namespace, self._op.op_key),
            turn=turn.turn,
            attempt_token=AttemptToken(self._pass.run_id, self._attempt.token.fence),
        )

    def _ask(self, turn: _Turn) -> tuple[codec.Encoded, Any] | None:
        """Find out whether an earlier turn has applied the effect; None: it is to be called."""
        effect = self._effect
        if not turn.resumed:
            return None
        telemetry.count(telemetry.Counter.RESUMED_OP)
        if effect.asks_a_person:
            self._doubt(_UndecidedError("an earlier attempt began it and left no answer, and no policy is declared"))
        if effect.reconcile is None:
            return None
        self._attempt.prove()
        found = effect.reconcile(self._info(turn))
        if isinstance(found, Done):
            return self._encoded(found.result)
        if isinstance(found, NotDone) or found is NotDone:
            return None
        if isinstance(found, Unknown) or found is Unknown:
            raise _UndecidedError(f"reconcile of op {self._op.op_key!r} could not find out")
        raise DefinitionError(f"{self._where}: reconcile must return Done(result), NotDone or Unknown, not {found!r}")

    def _call(self, turn: _Turn) -> tuple[codec.Encoded, Any]:
        """Call the provider. What it raises leaves the effect unknown, unless it is declared to say that it is not."""
        effect = self._effect
        self._attempt.prove()  # the last look at grant and lease before the effect
        point("op.call.b")
        try:
            value = effect.do(self._info(turn))
        except effect.refusals as error:
            kept = failures.capture(error, step=self._op.op_key).to_bytes()
            self._fenced(lambda guard: ledger.clear(guard, self._op, token=self._token, error=kept))
            self._is_clear = True
            raise
        except Exception as error:
            if effect.asks_a_person:
                self._doubt(error)
            raise
        point("op.call.a")
        return self._encoded(value)

    def _encoded(self, value: Any) -> tuple[codec.Encoded, Any]:
        return codec.round_trip(value, self._annotation, where=self._where)

    # -- what is recorded ------------------------------------------------------------------------------------------

    def _settle(self, token: UUID | None = None) -> Any:
        """Record the answer and the step, with what the caller commits, in one go."""
        assert self._answer is not None
        encoded, decoded = self._answer
        entry, held = self._entry, token or self._token

        def settle(guard: Guard) -> bool | None:
            return ledger.settle(guard, self._op, entry, token=held, result=encoded.data, digest=encoded.digest)

        point("op.done.b")
        commit = self._effect.commit
        if commit is None:
            self._attempt.commit(settle, entry.key, lost="op.done.r")
        else:
            record = Record(lambda tx: commit(tx, decoded), lambda _: (None, None), lambda guard, _: settle(guard))
            run_in_transaction(self._pass, entry, self._effect.binding, record, where=self._where)
        point("op.done.a")
        return decoded

    def _adopt(self, row: Op) -> Any:
        """Make the outcome in the ledger, of another run or of a person, the outcome of this step.

        Errors: AlreadyRecordedError once a failure is recorded, so that it is raised as at every replay.
        """
        if row.state is OpState.FAILED:
            assert row.error is not None
            error = row.error
            self._record(lambda guard: journal.commit(guard, self._entry, state=StepState.FAILED, error=error))
            raise AlreadyRecordedError(self._entry.key)
        assert row.result is not None
        result, digest = row.result, hashlib.sha256(row.result).digest()
        if digest != row.digest:
            corrupt = f"the recorded result of op {row.op_key!r} does not match its digest"
            self._pass.condemn(JournalCorruptError(corrupt))
        opened = self._pass.opened(result)
        try:
            value = codec.decode(opened, self._annotation)
        except DecodingError as error:
            if not row.commit_due:
                raise
            self._doubt(DecodingError(f"what {row.actor} gave as its result does not fit: {error}"), token=row.token)
        if row.commit_due and self._effect.commit is not None:
            self._answer = codec.Encoded(result, codec.Codec.JSON, digest), value
            try:
                return self._settle(row.token)
            finally:
                self._answer = None
        self._record(
            lambda guard: journal.commit(guard, self._entry, state=StepState.DONE, result=result, digest=digest)
        )
        return value

    def _record(self, work: Callable[[Guard], bool | None]) -> None:
        self._attempt.commit(work, self._entry.key)

    def _doubt(self, cause: Exception, *, token: UUID | None = None) -> NoReturn:
        """Leave the effect to a person, and this pass with it."""
        failure = failures.capture(cause, step=self._op.op_key)
        held = token or self._token
        self._fenced(lambda guard: ledger.doubt(guard, self._op, token=held, error=failure.to_bytes()))
        telemetry.count(telemetry.Counter.UNCERTAIN_OP)
        self._pass.condemn(UncertainOpError(self._op.op_key, failure.summary))

    def _reason_of(self, row: Op) -> str:
        if row.error is None:
            return "it waits for a person"
        return failures.from_bytes(self._pass.opened(row.error)).summary

    def _fenced(self, work: Callable[[Guard], bool | None]) -> None:
        if self._attempt.write(work, cancel=bool):
            raise Canceled("cancelled")
