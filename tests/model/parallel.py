"""A run with three branches, executed by two workers of which any may die or become a zombie at any moment.

Branch `work` is one step with a body. Branch `wait` waits for a fact, perhaps with a time-out. Branch `sleep` sleeps.
Each edge is one transaction of the protocol, or one move of a worker between two of them. `broken` names the one rule
that is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from tests.model.explorer import Edge

RULES: Final = ("wait for workers", "look for settled waits", "earliest of all", "fence", "reread")

SLEEP_DUE, DEADLINE = 1, 2

Branch = Literal["new", "busy", "parked", "over"]
Wait = Literal["none", "pending", "over"]
Run = Literal["ready", "running", "parked", "ended"]


class Worker(NamedTuple):
    """What a worker believes: its fence, and where its branches stand. Fence 0: it has nothing."""

    fence: int = 0
    work: Branch = "new"
    wait: Branch = "new"
    sleep: Branch = "new"


IDLE: Final = Worker()


class State(NamedTuple):
    """The database, the time, and two workers."""

    run: Run = "ready"
    fence: int = 0
    wake_at: int | None = None
    work_by: int = 0  # the fence that committed the step; 0: none has
    wait: Wait = "none"
    sleep: Wait = "none"
    fact: Literal["unsaid", "said", "routed"] = "unsaid"
    time: int = 0
    entries: int = 0  # into the body of `work`
    faults: int = 0
    workers: tuple[Worker, Worker] = (IDLE, IDLE)


class Model:
    """The edges of the model, with one rule left out or none, and with a time-out of the wait or without."""

    def __init__(self, broken: str = "", *, has_deadline: bool = False, take_overs: int = 1) -> None:
        assert broken in ("", *RULES)
        self._broken, self._take_overs = broken, take_overs
        self._has_deadline = has_deadline

    def is_goal(self, state: State) -> bool:
        """Say whether the run has ended."""
        return state.run == "ended"

    def edges(self, state: State) -> Iterator[Edge[State]]:
        """Yield everything that can happen next."""
        yield from self._world(state)
        yield from self._services(state)
        for number in (0, 1):
            if state.workers[number].fence:
                yield from self._worker(state, number)
            elif state.run == "ready":
                claimed = state._replace(run="running", fence=state.fence + 1, wake_at=None)
                yield "claim", _with(claimed, number, _replayed(claimed)), None

    # -- around the workers -------------------------------------------------------------------------------------------

    def _world(self, state: State) -> Iterator[Edge[State]]:
        if state.fact == "unsaid":
            yield "say the fact", state._replace(fact="said"), None
        if state.time < DEADLINE:
            later = state._replace(time=state.time + 1)
            yield "time passes", later, self._overslept(later)
        if state.run == "running" and state.faults < self._take_overs:
            taken = state._replace(run="ready", fence=state.fence + 1, faults=state.faults + 1)
            yield "!take over from a living worker", taken, None
            for number in (0, 1):
                if state.workers[number].fence == state.fence:
                    yield "!its worker dies", _with(taken, number, IDLE), None

    def _overslept(self, state: State) -> str | None:
        """Say whether a parked run is due while nothing will wake it."""
        if state.run != "parked" or (state.wake_at is not None and state.wake_at <= state.time):
            return None
        sleeps = state.sleep == "pending" and state.time >= SLEEP_DUE
        waits = self._has_deadline and state.wait == "pending" and state.time >= DEADLINE
        return "overslept" if sleeps or waits else None

    def _services(self, state: State) -> Iterator[Edge[State]]:
        if state.fact == "said":
            routed = state._replace(fact="routed")
            if state.wait == "pending":
                routed = _woken(routed._replace(wait="over"))
            yield "route the fact", routed, None
        if state.run == "parked" and state.wake_at is not None and state.wake_at <= state.time:
            yield "the timer wakes the run", _woken(self._timed(state)), None

    def _timed(self, state: State) -> State:
        if state.sleep == "pending" and state.time >= SLEEP_DUE:
            state = state._replace(sleep="over")
        if self._has_deadline and state.wait == "pending" and state.time >= DEADLINE:
            state = state._replace(wait="over")
        return state

    # -- a worker -----------------------------------------------------------------------------------------------------

    def _worker(self, state: State, number: int) -> Iterator[Edge[State]]:
        me = state.workers[number]
        mine = state.run == "running" and state.fence == me.fence
        dropped = _with(state, number, IDLE)
        if me.work == "new":
            if not mine:
                yield "work is refused", dropped, None  # no proof is given any more
            else:
                entered = state._replace(entries=state.entries + 1)
                twice = "a body entered twice without a fault" if state.entries and not state.faults else None
                yield "work begins", _with(entered, number, me._replace(work="busy")), twice
        if me.work == "busy":
            yield self._commit(state, number, mine=mine)
        if me.wait == "new":
            yield "register", self._register(state, number) if mine else dropped, None
        if me.sleep == "new":
            yield "sleep", self._sleep(state, number) if mine else dropped, None
        if me.work == "busy" and mine and self._broken != "reread":
            going = self._look(state, me)
            if going != me:
                yield "look", _with(state, number, going), None
        if self._broken == "wait for workers" or me.work == "over":
            yield from self._leave(state, number, mine=mine)

    def _commit(self, state: State, number: int, *, mine: bool) -> Edge[State]:
        me = state.workers[number]
        if not mine and self._broken != "fence":
            return "commit is refused", _with(state, number, IDLE), None
        done = _with(state._replace(work_by=me.fence), number, me._replace(work="over"))
        return "commit", done, "a step committed twice" if state.work_by else None

    def _register(self, state: State, number: int) -> State:
        me = state.workers[number]
        wait = state.wait
        if wait == "none":
            wait = "pending" if state.fact == "unsaid" else "over"
        if wait == "pending" and self._has_deadline and state.time >= DEADLINE:
            wait = "over"
        return _with(state._replace(wait=wait), number, me._replace(wait="over" if wait == "over" else "parked"))

    def _sleep(self, state: State, number: int) -> State:
        me = state.workers[number]
        sleep: Wait = "over" if state.sleep == "over" or state.time >= SLEEP_DUE else "pending"
        return _with(state._replace(sleep=sleep), number, me._replace(sleep="over" if sleep == "over" else "parked"))

    def _look(self, state: State, me: Worker) -> Worker:
        """Let parked branches go on whose time has come while another works."""
        if me.wait == "parked" and (state.wait == "over" or (self._has_deadline and state.time >= DEADLINE)):
            me = me._replace(wait="new")
        if me.sleep == "parked" and state.time >= SLEEP_DUE:
            me = me._replace(sleep="new")
        return me

    def _leave(self, state: State, number: int, *, mine: bool) -> Iterator[Edge[State]]:
        me = state.workers[number]
        if "new" in (me.wait, me.sleep):
            return
        if not mine:
            yield "park or end is refused", _with(state, number, IDLE), None
        elif me.work == me.wait == me.sleep == "over":
            early = not state.work_by or state.wait != "over" or state.sleep != "over"
            ended = _with(state._replace(run="ended", fence=state.fence + 1), number, IDLE)
            yield "end", ended, "ended before its branches" if early else None
        elif "parked" in (me.wait, me.sleep):
            if me.wait == "parked" and state.wait == "over" and self._broken != "look for settled waits":
                if self._broken != "reread":
                    yield "a wait was settled meanwhile", _with(state, number, me._replace(wait="new")), None
                return
            parked = state._replace(run="parked", fence=state.fence + 1, wake_at=self._wake_at(me))
            yield "park", _with(parked, number, me if me.work == "busy" else IDLE), None

    def _wake_at(self, me: Worker) -> int | None:
        times = [DEADLINE] if me.wait == "parked" and self._has_deadline else []
        if me.sleep == "parked" and not (self._broken == "earliest of all" and me.wait == "parked"):
            times.append(SLEEP_DUE)
        return min(times, default=None)


def _with(state: State, number: int, worker: Worker) -> State:
    workers = (worker, state.workers[1]) if number == 0 else (state.workers[0], worker)
    return state._replace(workers=workers)


def _replayed(state: State) -> Worker:
    """Return what a worker knows that has just claimed and then read the journal."""
    return Worker(
        state.fence,
        "over" if state.work_by else "new",
        "over" if state.wait == "over" else "new",
        "over" if state.sleep == "over" else "new",
    )


def _woken(state: State) -> State:
    return state._replace(run="ready", fence=state.fence + 1, wake_at=None) if state.run == "parked" else state
