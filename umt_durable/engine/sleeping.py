"""Sleeps: their end is fixed once, and recorded before anything follows it (I10)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from umt_durable.engine.exits import Canceled
from umt_durable.engine.passing import IN_PROCESS_SECONDS, Pass
from umt_durable.engine.recording import Recorder
from umt_durable.records import StepEntry
from umt_durable.states import RunState, StepKind, StepState
from umt_durable.store import journal
from umt_durable.store.guard import Guard


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """A sleep for a duration, or until a moment; `text` says which, and is its fingerprint."""

    name: str
    text: str
    duration: timedelta | None = None
    until: datetime | None = None


def sleep(the_pass: Pass, recorder: Recorder, this: Sleep) -> None:
    """Park the run until the sleep is over; return at once when it is."""
    entry, recorded = recorder.identify(this.name, StepKind.SLEEP, (this.text,), {})
    if recorded is not None and recorded.state is StepState.DONE:
        recorder.show_replay(recorded)
        return
    with the_pass.span(entry.key, entry.kind):
        _fall_asleep(the_pass, recorder, this, entry, recorded)


def _fall_asleep(
    the_pass: Pass, recorder: Recorder, this: Sleep, entry: journal.Entry, recorded: StepEntry | None
) -> None:
    """Return when a sleep is over; park the run unless that is soon."""
    if recorded is None:
        _check(the_pass, this)
    # Of a sleep of just that long, a part has passed when the reply comes; it parks all the same.
    long = recorded is None and this.duration is not None and this.duration.total_seconds() >= IN_PROCESS_SECONDS
    # The end of a sleep is recorded before anything follows it: a clock that jumps back cannot begin it again.
    ended = recorded is not None and recorded.due
    while True:
        due = _ask(the_pass, recorder, this, entry, ended=ended)
        if due.cancel:
            the_pass.leave(Canceled("cancelled"))
        if due.seconds is None or (ended and due.seconds <= 0.0):
            return
        if long or due.seconds > IN_PROCESS_SECONDS:
            _park(the_pass, recorder, this, entry)
        if the_pass.attempt.signal.wait(max(due.seconds, 0.0)):
            the_pass.check()
        ended = True


def _park(the_pass: Pass, recorder: Recorder, this: Sleep, entry: journal.Entry) -> None:
    until = f"sleep {this.name} {this.text}"
    recorder.guarded(lambda: the_pass.suspend(RunState.SLEEPING, steps=[entry.key], until=until))


def _ask(the_pass: Pass, recorder: Recorder, this: Sleep, entry: journal.Entry, *, ended: bool) -> journal.Due:
    """Fix when a sleep ends, or record that it has; say when that is."""

    def ask(guard: Guard) -> journal.Due | None:
        if ended:
            return journal.end_sleep(guard, entry.key)
        return journal.start_sleep(guard, entry, duration=this.duration, until=this.until)

    due = recorder.guarded(lambda: the_pass.attempt.write(ask, cancel=_is_cancel))
    assert due is not None
    return due


def _check(the_pass: Pass, this: Sleep) -> None:
    """Have the queue in front of us refuse a sleep that what waits for this run would not outlive."""
    lasts = this.duration if this.until is None else this.until - the_pass.database_now()
    if lasts is not None:
        the_pass.reporter.check_sleep(lasts.total_seconds())


def _is_cancel(reply: journal.Due | None) -> bool:
    return reply is not None and reply.cancel
