"""Forks: a linked run that begins where another was at a step, with what was done before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.support.clock import Clock
from tests.support.engine import Engine, enter
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.effects import OpInfo
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.errors import DefinitionError, UnknownRunError, UnknownStepError, WrongStatusError
from umt_durable.settings import Settings
from umt_durable.states import RunState, WaitState

NAP = timedelta(minutes=1)


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


class Shop:
    """A task of several steps, and what was entered of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.fails = engine, True
        self.entered: list[str] = []

        @engine.task("shop.fulfil", raises=(ValueError,))
        def fulfil(ctx: TaskContext, order: str, note: str = "") -> list[Any]:
            paid = ctx.step.run("charge", lambda: enter(self.entered, "charge", 40))
            try:
                ctx.step.run("tax", self.tax)
            except ValueError:
                enter(self.entered, "no tax", 0)
            fact = ctx.step.wait_for_fact("approved", timeout=timedelta(days=1))
            keyed = ctx.step.wait_for_fact("price", key="A", mode="queue")
            label = ctx.step.run("print", lambda name: enter(self.entered, "print", name), f"{order}{note}")
            late = ctx.step.wait_for_fact("late", timeout=timedelta(0), default="none")
            more = ctx.step.wait_for_fact("price", key="A", mode="queue", timeout=timedelta(0), default="none")
            return [paid, fact.payload, keyed.payload, label, late.payload, more.payload]

    def tax(self) -> None:
        """Be a step that fails for good, which the body goes on from."""
        enter(self.entered, "tax", 0)
        if self.fails:
            raise ValueError("no rate")

    def ended(self) -> str:
        """Return the id of a run that has ended well."""
        run_id = self.engine.start("shop.fulfil", "A-17")
        self.engine.client.signal(run_id, "approved", "by ann")
        for price in (1, 2):
            self.engine.client.emit("price", "A", price)
        outcome = self.deliver(run_id)
        assert outcome.value == [40, "by ann", 1, "A-17", "none", 2]
        self.entered.clear()
        return run_id

    def deliver(self, run_id: str) -> Finished:
        """Deliver a run, which must end."""
        outcome = self.engine.process().deliver(run_id, "shop.fulfil")
        assert isinstance(outcome, Finished), outcome
        return outcome


@pytest.fixture
def shop(engine: Engine) -> Shop:
    return Shop(engine)


def test_a_fork_has_what_was_done_before_the_step_and_executes_the_rest(shop: Shop, conn: Connection) -> None:
    run_id, client = shop.ended(), shop.engine.client
    before = kit.table(conn, "SELECT * FROM {}.run")
    kit.drop_hints(conn)

    fork = client.fork(run_id, from_step="print", actor="ann", reason="the label was torn")

    assert [run for run, *_ in kit.events(conn)] == [kit.number(conn, fork)]
    outcome = shop.deliver(fork)
    assert outcome.value == [40, "by ann", 1, "A-17", "none", 2]
    assert shop.entered == ["no tax", "print"]  # a failure that the body went on from is an outcome, too
    assert kit.table(conn, "SELECT * FROM {}.run WHERE id = %s", run_id) == before
    run = client.get(fork)
    assert (run.fork_of, run.retry_of, run.task, run.version) == (run_id, None, "shop.fulfil", 1)
    [kept] = client.history(run_id).audit
    detail = f"as run {fork} from print"
    assert (kept.act, kept.actor, kept.reason, kept.detail) == ("fork", "ann", "the label was torn", detail)
    assert kit.table(conn, "SELECT min(fence) FROM {}.attempt WHERE run = %s", run.no) == [(2,)]


def test_a_fork_may_have_other_arguments(shop: Shop) -> None:
    run_id = shop.ended()
    encoded = shop.engine.tasks.get("shop.fulfil").encode_call((), {"order": "B-4", "note": "!"})

    fork = shop.engine.client.fork(run_id, from_step="print", actor="ann", arguments=encoded)

    assert shop.deliver(fork).value == [40, "by ann", 1, "B-4!", "none", 2]


