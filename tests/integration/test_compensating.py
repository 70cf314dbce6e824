"""A cancel that compensates: what was done is undone backwards, each once, whatever dies, before the run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from tests.integration.cli_kit import cli_for
from tests.integration.test_engine_children import Offspring
from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, RecordingReporter, dying_at, in_thread, take_over
from tests.support.sealing import BOTH, CANARY, leaks
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext, current_context
from umt_durable.engine.outcomes import Dropped, Finished, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.undoing import _DECLARED, undo
from umt_durable.errors import DefinitionError, WrongStatusError
from umt_durable.payloads import Vault
from umt_durable.settings import Settings
from umt_durable.states import Reason, RunState

undone: list[Any] = []
broken: list[str] = []


@dataclass(frozen=True)
class Receipt:
    """What charging gives."""

    number: int


@undo
def refund(receipt: Receipt) -> None:
    if "refund" in broken:
        raise ValueError("the bank is closed")
    undone.append(receipt)


@undo
def note(text: str) -> None:
    undone.append(text)


@undo(name="unbook", retry=RetryPolicy(max_attempts=2, initial=timedelta(0)))
async def unbook(seat: str) -> None:
    undone.append((seat, current_context().idempotency_key))
    if broken:
        raise ValueError(broken.pop())


def paid(tx: object) -> Receipt:
    return Receipt(3)


def divmod_of(one: int, two: int) -> None:
    """Take one argument too many for an undo."""


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    undone.clear()
    broken.clear()
    yield engine
    engine.close()


def trip(engine: Engine, **options: Any) -> str:
    """Start a run that books, charges, and then waits for a fact."""

    @engine.task("trip", **options)
    def body(ctx: TaskContext) -> None:
        ctx.step.options(undo=unbook).run("book", lambda: "12A")
        ctx.step.run("look", lambda: 1)
        ctx.step.options(undo=refund, key="A-17").run("charge", Receipt, 40)
        ctx.step.wait_for_fact("go")
        ctx.step.run("ship", lambda: undone.append("shipped"))

    return engine.start("trip")


def names() -> list[Any]:
    return [one[0] if isinstance(one, tuple) else one for one in undone]


def test_d11_a_cancel_that_compensates_undoes_what_is_done_backwards_and_then_ends_the_run(
    engine: Engine, conn: Connection
) -> None:
    run_id = trip(engine)
    assert isinstance(engine.process().deliver(run_id, "trip"), Parked)

    engine.client.cancel(run_id, reason="customer", compensate=True)
    assert engine.state(run_id) is RunState.READY
    assert engine.client.get(run_id).compensate_at is not None
    outcome = engine.process().deliver(run_id, "trip")

    assert isinstance(outcome, Finished)
    assert names() == [Receipt(40), "12A"]
    run = engine.client.get(run_id)
    assert (run.state, run.reason, run.cancel_at) == (RunState.CANCELLED, "customer", run.compensate_at)
    steps = [(step.key, step.kind, step.state) for step in engine.client.history(run_id).steps]
    assert steps[3:] == [("umt.undo/charge[A-17]", "undo", "done"), ("umt.undo/book", "undo", "done")]


def test_d11_nothing_to_undo_ends_the_run_at_once_and_a_plain_cancel_undoes_nothing(engine: Engine) -> None:
    first, second = trip(engine), trip(engine)
    engine.process().deliver(second, "trip")

    engine.client.cancel(first, compensate=True)
    engine.client.cancel(second)

    assert engine.state(first) is engine.state(second) is RunState.CANCELLED
    assert undone == []


def test_d11_i11_the_first_cancel_decides_how_a_run_ends(engine: Engine) -> None:
    run_id = trip(engine)
    engine.process().deliver(run_id, "trip")
    engine.client.cancel(run_id, reason="first", compensate=True)

    engine.client.cancel(run_id, reason="second")
    engine.client.cancel(run_id, reason="third", compensate=True)

    assert engine.state(run_id) is RunState.READY
    engine.process().deliver(run_id, "trip")
    assert len(undone) == 2
    assert engine.client.get(run_id).reason == "first"


@pytest.mark.parametrize("plain_first", [False, True])
def test_d11_i11_a_running_run_ends_its_step_in_flight_which_is_undone_too(engine: Engine, plain_first: bool) -> None:
    mine = Gate()

    def charge() -> Receipt:
        return Receipt(mine.pass_through(7))

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.options(undo=refund).run("charge", charge)
        ctx.step.run("ship", lambda: undone.append("shipped"))

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")) as outcome:
        mine.wait_reached()
        engine.client.cancel(run_id, compensate=not plain_first)
        engine.client.cancel(run_id, compensate=plain_first)
        mine.open()

    if plain_first:
        assert isinstance(outcome[0], Finished)
        assert (undone, engine.state(run_id)) == ([], RunState.CANCELLED)
        return
    assert isinstance(outcome[0], Dropped)
    assert (undone, engine.state(run_id)) == ([], RunState.READY)
    assert isinstance(engine.process().deliver(run_id, "t"), Finished)
    assert (undone, engine.state(run_id)) == ([Receipt(7)], RunState.CANCELLED)


def test_d11_a_run_whose_owner_died_after_the_cancel_is_undone_by_who_takes_it_over(
    engine: Engine, clock: Clock
) -> None:
    mine = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.options(undo=refund).run("charge", Receipt, 1)
        ctx.step.run("in flight", mine.pass_through, 1)

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")):
        mine.wait_reached()
        engine.client.cancel(run_id, compensate=True)
        process.freeze()
        take_over(engine, clock)
        assert engine.state(run_id) is RunState.READY
        assert isinstance(engine.process().deliver(run_id, "t"), Finished)
        mine.open()

    assert (undone, engine.state(run_id)) == ([Receipt(1)], RunState.CANCELLED)


def test_d11_i6_a_crash_within_an_undo_repeats_that_one_under_the_same_key_and_no_other(
    engine: Engine, clock: Clock
) -> None:
    run_id = trip(engine)
    engine.process().deliver(run_id, "trip")
    engine.client.cancel(run_id, compensate=True)

    with dying_at("step.commit.b", nth=2), pytest.raises(KeyboardInterrupt):
        engine.process().deliver(run_id, "trip")
    assert len(undone) == 2
    take_over(engine, clock)
    engine.client.cancel(run_id)
    assert isinstance(engine.process().deliver(run_id, "trip"), Finished)

    assert names() == [Receipt(40), "12A", "12A"]
    assert undone[1] == undone[2]


def test_d11_an_undo_that_fails_for_good_leaves_the_run_to_a_person_and_goes_on_when_retried(
    engine: Engine, conn: Connection
) -> None:
    run_id = trip(engine)
    engine.process().deliver(run_id, "trip")
    engine.client.cancel(run_id, reason="customer", compensate=True)
    broken.extend(["no", "net", "refund"])

    assert engine.process().deliver(run_id, "trip") == Parked(RunState.QUARANTINED, Reason.UNDO)
    failure = engine.client.failure(engine.client.get(run_id))
    assert failure is not None
    assert "step 'charge[A-17]' could not be undone: ValueError: the bank is closed" in failure.summary
    engine.client.cancel(run_id)
    assert engine.state(run_id) is RunState.QUARANTINED
    with pytest.raises(WrongStatusError, match="undone"):
        engine.client.fork(run_id, from_step="look", actor="ann")

    broken.remove("refund")
    engine.client.retry(run_id, actor="ann")
    assert engine.process().deliver(run_id, "trip") == Parked(RunState.QUARANTINED, Reason.UNDO)
    engine.client.retry(run_id, actor="ann")
    assert isinstance(engine.process().deliver(run_id, "trip"), Finished)

    assert names() == [Receipt(40), "12A", "12A", "12A"]
    assert engine.client.get(run_id).reason == "customer"
    with pytest.raises(WrongStatusError, match="undone"):
        engine.client.retry(run_id, actor="ann")


def test_d11_a_worker_without_the_undo_leaves_the_run_to_a_person(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = trip(engine)
    engine.process().deliver(run_id, "trip")
    engine.client.cancel(run_id, compensate=True)

    with monkeypatch.context() as patch:
        patch.delitem(_DECLARED, "unbook")
        assert engine.process().deliver(run_id, "trip") == Parked(RunState.QUARANTINED, Reason.UNDO)
    failure = engine.client.failure(engine.client.get(run_id))
    assert failure is not None
    assert "step 'book' could not be undone: no undo 'unbook' is declared" in failure.summary
    engine.client.retry(run_id, actor="ann")
    engine.process().deliver(run_id, "trip")

    assert names() == [Receipt(40), "12A"]


def test_d11_a_pause_ends_with_the_cancel_and_one_within_the_undos_stops_between_two(
    engine: Engine, conn: Connection
) -> None:
    run_id = trip(engine)
    engine.process().deliver(run_id, "trip")
    engine.client.pause(run_id, actor="ann")

    engine.client.cancel(run_id, compensate=True)

    assert engine.client.get(run_id).paused_at is None
    engine.client.pause(run_id, actor="ann")
    assert isinstance(engine.process().deliver(run_id, "trip"), Dropped)
    assert undone == []
    engine.client.resume(run_id, actor="ann")
    engine.process().deliver(run_id, "trip")
    assert (len(undone), engine.state(run_id)) == (2, RunState.CANCELLED)


def test_d11_an_undo_waits_for_its_next_try_parked(engine: Engine, clock: Clock) -> None:
    run_id = trip(engine, retry=RetryPolicy(2, initial=timedelta(minutes=1), jitter=0))
    engine.process().deliver(run_id, "trip")
    engine.client.cancel(run_id, compensate=True)
    broken.append("refund")

    outcome = engine.process().deliver(run_id, "trip")
    assert isinstance(outcome, Parked)
    assert engine.state(run_id) is RunState.RETRYING
    engine.client.cancel(run_id)
    assert engine.state(run_id) is RunState.RETRYING
    broken.clear()
    clock.advance(seconds=61)
    engine.timers()

    assert isinstance(engine.process().deliver(run_id, "trip"), Finished)
    assert names() == [Receipt(40), "12A"]


def test_d11_steps_of_branches_are_undone_in_the_order_they_were_recorded(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        def branch(number: int) -> int:
            ctx.step.options(undo=refund).run("charge", Receipt, number)
            if number == 2:
                ctx.step.wait_for_fact("go")
            return number

        ctx.step.parallel({"one": (branch, 1), "two": (branch, 2)}, concurrency=1)

    run_id = engine.start("t")
    engine.process().deliver(run_id, "t")
    engine.client.cancel(run_id, compensate=True)
    engine.process().deliver(run_id, "t")

    assert undone == [Receipt(2), Receipt(1)]
    assert engine.state(run_id) is RunState.CANCELLED


def test_d11_a_transaction_has_an_undo_and_its_rows_stay(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.options(undo=refund).transaction("book", paid)
        ctx.step.sleep("long", timedelta(days=1))

    run_id = engine.start("t")
    engine.process().deliver(run_id, "t")
    engine.client.cancel(run_id, compensate=True)
    engine.process().deliver(run_id, "t")

    assert (undone, engine.state(run_id)) == ([Receipt(3)], RunState.CANCELLED)


def test_d11_a_retry_undoes_what_it_took_over_and_a_fork_only_what_it_did(engine: Engine) -> None:
    run_id = trip(engine)
    engine.process().deliver(run_id, "trip")
    engine.client.cancel(run_id)
    fork = engine.client.fork(run_id, from_step="charge[A-17]", actor="ann")
    again = engine.client.retry(run_id, actor="ann")

    engine.process().deliver(fork, "trip")
    engine.client.cancel(fork, compensate=True)
    engine.process().deliver(fork, "trip")
    assert names() == [Receipt(40)]
    engine.client.cancel(again, compensate=True)
    engine.process().deliver(again, "trip")

    assert names() == [Receipt(40), Receipt(40), "12A"]
    assert engine.state(fork) is engine.state(again) is RunState.CANCELLED


def test_d11_i7_the_undos_wait_until_no_lost_owner_can_enter_a_body(engine: Engine, clock: Clock) -> None:
    mine = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.options(undo=refund).run("charge", Receipt, 1)
        ctx.step.run("in flight", mine.pass_through, 1)

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")):
        mine.wait_reached()
        process.freeze()
        clock.advance(seconds=engine.settings.lease_seconds + 1)
        engine.sweep()
        before = engine.client.get(run_id).wake_at
        engine.client.cancel(run_id, compensate=True)
        assert before is not None
        after = engine.client.get(run_id).wake_at
        assert after is not None
        assert after >= before
        mine.open()

    clock.advance(seconds=1)
    engine.process().deliver(run_id, "t")
    assert (undone, engine.state(run_id)) == ([Receipt(1)], RunState.CANCELLED)


def test_d11_sql_and_the_command_line_ask_for_it_too(
    engine: Engine, conn: Connection, schema: str, settings: Settings
) -> None:
    first, second = trip(engine), trip(engine)
    for run_id in (first, second):
        engine.process().deliver(run_id, "trip")

    conn.execute(f'SELECT "{schema}".cancel(%s, %s, compensate => true)'.encode(), (first, "from SQL"))
    engine.route()
    with cli_for(settings) as cli:
        told = cli("cancel", second, "--compensate").stdout
        shown = cli("runs").stdout

    assert told == f"{second} ready, will be undone and end\n"
    assert "undoing" in shown
    for run_id in (first, second):
        engine.process().deliver(run_id, "trip")
    assert names() == [Receipt(40), "12A"] * 2
    assert engine.client.get(first).reason == "from SQL"


def test_d11_what_an_earlier_generation_has_done_is_settled(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, turn: int) -> None:
        ctx.step.options(undo=refund).run("charge", Receipt, turn)
        if turn == 0:
            ctx.continue_as_new(1)
        ctx.step.sleep("long", timedelta(days=1))

    run_id = engine.start("t", 0)
    engine.process().deliver(run_id, "t")
    engine.process().deliver(run_id, "t")
    engine.client.cancel(run_id, compensate=True)
    engine.process().deliver(run_id, "t")

    assert (undone, engine.state(run_id)) == ([Receipt(1)], RunState.CANCELLED)


def test_d11_children_end_with_the_cancel_and_their_parent_after_its_undos(engine: Engine) -> None:
    reporter = RecordingReporter(durable_tasks=Offspring(engine))

    @engine.task("child")
    def child(ctx: TaskContext) -> None:
        ctx.step.wait_for_fact("go")

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.options(undo=refund).run("charge", Receipt, 4)
        ctx.step.call("part", "child")

    run_id = engine.start("t")
    engine.process().deliver(run_id, "t", reporter=reporter)
    [part] = [run.id for run in engine.client.list() if run.id != run_id]

    engine.client.cancel(run_id, compensate=True)
    engine.route()

    assert (engine.state(part), engine.state(run_id)) == (RunState.CANCELLED, RunState.READY)
    engine.process().deliver(run_id, "t")
    assert (undone, engine.state(run_id)) == ([Receipt(4)], RunState.CANCELLED)


@pytest.mark.parametrize(
    "call",
    [
        lambda step: step.sleep("s", timedelta(0)),
        lambda step: step.map("m", lambda one: one, [1], key=str),
        lambda step: step.effect("e", lambda info: 1),
        lambda step: step.wait_for_fact("w"),
    ],
)
def test_d11_only_steps_whose_result_is_their_bodys_can_have_an_undo(
    engine: Engine, call: Callable[[Any], object]
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        call(ctx.step.options(undo=refund))

    run_id = engine.start("t")
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert engine.client.history(run_id).steps == []


def test_d11_a_declaration_that_could_not_be_found_again_is_refused() -> None:
    with pytest.raises(DefinitionError, match="at the module's level"):
        undo(lambda result: None)
    with pytest.raises(DefinitionError, match=r"is called as divmod_of\(result\)"):
        undo(name="two")(divmod_of)  # type: ignore[arg-type]  # refused for what it is
    with pytest.raises(DefinitionError, match="twice"):
        undo(name="unbook")(print)


def test_d11_what_is_undone_may_be_sealed(settings: Settings, conn: Connection, schema: str) -> None:
    undone.clear()
    engine = Engine(Database(settings, Vault(BOTH)), settings)

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.options(undo=note).run("book", lambda: CANARY)
        ctx.step.wait_for_fact("go")

    run_id = engine.start("t")
    engine.process().deliver(run_id, "t")
    engine.client.cancel(run_id, reason="customer", compensate=True)
    engine.process().deliver(run_id, "t")

    assert (undone, engine.state(run_id)) == ([CANARY], RunState.CANCELLED)
    assert leaks(conn, schema) == []
    engine.close()
    engine.database.close()
