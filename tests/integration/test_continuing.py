"""Runs that continue as new: another generation under the same id, with other arguments and an empty journal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.integration import service_kit as kit
from tests.integration.awaiting_kit import Outside
from tests.integration.test_engine_children import Offspring
from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, RecordingReporter, dying_at, in_thread, take_over
from tests.support.proxy import Proxy
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.engine.answers import Answer, bring
from umt_durable.engine.async_context import AsyncTaskContext
from umt_durable.engine.client import Client
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Continued, Dropped, Finished, Outcome, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import DefinitionError, InputError, UnknownTaskError
from umt_durable.services.router import Router
from umt_durable.settings import Settings
from umt_durable.states import AttemptOutcome, RunState
from umt_durable.telemetry import Counter


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def deliver(engine: Engine, run_id: str, task: str = "t", **options: Any) -> Outcome:
    """Deliver a run to a process of its own."""
    return engine.process().deliver(run_id, task, **options)


def until_ended(engine: Engine, run_id: str, task: str = "t", **options: Any) -> tuple[Finished, int]:
    """Deliver a run until it has ended; return its end and how many generations began meanwhile."""
    process, generations = engine.process(), 0
    while not isinstance(outcome := process.deliver(run_id, task, **options), Finished):
        assert isinstance(outcome, Continued), outcome
        generations += 1
    return outcome, generations


def sizes(conn: Connection, engine: Engine, run_id: str) -> dict[str, int]:
    """Count the rows that a run has."""
    no = kit.number(conn, run_id)
    tables = ("step", "wait", "attempt", "fact_read")
    return {one: kit.table(conn, f"SELECT count(*) FROM {{}}.{one} WHERE run = %s", no)[0][0] for one in tables}


def cursor(engine: Engine, last: int = 50) -> list[int]:
    """Declare a task that does two steps in each of its generations, and return what they were called with."""
    seen: list[int] = []

    @engine.task("t")
    def body(ctx: TaskContext, number: int, note: str = "") -> str:
        ctx.step.run("look", lambda: seen.append(number))
        ctx.step.run("keep", lambda: number)
        if number < last:
            ctx.continue_as_new(number + 1, note=f"{ctx.generation}")
        return f"{number} {note} {ctx.generation}"

    return seen


# -- the next generation ----------------------------------------------------------------------------------------------


def test_a_loop_of_fifty_generations_keeps_its_id_and_the_size_of_its_journal(engine: Engine, conn: Connection) -> None:
    seen = cursor(engine)
    run_id = engine.start("t", 0)
    process, found = engine.process(), []

    while isinstance(process.deliver(run_id, "t"), Continued):
        found.append(sizes(conn, engine, run_id))
    last = engine.client.get(run_id)

    assert seen == list(range(51))
    assert (last.state, engine.client.result(last), last.generation) == (RunState.SUCCEEDED, "50 49 50", 50)
    assert found == [{"step": 0, "wait": 0, "attempt": 1, "fact_read": 0}] * 50
    assert sizes(conn, engine, run_id) == {"step": 2, "wait": 0, "attempt": 2, "fact_read": 0}
    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(1,)]


def test_the_run_is_ready_at_once_with_a_hint_and_its_budgets_begin_anew(
    engine: Engine, conn: Connection, clock: Clock
) -> None:
    policy = RetryPolicy(3, initial=timedelta(seconds=30), max_elapsed=timedelta(seconds=130))
    tries: list[tuple[int, int]] = []

    @engine.task("t", retry=policy)
    def body(ctx: TaskContext, number: int) -> None:
        tries.append((number, ctx.attempt))
        if ctx.attempt < 3:
            raise OSError("away")
        ctx.continue_as_new(number + 1)

    run_id = engine.start("t", 0)
    outcome = deliver(engine, run_id)
    for _ in range(6):
        if len(tries) == 4:
            break
        kit.drop_hints(conn)
        if isinstance(outcome, Parked):
            clock.advance(seconds=61)
            engine.timers()
        outcome = deliver(engine, run_id)

    assert tries == [(0, 1), (0, 2), (0, 3), (1, 1)]
    assert isinstance(outcome, Parked)  # by max_elapsed it would have no try left, had its time not begun anew
    run = engine.client.get(run_id)
    assert (run.state, run.failures, run.crashes, run.generation) == (RunState.RETRYING, 1, 0, 1)
    assert run.continued_at is not None


def test_a_continued_run_has_a_hint(engine: Engine, conn: Connection) -> None:
    cursor(engine)
    run_id = engine.start("t", 0)
    kit.drop_hints(conn)

    assert deliver(engine, run_id) == Continued(1)

    no = kit.number(conn, run_id)
    assert kit.events(conn) == [(no, "pending", 0, None)]
    assert kit.row(conn, no, "state", "generation", "claim", "deliver_by IS NOT NULL") == ("ready", 1, None, True)
    assert [one.outcome for one in engine.client.history(run_id).attempts] == [AttemptOutcome.SUSPENDED]


def test_an_async_body_continues_as_new(engine: Engine) -> None:
    @engine.task("t")
    async def body(ctx: AsyncTaskContext, number: int) -> int:
        await ctx.step.run("look", int)
        if number < 3:
            await ctx.continue_as_new(number + 1)
        return number

    outcome, generations = until_ended(engine, engine.start("t", 0))

    assert (outcome.value, generations) == (3, 3)


def test_the_next_generation_may_have_another_version_but_has_the_same_unless_that_is_said(engine: Engine) -> None:
    @engine.task("t", version=1)
    def first(ctx: TaskContext, number: int) -> None:
        if number == 2:
            ctx.continue_as_new(version=2, text="two")
        ctx.continue_as_new(number + 1)

    run_id = engine.start("t", 0)

    @engine.task("t", version=2)
    def second(ctx: TaskContext, text: str) -> str:
        return f"{text} {ctx.version} {ctx.generation}"

    outcome, generations = until_ended(engine, run_id)

    assert (outcome.value, generations) == ("two 2 3", 3)


def test_what_is_derived_from_a_step_is_another_one_in_each_generation(engine: Engine, conn: Connection) -> None:
    """Keys for providers, children, and awaited tasks: of the same step, and not to be mistaken for the last one's."""
    keys: list[str] = []
    outside = Outside()

    @engine.task("double")
    def double(ctx: TaskContext, number: int) -> int:
        return 2 * number

    @engine.task("t")
    def body(ctx: TaskContext, number: int) -> list[Any]:
        ctx.step.run("charge", lambda: keys.append(ctx.idempotency_key))
        doubled = ctx.step.call("double", "double", number)
        label = ctx.step.task("label", "print")
        if number < 2:
            ctx.continue_as_new(number + 1)
        return [doubled, label]

    reporter = RecordingReporter(ordinary=outside, durable_tasks=Offspring(engine))
    run_id = engine.start("t", 1)
    outcomes = []
    for number in (1, 2):
        assert isinstance(deliver(engine, run_id, reporter=reporter), Parked)
        child = engine.client.list(task="double")[0]
        assert child.state is RunState.READY
        deliver(engine, child.id, "double")
        engine.route()
        assert isinstance(deliver(engine, run_id, reporter=reporter), Parked)
        _, place, token = outside.sent[-1]
        bring(engine.database, engine.settings, place, token=token.hex, answer=Answer(number), by=f"answer-{number}")
        outcomes.append(deliver(engine, run_id, reporter=reporter))

    continued, ended = outcomes
    assert continued == Continued(1)
    assert isinstance(ended, Finished)
    assert ended.value == [4, 2]
    assert len(set(keys)) == 2
    assert len({place.task_id for _, place, _ in outside.sent}) == 2
    assert len({run.id for run in engine.client.list(task="double")}) == 2


