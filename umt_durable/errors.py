"""Every error this package raises, in one tree.

    DurableError
    ├── ConfigurationError            a setting is wrong or missing
    │   ├── EmbeddedError             the embedded pair cannot be started
    │   ├── SchemaError               the schema is missing, behind or ahead of this code
    │   └── PrivilegeError            the database user lacks a right that this needs
    ├── DefinitionError               a task, step or policy is declared wrongly
    │   ├── DuplicateTaskError
    │   ├── DuplicateOutboxRouteError
    │   └── DurationError             a duration is not written in a form that is read; also a ValueError
    ├── InputError                    the arguments of a run are refused, naming each field
    ├── EncodingError                 a value cannot be stored and given back unchanged
    ├── DecodingError                 a stored value cannot be read
    │   ├── JournalCorruptError       a stored result does not match its digest
    │   └── FactPayloadError          a fact does not fit the type its wait asks for
    ├── PayloadKeyError               a stored value is encrypted with a key that is not known here
    ├── AutocommitError               a caller's connection has no transaction to join
    ├── UnknownTaskError
    ├── UnknownQueueError
    ├── UnknownRunError
    ├── UnknownEventError             no row of the outbox has this id
    ├── WrongStatusError              what a person wants of a run is not possible in its state
    ├── UnknownStepError              the run has no step of this key, or none that waits for an answer
    ├── IdempotencyConflictError      the same key was used with other input
    ├── RunExistsError                the same key was used before, and the caller wants a new run or none
    ├── OpConflictError               the same op key was used with another request
    ├── OpFailedError                 a person said that an effect was not applied and will not be
    ├── OpStateError                  a person decides about an op that is done, or being executed
    ├── UncertainOpError              nobody can say whether an effect was applied: a person has to
    ├── UndoError                     a step could not be undone: its run is parked for a person
    ├── UnknownOpError
    ├── NotAppliedError               raise it (or a subclass) to say that an effect was certainly not applied
    ├── FencingError                  a write came after the grant it was made under had ended
    ├── NonDeterminismError           a replay asked for another step than was recorded
    ├── FactTimeoutError              nothing came before the time-out of a wait
    ├── ChildrenFailedError           children of a step failed or were cancelled
    ├── StepTimeoutError              an awaited task did not end within its time-out
    ├── TokenError                    a token of a begun step completes nothing
    │   ├── InvalidTokenError         it is cut, forged, or signed with a key that is not known here
    │   ├── StaleTokenError           the step it was of is not there any more
    │   ├── ExpiredTokenError         the step's time is over
    │   └── UsedTokenError            the step has ended, with something else
    ├── UncertainStepError            nobody can say how an awaited task ended: a person has to
    ├── StepFailedError               a recorded failure whose own type is not known here
    ├── NonRetryableError             raise it (or a subclass) to end retrying at once
    ├── MessageRefusedError           a broker message is malformed or in a refused codec
    ├── DatabaseUnavailableError
    │   └── DatabaseBusyError         it answers, but a lock or its own time limit stopped the statement
    └── BrokerUnavailableError

Exits that are not errors (`umt_durable.engine.exits`) derive from `BaseException` and are not in this tree.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from uuid import UUID


class DurableError(Exception):
    """Root of all errors of this package."""


class ConfigurationError(DurableError):
    """A setting is missing or makes no sense."""


class EmbeddedError(ConfigurationError):
    """The embedded Postgres or Valkey is not installed or does not start."""


MIGRATE = "umt-durable migrate"
FOR_APPS = "with -A your.app where the app's own configuration names the database"
"""Follows a command in a text; a command line that was given -A leaves it out."""


class SchemaError(ConfigurationError):
    """The database schema is not at the revision this code needs; the text names the command to run."""


class PrivilegeError(ConfigurationError):
    """The database user lacks a right: `umt-durable grants` gives each kind of process what it needs."""


class DefinitionError(DurableError):
    """A task, step or policy is declared in a way that can never work."""


class DuplicateTaskError(DefinitionError):
    """Two owners declare the same task name and version."""


class DuplicateOutboxRouteError(DefinitionError):
    """Two tasks are given the events of one type."""

    def __init__(self, type: str, first: str, second: str) -> None:
        self.type = type
        super().__init__(f"events of type {type!r} are routed to {first} and to {second}: a type has one owner")


class DurationError(DefinitionError, ValueError):
    """A duration is not written in a form that is read, or has no fixed length."""


class InputError(DurableError, TypeError):
    """The arguments of a run do not fit its task. A TypeError, as it is of a Python function or of Celery's tasks.

    Shape: `problems` holds one (field, reason) pair for each field that was refused; `step` is the step that calls the
    task, if one does.
    """

    def __init__(self, task: str, problems: Sequence[tuple[str, str]], *, step: str | None = None) -> None:
        self.task = task
        self.problems = tuple(problems)
        self.step = step
        listed = "; ".join(f"{field}: {reason}" for field, reason in self.problems)
        where = "" if step is None else f"step {step!r}: "
        super().__init__(f"{where}arguments of {task} refused: {listed}")


class EncodingError(DurableError):
    """A value cannot be stored so that it comes back unchanged.

    Shape: `where` names the step or argument, `path` the place inside the value (`$.lines[3].price`).
    """

    def __init__(self, where: str, path: str, reason: str) -> None:
        self.where = where
        self.path = path
        self.reason = reason
        super().__init__(f"{where}: {path} cannot be stored: {reason}")


class DecodingError(DurableError):
    """A stored value cannot be read back as the type the code expects."""


class JournalCorruptError(DecodingError):
    """A recorded result does not match the digest that was stored with it."""


class FactPayloadError(DecodingError):
    """The fact that settled a wait does not fit the type the wait asks for; it stays the outcome of that wait."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"the fact {name!r} settled its wait, but not with a payload of the type asked for: {reason}")


