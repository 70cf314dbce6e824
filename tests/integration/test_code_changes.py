"""Code that changes under runs that are on their way: renamed steps, patches, and what a mismatch leads to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_engine_children import Offspring
from tests.support.clock import Clock
from tests.support.engine import Engine, RecordingReporter, dying_at, enter, take_over
from umt_durable import telemetry
from umt_durable.database import Connection, Database
from umt_durable.engine.async_context import AsyncTaskContext
from umt_durable.engine.context import TaskContext, current_context
from umt_durable.engine.effects import OpInfo
from umt_durable.engine.ids import op_idempotency_key
from umt_durable.engine.outcomes import Finished, Outcome, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import DefinitionError, DurableError, NonDeterminismError
from umt_durable.settings import Settings
from umt_durable.states import RunState, StepState
from umt_durable.telemetry import Counter

NAP = timedelta(minutes=1)
Change = Callable[[Any], Any]


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def counted() -> Iterator[list[Counter]]:
    seen: list[Counter] = []
    unsubscribe = telemetry.subscribe(lambda name, fields: seen.append(Counter(name)))
    yield seen
    unsubscribe()


class Deployed:
    """A task whose code is the one that was deployed last, and a run of it."""

    def __init__(self, engine: Engine, clock: Clock, **options: Any) -> None:
        self.engine, self.clock, self.code = engine, clock, [lambda ctx: None]
        self.run_id = ""

        @engine.task("t", **options)
        def body(ctx: TaskContext) -> Any:
            return self.code[0](ctx)

    def start(self, code: Change) -> Outcome:
        """Begin a run under some code, which parks it."""
        self.code[0] = code
        self.run_id, outcome = self.engine.run("t")
        return outcome

    def go_on(self, code: Change) -> Outcome:
        """Let the run go on under other code once its nap is over."""
        self.code[0] = code
        self.clock.advance(seconds=61)
        self.engine.timers()
        return self.engine.process().deliver(self.run_id, "t")

    def journal(self) -> list[str]:
        """Return the keys of the journal."""
        return [step.key for step in self.engine.client.history(self.run_id).steps]


def noted(log: list[Any], what: object, value: Any) -> Callable[[], Any]:
    """Return a step's body that notes that it was entered; what it notes is no input of the step."""
    return lambda: enter(log, what, value)


def value(outcome: Outcome) -> Any:
    """Return the result of a run that has ended well."""
    assert isinstance(outcome, Finished), outcome
    assert outcome.error is None, outcome.error
    return outcome.value


# -- renamed steps ----------------------------------------------------------------------------------------------------


def test_e10_a_renamed_step_is_found_under_its_old_name_with_and_without_a_key(engine: Engine, clock: Clock) -> None:
    entered: list[str] = []
    deployed = Deployed(engine, clock)

    def old(ctx: TaskContext) -> None:
        ctx.step.run("charge", noted(entered, "charge", 40))
        ctx.step.options(key="A-17").run("pick", noted(entered, "pick A-17", 3))
        ctx.step.sleep("nap", NAP)

    def new(ctx: TaskContext) -> list[int]:
        paid = ctx.step.options(renamed_from="charge").run("bill", noted(entered, "charge", 40))
        picked = ctx.step.options(key="A-17", renamed_from="pick").run("fetch", noted(entered, "pick A-17", 3))
        ctx.step.options(renamed_from="nap").sleep("rest", NAP)
        return [paid, picked]

    deployed.start(old)
    assert entered == ["charge", "pick A-17"]

    assert value(deployed.go_on(new)) == [40, 3]
    assert entered == ["charge", "pick A-17"]
    assert deployed.journal() == ["charge", "pick[A-17]", "nap"]


