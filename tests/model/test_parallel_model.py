"""The protocol of parallel branches with take-overs, in every order: it holds, and without any one rule it does not."""

from __future__ import annotations

import pytest

from tests.model.explorer import Found, explore
from tests.model.parallel import Model, State


def look(broken: str = "", *, has_deadline: bool = False, take_overs: int = 1) -> Found[State]:
    model = Model(broken, has_deadline=has_deadline, take_overs=take_overs)
    return explore(State(), model.edges, model.is_goal)


@pytest.mark.parametrize("has_deadline", [False, True])
def test_i6_i8_i10_parallel_branches_keep_their_promises_in_every_order(has_deadline: bool) -> None:
    found = look(has_deadline=has_deadline, take_overs=2)

    assert found.broken == {}
    assert found.stuck is None, found.stuck
    assert found.states > 1_000


def test_to_park_while_a_branch_works_enters_its_body_twice() -> None:
    assert "a body entered twice without a fault" in look("wait for workers").broken


def test_to_park_over_a_settled_wait_is_to_park_for_ever() -> None:
    stuck = look("look for settled waits").stuck

    assert stuck is not None
    assert "route the fact" in stuck


@pytest.mark.parametrize("has_deadline", [False, True])
def test_to_be_due_with_one_branch_only_oversleeps_the_others(has_deadline: bool) -> None:
    assert "overslept" in look("earliest of all", has_deadline=has_deadline).broken


def test_commits_without_the_fence_are_made_twice_after_a_take_over() -> None:
    assert "a step committed twice" in look("fence").broken


def test_not_to_read_again_what_was_settled_is_to_look_for_ever() -> None:
    assert look("reread").stuck is not None
