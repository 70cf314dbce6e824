"""Why a run stands where it stands, what it goes on with, and what a person can do about it. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from umt_durable.records import Run
from umt_durable.states import OWN, Reason, RunState, Scope
from umt_durable.store import waits
from umt_durable.store.diagnosis import OpenStep, OpenWait, Standing
from umt_durable.store.pauses import Pause

REMEDIES = {
    Reason.CRASH_BUDGET: "find what kills its process, then `umt-durable retry {run}`",
    Reason.NONDETERMINISM: "deploy code that fits its journal, then `umt-durable retry {run}`, or fork it",
    Reason.BAD_INPUT: "deploy code that takes its arguments, then `umt-durable retry {run}`",
    Reason.JOURNAL_CORRUPT: "its record was changed: compare with a backup, or start it anew",
    Reason.UNCERTAIN_OP: "say how it ended: `umt-durable show {run}` has the step; `umt-durable ops list`",
    Reason.PAYLOAD_KEY: "give its workers that key, then `umt-durable retry {run}`",
    Reason.UNDO: "repair what its undo failed on, then `umt-durable retry {run}`",
}


class Why(StrEnum):
    """Why a run stands where it stands. Programs may rely on these."""

    ENDED = "ended"
    REPORT_PENDING = "report_pending"  # its result or a callback has not left yet
    CANCEL_ASKED = "cancel_asked"
    PAUSED = "paused"  # it, its task or its queue
    MISSING_CODE = "missing_code"  # no live worker declares its version
    HINT_PENDING = "hint_pending"  # a relay is to publish its message
    HINT_SENT = "hint_sent"  # the message is on its way to a worker
    HINT_REFUSED = "hint_refused"  # the broker refused it for good
    UNDOING = "undoing"  # what it has done, before it ends as cancelled
    EXPIRES = "expires"  # it is cancelled if nobody has begun it by then
    RUNNING = "running"
    OWNER_GONE = "owner_gone"  # the lease of its process has ended
    STEP = "step"  # one that has begun and has no outcome
    SLEEPING = "sleeping"
    RETRYING = "retrying"
    FACT = "fact"
    GROUP = "group"  # of waits, one or several of which are enough
    CHILDREN = "children"
    ANSWER = "answer"  # of an ordinary task, or of whoever completes a begun step
    OVERDUE = "overdue"  # due, and maintenance has not come by
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Because:
    """One reason. `until` is when it ends by itself, if it does; `remedy` is what a person can do, if anything."""

    why: Why
    text: str
    until: datetime | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a run stands where it stands: the first reason is the one that keeps it."""

    run: Run
    because: tuple[Because, ...]

    def __str__(self) -> str:
        lines = [f"run {self.run.id} of {version_of(self.run)} is {self.run.state}"]
        for one in self.because:
            until = "" if one.until is None else f", until {one.until.isoformat(timespec='seconds')}"
            remedy = "" if one.remedy is None else f". To do: {one.remedy}"
            lines.append(f"  {one.text}{until}{remedy}")
        return "\n".join(lines)


def version_of(run: Run) -> str:
    """Return the task of a run with its version, as workers declare it."""
    return run.task if run.version is None else f"{run.task}@{run.version}"


def keeping(run: Run, paused: Sequence[Pause]) -> list[Pause]:
    """Return which pauses of a task or queue keep a ready run."""
    if run.state is not RunState.READY:
        return []
    names = {Scope.TASK: run.task, Scope.QUEUE: None if run.task.startswith(OWN) else run.queue}
    return [one for one in paused if names[one.scope] == one.name]


def explain(
    run: Run,
    standing: Standing,
    steps: Sequence[OpenStep],
    open_waits: Sequence[OpenWait],
    *,
    paused: Sequence[Pause],
    versions: Collection[str],
) -> Explanation:
    """Say why a run stands where it stands.

    Shape: `versions` are what live workers declare, `paused` what is paused as a whole.
    """
    return Explanation(run, tuple(_Reasons(run, standing, steps, open_waits, paused, versions).all()))