def test_other_arguments_of_a_step_before_that_place_are_told_as_for_any_journal(shop: Shop) -> None:
    run_id = shop.ended()
    encoded = shop.engine.tasks.get("shop.fulfil").encode_call(("B-4",), {})
    fork = shop.engine.client.fork(run_id, from_step="late", actor="ann", arguments=encoded)

    outcome = shop.engine.process().deliver(fork, "shop.fulfil")

    assert isinstance(outcome, Parked)
    assert shop.engine.client.get(fork).reason == "nondeterminism"


def test_a_fact_that_was_said_to_the_other_is_there_only_if_a_wait_before_the_step_took_it(
    shop: Shop, conn: Connection, clock: Clock
) -> None:
    run_id, client = shop.ended(), shop.engine.client

    fork = client.fork(run_id, from_step="approved", actor="ann")
    outcome = shop.engine.process().deliver(fork, "shop.fulfil")
    assert isinstance(outcome, Parked)  # what was approved was another order: it has to be approved again
    client.signal(fork, "approved", "by bob")

    assert shop.deliver(fork).value == [40, "by bob", 1, "A-17", "none", 2]
    assert shop.entered == ["no tax", "no tax", "print"]


def test_a_fork_at_the_first_step_has_nothing_of_the_other(shop: Shop) -> None:
    run_id, client = shop.ended(), shop.engine.client
    shop.fails = False

    fork = client.fork(run_id, from_step="charge", actor="ann")

    history = client.history(fork)
    assert (history.steps, history.waits) == ([], [])
    assert isinstance(shop.engine.process().deliver(fork, "shop.fulfil"), Parked)
    assert shop.entered == ["charge", "tax"]


