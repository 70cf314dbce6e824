"""What each policy of an effect promises with zombies, against a provider in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.effect_kit import OP, Shipping, assert_succeeded, assert_visibly_uncertain, with_a_zombie
from tests.support import provider
from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, in_thread, take_over
from tests.support.provider import Mode, Provider
from tests.support.wait import until
from umt_durable import Done, NotDone, OpInfo, Policy
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped
from umt_durable.settings import Settings
from umt_durable.states import OpState, RunState

STOPS = ("before the call", "in the network", "after the call")


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def start_provider(tmp_path: Path) -> Iterator[Callable[[Mode], Provider]]:
    started: list[Provider] = []

    def start(mode: Mode) -> Provider:
        started.append(Provider(mode, tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.close()


# -- at most once, and never misreported ------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", STOPS)
def test_i15_e4_a_provider_that_honours_the_key_applies_once_whatever_a_zombie_does(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider], stop: str
) -> None:
    shipping = Shipping(start_provider("idempotent"), stop)

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do, policy=Policy.IDEMPOTENT_KEY)

    _, outcome, late = with_a_zombie(engine, clock, shipping)

    assert_succeeded(outcome, 1)
    assert isinstance(late, Dropped)
    assert shipping.provider.applied(OP) == 1
    assert [info.resumed for info in shipping.infos] == [False, True]
    assert [info.turn for info in shipping.infos] == [1, 2]
    assert len({info.idempotency_key for info in shipping.infos}) == 1
    assert len({info.attempt_token for info in shipping.infos}) == 2


@pytest.mark.parametrize("stop", STOPS)
def test_i15_e6_a_provider_that_compares_turns_in_calls_and_look_ups_applies_once(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider], stop: str
) -> None:
    shipping = Shipping(start_provider("fenced"), stop)

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do, reconcile=shipping.reconcile, policy=Policy.FENCED)

    _, outcome, late = with_a_zombie(engine, clock, shipping)

    assert_succeeded(outcome, 1)
    assert isinstance(late, Dropped)
    assert shipping.provider.applied(OP) == 1
    assert [info.turn for info in shipping.looked] == [2]


@pytest.mark.parametrize("stop", STOPS)
def test_i15_without_a_policy_an_effect_that_nobody_can_tell_of_waits_for_a_person(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider], stop: str
) -> None:
    shipping = Shipping(start_provider("plain"), stop)

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do)

    run_id, outcome, late = with_a_zombie(engine, clock, shipping)

    assert_visibly_uncertain(engine, run_id, outcome)
    assert isinstance(late, Dropped)
    assert shipping.provider.applied(OP) == 1
    engine.client.ops.resolve(OP, done=1, actor="ann", reason="seen in the portal")
    assert_succeeded(engine.process().deliver(run_id, "t"), 1)
    assert shipping.provider.applied(OP) == 1


def test_i15_e6_a_look_up_finds_what_an_earlier_attempt_applied(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider]
) -> None:
    shipping = Shipping(start_provider("plain"), "after the call")

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do, reconcile=shipping.reconcile)

    _, outcome, _ = with_a_zombie(engine, clock, shipping)

    assert_succeeded(outcome, 1)
    assert shipping.provider.applied(OP) == 1
    assert len(shipping.infos) == 1


# -- the windows that are documented, each shown to be there ----------------------------------------------------------


@pytest.mark.parametrize("stop", ["before the call", "in the network"])
def test_i15_a_plain_look_up_has_its_window_a_zombie_that_calls_after_it(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider], stop: str
) -> None:
    shipping = Shipping(start_provider("plain"), stop)

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do, reconcile=shipping.reconcile)

    _, outcome, _ = with_a_zombie(engine, clock, shipping)

    assert_succeeded(outcome, 1)
    assert shipping.provider.applied(OP) == 2


def test_i15_a_plain_provider_that_is_called_again_applies_twice(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider]
) -> None:
    shipping = Shipping(start_provider("plain"), "after the call")

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do, policy=Policy.IDEMPOTENT_KEY)

    with_a_zombie(engine, clock, shipping)

    assert shipping.provider.applied(OP) == 2


def test_i15_a_key_with_the_attempt_in_it_is_another_one_for_the_provider_which_applies_twice(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider]
) -> None:
    shipping = Shipping(start_provider("idempotent"), "after the call")

    def do_with_a_key_of_its_own(info: OpInfo) -> int:
        return shipping.do(replace(info, idempotency_key=f"{info.idempotency_key}/{info.attempt_token.fence}"))

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, do_with_a_key_of_its_own, policy=Policy.IDEMPOTENT_KEY)

    with_a_zombie(engine, clock, shipping)

    assert shipping.provider.applied(OP) == 2


def test_i15_a_provider_that_compares_turns_in_calls_alone_applies_twice(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider]
) -> None:
    shipping = Shipping(start_provider("fenced"), "before the call")
    looked = Gate()

    def look_without_turn(info: OpInfo) -> Done[int] | NotDone:
        looked.pass_through()  # what a provider says that keeps no turn of a look-up: nothing is found
        return NotDone()

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do, reconcile=look_without_turn, policy=Policy.FENCED)

    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")):
        shipping.wait_stopped()
        zombie.freeze()
        take_over(engine, clock)
        with in_thread(lambda: heir.deliver(run_id, "t")):
            looked.wait_reached()
            shipping.go_on()
            provider_has(shipping.provider, 1)
            looked.open()

    assert shipping.provider.applied(OP) == 2


def provider_has(process: Provider, times: int) -> None:
    """Wait until the provider has applied the effect so often."""
    until(lambda: process.applied(OP) == times, what=f"the effect to be applied {times} times")


def test_i15_a_look_up_that_assumes_success_reports_what_was_not_applied(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider]
) -> None:
    shipping = Shipping(start_provider("fenced"), "before the call")

    def assume(info: OpInfo) -> Done[int]:
        provider.look_up(info, address=shipping.provider.address)  # fences the zombie out
        return Done(1)

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do, reconcile=assume, policy=Policy.FENCED)

    _, outcome, _ = with_a_zombie(engine, clock, shipping)

    assert_succeeded(outcome, 1)
    assert shipping.provider.applied(OP) == 0


# -- two runs, one key ------------------------------------------------------------------------------------------------


def test_i15_e4_e5_of_two_runs_that_meet_on_one_key_the_second_waits_and_gets_the_answer_of_the_first(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider]
) -> None:
    shipping = Shipping(start_provider("plain"), "before the call")

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do)

    first, second = engine.start("t"), engine.start("t")
    with in_thread(lambda: engine.process().deliver(first, "t")) as outcome:
        shipping.wait_stopped()
        engine.process().deliver(second, "t")
        waiting = engine.client.get(second)
        shipping.go_on()
    assert (waiting.state, waiting.failures) == (RunState.RETRYING, 0)
    clock.advance(seconds=61)
    engine.timers()
    late = engine.process().deliver(second, "t")

    assert_succeeded(outcome[0], 1)
    assert_succeeded(late, 1)
    assert shipping.provider.applied(OP) == 1
    assert engine.client.history(second).steps[0].failures == 0


def test_i15_a_run_takes_the_op_of_another_run_whose_grant_has_ended_and_both_get_one_answer(
    engine: Engine, clock: Clock, start_provider: Callable[[Mode], Provider]
) -> None:
    shipping = Shipping(start_provider("idempotent"), "before the call")

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.effect(OP, shipping.do, policy=Policy.IDEMPOTENT_KEY)

    first, second, zombie = engine.start("t"), engine.start("t"), engine.process()
    with in_thread(lambda: zombie.deliver(first, "t")) as late:
        shipping.wait_stopped()
        zombie.freeze()
        take_over(engine, clock)
        taken = engine.process().deliver(second, "t")
        shipping.go_on()
    outcome = engine.process().deliver(first, "t")

    assert_succeeded(taken, 1)
    assert_succeeded(outcome, 1)
    assert isinstance(late[0], Dropped)
    assert shipping.provider.applied(OP) == 1
    op = engine.client.ops.get(OP)
    assert (op.state, op.turn, op.run_id) == (OpState.DONE, 2, second)
