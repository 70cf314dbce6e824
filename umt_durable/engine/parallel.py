"""Parallel steps: the items of a map and the branches of a body, each with an entry of its own in the journal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from umt_durable import codec
from umt_durable.engine.fan import Fan, Job
from umt_durable.engine.loops import drive
from umt_durable.engine.passing import Pass
from umt_durable.engine.recording import Body, Recorder, StepOptions, awaited
from umt_durable.errors import DefinitionError
from umt_durable.states import StepKind, StepState
from umt_durable.store import journal

DEFAULT_CONCURRENCY: Final = 8
MOST_CONCURRENT: Final = 1000
POLICIES = ("fail", "collect")


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """What stands in the results of `on_error="collect"` for an item or branch that failed."""

    key: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Piece:
    """One item of a map, or one branch: its key, and the call that it is."""

    key: object
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """A parallel step. Of kind ITEM each piece is the body of a step; a BRANCH calls steps itself."""

    verb: str
    name: str
    kind: StepKind
    pieces: list[Piece]
    concurrency: int | None
    on_error: str

    def __post_init__(self) -> None:
        if self.on_error not in POLICIES:
            raise DefinitionError(f"step.{self.verb} {self.name!r}: on_error is fail or collect, not {self.on_error!r}")
        number = DEFAULT_CONCURRENCY if self.concurrency is None else self.concurrency
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_CONCURRENT:
            raise DefinitionError(
                f"step.{self.verb} {self.name!r}: concurrency must be from 1 to {MOST_CONCURRENT}, not {number!r}"
            )
        for piece in self.pieces:
            if not callable(piece.fn):
                raise DefinitionError(f"step.{self.verb} {self.name!r}: {piece.fn!r} is no function")


def run_parallel(the_pass: Pass, options: StepOptions, step: Parallel) -> list[Any]:
    """Return the results of all pieces in their order; of `collect`, an ItemFailure for each that failed.

    Errors: of `fail`, the failure of the first piece in that order which failed; no piece is begun after a failure, but
    those in flight end and are recorded.
    """
    the_pass.check()
    of = the_pass.keys.make(step.name, options.key)
    former = the_pass.keys.former(step.name, options.renamed_from, options.key)
    if former:
        of = next((one for one in (of, *former) if the_pass.has_under(one)), of)
    keys = the_pass.keys.items(step.name, of, [piece.key for piece in step.pieces])
    stop = step.on_error == "fail"
    fan = Fan(the_pass, concurrency=step.concurrency or DEFAULT_CONCURRENCY, stop_at_failure=stop)
    recorder = Recorder(the_pass, options, keep=fan.keep)
    preemptible = options.preemptible
    jobs = [
        _job(the_pass, recorder, step, piece, key, preemptible=preemptible)
        for piece, key in zip(step.pieces, keys, strict=True)
    ]
    if not (stop and any(job.error for job in jobs)):
        fan.run([job for job in jobs if not job.is_over])
    return list(_results(step, jobs, stop=stop))


def _results(step: Parallel, jobs: list[Job], *, stop: bool) -> Iterable[Any]:
    for piece, job in zip(step.pieces, jobs, strict=True):
        if job.error is not None and stop:
            job.error.add_note(f"in {piece.key!r} of step.{step.verb} {step.name!r}")
            raise job.error
    for piece, job in zip(step.pieces, jobs, strict=True):
        yield job.value if job.error is None else ItemFailure(str(piece.key), job.error)


def _job(the_pass: Pass, recorder: Recorder, step: Parallel, piece: Piece, key: str, *, preemptible: bool) -> Job:
    """Return what is to be done for a piece, or what is recorded of it."""
    entry, recorded = recorder.recall(key, step.name, step.kind, piece.args, {}, is_keyed=True)
    annotation = codec.return_annotation(piece.fn)
    if recorded is not None and recorded.state is StepState.FAILED:
        try:
            recorder.replay(recorded, annotation)
        except Exception as error:  # noqa: BLE001 - the recorded failure
            return Job(entry.key, _nothing, error=error, is_over=True)
    if recorded is not None and recorded.state is StepState.DONE:
        return Job(entry.key, _nothing, value=recorder.replay(recorded, annotation), is_over=True)
    if step.kind is StepKind.ITEM:
        body = Body(lambda: _call_item(the_pass, piece, preemptible=preemptible), annotation, entry.key)
        return Job(entry.key, lambda: _execute_item(the_pass, recorder, entry, body))
    body = Body(lambda: _call_branch(piece), annotation, entry.key)
    return Job(entry.key, lambda: _execute_branch(the_pass, recorder, entry, body))


def _nothing() -> None:
    """Be the work of what has its outcome."""


def _call_item(the_pass: Pass, piece: Piece, *, preemptible: bool) -> Any:
    return awaited(the_pass, piece.fn(*piece.args), preemptible=preemptible)


def _call_branch(piece: Piece) -> Any:
    """Call a branch; what an async one awaits of its context is done in the thread of the branch."""
    value = piece.fn(*piece.args)
    return drive(value) if inspect.iscoroutine(value) else value


def _execute_item(the_pass: Pass, recorder: Recorder, entry: journal.Entry, body: Body) -> Any:
    the_pass.check()
    recorded = the_pass.journal.lookup(entry.key, StepKind.ITEM, None)  # read again since, where it has been parked
    failures = 0 if recorded is None else recorded.failures
    return recorder.execute(replace(entry, failures=failures), recorded, body)


def _execute_branch(the_pass: Pass, recorder: Recorder, entry: journal.Entry, body: Body) -> Any:
    the_pass.check()
    recorder.guarded(the_pass.attempt.prove)  # user code is entered: the run must still be ours, and not cancelled
    try:
        value = body.call()
    except Exception as error:  # noqa: BLE001 - whatever left the branch is its outcome
        the_pass.check_left()
        recorder.record_failure(entry, body.name, error)
    the_pass.check_left()  # a branch that swallowed its exit is parked all the same
    return recorder.commit(entry, body, value)