def test_a_timed_out_wait_before_the_step_stays_timed_out(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> list[Any]:
        won = ctx.step.wait_any({"yes": "yes", "late": timedelta(minutes=1)}, timeout=timedelta(days=1))
        fact = ctx.step.wait_for_fact("approved", timeout=timedelta(0), default="none")
        return [won.label, fact.payload, ctx.step.run("last", lambda: 1)]

    run_id, _ = engine.run("t")
    clock.advance(seconds=61)
    engine.timers()
    engine.process().deliver(run_id, "t")

    fork = engine.client.fork(run_id, from_step="last", actor="ann")
    engine.client.signal(fork, "approved", "too late")
    outcome = engine.process().deliver(fork, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == ["late", "none", 1]
    states = {wait.key: wait.state for wait in engine.client.history(fork).waits}
    assert states["approved"] is WaitState.TIMED_OUT


def fanned(engine: Engine) -> tuple[str, list[str]]:
    """Run a task with branches to its end; return its id and what was entered."""
    entered: list[str] = []

    def branch(ctx: TaskContext, label: str) -> str:
        for step in ("one", "two"):
            ctx.step.run(step, partial(enter, entered, f"{label}/{step}", step))
        return label

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        picked = ctx.step.map("pick", lambda item: enter(entered, item, item), ["a", "b"], key=str, concurrency=1)
        fan = ctx.step.parallel({one: partial(branch, ctx, one) for one in ("left", "right")}, concurrency=1)
        return [picked, fan, ctx.step.run("last", lambda: enter(entered, "last", 1))]

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Finished), outcome
    assert outcome.error is None, outcome.error
    entered.clear()
    return run_id, entered


@pytest.mark.parametrize(
    ("from_step", "expected"),
    [
        ("last", ["last"]),
        ("pick", ["a", "b", "left/one", "left/two", "right/one", "right/two", "last"]),
        ("pick[b]", ["b", "left/one", "left/two", "right/one", "right/two", "last"]),
        ("parallel", ["left/one", "left/two", "right/one", "right/two", "last"]),
        ("parallel[left]/two", ["left/two", "last"]),
    ],
)
def test_a_fork_from_within_a_parallel_step_does_not_take_the_branch_around_it_for_done(
    engine: Engine, from_step: str, expected: list[str]
) -> None:
    run_id, entered = fanned(engine)

    outcome = engine.process().deliver(engine.client.fork(run_id, from_step=from_step, actor="ann"), "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [["a", "b"], {"left": "left", "right": "right"}, 1]
    assert entered == expected


def test_an_effect_that_is_done_is_not_done_again_by_a_fork(engine: Engine) -> None:
    called: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        return ctx.step.effect("ship:A-17", ship)

    def ship(info: OpInfo) -> str:
        return enter(called, info.idempotency_key, "shipped")

    run_id, _ = engine.run("t")
    outcome = engine.process().deliver(engine.client.fork(run_id, from_step="ship:A-17", actor="ann"), "t")

    assert isinstance(outcome, Finished)
    assert (outcome.value, len(called)) == ("shipped", 1)


def test_each_call_makes_a_fork_of_its_own_with_keys_of_its_own_for_providers(engine: Engine) -> None:
    keys: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("charge", lambda: keys.append(ctx.idempotency_key))

    run_id, _ = engine.run("t")
    forks = [engine.client.fork(run_id, from_step="charge", actor="ann") for _ in range(2)]
    for fork in forks:
        engine.process().deliver(fork, "t")

    assert len(set(forks)) == 2
    assert len(set(keys)) == 3


def test_a_quarantined_run_is_forked_and_goes_on_being_quarantined(engine: Engine, clock: Clock) -> None:
    amount = [1]

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        paid = ctx.step.run("charge", lambda value: value, amount[0])
        ctx.step.sleep("nap", NAP)
        return paid

    run_id, _ = engine.run("t")
    amount[0] = 2
    clock.advance(seconds=61)
    engine.timers()
    engine.process().deliver(run_id, "t")
    assert engine.state(run_id) is RunState.QUARANTINED

    fork = engine.client.fork(run_id, from_step="charge", actor="ann")
    assert isinstance(engine.process().deliver(fork, "t"), Parked)
    clock.advance(seconds=61)
    engine.timers()
    outcome = engine.process().deliver(fork, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 2
    assert engine.state(run_id) is RunState.QUARANTINED


def test_a_fork_may_have_another_version(engine: Engine) -> None:
    for number in (1, 2):
        engine.task("t", version=number)(lambda ctx: ctx.step.run("charge", int))
    run_id, _ = engine.run("t")
    assert engine.client.get(run_id).version == 2

    fork = engine.client.fork(run_id, from_step="charge", actor="ann", version=1)

    assert engine.client.get(fork).version == 1
    assert isinstance(engine.process().deliver(fork, "t"), Finished)


def test_nothing_follows_a_fork_and_nobody_waits_for_its_reply(engine: Engine, conn: Connection) -> None:
    engine.task("t")(lambda ctx: ctx.step.run("charge", int))
    run_id, _ = engine.run("t")
    message = {"callbacks": [{}], "errbacks": [{}], "chain": [{}], "chord": {}, "reply_to": "q", "root_id": "r"}
    kit.table(conn, "UPDATE {}.run SET envelope = %s, ref = 'order:1'", json.dumps(message).encode())

    fork = kit.number(conn, engine.client.fork(run_id, from_step="charge", actor="ann"))

    envelope, ref = kit.row(conn, fork, "envelope", "ref")
    assert json.loads(bytes(envelope)) == {"root_id": "r"}
    assert ref == "order:1"


def test_i2_a_fork_in_a_callers_transaction_exists_if_he_commits(engine: Engine, conn: Connection) -> None:
    engine.task("t")(lambda ctx: ctx.step.run("charge", int))
    run_id, _ = engine.run("t")

    with psycopg.connect(engine.database.url) as own:
        engine.client.fork(run_id, from_step="charge", actor="ann", conn=own)
        own.rollback()
        assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(1,)]
        assert engine.client.history(run_id).audit == []
        committed = engine.client.fork(run_id, from_step="charge", actor="ann", conn=own)

    assert engine.client.get(committed).state is RunState.READY


def test_a_retry_of_a_fork_is_a_retry_like_any(engine: Engine) -> None:
    broken = [False]

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        if broken[0]:
            raise ValueError("broken")
        return ctx.step.run("charge", lambda: 7)

    run_id, _ = engine.run("t")
    broken[0] = True
    fork = engine.client.fork(run_id, from_step="charge", actor="ann")
    engine.process().deliver(fork, "t")
    broken[0] = False

    again = engine.client.retry(fork, actor="ann")

    assert engine.client.get(again).retry_of == fork
    assert isinstance(engine.process().deliver(again, "t"), Finished)


@pytest.mark.parametrize("state", ["ready", "running", "sleeping"])
def test_n10_a_run_that_is_under_way_is_refused_and_the_error_names_its_state(
    state: str, engine: Engine, conn: Connection
) -> None:
    match state:
        case "ready":
            new = kit.enqueue(conn)
        case "sleeping":
            new, _ = kit.sleeping(conn, 60)
        case _:
            new, _, _ = kit.running(conn)

    with pytest.raises(WrongStatusError, match=f"run {new.id} is {state}") as refused:
        engine.client.fork(new.id, from_step="nap", actor="ann")

    assert refused.value.code == "wrong_status"
    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(1,)]
    assert kit.table(conn, "SELECT count(*) FROM {}.audit") == [(0,)]


def test_what_no_fork_can_begin_from_is_refused_before_anything_is_written(engine: Engine, conn: Connection) -> None:
    engine.task("t")(lambda ctx: ctx.step.run("charge", int))
    run_id, _ = engine.run("t")
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (UnknownRunError, "nobody", {}),
        (UnknownStepError, run_id, {"from_step": "charge#2"}),
        (UnknownStepError, run_id, {"from_step": "char"}),
        (DefinitionError, run_id, {"from_step": ""}),
        (DefinitionError, run_id, {"from_step": "a\0"}),
        (DefinitionError, run_id, {"from_step": 7}),
        (DefinitionError, run_id, {"version": 0}),
        (DefinitionError, run_id, {"version": "2"}),
        (DefinitionError, run_id, {"actor": ""}),
        (DefinitionError, run_id, {"reason": "x" * 1001}),
    ]

    for error, run, given in wrong:
        with pytest.raises(error):
            engine.client.fork(run, **{"from_step": "charge", "actor": "ann", **given})

    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(1,)]
    assert kit.table(conn, "SELECT count(*) FROM {}.audit") == [(0,)]