class PayloadKeyError(DurableError):
    """A stored value is sealed with a key that this process does not have; the value is untouched.

    Shape: `key` is the id of that key. `has_codec` is false where the process has no payload codec at all.
    """

    def __init__(self, key: str, *, has_codec: bool = True) -> None:
        self.key = key
        self.has_codec = has_codec
        hint = "its payload codec has no key of this id" if has_codec else "it has no payload_codec"
        super().__init__(f"a stored value is sealed with the key {key!r}, which this process cannot open: {hint}")


class AutocommitError(DurableError):
    """A connection was given as `conn` that has no open transaction to join."""


class UnknownTaskError(DurableError):
    """No durable task of this name (and version) is registered here."""

    def __init__(self, task: str, known: Iterable[str] = ()) -> None:
        self.task = task
        names = ", ".join(sorted(known)) or "none"
        super().__init__(f"no durable task named {task!r} is registered here (registered: {names})")


class UnknownQueueError(DurableError):
    """No durable task and no run has a queue of this name."""

    def __init__(self, queue: str, known: Iterable[str] = ()) -> None:
        self.queue = queue
        super().__init__(
            f"no task and no run has a queue named {queue!r} (known: {', '.join(sorted(known)) or 'none'})"
        )


class UnknownRunError(DurableError):
    """No run has this id, now or in the time retention remembers."""

    def __init__(self, run: object) -> None:
        self.run = run
        super().__init__(f"no run with id {str(run)!r}")


class UnknownEventError(DurableError):
    """No row of the outbox has this id: a row of ours is gone once it has left."""

    def __init__(self, event: object) -> None:
        self.event = event
        super().__init__(f"no outbox row with id {str(event)!r}")