def test_e10_several_calls_of_an_old_name_are_found_in_their_order_and_new_ones_are_recorded_under_the_new(
    engine: Engine, clock: Clock
) -> None:
    entered: list[int] = []
    deployed = Deployed(engine, clock)

    def old(ctx: TaskContext) -> None:
        for number in range(2):
            ctx.step.run("charge", noted(entered, number, number))
        ctx.step.sleep("nap", NAP)

    def new(ctx: TaskContext) -> list[int]:
        bill = ctx.step.options(renamed_from=["invoice", "charge"])
        return [bill.run("bill", noted(entered, number, number)) for number in range(3)]

    deployed.start(old)
    assert value(deployed.go_on(new)) == [0, 1, 2]
    assert entered == [0, 1, 2]
    assert deployed.journal() == ["charge", "charge#2", "nap", "bill#3"]


def test_e10_a_run_that_began_after_the_rename_has_the_new_name_and_needs_the_old_one_no_more(
    engine: Engine, clock: Clock
) -> None:
    entered: list[int] = []
    deployed = Deployed(engine, clock)

    def renamed(ctx: TaskContext) -> None:
        ctx.step.options(renamed_from="charge").run("bill", noted(entered, 1, 1))
        ctx.step.sleep("nap", NAP)

    def forgotten(ctx: TaskContext) -> Any:
        ctx.step.run("bill", noted(entered, 1, 1))
        return ctx.step.run("charge", noted(entered, 2, 2))

    deployed.start(renamed)
    assert value(deployed.go_on(forgotten)) == 2
    assert entered == [1, 2]
    assert deployed.journal() == ["bill", "nap", "charge"]


def test_e10_a_renamed_step_that_was_in_flight_is_executed_again_under_its_old_name(
    engine: Engine, clock: Clock
) -> None:
    deployed = Deployed(engine, clock, retry=RetryPolicy(3, initial=timedelta(seconds=30)))
    entered: list[str] = []

    def fails_once() -> str:
        entered.append("in")
        if len(entered) == 1:
            raise OSError("away")
        return "paid"

    outcome = deployed.start(lambda ctx: ctx.step.run("charge", fails_once))
    assert isinstance(outcome, Parked)

    assert value(deployed.go_on(lambda ctx: ctx.step.options(renamed_from="charge").run("bill", fails_once))) == "paid"
    [step] = engine.client.history(deployed.run_id).steps
    assert (step.key, step.state, step.failures) == ("charge", StepState.DONE, 1)


def test_e10_items_and_branches_of_a_renamed_step_are_found_with_what_they_did(engine: Engine, clock: Clock) -> None:
    entered: list[str] = []
    deployed = Deployed(engine, clock)

    def left(ctx: TaskContext) -> str:
        ctx.step.run("charge", noted(entered, "left", 1))
        ctx.step.sleep("nap", NAP)
        return "left"

    def body(name: str, fan: str, was: tuple[str, str] | None = None) -> Change:
        def code(ctx: TaskContext) -> Any:
            def pick(item: str) -> str:
                return enter(entered, item, item)

            picked = ctx.step.options(renamed_from=was and was[0]).map(name, pick, ["a", "b"], key=str)
            fanned = ctx.step.options(renamed_from=was and was[1]).parallel(
                {"left": lambda: left(ctx), "right": lambda: enter(entered, "right", "right")}, name=fan
            )
            return [picked, fanned]

        return code

    deployed.start(body("pick", "fan"))
    outcome = deployed.go_on(body("fetch", "both", ("pick", "fan")))

    assert value(outcome) == [["a", "b"], {"left": "left", "right": "right"}]
    assert sorted(entered) == ["a", "b", "left", "right"]
    assert sorted(deployed.journal()) == [
        *("fan[left]", "fan[left]/charge", "fan[left]/nap", "fan[right]", "pick[a]", "pick[b]"),
    ]


def test_e10_i17_a_renamed_step_that_awaits_a_child_awaits_the_same_one(engine: Engine) -> None:
    renamed = [False]

    @engine.task("double")
    def double(ctx: TaskContext, number: int) -> int:
        return 2 * number

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        steps = ctx.step.options(renamed_from="twice") if renamed[0] else ctx.step
        return steps.call("doubled" if renamed[0] else "twice", "double", 4)

    reporter = RecordingReporter(durable_tasks=Offspring(engine))
    run_id = engine.start("t")
    assert isinstance(engine.process().deliver(run_id, "t", reporter=reporter), Parked)
    renamed[0] = True
    [child] = engine.client.list(task="double")
    engine.process().deliver(child.id, "double")
    engine.route()

    assert value(engine.process().deliver(run_id, "t", reporter=reporter)) == 8
    assert len(engine.client.list(task="double")) == 1