def test_of_a_continued_run_its_last_generation_is_forked(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, number: int) -> list[int]:
        fact = ctx.step.wait_for_fact("order")
        keyed = ctx.step.wait_for_fact("price", key="A", mode="queue")
        if number == 0:
            ctx.continue_as_new(1)
        return [number, fact.payload, keyed.payload, ctx.step.run("last", lambda: ctx.generation)]

    run_id, process = engine.start("t", 0), engine.process()
    for number in (1, 2):
        engine.client.signal(run_id, "order", number)
        engine.client.emit("price", "A", 10 * number)
    process.deliver(run_id, "t")
    process.deliver(run_id, "t")

    forks = [engine.client.fork(run_id, from_step=step, actor="ann") for step in ("last", "price")]
    outcomes = [process.deliver(fork, "t") for fork in forks]

    assert [getattr(outcome, "value", None) for outcome in outcomes] == [[1, 2, 20, 1], [1, 2, 20, 1]]


def test_a_queue_in_a_retry_takes_each_fact_once(engine: Engine) -> None:
    broken = [True]

    @engine.task("t")
    def body(ctx: TaskContext) -> list[Any]:
        first = ctx.step.wait_for_fact("order", mode="queue").payload
        if broken[0]:
            raise ValueError("broken")
        return [first, ctx.step.wait_for_fact("order", mode="queue").payload]

    run_id = engine.start("t")
    for number in (1, 2):
        engine.client.signal(run_id, "order", number)
    engine.process().deliver(run_id, "t")
    broken[0] = False

    outcome = engine.process().deliver(engine.client.retry(run_id, actor="ann"), "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [1, 2]
