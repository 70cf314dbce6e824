"""The undos of a run that was cancelled with `compensate`: each recorded step that has one, the last recorded first.

The body is not called again. Each undo is a step of its own, under a key that says which step it undoes, so a process
that takes the run over goes on where the last one stopped. One that fails for good is no outcome: it stays open, the
run waits for a person, and is tried anew when that person has the run go on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from umt_durable.engine import failures
from umt_durable.engine.passing import Pass
from umt_durable.engine.recording import Body, Recorder, StepOptions, awaited
from umt_durable.engine.replay import undo_key
from umt_durable.engine.undoing import Undo, find
from umt_durable.errors import UndoError
from umt_durable.records import StepEntry
from umt_durable.states import StepKind, StepState
from umt_durable.store import journal


def undo_all(the_pass: Pass, entries: list[StepEntry]) -> None:
    """Return when everything that is to be undone is.

    Errors: UndoError names the step whose undo failed, or is not known here; the exits of the pass.
    """
    done = [entry for entry in entries if entry.state is StepState.DONE]
    undone = {entry.key for entry in done if entry.kind == StepKind.UNDO}
    left = [entry for entry in done if entry.undo is not None and undo_key(entry.key) not in undone]
    for entry in sorted(left, key=lambda one: (one.finished_at, one.seq), reverse=True):
        the_pass.check()
        _undo(the_pass, entry)


def _undo(the_pass: Pass, step: StepEntry) -> None:
    assert step.undo is not None
    undo = find(step.undo)
    if undo is None:
        raise UndoError(step.key, f"no undo {step.undo!r} is declared in this worker")
    recorder = Recorder(the_pass, StepOptions(retry=undo.retry))
    entry, recorded = recorder.recall(undo_key(step.key), step.key, StepKind.UNDO, (), {}, is_keyed=True)
    if recorded is not None and recorded.failures == 0:
        recorded = replace(recorded, age_seconds=0.0, wake_at=None)  # begun anew, after a failure for good or a crash
    try:
        value = recorder.replay(step, undo.annotation)
    except Exception as error:
        if the_pass.is_fatal(error):
            raise
        raise UndoError(step.key, f"its result cannot be given to {undo.name!r}: {error}") from error

    def leave_open(error: Exception) -> None:
        """Keep the entry from having an outcome, and its tries from counting for whoever goes on."""
        kept = failures.capture(error, step=entry.key).to_bytes()
        open_again = replace(entry, failures=0)
        the_pass.attempt.write(
            lambda guard: journal.record_try(guard, open_again, delay_seconds=0.0, error=kept, age_seconds=0.0),
            cancel=lambda reply: reply is not None and reply.cancel,
        )
        raise UndoError(step.key, failures.capture(error).summary) from error

    body = Body(lambda: _call(the_pass, undo, value), None, entry.key, on_final=leave_open)
    recorder.execute(entry, recorded, body, explicit=True)


def _call(the_pass: Pass, undo: Undo, value: Any) -> None:
    """Call an undo; what it returns is nobody's."""
    awaited(the_pass, undo.function(value))
