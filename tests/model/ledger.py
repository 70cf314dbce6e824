"""A transaction step in another database, by two workers of which any may die or become a zombie at any moment.

Each edge is one transaction of the protocol, in the journal or there, or one move of a worker between two of them. The
transaction there holds the entry from its claim on; what a lost connection leaves of it ends by itself, either way if
its commit was sent. The function of the step may fail, which is final. That the journal is asked for the grant before
the commit there is left out: the answer may be 100 ms old. `broken` names the one rule that is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from tests.model.explorer import Edge

RULES: Final = (
    "look first",
    "claim in the transaction",
    "compare fences",
    "doubt after a lost reply",
    "fence of the journal",
)

Phase = Literal["idle", "begin", "look", "open", "body", "commit", "record", "fail"]


class Worker(NamedTuple):
    """What a worker is about to do, under which fence, and whether an earlier try of the step may be committed."""

    phase: Phase = "idle"
    fence: int = 0
    doubt: bool = False


class Left(NamedTuple):
    """A transaction there whose client is gone: under which fence, and whether its commit was sent."""

    fence: int
    sent: bool


IDLE: Final = Worker()


class State(NamedTuple):
    """The journal, the other database, and two workers."""

    fence: int = 0
    owner: int = 0
    started: bool = False
    outcome: Literal["", "done", "failed"] = ""
    claimed: int = 0  # by which fence the entry is claimed
    done_by: int = 0  # 0: the entry has no result
    rows: int = 0
    held: tuple[int, ...] = ()  # the fences of open transactions there
    left: tuple[Left, ...] = ()
    faults: int = 0
    workers: tuple[Worker, Worker] = (IDLE, IDLE)


class Model:
    """The edges of the model, with one rule left out or none."""

    def __init__(self, broken: str = "", *, faults: int = 3) -> None:
        assert broken in ("", *RULES)
        self._broken, self._faults = broken, faults

    def is_goal(self, state: State) -> bool:
        """Say whether the run has ended, and nobody holds anything."""
        return bool(state.outcome) and not state.held and all(one.phase == "idle" for one in state.workers)

    def edges(self, state: State) -> Iterator[Edge[State]]:
        """Yield what can happen next."""
        for who in (0, 1):
            yield from self._claims(state, who)
            yield from self._acts(state, who)
            yield from self._dies(state, who)
        for one in state.left:
            rest = state._replace(left=_without(state.left, one), held=_without(state.held, one.fence))
            yield "the server ends what is left", rest, None
            if one.sent:
                yield "the server commits what is left", *self._committed(rest, one.fence)

    # -- the journal ---------------------------------------------------------------------------------------------------

    def _claims(self, state: State, who: int) -> Iterator[Edge[State]]:
        """Take the run, from its start or from its owner, who may be alive."""
        if state.outcome or state.workers[who].phase != "idle":
            return
        lives = state.fence > 0 and state.workers[state.owner].phase != "idle"
        if lives and state.faults >= self._faults:
            return
        fence = state.fence + 1
        if fence > self._faults + 2:
            return
        taken = state._replace(fence=fence, owner=who, faults=state.faults + lives)
        yield ("!" if lives else "") + f"{who} claims", _with(taken, who, Worker("begin", fence, state.started)), None

    def _acts(self, state: State, who: int) -> Iterator[Edge[State]]:
        me = state.workers[who]
        is_mine = state.fence == me.fence and not state.outcome
        match me.phase:
            case "begin":
                looks = me.doubt and self._broken != "look first"
                after = state._replace(started=True) if is_mine else state
                yield f"{who} begins", _with(after, who, _to(me, "look" if looks else "open", is_mine)), None
            case "look" | "open":
                yield from self._there(state, who)
            case "body":
                yield f"{who} calls", _with(state, who, me._replace(phase="commit")), None
                failed = _with(state, who, me._replace(phase="fail"))
                yield f"{who} fails", failed._replace(held=_without(state.held, me.fence)), None
            case "commit":
                after, broken = self._committed(state._replace(held=_without(state.held, me.fence)), me.fence)
                yield f"{who} commits", _with(after, who, me._replace(phase="record")), broken
            case "record":
                yield from self._records(state, who, "done", is_mine)
            case "fail":
                yield from self._records(state, who, "failed", is_mine)

    def _records(
        self, state: State, who: int, outcome: Literal["done", "failed"], is_mine: bool
    ) -> Iterator[Edge[State]]:
        broken = "recorded twice" if state.outcome else None
        if outcome == "failed" and state.done_by:
            broken = "failed, but committed"
        if is_mine or self._broken == "fence of the journal":
            yield f"{who} records {outcome}", _with(state._replace(outcome=outcome), who, IDLE), broken
        else:
            yield f"{who} is refused", _with(state, who, IDLE), None

    # -- the other database --------------------------------------------------------------------------------------------

    def _there(self, state: State, who: int) -> Iterator[Edge[State]]:
        """Claim the entry: in a transaction of its own, or in that of the function, which then holds it."""
        me = state.workers[who]
        claims = me.phase == "look" or self._broken != "claim in the transaction"
        if claims and state.held:
            return  # whoever holds the entry is waited for
        if claims and state.done_by:
            yield f"{who} finds it", _with(state, who, me._replace(phase="record", doubt=False)), None
        elif claims and state.claimed > me.fence and self._broken != "compare fences":
            yield f"{who} is shut out", _with(state, who, IDLE), None
        elif me.phase == "look":
            after = state._replace(claimed=me.fence)
            yield f"{who} looks", _with(after, who, me._replace(phase="open", doubt=False)), None
        else:
            after = state._replace(held=(*state.held, me.fence))
            yield f"{who} opens", _with(after, who, me._replace(phase="body")), None

    def _committed(self, state: State, fence: int) -> tuple[State, str | None]:
        after = state._replace(claimed=fence, done_by=fence, rows=state.rows + 1)
        if after.rows > 1:
            return after, "committed twice"
        return after, "failed, but committed" if state.outcome == "failed" else None

    # -- faults --------------------------------------------------------------------------------------------------------

    def _dies(self, state: State, who: int) -> Iterator[Edge[State]]:
        """Die, or lose the connection there, with the reply to a commit that was sent, or before."""
        me = state.workers[who]
        if me.phase == "idle" or state.faults >= self._faults:
            return
        failed = state._replace(faults=state.faults + 1)
        if me.phase not in ("body", "commit"):
            yield f"!{who} dies", _with(failed, who, IDLE), None
            return
        left = failed._replace(left=(*state.left, Left(me.fence, me.phase == "commit")))
        yield f"!{who} dies", _with(left, who, IDLE), None
        if me.phase == "commit":
            knows = self._broken != "doubt after a lost reply"
            yield (
                f"!{who} loses the reply",
                _with(left, who, Worker("begin" if knows else "fail", me.fence, True)),
                None,
            )


def _with(state: State, who: int, worker: Worker) -> State:
    first, second = state.workers
    return state._replace(workers=(worker, second) if who == 0 else (first, worker))


def _to(worker: Worker, phase: Phase, may: bool) -> Worker:
    return worker._replace(phase=phase) if may else IDLE


def _without(items: tuple[object, ...], item: object) -> tuple:  # type: ignore[type-arg]  # of whatever they are
    place = items.index(item)
    return (*items[:place], *items[place + 1 :])
