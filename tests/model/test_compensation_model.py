"""The protocol of a cancel that compensates, in every order: it holds, and without any one rule it does not."""

from __future__ import annotations

import pytest

from tests.model.compensation import Model, State
from tests.model.explorer import Found, explore


def look(broken: str = "") -> Found[State]:
    model = Model(broken)
    return explore(State(), model.edges, model.is_goal)


def test_d11_what_is_done_is_undone_backwards_and_once_before_the_run_ends_in_every_order() -> None:
    found = look()

    assert found.broken == {}
    assert found.stuck is None, found.stuck
    assert found.states > 1_000


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("let the owner record", "applied, but neither recorded nor undone"),
        ("compare fences", "recorded after the end of its grant"),
        ("finish looks at the mark", "ended with something to undo"),
        ("take-over looks at the mark", "ended with something to undo"),
        ("one step after the other", "undone in another order"),
        ("skip what is undone", "undone twice"),
        ("no other cancel meanwhile", "ended with something to undo"),
        ("a failed undo stays open", "stuck"),
    ],
)
def test_without_any_one_rule_a_promise_is_broken(rule: str, fault: str) -> None:
    found = look(rule)

    assert fault in found.broken or (fault == "stuck" and found.stuck is not None), found.broken