def test_a_late_answer_for_an_earlier_generation_is_refused(engine: Engine) -> None:
    outside = Outside()

    @engine.task("t")
    def body(ctx: TaskContext, number: int) -> Any:
        if number == 0:
            ctx.step.parallel({"a": lambda: ctx.step.task("label", "print"), "b": lambda: 1 // 0}, on_error="fail")
        return ctx.step.parallel({"a": lambda: ctx.step.task("label", "print")})

    @engine.task("catches")
    def catches(ctx: TaskContext, number: int) -> Any:
        try:
            return body(ctx, number)
        except Exception:  # noqa: BLE001 - the branch that awaits the task is dropped with it
            ctx.continue_as_new(1)

    reporter = RecordingReporter(ordinary=outside)
    run_id = engine.start("catches", 0)
    assert deliver(engine, run_id, "catches", reporter=reporter) == Continued(1)
    assert isinstance(deliver(engine, run_id, "catches", reporter=reporter), Parked)
    [(_, early, old_token), (_, late, token)] = outside.sent

    brought = bring(engine.database, engine.settings, early, token=old_token.hex, answer=Answer("old"), by="a")
    assert not brought
    assert bring(engine.database, engine.settings, late, token=token.hex, answer=Answer("new"), by="b")
    outcome = deliver(engine, run_id, "catches", reporter=reporter)
    assert isinstance(outcome, Finished)
    assert outcome.value == {"a": "new"}


# -- facts ------------------------------------------------------------------------------------------------------------


def reading(engine: Engine, read: Callable[[TaskContext], Any], generations: int) -> None:
    """Declare a task that reads in each generation, and gives all it has read in the end."""

    @engine.task("t")
    def body(ctx: TaskContext, so_far: list[Any]) -> list[Any]:
        so_far = [*so_far, read(ctx)]
        if len(so_far) < generations:
            ctx.continue_as_new(so_far)
        return so_far


def test_a_fact_that_was_read_is_not_read_again_and_one_that_was_not_waits_for_the_next_generation(
    engine: Engine, conn: Connection
) -> None:
    reading(engine, lambda ctx: ctx.step.wait_for_fact("order", timeout=timedelta(0), default=None).payload, 3)
    run_id = engine.start("t", [])
    for number in (1, 2):
        engine.client.signal(run_id, "order", number)

    outcome, _ = until_ended(engine, run_id)

    assert outcome.value == [1, 2, None]
    assert kit.table(conn, "SELECT count(*) FROM {}.fact") == [(2,)]


@pytest.mark.parametrize(
    ("mode", "expected"), [("first", [1, 2, 3, None]), ("queue", [1, 2, 3, None]), ("latest", [3, None, None, None])]
)
def test_facts_under_a_key_are_read_once_by_a_run_that_continues(
    engine: Engine, mode: str, expected: list[Any]
) -> None:
    def read(ctx: TaskContext) -> Any:
        options: dict[str, Any] = {"timeout": timedelta(0), "default": None}
        return ctx.step.wait_for_fact("price", key="A", mode=mode, **options).payload

    reading(engine, read, 4)
    run_id, other = engine.start("t", []), engine.start("t", [])
    for number in (1, 2, 3):
        engine.client.emit("price", "A", number)

    assert until_ended(engine, run_id)[0].value == expected
    assert until_ended(engine, other)[0].value == expected


def test_i8_a_fact_said_between_two_generations_is_found_by_the_next(engine: Engine) -> None:
    reading(engine, lambda ctx: ctx.step.wait_for_fact("order").payload, 2)
    run_id = engine.start("t", [])
    engine.client.signal(run_id, "order", 1)
    assert deliver(engine, run_id) == Continued(1)

    engine.client.signal(run_id, "order", 2)

    outcome, _ = until_ended(engine, run_id)
    assert outcome.value == [1, 2]


def test_i8_a_fact_that_a_parked_generation_waits_for_wakes_it_and_those_read_before_do_not(engine: Engine) -> None:
    reading(engine, lambda ctx: ctx.step.wait_for_fact("order").payload, 2)
    run_id = engine.start("t", [])
    engine.client.signal(run_id, "order", 1)
    assert deliver(engine, run_id) == Continued(1)
    assert isinstance(deliver(engine, run_id), Parked)

    engine.route()
    found = Router(engine.database, engine.settings).rescan()
    assert (found.settled, found.woken, engine.state(run_id)) == (0, 0, RunState.WAITING)
    engine.client.signal(run_id, "order", 2)

    assert until_ended(engine, run_id)[0].value == [1, 2]


def test_another_payload_in_another_generation_contradicts_nothing(engine: Engine) -> None:
    seen: list[str] = []
    unsubscribe = telemetry.subscribe(lambda name, fields: seen.append(name))
    reading(engine, lambda ctx: ctx.step.wait_for_fact("order").payload, 3)
    run_id = engine.start("t", [])
    for number in (1, 2, 3):
        engine.client.signal(run_id, "order", number)
        deliver(engine, run_id)
    engine.route()
    unsubscribe()

    assert engine.state(run_id) is RunState.SUCCEEDED
    assert Counter.CONTRADICTING_FACT not in seen


def test_a_fact_whose_wait_was_dropped_before_the_body_had_it_stays_unread(engine: Engine) -> None:
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext, number: int) -> Any:
        if number == 1:
            return ctx.step.wait_for_fact("order", timeout=timedelta(0), default=None).payload
        try:
            ctx.step.parallel({"a": lambda: ctx.step.wait_for_fact("order"), "b": lambda: 1 // 0})
        except Exception:  # noqa: BLE001 - the branch that waits is dropped with it
            gate.pass_through()
            ctx.continue_as_new(1)

    run_id = engine.start("t", 0)
    with in_thread(lambda: deliver(engine, run_id)) as outcome:
        gate.wait_reached()
        engine.client.signal(run_id, "order", "taken by a wait that nobody reads")
        assert engine.client.history(run_id).waits[0].fact is not None
        gate.open()

    assert outcome == [Continued(1)]
    assert until_ended(engine, run_id)[0].value == "taken by a wait that nobody reads"


def test_a_retry_of_a_continued_run_reads_what_its_last_generation_had_not_and_no_more(engine: Engine) -> None:
    broken = [True]

    @engine.task("t")
    def body(ctx: TaskContext, so_far: list[Any]) -> list[Any]:
        own = ctx.step.wait_for_fact("order").payload
        keyed = ctx.step.wait_for_fact("price", key="A", mode="queue").payload
        so_far = [*so_far, [own, keyed]]
        if len(so_far) < 2:
            ctx.continue_as_new(so_far)
        if broken[0]:
            raise ValueError("broken")
        more = ctx.step.wait_for_fact("price", key="A", mode="queue", timeout=timedelta(0), default=None)
        return [*so_far, more.payload]

    run_id = engine.start("t", [])
    for number in (1, 2):
        engine.client.signal(run_id, "order", number)
        engine.client.emit("price", "A", 10 * number)
    assert until_ended(engine, run_id)[0].state is RunState.FAILED
    broken[0] = False

    again = engine.client.retry(run_id, actor="ann")

    assert until_ended(engine, again)[0].value == [[1, 10], [2, 20], None]


def test_a_retry_or_fork_of_a_continued_run_is_of_its_generation(engine: Engine) -> None:
    broken = [True]

    @engine.task("t")
    def body(ctx: TaskContext, number: int) -> list[int]:
        turn = ctx.step.run("turn", int, ctx.generation)
        if number < 2:
            ctx.continue_as_new(number + 1)
        if broken[0]:
            raise ValueError("broken")
        return [number, turn, ctx.step.run("last", lambda: ctx.generation)]

    run_id = engine.start("t", 0)
    assert until_ended(engine, run_id)[0].state is RunState.FAILED
    broken[0] = False

    again = engine.client.retry(run_id, actor="ann")
    assert until_ended(engine, again)[0].value == [2, 2, 2]

    fork = engine.client.fork(again, from_step="last", actor="ann")
    assert until_ended(engine, fork)[0].value == [2, 2, 2]


# -- crashes, zombies, cancels ----------------------------------------------------------------------------------------


def test_i5_a_crash_before_the_commit_begins_the_generation_again_from_its_journal(
    engine: Engine, clock: Clock, conn: Connection
) -> None:
    seen = cursor(engine, last=1)
    run_id = engine.start("t", 0)
    with pytest.raises(KeyboardInterrupt), dying_at("continue.commit.b"):
        deliver(engine, run_id)
    assert kit.row(conn, kit.number(conn, run_id), "generation") == (0,)
    take_over(engine, clock)

    outcome, generations = until_ended(engine, run_id)

    assert (outcome.value, generations, seen) == ("1 0 1", 1, [0, 1])


def test_a_crash_after_the_commit_loses_nothing(engine: Engine, conn: Connection) -> None:
    seen = cursor(engine, last=1)
    run_id = engine.start("t", 0)
    with pytest.raises(KeyboardInterrupt), dying_at("continue.commit.a"):
        deliver(engine, run_id)

    no = kit.number(conn, run_id)
    assert kit.row(conn, no, "state", "generation", "crashes") == ("ready", 1, 0)
    outcome, generations = until_ended(engine, run_id)
    assert (outcome.value, generations, seen) == ("1 0 1", 0, [0, 1])


@pytest.mark.parametrize("loss", ["reply", "request"])
def test_i24_a_lost_reply_of_the_commit_makes_one_generation(
    loss: str, proxied_url: str, schema: str, database_proxy: Proxy, conn: Connection
) -> None:
    settings = Settings(database_url=proxied_url, schema=schema, embedded=False, lease_seconds=3.0)
    database = Database(settings)
    engine = Engine(database, settings)
    seen = cursor(engine, last=1)
    run_id = engine.start("t", 0)
    cut = (
        database_proxy.cut_after_commit(match=b"continue_run")
        if loss == "reply"
        else database_proxy.cut_before("continue_run")
    )

    assert deliver(engine, run_id) == Continued(1)

    assert cut.fired == 1
    assert kit.row(conn, kit.number(conn, run_id), "state", "generation") == ("ready", 1)
    assert until_ended(engine, run_id)[0].value == "1 0 1"
    assert seen == [0, 1]
    engine.close()
    database.close()


def test_i24_a_repeat_that_comes_when_the_run_is_two_generations_on_is_known_for_what_it_is(engine: Engine) -> None:
    cursor(engine, last=3)
    run_id, patient = engine.start("t", 0), engine.database.do
    repeated: list[Outcome] = []

    def twice(work: Callable[[Connection], Any], **options: Any) -> Any:
        reply = patient(work, **options)
        if not repeated and engine.client.get(run_id).generation == 1:
            engine.database.do = patient  # type: ignore[method-assign]  # once
            repeated.extend(deliver(engine, run_id) for _ in range(2))
            return patient(work, **options)  # as after a lost reply
        return reply

    process = engine.process()
    process.lease.ensure()
    beside = Database(engine.settings)
    engine.client = Client(beside, engine.settings)
    engine.database.do = twice  # type: ignore[method-assign]

    assert process.deliver(run_id, "t") == Continued(1)
    assert repeated == [Continued(2), Continued(3)]
    assert until_ended(engine, run_id)[0].value == "3 2 3"
    beside.close()


def test_i5_a_zombie_of_an_earlier_generation_is_fenced(engine: Engine, clock: Clock, conn: Connection) -> None:
    gate, first = Gate(), threading.Event()
    entered: list[int] = []

    def charge(number: int) -> int:
        entered.append(number)
        if not first.is_set():
            first.set()
            return gate.pass_through(666)
        return number

    @engine.task("t")
    def body(ctx: TaskContext, number: int) -> int:
        paid = ctx.step.run("charge", charge, number)
        if number < 7:
            ctx.continue_as_new(7)
        ctx.step.sleep("nap", timedelta(hours=1))
        return paid

    run_id = engine.start("t", 0)
    zombie = engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        assert deliver(engine, run_id) == Continued(1)
        assert isinstance(deliver(engine, run_id), Parked)
        before = engine.client.history(run_id)
        gate.open()

    assert isinstance(late[0], Dropped)
    after = engine.client.history(run_id)
    assert after.run == before.run
    assert [(step.key, step.fence) for step in after.steps] == [(step.key, step.fence) for step in before.steps]
    assert [step.result for step in after.steps if step.key == "charge"] == [b"7"]
    lost = [one.outcome for one in after.attempts if one.outcome is AttemptOutcome.LOST]
    assert lost == [AttemptOutcome.LOST]  # it stays in the history: its process may live


def test_i11_a_cancel_that_comes_first_ends_the_run(engine: Engine, conn: Connection) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        engine.client.cancel(ctx.run_id, reason="enough")
        ctx.continue_as_new()

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert (outcome.state, engine.client.get(run_id).generation) == (RunState.CANCELLED, 0)


def test_a_paused_run_continues_paused(engine: Engine, conn: Connection) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, number: int) -> int:
        if number == 0:
            engine.client.pause(ctx.run_id, actor="ann")
            ctx.continue_as_new(1)
        return number

    run_id = engine.start("t", 0)
    assert deliver(engine, run_id) == Continued(1)
    assert isinstance(deliver(engine, run_id), Dropped)
    engine.client.resume(run_id, actor="ann")

    assert until_ended(engine, run_id)[0].value == 1


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(engine: Engine, code: Callable[[TaskContext], Any]) -> Exception:
    """Return what a body gets that continues as new by some code, once it is certain that nothing was written."""
    caught: list[Exception] = []

    @engine.task("t")
    def body(ctx: TaskContext, number: int, note: str = "") -> str:
        try:
            code(ctx)
        except Exception as error:  # noqa: BLE001 - to be looked at
            caught.append(error)
        return ctx.step.run("after", lambda: "goes on")

    run_id, outcome = engine.run("t", 0)
    assert isinstance(outcome, Finished)
    assert (outcome.value, engine.client.get(run_id).generation) == ("goes on", 0)
    return caught[0]


def test_arguments_that_the_task_refuses_are_named_and_nothing_is_written(engine: Engine) -> None:
    error = refused(engine, lambda ctx: ctx.continue_as_new("seven", note=7, more=True))

    assert isinstance(error, InputError)
    assert {field for field, _ in error.problems} == {"number", "note", "more"}


def test_a_version_that_is_not_here_is_refused(engine: Engine) -> None:
    assert isinstance(refused(engine, lambda ctx: ctx.continue_as_new(1, version=9)), UnknownTaskError)
    assert isinstance(refused(engine, lambda ctx: ctx.continue_as_new(1, version="2")), DefinitionError)  # type: ignore[arg-type]


def test_a_branch_cannot_continue_its_run(engine: Engine) -> None:
    error = refused(engine, lambda ctx: ctx.step.parallel({"a": lambda: ctx.continue_as_new(1)}))

    assert "step.parallel has returned" in str(error)


def test_a_step_cannot_continue_its_run(engine: Engine) -> None:
    error = refused(engine, lambda ctx: ctx.step.run("inside", lambda: ctx.continue_as_new(1)))

    assert "call them from the task's body" in str(error)


def test_no_except_of_the_body_keeps_the_run_from_continuing(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, number: int) -> int:
        with contextlib.suppress(BaseException):  # user code that catches all does not get past it
            if number == 0:
                ctx.continue_as_new(1)
        return number

    outcome, generations = until_ended(engine, engine.start("t", 0))

    assert (outcome.value, generations) == (1, 1)
