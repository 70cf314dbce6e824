"""The protocol of steps in another database, in every order: it holds, and without any one rule it does not."""

from __future__ import annotations

import pytest

from tests.model.explorer import Found, explore
from tests.model.ledger import Model, State


def look(broken: str = "") -> Found[State]:
    model = Model(broken)
    return explore(State(), model.edges, model.is_goal)


def test_i16_a_step_in_another_database_is_committed_once_and_recorded_as_it_is_in_every_order() -> None:
    found = look()

    assert found.broken == {}
    assert found.stuck is None, found.stuck
    assert found.states > 1_000


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("look first", "failed, but committed"),
        ("claim in the transaction", "committed twice"),
        ("compare fences", "failed, but committed"),
        ("doubt after a lost reply", "failed, but committed"),
        ("fence of the journal", "recorded twice"),
    ],
)
def test_without_any_one_rule_a_promise_is_broken(rule: str, fault: str) -> None:
    assert fault in look(rule).broken