class WrongStatusError(DurableError):
    """What a person wants of a run is not possible in the state it is in.

    Shape: `code` is `wrong_status`; `run` is the id of the run that is in this state, `state` that state.
    """

    code = "wrong_status"

    def __init__(self, run: str, state: str, wanted: str) -> None:
        self.run = run
        self.state = state
        super().__init__(f"run {run} is {state}: {wanted}")


class UnknownStepError(DurableError):
    """The run has no step of this key; or none that waits for an answer, where one is to be given."""

    def __init__(self, run: str, step: str, wanted: str = " that waits for an answer") -> None:
        self.run = run
        self.step = step
        super().__init__(f"run {run!r} has no step {step!r}{wanted}")


class IdempotencyConflictError(DurableError):
    """An idempotency key was used before with other input.

    Shape: `run` is the id of the run, or of the outbox event, that owns the key; it is untouched. `task` is the task,
    or the type of the event.
    """

    def __init__(self, task: str, key: str, run: str, *, kind: str = "run") -> None:
        self.task = task
        self.key = key
        self.run = run
        super().__init__(f"idempotency key {key!r} of {task} belongs to {kind} {run}, which was made with other input")


class RunExistsError(DurableError):
    """An idempotency key was used before, and the call said that it wants no earlier run.

    Shape: `run` is the id of the run that owns the key; that run is untouched.
    """

    def __init__(self, task: str, key: str, run: str) -> None:
        self.task = task
        self.key = key
        self.run = run
        super().__init__(f"idempotency key {key!r} of {task} belongs to run {run}; no other was started")


class OpConflictError(DurableError):
    """An op key was used before for another request.

    Shape: `run` is the id of the run that began it, `expected` and `found` the digests of the two requests.
    """

    def __init__(self, op_key: str, run: str | None, expected: str, found: str) -> None:
        self.op_key = op_key
        self.run = run
        self.expected = expected
        self.found = found
        owner = "a run that was removed" if run is None else f"run {run}"
        super().__init__(
            f"op {op_key!r} was begun by {owner} for the request {expected}, but is now asked for with {found}: "
            "another request needs an op key of its own"
        )


class OpFailedError(DurableError):
    """A person said of an effect that it was not applied and will not be."""

    def __init__(self, op_key: str, message: str) -> None:
        self.op_key = op_key
        self.message = message
        super().__init__(f"op {op_key!r}: {message}")


class OpStateError(DurableError):
    """A person's decision about an op is refused: it is done, or a running run is executing it."""


class UncertainOpError(DurableError):
    """Nobody can say whether an effect was applied; its run is parked until a person does."""

    def __init__(self, op_key: str, reason: str) -> None:
        self.op_key = op_key
        self.reason = reason
        command = f"umt-durable ops resolve {shlex.quote(op_key)}"
        # The reason last: it may be long, and a list cuts what it shows.
        super().__init__(
            f"whether op {op_key!r} was applied is not known; find out, then say `{command} --done JSON` (it was: its"
            f" result), or with `--not-done` (it was not: call it again) or `--failed TEXT` instead ({FOR_APPS}):"
            f" {reason}"
        )


class UndoError(DurableError):
    """A step could not be undone; its run is parked until a person has it go on."""

    def __init__(self, step: str, reason: str) -> None:
        self.step = step
        self.reason = reason
        super().__init__(f"step {step!r} could not be undone: {reason}")


class UnknownOpError(DurableError):
    """No effect with this key was ever begun in this namespace."""

    def __init__(self, namespace: str, op_key: str) -> None:
        self.namespace = namespace
        self.op_key = op_key
        super().__init__(f"no op with key {op_key!r} in the namespace {namespace!r}")


class NotAppliedError(DurableError):
    """Raise this, or a subclass, in the function of an effect: the provider has certainly applied nothing."""


class FencingError(DurableError):
    """A write of an attempt was refused, because its grant of the run had ended."""

    def __init__(self, run: int, fence: int) -> None:
        self.run = run
        self.fence = fence
        super().__init__(f"the grant {fence} of run no. {run} has ended; this write was refused")