def two_from_one(ctx: TaskContext) -> None:
    ctx.step.options(renamed_from="charge").run("bill", int)
    ctx.step.options(renamed_from="charge").run("pay", int)


def two_from_one_key(ctx: TaskContext) -> None:
    ctx.step.options(renamed_from="charge", key="A").run("bill", int)
    ctx.step.options(renamed_from="charge", key="A").run("pay", int)


def old_name_after(ctx: TaskContext) -> None:
    ctx.step.options(renamed_from="charge").run("bill", int)
    ctx.step.run("charge", int)


def old_name_before(ctx: TaskContext) -> None:
    ctx.step.run("charge", int)
    ctx.step.options(renamed_from="charge").run("bill", int)


def old_key_in_use(ctx: TaskContext) -> None:
    ctx.step.options(renamed_from="charge", key="A").run("bill", int)
    ctx.step.options(key="A").run("charge", int)


@pytest.mark.parametrize(
    "code",
    [two_from_one, two_from_one_key, old_name_after, old_name_before, old_key_in_use],
    ids=lambda one: one.__name__,
)
def test_e10_an_old_name_that_two_steps_have_at_once_is_an_error_that_names_it(
    engine: Engine, clock: Clock, code: Change
) -> None:
    outcome = Deployed(engine, clock).start(code)

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert "'charge" in str(outcome.error)
    assert "'bill'" in str(outcome.error)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (lambda ctx: ctx.step.options(renamed_from="paid").wait_for_fact("payment"), "wait 'payment'"),
        (lambda ctx: ctx.step.options(renamed_from="a").wait_any(["b"]), "step.wait_any"),
        (lambda ctx: ctx.step.options(renamed_from="ship:1").effect("ship-1", lambda info: 1), "effect 'ship-1'"),
        (lambda ctx: ctx.step.options(renamed_from="").run("a", int), "renamed_from="),
        (lambda ctx: ctx.step.options(renamed_from=[7]).run("a", int), "renamed_from="),
        (lambda ctx: ctx.step.options(renamed_from="a").run("a", int), "step 'a'"),
    ],
)
def test_what_cannot_be_renamed_is_refused_before_anything_is_written(
    engine: Engine, clock: Clock, code: Change, says: str
) -> None:
    deployed = Deployed(engine, clock)
    outcome = deployed.start(code)

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert says in str(outcome.error)
    history = engine.client.history(deployed.run_id)
    assert (history.steps, history.waits) == ([], [])


# -- patches ----------------------------------------------------------------------------------------------------------


def test_f1_a_run_that_was_past_the_place_keeps_the_old_way_and_one_that_was_not_takes_the_new(
    engine: Engine, clock: Clock
) -> None:
    entered: list[str] = []
    deployed = Deployed(engine, clock)

    def before(ctx: TaskContext) -> str:
        ctx.step.run("charge", noted(entered, "old", 1))
        ctx.step.sleep("nap", NAP)
        return "old"

    def after(ctx: TaskContext) -> str:
        way = "new" if ctx.patched("tax") else "old"
        ctx.step.run("charge" if way == "old" else "charge with tax", noted(entered, way, 1))
        ctx.step.sleep("nap", NAP)
        return f"{way}, {'new' if ctx.patched('tax') else 'old'}"

    deployed.start(before)
    assert value(deployed.go_on(after)) == "old, old"
    assert entered == ["old"]
    assert deployed.journal() == ["charge", "nap", "ctx.patched[tax]"]

    deployed.start(after)
    assert value(deployed.go_on(after)) == "new, new"
    assert entered == ["old", "new"]
    assert deployed.journal() == ["ctx.patched[tax]", "charge with tax", "nap"]