@dataclass(frozen=True, slots=True)
class _Reasons:
    run: Run
    standing: Standing
    steps: Sequence[OpenStep]
    open_waits: Sequence[OpenWait]
    paused: Sequence[Pause]
    versions: Collection[str]

    def all(self) -> list[Because]:
        run = self.run
        if run.state.is_terminal:
            return self._ended()
        found = []
        if run.paused_at is not None:
            found.append(
                Because(Why.PAUSED, f"it is paused since {_time(run.paused_at)}", remedy=self._command("resume"))
            )
        if run.cancel_at is not None:
            then = "what it has done is undone, then it ends" if run.compensate_at else "it ends at its next step"
            found.append(Because(Why.CANCEL_ASKED, f"a cancel was asked for at {_time(run.cancel_at)}; {then}"))
        elif run.compensate_at is not None:
            found.append(Because(Why.UNDOING, "it was cancelled; what it has done is undone before it ends"))
        match run.state:
            case RunState.READY:
                found += self._ready()
            case RunState.RUNNING:
                found += self._running()
            case RunState.QUARANTINED:
                found.append(self._quarantined())
            case _:
                found += self._parked()
        return found

    def _command(self, verb: str) -> str:
        return f"`umt-durable {verb} {shlex.quote(self.run.id)}`"

    def _ended(self) -> list[Because]:
        run, left = self.run, self.standing.unreported
        why = "" if run.reason is None else f": {run.reason}"
        at = "" if run.finished_at is None else f" at {_time(run.finished_at)}"
        remedy = self._command("retry") if run.state is not RunState.SUCCEEDED else None
        found = [Because(Why.ENDED, f"it has {_ENDS[run.state]}{at}{why}", remedy=remedy)]
        if left:
            said = f"{left} message(s) about its end (result, callbacks) wait for a relay, or for the result backend"
            found.append(Because(Why.REPORT_PENDING, said))
        return found

    def _ready(self) -> list[Because]:
        run, standing, needed = self.run, self.standing, version_of(self.run)
        found = []
        for pause in keeping(run, self.paused):
            remedy = f"`umt-durable {pause.scope} resume {shlex.quote(pause.name)}`"
            found.append(Because(Why.PAUSED, str(pause), remedy=remedy))
        if needed not in self.versions:
            found.append(
                Because(Why.MISSING_CODE, f"no live worker declares {needed}", remedy="start a worker with that code")
            )
        if standing.hint_at is not None:
            is_due = standing.hint_at <= standing.now
            said = "its message waits for a relay" if is_due else "a relay publishes its message then"
            found.append(Because(Why.HINT_PENDING, said, until=_ahead(standing.hint_at, standing.now)))
        elif standing.has_dead_hint:
            remedy = "`umt-durable outbox dead` has the reason; `umt-durable outbox replay --type run` tries it again"
            found.append(Because(Why.HINT_REFUSED, "the broker refused its message for good", remedy=remedy))
        elif run.paused_at is None and not found:
            again = f", sent again {standing.redelivers} time(s) so far" if standing.redelivers else ""
            said = f"its message is in queue {run.queue or 'of its task'}{again}; without a claim it is sent again"
            found.append(Because(Why.HINT_SENT, said, until=standing.deliver_by))
        return found + self._expiry()

    def _expiry(self) -> list[Because]:
        if self.standing.expires_at is None:
            return []
        return [
            Because(Why.EXPIRES, "if nobody has begun it by then it ends as cancelled", until=self.standing.expires_at)
        ]

    def _running(self) -> list[Because]:
        standing = self.standing
        where = "a process that is forgotten" if standing.host is None else f"{standing.host}, process {standing.pid}"
        if standing.is_held:
            found = [Because(Why.RUNNING, f"it is executed by {where}", until=standing.attempt_deadline)]
        else:
            found = [
                Because(Why.OWNER_GONE, f"it was executed by {where}, whose lease has ended; a sweeper takes it over")
            ]
        return found + [self._step(step) for step in self.steps]

    def _parked(self) -> list[Because]:
        run, now = self.run, self.standing.now
        found = [self._wait(wait) for wait in self.open_waits]
        found += [self._step(step) for step in self.steps if step.kind not in ("call", "task")]
        found += self._expiry()
        if run.state is RunState.RETRYING and not any(one.why is Why.STEP and one.until for one in found):
            found.insert(
                0, Because(Why.RETRYING, f"it failed {run.failures} time(s) and is tried again", until=run.wake_at)
            )
        elif run.state is RunState.SLEEPING and not any(one.why is Why.SLEEPING for one in found):
            found.insert(0, Because(Why.SLEEPING, "it begins when its time has come", until=run.wake_at))
        if run.wake_at is not None and run.wake_at < now:
            said = f"it is due since {_time(run.wake_at)}: maintenance, of a worker or of `umt-durable serve`, wakes it"
            found.insert(0, Because(Why.OVERDUE, said))
        return found

    def _quarantined(self) -> Because:
        reason = self.run.reason or "unknown"
        remedy = REMEDIES.get(Reason(reason)) if reason in set(Reason) else None
        said = (
            f"it waits for a person ({reason}), after {self.run.failures} failure(s) and {self.run.crashes} crash(es)"
        )
        return Because(
            Why.QUARANTINED, said, remedy=None if remedy is None else remedy.format(run=shlex.quote(self.run.id))
        )

    def _step(self, step: OpenStep) -> Because:
        tried = f", after {step.failures} failed tries" if step.failures else ""
        if step.kind == "sleep":
            return Because(Why.SLEEPING, f"sleep {step.key!r}", until=step.wake_at)
        if step.wake_at is not None:
            return Because(Why.STEP, f"step {step.key!r} is tried again{tried}", until=step.wake_at)
        since = "" if step.started_at is None else f" since {_time(step.started_at)}"
        return Because(Why.STEP, f"step {step.key!r} is under way{since}{tried}")

    def _wait(self, wait: OpenWait) -> Because:
        match wait.mode:
            case "join":
                said = f"step {_step_of(wait)!r} waits for {self.standing.children.get(_step_of(wait), 0)} child run(s)"
                return Because(Why.CHILDREN, said, until=wait.deadline)
            case "task":
                return Because(Why.ANSWER, f"step {_step_of(wait)!r} waits for its task's answer", until=wait.deadline)
            case "begin":
                said = f"step {wait.key!r} waits until the holder of its token completes it"
                return Because(Why.ANSWER, said, until=wait.deadline)
        if wait.need is not None:
            said = f"{wait.name} {wait.key!r} goes on with {wait.need} of what follows"
            return Because(Why.GROUP, said, until=wait.deadline)
        if wait.address == waits.TIMER:
            return Because(Why.SLEEPING, f"timer {wait.name!r}", until=wait.deadline)
        key = _key_of(wait.address)
        if key is not None:
            said, remedy = f"fact {wait.name!r} of key {key!r}", f"`durable.emit({wait.name!r}, {key!r})`"
        else:
            said = f"fact {wait.name!r}"
            remedy = f"`umt-durable signal {shlex.quote(self.run.id)} {shlex.quote(wait.name)}`"
        return Because(Why.FACT, f"it waits for {said}", until=wait.deadline, remedy=remedy)


_ENDS = {RunState.SUCCEEDED: "succeeded", RunState.FAILED: "failed", RunState.CANCELLED: "been cancelled"}


def _key_of(address: str) -> str | None:
    """Return the key under which a fact has to be said; None where it is said to the run."""
    try:
        parts = json.loads(address)
        return str(parts[2]) if parts[0] == "key" else None
    except (ValueError, IndexError, TypeError):  # nobody of ours has written it; people want to see the rest
        return None


def _step_of(wait: OpenWait) -> str:
    """Return the key of the step whose wait for others this is."""
    return wait.key.partition("/")[2] or wait.key


def _ahead(at: datetime, now: datetime) -> datetime | None:
    return at if at > now else None


def _time(at: datetime) -> str:
    return at.isoformat(timespec="seconds")
