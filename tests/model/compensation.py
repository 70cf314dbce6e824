"""A cancel that compensates, in every order: two workers of which any may die or be a zombie, cancels at any moment.

Each edge is one transaction of the protocol or one move of a worker between two of them. A run has two steps with an
undo. A cancel marks a running run; the mark becomes the compensation when its grant ends, by its owner or by who takes
it over, and at once where nobody owns it. `broken` names the one rule that is left out. That a body is entered up to
100 ms after the last proof is left out: the proof and the entry are one edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from tests.model.explorer import Edge

RULES: Final = (
    "let the owner record",
    "compare fences",
    "finish looks at the mark",
    "take-over looks at the mark",
    "one step after the other",
    "skip what is undone",
    "no other cancel meanwhile",
    "a failed undo stays open",
)
STEPS: Final = 2

Phase = Literal["idle", "next", "body", "commit", "undo", "undone", "failed"]
Asked = Literal["", "plain", "compensate"]


class Worker(NamedTuple):
    """What a worker is about to do, under which fence, for which step, and whether it has the run for its undos."""

    phase: Phase = "idle"
    fence: int = 0
    step: int = 0
    undoes: bool = False


IDLE: Final = Worker()


class State(NamedTuple):
    """The row of the run, its journal, what happened outside, and two workers."""

    state: Literal["ready", "running", "quarantined", "succeeded", "cancelled"] = "ready"
    fence: int = 0
    asked: Asked = ""  # a cancel is pending: the owner is to stop
    compensating: bool = False
    done: int = 0  # so many steps are recorded
    undone: tuple[int, ...] = ()  # in the order they were recorded
    closed: tuple[int, ...] = ()  # undos that are recorded as failed for good
    applied: int = 0  # so many steps have had their effect, while nothing failed
    cancels: int = 0
    faults: int = 0
    workers: tuple[Worker, Worker] = (IDLE, IDLE)


class Model:
    """The edges of the model, with one rule left out or none."""

    def __init__(self, broken: str = "", *, faults: int = 2, cancels: int = 2) -> None:
        assert broken in ("", *RULES)
        self._broken, self._faults, self._cancels = broken, faults, cancels

    def is_goal(self, state: State) -> bool:
        """Say whether the run has ended, and nobody does anything."""
        return state.state in ("succeeded", "cancelled") and all(one.phase == "idle" for one in state.workers)

    def edges(self, state: State) -> Iterator[Edge[State]]:
        """Yield what can happen next."""
        for asked in ("plain", "compensate"):
            if state.cancels < self._cancels and state.state not in ("succeeded", "cancelled"):
                yield f"a {asked} cancel", *self._cancelled(state._replace(cancels=state.cancels + 1), asked)
        if state.state == "quarantined" and not state.closed:
            yield "a person retries", _ready(state), None
        for who in (0, 1):
            yield from self._claims(state, who)
            yield from self._acts(state, who)
            yield from self._dies(state, who)

    # -- the row of the run --------------------------------------------------------------------------------------------

    def _cancelled(self, state: State, asked: Literal["plain", "compensate"]) -> tuple[State, str | None]:
        """Apply a cancel: mark what runs, and end the rest or have it compensated."""
        if (state.asked or state.compensating) and self._broken != "no other cancel meanwhile":
            return state, None
        if state.state != "running":
            return self._ends(state._replace(asked=asked))
        if asked == "compensate" and self._broken == "let the owner record":
            return self._ends(state._replace(asked=asked))
        return state._replace(asked=asked), None

    def _ends(self, state: State, *, looks: bool = True) -> tuple[State, str | None]:
        """End what is to be cancelled, unless it has something to undo."""
        if looks and state.asked == "compensate" and self._left(state):
            return _ready(state)._replace(asked="", compensating=True), None
        return self._finished(state, "cancelled")

    def _finished(self, state: State, ended: Literal["succeeded", "cancelled"]) -> tuple[State, str | None]:
        after = state._replace(state=ended, fence=state.fence + 1)
        if state.state in ("succeeded", "cancelled"):
            return after, "ended twice"
        if (state.asked or state.compensating) and ended == "succeeded":
            return after, "succeeded after a cancel"
        if (state.compensating or state.asked == "compensate") and len(set(state.undone)) < state.done:
            return after, "ended with something to undo"
        if state.compensating and state.faults == 0 and len(set(state.undone)) < state.applied:
            return after, "applied, but neither recorded nor undone"
        return after, None

    def _left(self, state: State) -> list[int]:
        """List the steps to undo, the last first."""
        left = [step for step in range(state.done) if step not in state.undone or self._broken == "skip what is undone"]
        return left if self._broken == "one step after the other" else left[::-1]

    # -- workers -------------------------------------------------------------------------------------------------------

    def _claims(self, state: State, who: int) -> Iterator[Edge[State]]:
        """Take a ready run, or one from its owner, who may be alive: what is marked is ended instead."""
        if state.workers[who].phase != "idle":
            return
        if state.state == "ready":
            taken = state._replace(state="running", fence=state.fence + 1)
            yield f"{who} claims", _with(taken, who, Worker("next", taken.fence, 0, state.compensating)), None
        lives = any(one.phase != "idle" and one.fence == state.fence for one in state.workers)
        if state.state == "running" and state.faults < self._faults + (not lives):
            lost = state._replace(faults=state.faults + lives)
            label = ("!" if lives else "") + "the run is taken over"
            if state.asked:
                yield label, *self._ends(lost, looks=self._broken != "take-over looks at the mark")
            else:
                yield label, _ready(lost), None

    def _acts(self, state: State, who: int) -> Iterator[Edge[State]]:
        me = state.workers[who]
        is_mine = state.state == "running" and state.fence == me.fence
        may_write = is_mine or self._broken == "compare fences"
        match me.phase:
            case "next":
                yield self._goes_on(state, who, is_mine)
            case "body":
                applied = max(state.applied, me.step + 1)
                yield f"{who} calls", _with(state._replace(applied=applied), who, me._replace(phase="commit")), None
            case "commit" if may_write:
                late = "recorded after the end of its grant" if not is_mine else None
                after = state._replace(done=max(state.done, me.step + 1))
                yield f"{who} records", _with(after, who, me._replace(phase="next")), late
            case "undo":
                yield f"{who} undoes", _with(state, who, me._replace(phase="undone")), None
                if state.faults < self._faults:
                    failed = state._replace(faults=state.faults + 1)
                    yield f"!{who} fails to undo", _with(failed, who, me._replace(phase="failed")), None
            case "undone" if may_write:
                twice = "undone twice" if me.step in state.undone else None
                if any(step > me.step and step not in state.undone for step in range(state.done)):
                    twice = "undone in another order"
                after = state._replace(undone=(*state.undone, me.step))
                yield f"{who} records the undo", _with(after, who, me._replace(phase="next")), twice
            case "failed" if is_mine:
                closed = state.closed if self._broken != "a failed undo stays open" else (*state.closed, me.step)
                parked = state._replace(state="quarantined", fence=state.fence + 1, closed=closed)
                yield f"{who} parks the run", _with(parked, who, IDLE), None
            case "commit" | "undone" | "failed":
                yield f"{who} is refused", _with(state, who, IDLE), None

    def _goes_on(self, state: State, who: int, is_mine: bool) -> Edge[State]:
        """Ask for the grant, and enter what is next; or end the grant."""
        me = state.workers[who]
        if not is_mine and self._broken != "compare fences":
            return f"{who} is shut out", _with(state, who, IDLE), None
        if me.undoes:
            left = self._left(state)
            if not left:
                after, broken = self._finished(state, "cancelled")
                return f"{who} ends the run", _with(after, who, IDLE), broken
            if left[0] in state.closed:
                return f"{who} finds it failed", _with(state._replace(state="quarantined"), who, IDLE), None
            return f"{who} enters an undo", _with(state, who, me._replace(phase="undo", step=left[0])), None
        if state.asked and is_mine:
            after, broken = self._ends(state, looks=self._broken != "finish looks at the mark")
            return f"{who} stops", _with(after, who, IDLE), broken
        if state.done == STEPS:
            after, broken = self._finished(state, "succeeded")
            return f"{who} finishes", _with(after, who, IDLE), broken
        entered = _with(state, who, me._replace(phase="body", step=state.done))
        return f"{who} enters a body", entered, "entered after the cancel" if state.compensating else None

    def _dies(self, state: State, who: int) -> Iterator[Edge[State]]:
        if state.workers[who].phase != "idle" and state.faults < self._faults:
            yield f"!{who} dies", _with(state._replace(faults=state.faults + 1), who, IDLE), None


def _ready(state: State) -> State:
    return state._replace(state="ready", fence=state.fence + 1)


def _with(state: State, who: int, worker: Worker) -> State:
    first, second = state.workers
    return state._replace(workers=(worker, second) if who == 0 else (first, worker))