def test_the_query_of_the_how_to_finds_the_runs_that_still_need_the_old_way(
    engine: Engine, clock: Clock, conn: Connection, schema: str
) -> None:
    deployed = Deployed(engine, clock)

    def before(ctx: TaskContext) -> None:
        for name in ("one", "two"):
            ctx.step.sleep(name, NAP)

    def after(ctx: TaskContext) -> None:
        ctx.patched("tax")
        before(ctx)

    deployed.start(before)
    said_no = deployed.run_id
    assert isinstance(deployed.go_on(after), Parked)
    deployed.start(before)
    not_asked = deployed.run_id
    deployed.start(after)

    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "change-code.md"
    query = page.read_text(encoding="utf-8").split("```sql\n")[1].split("```")[0]
    query = query.replace("umt_durable.", f'"{schema}".').replace("'shop.fulfil'", "'t'").replace("%", "%%")

    assert {row[0] for row in conn.execute(query.encode(), {})} == {said_no, not_asked}


def test_f1_a_run_that_stands_before_the_place_takes_the_new_way(engine: Engine, clock: Clock) -> None:
    deployed = Deployed(engine, clock)
    deployed.start(lambda ctx: ctx.step.sleep("nap", NAP))

    def after(ctx: TaskContext) -> bool:
        ctx.step.sleep("nap", NAP)
        return ctx.patched("tax")

    assert value(deployed.go_on(after)) is True


def test_f1_the_answer_stays_through_a_crash_before_and_after_it_is_recorded(engine: Engine, clock: Clock) -> None:
    answers: list[bool] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> bool:
        for _ in range(2):
            answers.append(ctx.patched("tax"))
        ctx.step.run("charge", int)
        return ctx.patched("tax")

    run_id = engine.start("t")
    for point, nth in (("step.commit.b", 1), ("step.commit.a", 1), ("step.commit.a", 1)):
        with pytest.raises(KeyboardInterrupt), dying_at(point, nth):
            engine.process().deliver(run_id, "t")
        take_over(engine, clock)

    assert value(engine.process().deliver(run_id, "t")) is True
    assert set(answers) == {True}


def test_f1_branches_answer_for_themselves_unless_the_body_has_before(engine: Engine, clock: Clock) -> None:
    entered: list[str] = []
    deployed = Deployed(engine, clock)

    def charge(ctx: TaskContext, label: str, *, patched: bool) -> str:
        way = "new" if patched and ctx.patched("tax") else "old"
        ctx.step.run(f"charge {way}", noted(entered, f"{label} {way}", 1))
        ctx.step.sleep("nap", NAP)
        return way

    def code(labels: str, *, patched: bool, outside: bool = False) -> Change:
        def body(ctx: TaskContext) -> Any:
            around = ctx.patched("tax") if outside else None
            ways = ctx.step.parallel({one: (charge_in, one) for one in labels})
            return [around, ways]

        def charge_in(label: str) -> str:
            return charge(contexts[-1], label, patched=patched)

        contexts: list[TaskContext] = []

        def wrapped(ctx: TaskContext) -> Any:
            contexts.append(ctx)
            return body(ctx)

        return wrapped

    deployed.start(code("a", patched=False))
    outcome = deployed.go_on(code("ab", patched=True))
    assert isinstance(outcome, Parked)
    assert value(deployed.go_on(code("ab", patched=True))) == [None, {"a": "old", "b": "new"}]
    assert entered == ["a old", "b new"]
    assert {"parallel[a]/ctx.patched[tax]", "parallel[b]/ctx.patched[tax]"} < set(deployed.journal())

    deployed.start(code("ab", patched=True, outside=True))
    assert value(deployed.go_on(code("ab", patched=True, outside=True))) == [True, {"a": "new", "b": "new"}]
    assert [key for key in deployed.journal() if "patched" in key] == ["ctx.patched[tax]"]


