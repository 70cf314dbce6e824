"""The steps a body can call. Each is one journal entry: recorded once, given back at every replay."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, ParamSpec, TypeVar, overload
from uuid import UUID

from umt_durable import codec
from umt_durable.engine.awaiting import TaskCall, TaskInfo, await_task
from umt_durable.engine.children import call, gather, spawn
from umt_durable.engine.effecting import run_effect
from umt_durable.engine.effects import MISSING as MISSING_REQUEST
from umt_durable.engine.effects import Effect, OpInfo, Policy, Reconciled
from umt_durable.engine.elsewhere import Elsewhere, LedgerStep
from umt_durable.engine.functions import check_call, check_function
from umt_durable.engine.parallelsteps import ParallelSteps
from umt_durable.engine.passing import LONGEST, Pass
from umt_durable.engine.recording import Body, Recorder, StepOptions, awaited
from umt_durable.engine.replay import former_names
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.sleeping import Sleep, sleep
from umt_durable.engine.txstep import run_in_transaction, step_record
from umt_durable.engine.undoing import Undo
from umt_durable.engine.waitsteps import WaitSteps
from umt_durable.errors import DefinitionError
from umt_durable.ledger import Ledger
from umt_durable.records import StepEntry
from umt_durable.session import Binding, check_binding
from umt_durable.states import StepKind, StepState
from umt_durable.store.journal import Entry

P = ParamSpec("P")
R = TypeVar("R")


class Steps(WaitSteps, ParallelSteps):
    """The vocabulary of a durable body."""

    def __init__(self, the_pass: Pass, options: StepOptions | None = None) -> None:
        self._pass = the_pass
        self._options = options or StepOptions()
        self._recorder = Recorder(the_pass, self._options)

    def options(
        self,
        *,
        key: str | int | UUID | None = None,
        retry: RetryPolicy | None = None,
        preemptible: bool = False,
        renamed_from: str | Sequence[str] | None = None,
        undo: Undo | None = None,
    ) -> Steps:
        """Return these steps with options for the call that follows.

        Shape: `key` tells same-named steps apart whatever their order; `retry` replaces the task's policy;
        `preemptible` has a coroutine cancelled as soon as the body should stop (a cancel, a lost lease, a shutdown),
        where a plain function is let finish. `renamed_from` is what earlier code called the step, or several such
        names: runs that have recorded it under one of them find it there. `undo`, declared by the decorator of that
        name, is given the result of a `run` or `transaction` step when a cancel with `compensate=True` has it undone.
        Errors: DefinitionError, here for what is no policy, no name or no undo, at the call for an old name that two
        steps have at once.
        """
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise DefinitionError(f"retry: a RetryPolicy, such as RetryPolicy.NETWORK, not {retry!r:.100}")
        if not isinstance(preemptible, bool):
            raise DefinitionError(f"preemptible is True or False, not {preemptible!r:.100}")
        if undo is not None and not isinstance(undo, Undo):
            raise DefinitionError(f"undo: a function declared with @undo, not {undo!r:.100}")
        former = former_names(renamed_from)
        chosen = replace(self._options, key=key, retry=retry, preemptible=preemptible, renamed_from=former, undo=undo)
        return Steps(self._pass, chosen)

    @overload
    def run(self, name: str, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def run(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def run(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Execute a function once and record its result; at every replay give that result back instead (I6).

        The result is what would be read back: typed by the function's return annotation, also on the first pass. A
        coroutine function runs on the event loop of the process.
        Errors: DefinitionError for what is no function; whatever the function raises when its retries are used up,
        recorded too; EncodingError, without a retry, for a result that cannot be stored; NonDeterminismError when the
        journal holds something else here.
        """
        check_function(f"step {name!r}", "fn", fn)
        annotation = codec.return_annotation(fn)
        entry, recorded = self._recorder.identify(name, StepKind.RUN, args, kwargs)
        if recorded is not None and recorded.state is not StepState.STARTED:
            return self._recorder.replay(recorded, annotation)
        check_call(f"step {name!r}", "fn", fn, *args, **kwargs)  # not of what is only replayed: that has to be cheap
        return self._recorder.execute(entry, recorded, Body(self._call(fn, args, kwargs), annotation, name))

    def transaction(
        self, name: str, fn: Callable[..., R], /, *args: Any, on: Binding | str | None = None, **kwargs: Any
    ) -> R:
        """Execute `fn(tx, ...)` in one transaction with the record of its result and the check of the fence (I16).

        Shape: `tx` is a SQLAlchemy Session or a psycopg Connection, after the binding named in the settings or given
        as `on`, or a Django connection; without a binding, a psycopg Connection to our own database. Whatever `fn`
        writes through it is committed with the result or not at all, so the step is exactly once. A `Ledger` as
        binding leads to another database: the rows are committed with an entry of the ledger there, exactly once.
        Errors: as `run`; SchemaError for a database without our schema, or without its ledger; FencingError from the
        database ends the attempt quietly.
        """
        check_function(f"step {name!r}", "fn", fn, plain=True)
        annotation = codec.return_annotation(fn)
        entry, recorded = self._recorder.identify(name, StepKind.TRANSACTION, args, kwargs)
        if recorded is not None and recorded.state is not StepState.STARTED:
            result: R = self._recorder.replay(recorded, annotation)
            return result
        check_call(f"step {name!r}", "fn", fn, None, *args, **kwargs)
        call = self._transaction(entry, recorded, lambda tx: fn(tx, *args, **kwargs), annotation, on, name=name)
        value: R = self._recorder.execute(entry, recorded, Body(call, annotation, name, commits=True), explicit=True)
        return value

    def effect(
        self,
        op_key: str,
        do: Callable[[OpInfo], R],
        *,
        reconcile: Callable[[OpInfo], Reconciled[R]] | None = None,
        commit: Callable[[Any, R], object] | None = None,
        policy: Policy | None = None,
        request: Any = MISSING_REQUEST,
        not_applied: Sequence[type[Exception]] = (),
        on: Binding | str | None = None,
    ) -> R:
        """Have an effect outside the database applied once, whatever dies, or have a person asked about it (I15).

        Shape: `op_key` is unique in its namespace, over all runs: a recorded result is returned to whoever asks.
        `do(info)` calls the provider. When an earlier attempt has begun the effect and left no answer, `policy` and
        `reconcile(info)`, which gives `Done(result)`, `NotDone` or `Unknown`, decide; with neither a person does.
        `commit(tx, result)` writes what belongs to the result, through the binding `on`, in the transaction that
        records it. `request` tells the same effect from another one under the same key; without it the arguments that
        `functools.partial` has bound to `do`. `not_applied` are exceptions of `do` which say that nothing was applied.
        Errors: OpConflictError for another request; as `run` for `NotAppliedError` and those of `not_applied`, when
        retries are used up. Any other failure leaves the effect unknown: the run is parked, with the reason
        `uncertain_op`, once its retries are used up.
        """
        effect = Effect(
            op_key=op_key,
            do=do,
            reconcile=reconcile,
            commit=commit,
            policy=policy,
            request=request,
            not_applied=not_applied,
            binding=self._binding(on, f"effect {op_key!r}"),
        )
        self._options.refuse_renaming(f"effect {op_key!r}", "its key is what all runs and the provider know it by")
        result: R = run_effect(self._pass, self._recorder, effect)
        return result

    def sleep(self, name: str, duration: timedelta) -> None:
        """Park the run until a time from now, fixed once; replays and crashes do not prolong it (I10).

        Errors: DefinitionError for anything but a timedelta that is not negative.
        """
        if not isinstance(duration, timedelta) or not timedelta(0) <= duration <= LONGEST:
            raise DefinitionError(
                f"step {name!r}: a sleep is a timedelta from 0 to {LONGEST.days} days, not {duration!r}"
            )
        sleep(self._pass, self._recorder, Sleep(name=name, text=f"for {duration}", duration=duration))

    def sleep_until(self, name: str, moment: datetime) -> None:
        """Park the run until a moment; one that has passed does not park it.

        Errors: DefinitionError for a datetime without a zone.
        """
        if not isinstance(moment, datetime) or moment.tzinfo is None:
            raise DefinitionError(f"step {name!r}: sleep_until needs a datetime with a time zone, not {moment!r}")
        sleep(self._pass, self._recorder, Sleep(name=name, text=f"until {moment.isoformat()}", until=moment))

    def task(
        self,
        name: str,
        signature: Any,
        *,
        timeout: timedelta | None = None,
        reconcile: Callable[[TaskInfo], Reconciled[Any]] | None = None,
        idempotent: bool | None = None,
        resend: timedelta | None = None,
    ) -> Any:
        """Send an ordinary Celery task through the outbox, park until it ends, and give its result.

        Shape: `signature` is as from `print_label.s(...)`, or a chain or chord of ordinary tasks; the result is JSON.
        At the end of `timeout` a message that has not left is taken back, and the step fails with StepTimeoutError; of
        one that has the result backend is asked once. If it does not know: `reconcile(info)` says `Done`,
        `NotDone` or `Unknown`; an `idempotent` task (default: what its class says) has failed with StepTimeoutError;
        any other leaves the run quarantined as `uncertain_op`, until its answer comes or a person says what it is by
        `durable.resolve_step`. Only an `idempotent` task is sent again as lost, after `resend` and then twice as long
        each time (default: a quarter of `timeout`, or an hour). The message of any other is published at most once; if
        nobody knows whether it was, a step without `timeout` is left to a person at once.
        Errors: InputError for arguments that a task which is registered here does not take, before anything is written;
        what the task raised, as itself if its class is registered, else StepFailedError; StepTimeoutError;
        EncodingError; DefinitionError for a durable task (await it with `step.call`) and for a group.
        """
        call = TaskCall(
            name=name, signature=signature, timeout=timeout, reconcile=reconcile, idempotent=idempotent, resend=resend
        )
        return await_task(self._pass, self._recorder, call)

    def call(self, name: str, task: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a child run of a durable task, park until it ends, and return its result, typed by the task (I17).

        The child is there exactly once, under an id derived from this run and step; it ends as cancelled should this
        run end before it.
        Errors: what the child failed with, as itself if its class is registered, else StepFailedError;
        ChildrenFailedError for one that was cancelled; DefinitionError for what is no durable task.
        """
        return call(self._pass, self._recorder, name, task, args, kwargs)

    def gather(self, name: str, calls: Sequence[Any]) -> list[Any]:
        """Start a child run for each signature, park until all have ended, and return their results in order (I17).

        Shape: `calls` are signatures of durable tasks, as `task.s(...)`; none gives an empty list at once.
        Errors: ChildrenFailedError names each child that failed or was cancelled, once all have ended.
        """
        return gather(self._pass, self._recorder, name, calls)

    def spawn(self, name: str, task: Any, /, *args: Any, on_parent_end: str = "abandon", **kwargs: Any) -> str:
        """Start a child run that nobody awaits, and return its id.

        Shape: `on_parent_end` says what becomes of it when this run ends before it: `abandon` lets it live, `cancel`
        ends it.
        Errors: DefinitionError.
        """
        return spawn(self._pass, self._recorder, name, task, args, kwargs, on_parent_end=on_parent_end)

    def value(self, name: str, make: Callable[[], R], annotation: Any) -> R:
        """Record a value made by the engine itself, such as the time."""
        entry, recorded = self._recorder.identify(name, StepKind.VALUE, (), {})
        if recorded is not None and recorded.state is not StepState.STARTED:
            result: R = self._recorder.replay(recorded, annotation)
            return result
        value: R = self._recorder.execute(entry, recorded, Body(make, annotation, name))
        return value

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Return a call of a step's function, which may be a coroutine function, or return a coroutine."""
        return lambda: awaited(self._pass, fn(*args, **kwargs), preemptible=self._options.preemptible)

    def _transaction(
        self,
        entry: Entry,
        recorded: StepEntry | None,
        body: Callable[[Any], Any],
        annotation: Any,
        on: Binding | Ledger | str | None,
        *,
        name: str,
    ) -> Callable[[], Any]:
        """Return what executes a transaction step once, where its binding leads."""
        where = f"step {name!r}"
        binding = self._binding(on, where)
        if isinstance(binding, Ledger):
            begun = None if recorded is None else recorded.age_seconds or 0.0
            return LedgerStep(self._pass, Elsewhere(entry, binding, body, annotation, where, begun)).once
        record = step_record(entry, body, annotation, where=where)
        return lambda: run_in_transaction(self._pass, entry, binding, record, where=where)

    def _binding(self, on: Binding | str | None, where: str) -> Binding:
        bindings = self._pass.bindings
        if on is None or (isinstance(on, str) and "://" not in on):
            name = on or "default"
            if name not in bindings:
                known = ", ".join(sorted(bindings))
                raise DefinitionError(f"{where}: on: no binding named {name!r} is configured (known: {known})")
            on = bindings[name]
        if not isinstance(on, Ledger):  # which was checked when it was made
            check_binding(on, f"{where}: on: ")
        return on
