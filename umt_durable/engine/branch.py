"""Where a piece of a body is executed: in the body itself, or in a branch of a parallel step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from umt_durable.engine.exits import Suspended
from umt_durable.engine.replay import KeyMaker
from umt_durable.states import RunState


@dataclass(frozen=True, slots=True)
class Blocked:
    """What a branch cannot go on without: any of these steps or waits, or the next poll."""

    state: RunState
    until: str
    steps: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    poll: timedelta | None = None

    @classmethod
    def on_any(cls, blocked: Sequence[Blocked]) -> Blocked:
        """Return what a run is blocked on when all its branches are: the earliest of everything (RG-10)."""
        waits = tuple(key for one in blocked for key in one.waits)
        steps = tuple(key for one in blocked for key in one.steps)
        states = {one.state for one in blocked}
        polls = [one.poll for one in blocked if one.poll is not None]
        if RunState.WAITING in states:
            state = RunState.WAITING
        else:
            state = RunState.SLEEPING if RunState.SLEEPING in states else RunState.RETRYING
        until = blocked[0].until if len(blocked) == 1 else f"{len(blocked)} branches, one of them {blocked[0].until}"
        return cls(state, until, steps, waits, min(polls, default=None))


class Branch:
    """One line of execution in a pass.

    Shape: the keys of all it does begin with `prefix`, which is empty for the body itself. `exit` says that it is
    parked, and `blocked` on what.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.keys = KeyMaker(prefix)
        self.exit: Suspended | None = None
        self.blocked: Blocked | None = None