def test_code_that_asks_no_more_for_a_patch_does_not_miss_it_and_its_log_is_not_silent(
    engine: Engine, clock: Clock, counted: list[Counter], caplog: pytest.LogCaptureFixture
) -> None:
    deployed = Deployed(engine, clock)

    def after(ctx: TaskContext) -> None:
        assert ctx.patched("tax")
        ctx.step.sleep("nap", NAP)

    def cleaned(ctx: TaskContext) -> bool:
        ctx.step.sleep("nap", NAP)
        ctx.logger.warning("awake")
        return ctx.patched("another")

    deployed.start(after)
    with caplog.at_level(logging.WARNING):
        assert value(deployed.go_on(cleaned)) is True

    assert "awake" in caplog.text
    assert Counter.ORPHAN_STEP not in counted


def test_f1_an_async_body_awaits_the_answer_and_hears_of_it_where_it_forgets_to(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    async def body(ctx: AsyncTaskContext) -> bool:
        await ctx.step.run("charge", int)
        return await ctx.patched("tax")

    @engine.task("forgets")
    async def forgets(ctx: AsyncTaskContext) -> str:
        return "new" if ctx.patched("tax") else "old"

    _, outcome = engine.run("t")
    assert value(outcome) is True
    _, outcome = engine.run("forgets")
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DurableError)
    assert "await ctx.patched" in str(outcome.error)


@pytest.mark.parametrize("patch", ["", 7, "a\0b", "x" * 2000], ids=["empty", "number", "nul", "long"])
def test_a_patch_whose_name_cannot_be_kept_is_refused(engine: Engine, clock: Clock, patch: Any) -> None:
    outcome = Deployed(engine, clock).start(lambda ctx: ctx.patched(patch))

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)


# -- what a mismatch leads to -----------------------------------------------------------------------------------------


def charged(amount: int, entered: list[int]) -> Change:
    def code(ctx: TaskContext) -> int:
        paid = ctx.step.run("charge", lambda value: enter(entered, value, value), amount)
        ctx.step.sleep("nap", NAP)
        return paid

    return code


def test_f6_park_shows_both_sides_and_the_run_goes_on_with_the_code_put_right(engine: Engine, clock: Clock) -> None:
    entered: list[int] = []
    deployed = Deployed(engine, clock)
    deployed.start(charged(40, entered))

    outcome = deployed.go_on(charged(41, entered))

    assert isinstance(outcome, Parked)
    run = engine.client.get(deployed.run_id)
    assert (run.state, run.reason) == (RunState.QUARANTINED, "nondeterminism")
    failure = engine.client.failure(run)
    assert failure is not None
    assert "the journal holds the run step 'charge' with inputs" in failure.message
    assert "but the code now asks for the run step 'charge' with inputs" in failure.message
    engine.client.retry(deployed.run_id, actor="ann", reason="rolled back")
    assert value(deployed.go_on(charged(40, entered))) == 40
    assert entered == [40]


def test_f6_fail_ends_the_run_at_once_whatever_the_body_catches(engine: Engine, clock: Clock) -> None:
    entered: list[int] = []
    deployed = Deployed(engine, clock, on_mismatch="fail", retry=RetryPolicy(5))
    deployed.start(charged(40, entered))

    def catches(ctx: TaskContext) -> None:
        try:
            charged(41, entered)(ctx)
        except Exception:  # noqa: BLE001 - user code that catches all does not get past it
            ctx.step.run("other", noted(entered, 0, 0))

    outcome = deployed.go_on(catches)

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.FAILED
    assert isinstance(outcome.error, NonDeterminismError)
    assert entered == [40]


def test_f6_warn_executes_the_other_step_beside_the_recorded_one_and_reports_that_as_an_orphan(
    engine: Engine, clock: Clock, counted: list[Counter], caplog: pytest.LogCaptureFixture
) -> None:
    entered: list[int] = []
    deployed = Deployed(engine, clock, on_mismatch="warn")
    deployed.start(charged(40, entered))

    def twice(ctx: TaskContext) -> list[int]:
        paid = charged(41, entered)(ctx)
        ctx.step.sleep("another", NAP)
        return [paid, ctx.step.run("charge", lambda value: enter(entered, value, value), 42)]

    with caplog.at_level(logging.WARNING):
        outcome = deployed.go_on(twice)
        assert isinstance(outcome, Parked)
        outcome = deployed.go_on(twice)

    assert value(outcome) == [41, 42]
    assert entered == [40, 41, 42]
    assert "the journal holds the run step 'charge'" in caplog.text
    assert counted.count(Counter.ORPHAN_STEP) == 1
    history = engine.client.history(deployed.run_id)
    assert history.steps[0].key == "charge"
    assert history.attempts[-1].error == "recorded, but not asked for: 'charge'"


