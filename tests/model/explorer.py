"""A breadth-first search through every state of a small model: the shortest way to a fault, and what is stuck."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")

Edge = tuple[str, S, str | None]
"""What happens (`!` begins the name of a fault), the state after it, and which promise that breaks."""


@dataclass
class Found(Generic[S]):
    """What the search came to: each broken promise with the shortest way to it, and one state with no way to a goal."""

    states: int = 0
    broken: dict[str, list[str]] = field(default_factory=dict)
    stuck: list[str] | None = None


def explore(first: S, edges: Callable[[S], Iterable[Edge[S]]], is_goal: Callable[[S], bool]) -> Found[S]:
    """Look at every state that can be reached; from each, some way without a further fault must lead to a goal."""
    found: Found[S] = Found()
    came: dict[S, tuple[S, str] | None] = {first: None}
    back: dict[S, list[S]] = {}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        for label, after, breaks in edges(state):
            if breaks is not None:
                found.broken.setdefault(breaks, [*_way(came, state), label])
                continue
            if after not in came:
                came[after] = (state, label)
                queue.append(after)
            if not label.startswith("!"):
                back.setdefault(after, []).append(state)
    found.states = len(came)
    live = {state for state in came if is_goal(state)}
    queue = deque(live)
    while queue:
        for before in back.get(queue.popleft(), ()):
            if before not in live:
                live.add(before)
                queue.append(before)
    lost = next((state for state in came if state not in live), None)
    found.stuck = None if lost is None else _way(came, lost)
    return found


def _way(came: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    way: list[str] = []
    while (before := came[state]) is not None:
        state, label = before
        way.append(label)
    return way[::-1]
