"""What a durable body is given: the run it is, its steps, and the request to stop."""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, overload

from umt_durable import codec
from umt_durable.engine import loops
from umt_durable.engine.attempt import Abort, HeldLease
from umt_durable.engine.changing import continue_as_new, patched
from umt_durable.engine.ids import NAMESPACE, op_idempotency_key
from umt_durable.engine.replay import StepKey
from umt_durable.engine.telling import RUN, amounts, heartbeat_payload, status_text
from umt_durable.errors import DurableError
from umt_durable.redaction import RedactingFilter
from umt_durable.states import StepKind
from umt_durable.store import progress

if TYPE_CHECKING:
    from umt_durable.engine.passing import Pass
    from umt_durable.engine.steps import Steps

V = TypeVar("V")

_current: ContextVar[TaskContext | None] = ContextVar("umt_durable.context", default=None)

logger = logging.getLogger("umt_durable.task")
logger.addFilter(RedactingFilter())


class AttemptToken(NamedTuple):
    """The run and the fence of this attempt. Downstream may compare fences of one run: the larger one is newer."""

    run_id: str
    fence: int


class ReplayLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs with the run's fields, and nothing while recorded steps are replayed: those lines were logged before."""

    def __init__(self, log: logging.Logger, the_pass: Pass) -> None:
        super().__init__(log, {"run": the_pass.run_id, "attempt": the_pass.failures + 1})
        self._pass = the_pass

    def isEnabledFor(self, level: int) -> bool:
        """Say whether a record of this level would be logged now."""
        return not self._pass.is_replaying and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the run's fields to a record."""
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs


class RunContext:
    """What the contexts of plain and of async bodies have in common.

    Every method may leave the body by an exit that `except Exception` does not catch; after one, each further call
    leaves the same way.
    """

    def __init__(self, the_pass: Pass) -> None:
        self._pass = the_pass
        self.logger = ReplayLogger(logger, the_pass)
        """A logger that redacts secrets and is silent on replay."""

    @property
    def run_id(self) -> str:
        """The run's id, which is its Celery task id."""
        return self._pass.run_id

    @property
    def nesting(self) -> int:
        """How often the task replaced itself by another one before this run; see Celery's `replace`."""
        return self._pass.nesting

    @property
    def trace_id(self) -> str:
        """32 hex digits that stay the same through all attempts of the run.

        It is the id of the trace that the run's message belonged to, where it belonged to one: W3C's `traceparent`, or
        Sentry's header.
        """
        return self._pass.reporter.trace_id or uuid.uuid5(NAMESPACE, f"trace/{self._pass.run_id}").hex

    @property
    def input(self) -> Mapping[str, Any]:
        """The arguments of the run, validated, by parameter name."""
        return self._pass.input

    @property
    def priority(self) -> int | None:
        """The run's priority; higher is sooner."""
        return self._pass.priority

    @property
    def version(self) -> int:
        """The version of the task that this run is pinned to."""
        return self._pass.version

    @property
    def generation(self) -> int:
        """How often this run was continued as new: 0 at first."""
        return self._pass.generation

    @property
    def attempt(self) -> int:
        """1 and the number of failures of the run; crashes and wake-ups do not count."""
        return self._pass.failures + 1

    @property
    def attempt_token(self) -> AttemptToken:
        """The fencing token of this execution, new at each one."""
        return AttemptToken(self._pass.run_id, self._pass.attempt.token.fence)

    @property
    def idempotency_key(self) -> str:
        """The key to hand to a provider from inside a step's body: the same for all attempts of that step.

        Errors: DurableError outside a step, where no one effect is meant.
        """
        running = self._pass.attempt.running()
        if running is None:
            raise DurableError("ctx.idempotency_key belongs to the step being executed; there is none here")
        if running.kind is StepKind.EFFECT:
            own = running.key.removeprefix(self._pass.branch.prefix)
            return op_idempotency_key(self._pass.op_namespace, StepKey.parse(own).name)
        key = self._pass.in_generation(running.key)
        return str(uuid.uuid5(NAMESPACE, f"{self._pass.run_id}/{self._pass.nesting}/{key}"))

    @property
    def abort(self) -> Abort:
        """Set when the body should stop: `abort.reason` is `cancel`, `lease_lost` or `shutdown`."""
        return self._pass.attempt.signal

    @property
    def lease(self) -> HeldLease:
        """The lease of this process: `lease.remaining` seconds, and whether it `is_lost`."""
        return self._pass.attempt.held

    def throw_if_canceled(self) -> None:
        """Leave the body if a cancel was asked for or the lease was lost."""
        self._pass.check()

    def set_status(self, text: str | None) -> None:
        """Say in a few words where the run stands, for people: `show`, `explain` and `get` give it within a second.

        Shape: at most 255 characters, secrets are masked; None takes it back. It costs no round trip.
        Errors: DefinitionError.
        """
        self._pass.check_left()
        self._pass.attempt.telling.say(RUN, status=status_text(text))

    def progress(self, done: float, total: float | None = None) -> None:
        """Say how much of the run is done, and of how much; see `set_status`. It may be called as often as you like.

        Errors: DefinitionError for what is no number, or is below zero.
        """
        self._pass.check_left()
        self._pass.attempt.telling.say(RUN, **amounts(done, total))

    def heartbeat(self, progress: Any = None) -> None:
        """Say that a long step is alive, keep how far it is, and leave it if it was asked to stop.

        Shape: what is given is kept within a second, for `last_heartbeat` of the next execution of this step, should
        this one be cut off; None keeps what was given before. Outside a step it is for a body that has none.
        Errors: EncodingError for a value that would come back different.
        """
        self._pass.check_left()
        attempt = self._pass.attempt
        given = {} if progress is None else {"payload": heartbeat_payload(progress)}
        attempt.telling.say(self._beating(), **given)
        attempt.signal.raise_if_set()

    def _beating(self) -> str:
        """Return the key that heartbeats of this code are kept under."""
        running = self._pass.attempt.running()
        return RUN if running is None else running.key

    def _read_heartbeat(self, key: str, annotation: Any) -> Any:
        attempt = self._pass.attempt
        payload = attempt.telling.last(key)
        if payload is None:
            run = attempt.token.run
            found = attempt.read(lambda guard: progress.of_run(guard.conn, run))
            payload = next((one.payload for one in found if one.key == key), None)
        if payload is None:
            return None
        return codec.decode(self._pass.opened(payload), codec.EMPTY if annotation is None else annotation)


