"""Typed waits, addresses handed out, names used again, checks that are asked ever more seldom, facts for many."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from tests.integration import service_kit as kit
from tests.support.clock import Clock
from tests.support.engine import Engine, dying_at, take_over
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.waitables import FactAddress, FactWait, PollPolicy
from umt_durable.errors import DefinitionError, FactPayloadError
from umt_durable.services.router import Router, route
from umt_durable.settings import Settings
from umt_durable.states import RunState


@dataclass
class Approval:
    by: str
    limit: int = 0


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def value(outcome: object) -> Any:
    assert isinstance(outcome, Finished), outcome
    return outcome.value


def test_a_typed_wait_gives_its_payload_as_that_type(engine: Engine) -> None:
    seen: list[Approval] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        approval = ctx.step.wait_for_fact("approved", type=Approval)
        seen.append(approval.payload)
        return approval.payload.by

    run_id, _ = engine.run("t")
    engine.client.signal(run_id, "approved", {"by": "ann", "limit": 3})

    assert value(engine.process().deliver(run_id, "t")) == "ann"
    assert seen == [Approval("ann", 3)]


def test_a_fact_of_another_type_is_a_typed_error_at_each_replay_and_a_queue_passes_it(
    engine: Engine, clock: Clock
) -> None:
    errors: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        while True:
            try:
                found = ctx.step.wait_for_fact("approved", type=Approval, mode="queue")
            except FactPayloadError as error:
                errors.append(str(error))
                continue
            ctx.step.sleep("nap", timedelta(minutes=1))
            return found.payload.by

    run_id = engine.start("t")
    engine.client.signal(run_id, "approved", {"who": "ann"})
    engine.client.signal(run_id, "approved", {"by": "bob"})
    engine.process().deliver(run_id, "t")
    clock.advance(seconds=61)
    engine.timers()

    assert value(engine.process().deliver(run_id, "t")) == "bob"
    assert len(errors) == 2
    assert errors[0] == errors[1]
    assert "'approved'" in errors[0]
    assert "by" in errors[0]


def test_a_fact_of_another_type_that_nobody_catches_fails_the_run_without_a_retry(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.wait_for_fact("n", type=int).payload

    run_id = engine.start("t")
    engine.client.signal(run_id, "n", "seven")
    engine.process().deliver(run_id, "t")

    assert engine.state(run_id) is RunState.FAILED
    assert "FactPayloadError" in str(engine.client.get(run_id).error)


def test_the_address_is_handed_out_after_the_wait_is_there_once(engine: Engine, conn: Connection) -> None:
    handed: list[tuple[FactAddress, dict[str, str]]] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def hand_out(address: FactAddress) -> None:
            handed.append((address, kit.wait_states(conn, engine.client.get(address.run_id).no)))

        ctx.step.wait_for_fact("first", on_created=hand_out)
        return ctx.step.wait_for_fact("second").payload

    run_id, _ = engine.run("t")
    address = handed[0][0]
    engine.client.signal(address.run_id, address.name)
    engine.process().deliver(run_id, "t")
    engine.client.signal(run_id, "second", 2)

    assert value(engine.process().deliver(run_id, "t")) == 2
    assert handed == [(FactAddress(run_id, "first"), {"first": "pending"})]


def test_the_address_is_handed_out_again_after_a_crash_in_the_middle_and_not_after_one_later(
    engine: Engine, clock: Clock
) -> None:
    handed: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def hand_out(address: FactAddress) -> None:
            handed.append(address.name)
            if len(handed) == 1:
                raise KeyboardInterrupt

        return ctx.step.wait_for_fact("f", on_created=hand_out).payload

    run_id, process = engine.start("t"), engine.process()
    with pytest.raises(KeyboardInterrupt):
        process.deliver(run_id, "t")
    process.freeze()
    take_over(engine, clock)
    process = engine.process()
    with dying_at("wait.run_lock.a"), pytest.raises(KeyboardInterrupt):
        process.deliver(run_id, "t")
    process.freeze()
    take_over(engine, clock)
    assert isinstance(engine.process().deliver(run_id, "t"), Parked)

    assert handed == ["f", "f"]


def test_e8_a_queue_takes_each_fact_once_in_their_order_and_never_one_that_a_wait_took(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        first = ctx.step.wait_for_fact("line").payload
        return [first, *(ctx.step.wait_for_fact("line", mode="queue").payload for _ in range(4))]

    run_id = engine.start("t")
    for number in range(3):
        engine.client.signal(run_id, "line", number)
    assert isinstance(engine.process().deliver(run_id, "t"), Parked)
    engine.client.signal(run_id, "line", 3)
    assert isinstance(engine.process().deliver(run_id, "t"), Parked)
    engine.client.signal(run_id, "line", 4)

    assert value(engine.process().deliver(run_id, "t")) == [0, 1, 2, 3, 4]


def test_e8_facts_routed_in_another_order_are_still_taken_in_the_order_they_were_said(
    engine: Engine, conn: Connection
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return [ctx.step.wait_for_fact("line", mode="queue").payload for _ in range(2)]

    run_id, _ = engine.run("t")
    said = [kit.signal(conn, run_id, "line", payload) for payload in (b"1", b"2")]
    for fact in reversed(said):
        route(engine.database, engine.settings, fact)

    assert value(engine.process().deliver(run_id, "t")) == [1, 2]


def test_e8_the_same_name_in_mode_first_gives_the_same_fact_again(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        modes = ("first", "first", "latest")
        return [ctx.step.wait_for_fact("rate", mode=mode).payload for mode in modes]

    run_id = engine.start("t")
    engine.client.signal(run_id, "rate", 1)
    engine.client.signal(run_id, "rate", 2)

    assert value(engine.process().deliver(run_id, "t")) == [1, 1, 2]


@pytest.mark.parametrize("second", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_e8_a_second_write_with_another_payload_is_reported_once(engine: Engine, second: int, early: bool) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return ctx.step.wait_for_fact("rate").payload

    run_id = engine.start("t")
    with kit.counted(telemetry.Counter.CONTRADICTING_FACT) as counted:
        if not early:
            engine.process().deliver(run_id, "t")
        engine.client.signal(run_id, "rate", 1)
        engine.client.signal(run_id, "rate", second)
        outcome = engine.process().deliver(run_id, "t")
        engine.route()

        assert value(outcome) == 1
        assert counted() == (second != 1)


def test_d14_a_check_is_asked_ever_more_seldom_up_to_a_limit(engine: Engine, clock: Clock) -> None:
    asked: list[float] = []
    policy = PollPolicy(timedelta(minutes=1), factor=2.0, maximum=timedelta(minutes=4))
    begin = clock.now()

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def check() -> bool:
            asked.append(round((ctx.step._pass.database_now() - begin).total_seconds() / 60, 1))
            return len(asked) == 6

        return ctx.step.wait_for_fact("row", check=check, poll=policy).source

    run_id, outcome = engine.run("t")
    while isinstance(outcome, Parked):
        clock.advance(seconds=20)
        engine.timers()
        if engine.state(run_id) is RunState.READY:
            outcome = engine.process().deliver(run_id, "t")

    assert value(outcome) == "check"
    gaps = [round(later - earlier) for earlier, later in itertools.pairwise(asked)]
    assert gaps == [1, 2, 4, 4, 4], asked


@pytest.mark.parametrize(
    "make",
    [
        lambda: PollPolicy(timedelta(0)),
        lambda: PollPolicy(factor=0.5),
        lambda: PollPolicy(maximum=timedelta(seconds=-1)),
        lambda: FactWait("n", mode="last"),
        lambda: FactWait(""),
        lambda: FactWait("n", check="ready"),  # type: ignore[arg-type]  # the point
    ],
)
def test_what_can_never_work_is_refused(make: Any) -> None:
    with pytest.raises(DefinitionError):
        make()


def test_i8_one_emit_wakes_a_thousand_runs(engine: Engine, conn: Connection) -> None:
    kit.waiting(conn, "opened", key="shop")
    kit.waiting(conn, "opened", key="other")
    kit.table(
        conn,
        "INSERT INTO {}.run (id, task, version, queue, state, fence, args)"
        " SELECT id || n, task, version, queue, state, fence, args"
        " FROM {}.run, generate_series(1, 999) AS n WHERE no = 1",
    )
    kit.table(
        conn,
        "INSERT INTO {}.wait (run, key, seq, name, address, mode)"
        " SELECT r.no, w.key, w.seq, w.name, w.address, w.mode"
        " FROM {}.run AS r, {}.wait AS w WHERE r.no > 2 AND w.run = 1",
    )
    kit.emit(conn, "opened", "shop")

    counts = Router(engine.database, engine.settings).run_once()

    assert (counts.settled, counts.woken, counts.routed) == (1000, 1000, 1)
    rows = kit.table(conn, "SELECT state, count(*) FROM {}.wait GROUP BY state ORDER BY state")
    assert rows == [("pending", 1), ("satisfied", 1000)]