def test_f6_warn_goes_past_another_kind_an_item_a_branch_and_a_wait(engine: Engine, clock: Clock) -> None:
    entered: list[Any] = []
    deployed = Deployed(engine, clock, on_mismatch="warn")

    def old(ctx: TaskContext) -> None:
        ctx.step.run("pause", noted(entered, "pause", 1))
        ctx.step.map("pick", lambda item: enter(entered, item, item), [1], key=lambda item: "A")
        ctx.step.parallel({"left": (lambda number: ctx.step.run("in", noted(entered, number, number)), 1)})
        ctx.step.wait_for_fact("approved", timeout=NAP, default=None)

    def new(ctx: TaskContext) -> Any:
        ctx.step.sleep("pause", timedelta(0))
        picked = ctx.step.map("pick", lambda item: enter(entered, item, item), [2], key=lambda item: "A")
        fanned = ctx.step.parallel({"left": (lambda number: ctx.step.run("in", noted(entered, number, number)), 2)})
        fact = ctx.step.options(key=None).wait_for_fact("approved", key="order-1", timeout=NAP, default="late")
        return [picked, fanned, fact.payload]

    deployed.start(old)
    assert isinstance(deployed.go_on(new), Parked)
    outcome = deployed.go_on(new)

    assert value(outcome) == [[2], {"left": 2}, "late"]
    assert entered == ["pause", 1, 1, 2, 2]
    error = engine.client.history(deployed.run_id).attempts[-1].error
    assert error is not None
    for key in ("pause", "pick[A]", "parallel[left]", "approved"):
        assert repr(key) in error


def test_f6_a_recorded_step_and_wait_that_the_code_dropped_are_reported(
    engine: Engine, clock: Clock, counted: list[Counter]
) -> None:
    deployed = Deployed(engine, clock)

    def old(ctx: TaskContext) -> None:
        ctx.step.run("audit", int)
        ctx.step.wait_for_fact("approved", timeout=timedelta(0), default=None)
        ctx.step.sleep("nap", NAP)

    deployed.start(old)
    assert value(deployed.go_on(lambda ctx: ctx.step.sleep("nap", NAP))) is None

    error = engine.client.history(deployed.run_id).attempts[-1].error
    assert error == "recorded, but not asked for: 'audit', 'approved'"
    assert counted.count(Counter.ORPHAN_STEP) == 2


def test_a_policy_that_there_is_not_is_refused_when_the_task_is_declared(engine: Engine, clock: Clock) -> None:
    with pytest.raises(DefinitionError, match="on_mismatch is park, fail or warn, not 'ignore'"):
        Deployed(engine, clock, on_mismatch="ignore")


def test_the_key_for_a_provider_is_the_same_for_an_effect_beside_another(
    engine: Engine, clock: Clock, settings: Settings
) -> None:
    """Under `warn` an effect may have a key in the journal that is not its op key; the provider's is."""
    seen: list[str] = []
    deployed = Deployed(engine, clock, on_mismatch="warn")

    def ship(info: OpInfo) -> str:
        seen.append(current_context().idempotency_key)
        return info.op_key

    def old(ctx: TaskContext) -> None:
        ctx.step.run("ship:1", int)
        ctx.step.sleep("nap", NAP)

    deployed.start(old)
    assert value(deployed.go_on(lambda ctx: ctx.step.effect("ship:1", ship))) == "ship:1"
    assert seen == [op_idempotency_key(settings.op_namespace, "ship:1")]