class TaskContext(RunContext):
    """The context of one pass through a durable body."""

    def __init__(self, the_pass: Pass, steps: Steps) -> None:
        super().__init__(the_pass)
        self._steps = steps

    @property
    def step(self) -> Steps:
        """The steps this body can call.

        Errors: DurableError in the code of an async body, which would hold up all others: its own context is awaited.
        """
        self._refuse_async()
        return self._steps

    def _refuse_async(self) -> None:
        if loops.is_here():
            raise DurableError("this durable body is async: await the steps of the context that is its first argument")

    def now(self) -> datetime:
        """Return the database's time, the same at each replay."""
        value = self.step.value("ctx.now", self._pass.database_now, datetime)
        assert isinstance(value, datetime)
        return value

    def uuid(self) -> uuid.UUID:
        """Return a random UUID, the same at each replay."""
        value = self.step.value("ctx.uuid", uuid.uuid4, uuid.UUID)
        assert isinstance(value, uuid.UUID)
        return value

    def random(self) -> float:
        """Return a random number from 0 to 1, the same at each replay."""
        value = self.step.value("ctx.random", random.random, float)
        assert isinstance(value, float)
        return value

    @overload
    def last_heartbeat(self, type: type[V]) -> V | None: ...
    @overload
    def last_heartbeat(self) -> Any: ...
    def last_heartbeat(self, type: Any = None) -> Any:
        """Return what the last heartbeat of this step was given, by this execution or one that was cut off.

        Shape: None where there is none; with `type` it is validated as that. One of a process that was killed may be a
        second old, so more than was kept may have been done.
        Errors: DecodingError when it does not fit the type.
        """
        if loops.is_here():
            raise DurableError("await ctx.last_heartbeat() of the context that is the body's first argument")
        return self._read_heartbeat(self._beating(), type)

    def patched(self, patch: str) -> bool:
        """Say whether this run takes the new way at a place where the code was changed, the same at each replay.

        Shape: False for a run that was past this place before the code had the patch, True for any other. `patch` is
        its name; asked again, also in branches begun afterwards, the answer is the same.
        Errors: DefinitionError for a name the journal cannot store.
        """
        self._refuse_async()
        return patched(self._pass, patch)

    def continue_as_new(self, *args: Any, version: int | None = None, **kwargs: Any) -> NoReturn:
        """End this generation of the run: it begins anew, under its id, with these arguments and an empty journal.

        Shape: the arguments are those of the task, as for `delay`. Facts that the run has not read stay, attempts and
        budgets begin anew, and `ctx.generation` is one more. The run keeps its version unless another one is named,
        which has to be declared here.
        Errors: InputError names each argument that the task refuses, EncodingError, UnknownTaskError for the version,
        DefinitionError in a branch: nothing is written then, and the body goes on.
        """
        self._refuse_async()
        continue_as_new(self._pass, args, kwargs, version)


def current_context() -> TaskContext:
    """Return the context of the durable body that is being executed here.

    In an async body, and in its steps' functions, it is for what is not awaited, such as `idempotency_key`.
    Errors: DurableError outside one.
    """
    context = _current.get()
    if context is None:
        raise DurableError("no durable task is being executed here")
    return context


def has_context() -> bool:
    """Say whether a durable body is being executed here."""
    return _current.get() is not None