class NonDeterminismError(DurableError):
    """On replay the code asked for a step other than the recorded one."""

    def __init__(self, expected: str, found: str) -> None:
        self.expected = expected
        self.found = found
        super().__init__(f"the journal holds {expected}, but the code now asks for {found}")


class FactTimeoutError(DurableError):
    """No fact came before the time-out of a wait; the outcome is journaled and stays."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no fact {name!r} came before the time-out")


class ChildrenFailedError(DurableError):
    """Some of the child runs of a step failed or were cancelled; the text names each with its reason."""


class StepTimeoutError(DurableError):
    """An awaited task did not end within its time-out; the outcome is journaled and stays."""


class TokenError(DurableError):
    """A token of a begun step completes nothing, and nothing was changed. The text never shows the token."""


class InvalidTokenError(TokenError):
    """A token is cut or forged, or was signed with a key that is not known here."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the token is not valid, since {reason}")


class StaleTokenError(TokenError):
    """The step of a token is not there any more: its run has gone on in a new generation, or is another one now."""

    def __init__(self, run: str, step: str) -> None:
        self.run = run
        self.step = step
        super().__init__(f"step {step!r} of run {run} is not there any more: its run has begun anew since")


class ExpiredTokenError(TokenError):
    """The time-out of a begun step has passed; the outcome is journaled and stays."""

    def __init__(self, run: str, step: str) -> None:
        self.run = run
        self.step = step
        super().__init__(f"the time of step {step!r} of run {run} is over")


class UsedTokenError(TokenError):
    """A begun step has ended otherwise: it was completed with something else, or its run has ended without it."""

    def __init__(self, run: str, step: str, why: str) -> None:
        self.run = run
        self.step = step
        super().__init__(f"step {step!r} of run {run} {why}")


class UncertainStepError(DurableError):
    """An awaited task gave no answer in time, and nobody can say whether it was executed; its run is parked.

    The answer, if it still comes, or a person's decision lets the run go on.
    Shape: `step` is the step's key in the journal of `run`, `task_id` the Celery id of the task.
    """

    def __init__(self, run: str, step: str, task: str, task_id: str, why: str = "gave no answer in time") -> None:
        self.run = run
        self.step = step
        self.task = task
        self.task_id = task_id
        command = f"umt-durable resolve {shlex.quote(run)} {shlex.quote(step)}"
        super().__init__(
            f"step {step!r}: {task} ({task_id}) {why}; find out whether it was executed, then say `{command} --result"
            f" JSON` (what it gave), or with `--error TEXT` (it failed, or was not executed) instead ({FOR_APPS})"
        )


class StepFailedError(DurableError):
    """A recorded failure whose exception type is not registered in this process.

    Shape: `traceback` is the redacted text of where it was raised.
    """

    def __init__(self, step: str, type_name: str, message: str, traceback: str = "") -> None:
        self.step = step
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        super().__init__(f"{step} failed: {type_name}: {message}")


class NonRetryableError(DurableError):
    """Raise this, or a subclass, in a body to fail without a further try."""


class MessageRefusedError(DurableError):
    """A broker message is malformed, or in a serialisation that is never read."""


class DatabaseUnavailableError(DurableError):
    """The database did not answer within the time allowed; nothing was lost."""


class DatabaseBusyError(DatabaseUnavailableError):
    """The database answers, but a lock that someone holds, or its time limit, stopped a statement each time."""


class BrokerUnavailableError(DurableError):
    """The broker did not take messages.

    Shape: `confirmed` holds the keys of those it had confirmed before it failed, `doubtful` of those it was given
    without a word from it: they may have arrived or not.
    """

    def __init__(self, reason: str, confirmed: Iterable[UUID] = (), doubtful: Iterable[UUID] = ()) -> None:
        self.confirmed = frozenset(confirmed)
        self.doubtful = frozenset(doubtful)
        super().__init__(reason)
