"""Maps on workers: each item a child run by its key, the parent woken once or once a round, failures named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from tests.integration.test_engine_children import Offspring
from tests.support.clock import Clock
from tests.support.engine import Engine, RecordingReporter
from tests.support.proxy import Proxy
from umt_durable import ChildrenFailedError, ItemFailure
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Outcome, Parked
from umt_durable.errors import DefinitionError, InputError
from umt_durable.settings import Settings
from umt_durable.states import RunState, StepState


class Spread:
    """A parent that maps a task over items, delivered as the test wants."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.items: list[int] = []
        self.task: Any = "half"
        self.key: Callable[[int], Any] = lambda item: f"k{item}"
        self.options: dict[str, Any] = {}
        self.passes = 0

        @engine.task("half", raises=(LookupError,))
        def half(ctx: TaskContext, value: int) -> UUID:
            if value < 0:
                raise LookupError(f"no half of {value}")
            return ctx.step.run("only", lambda: UUID(int=value))

        @engine.task("parent", raises=(LookupError,))
        def parent(ctx: TaskContext) -> list[Any]:
            self.passes += 1
            found = ctx.step.map("all", self.task, list(self.items), key=self.key, workers=True, **self.options)
            ctx.step.sleep("nap", timedelta(minutes=1))
            return [self.shown(one) for one in found]

    def shown(self, one: Any) -> Any:
        """Return a result as JSON has it."""
        if isinstance(one, ItemFailure):
            return f"{one.key}: {type(one.error).__name__}: {one.error}"
        assert isinstance(one, UUID), one
        return one.int

    def deliver(self, run_id: str) -> Outcome:
        """Deliver a hint of a run."""
        task = self.engine.client.get(run_id).task
        reporter = RecordingReporter(durable_tasks=Offspring(self.engine))
        return self.engine.process().deliver(run_id, task, reporter=reporter)

    def parent(self, *items: int, **options: Any) -> str:
        """Start a parent and deliver it once."""
        self.items, self.options = list(items), options
        run_id = self.engine.start("parent")
        self.deliver(run_id)
        return run_id

    def live(self) -> list[str]:
        """Return the ids of the children that have not ended, the first one first."""
        found = self.engine.client.list(task="half", limit=1_000)
        return [run.id for run in reversed(found) if not run.state.is_terminal]

    def finish(self, *, last_first: bool = False) -> None:
        """Execute all live children, and route that they have ended."""
        for child in reversed(self.live()) if last_first else self.live():
            self.deliver(child)
        self.engine.route()

    def end(self, run_id: str, clock: Clock) -> Finished:
        """Wake a parent from the sleep behind its map, and return what it ended in."""
        clock.advance(seconds=61)
        self.engine.timers()
        outcome = self.deliver(run_id)
        assert isinstance(outcome, Finished), outcome
        return outcome


@pytest.fixture
def spread(database: Database, settings: Settings) -> Iterator[Spread]:
    """Return a family on an engine."""
    spread = Spread(Engine(database, settings))
    yield spread
    spread.engine.close()


def test_i17_results_are_in_item_order_and_typed_whatever_order_the_children_end_in(
    spread: Spread, clock: Clock
) -> None:
    parent = spread.parent(3, 1, 2)
    assert spread.engine.state(parent) is RunState.WAITING

    spread.finish(last_first=True)
    assert isinstance(spread.deliver(parent), Parked)

    assert spread.end(parent, clock).value == [3, 1, 2]
    assert spread.passes == 3  # start, the one wake of the map, the wake of the sleep
    assert [step.key for step in spread.engine.client.history(parent).steps] == ["all", "nap"]
    assert len(spread.engine.client.list(task="half")) == 3


def test_i17_items_in_another_order_are_the_same_items(spread: Spread, clock: Clock) -> None:
    parent = spread.parent(3, 1, 2)
    spread.items = [2, 3, 1]
    spread.finish()
    spread.deliver(parent)
    spread.items = [1, 2, 3]

    assert spread.end(parent, clock).value == [1, 2, 3]
    assert len(spread.engine.client.list(task="half")) == 3


@pytest.mark.parametrize("items", [[1], [1, 2, 4], [1, 3]])
def test_other_items_are_no_determinism(spread: Spread, items: list[int]) -> None:
    parent = spread.parent(1, 2)
    spread.finish()
    spread.items = items
    spread.deliver(parent)
    assert spread.engine.state(parent) is RunState.QUARANTINED


@pytest.mark.parametrize("concurrency", [None, 3])
def test_no_items_need_no_wait(spread: Spread, clock: Clock, concurrency: int | None) -> None:
    parent = spread.parent(concurrency=concurrency)
    assert spread.engine.state(parent) is RunState.SLEEPING
    assert spread.end(parent, clock).value == []
    assert spread.passes == 2


def test_i17_concurrency_bounds_how_many_children_are_live(spread: Spread, clock: Clock) -> None:
    parent = spread.parent(*range(5), concurrency=2)
    rounds = []
    while live := spread.live():
        rounds.append(len(live))
        spread.finish(last_first=True)
        spread.deliver(parent)

    assert rounds == [2, 2, 1]
    assert spread.end(parent, clock).value == [0, 1, 2, 3, 4]
    keys = [step.key for step in spread.engine.client.history(parent).steps]
    assert keys == ["all", "all\\.1", "all\\.2", "all\\.3", "nap"]
    assert spread.passes == 5


def test_another_concurrency_in_the_middle_is_no_determinism(spread: Spread) -> None:
    parent = spread.parent(*range(5), concurrency=2)
    spread.finish()
    spread.options = {}
    spread.deliver(parent)
    assert spread.engine.state(parent) is RunState.QUARANTINED
    assert len(spread.engine.client.list(task="half")) == 2


def test_failures_of_items_are_named_together_once_all_have_ended(spread: Spread) -> None:
    parent = spread.parent(1, -2, 3, -4)
    one = spread.live()[-1]
    spread.engine.client.cancel(one, reason="not wanted")
    spread.engine.route()
    spread.finish()

    outcome = spread.deliver(parent)

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, ChildrenFailedError)
    said = str(outcome.error)
    assert said.startswith("step 'all': 3 of 4 items failed: ")
    assert "'k-2': half (" in said
    assert "failed: LookupError: no half of -2" in said
    assert "failed: LookupError: no half of -4" in said
    assert f"half ({one}) was cancelled: not wanted" in said


def test_no_round_is_begun_after_one_with_a_failure(spread: Spread) -> None:
    parent = spread.parent(-1, 2, 3, 4, concurrency=2)
    spread.finish()
    outcome = spread.deliver(parent)

    assert isinstance(outcome, Finished)
    assert "1 of 2 items failed: 'k-1': half (" in str(outcome.error)
    assert str(outcome.error).endswith("; 2 were not begun")
    assert spread.live() == []


@pytest.mark.parametrize("concurrency", [None, 2])
def test_collect_gives_the_failures_in_the_places_of_their_items(
    spread: Spread, clock: Clock, concurrency: int | None
) -> None:
    parent = spread.parent(1, -2, 3, 4, on_error="collect", concurrency=concurrency)
    spread.engine.client.cancel(spread.live()[-1], reason="not wanted")
    spread.engine.route()
    while spread.live():
        spread.finish()
        spread.deliver(parent)
    spread.deliver(parent)

    value = spread.end(parent, clock).value
    assert len([one for one in value if isinstance(one, int)]) == 2
    assert value[1] == "k-2: LookupError: no half of -2"
    (cancelled,) = (one for one in value if isinstance(one, str) and "ChildrenFailedError" in one)
    assert cancelled.endswith("was cancelled: not wanted")


def test_a_cancel_of_the_parent_ends_the_items(spread: Spread) -> None:
    parent = spread.parent(1, 2)
    children = spread.live()
    spread.engine.client.cancel(parent)
    spread.engine.route()
    assert spread.engine.state(parent) is RunState.CANCELLED
    assert {spread.engine.state(child) for child in children} == {RunState.CANCELLED}


def half(value: int) -> UUID:
    """Be a function that is no task."""
    return UUID(int=value)


@pytest.mark.parametrize(
    ("task", "options", "said"),
    [
        (half, {}, "step.map 'all': with workers=True fn must be a durable task, or its name, not a function"),
        (partial(half, 1), {}, "not a function of this process"),
        ({"task": "half"}, {}, "not a signature"),
        ("nothing", {}, "step 'all': nothing is no durable task"),
        (7, {}, "step 'all': "),
        ("half", {"concurrency": 0}, "step.map 'all': concurrency must be from 1"),
        ("half", {"concurrency": True}, "step.map 'all': concurrency must be from 1"),
        ("half", {"on_error": "ignore"}, "step.map 'all': on_error is fail or collect"),
    ],
)
def test_what_can_never_work_is_refused_before_anything_is_written(
    spread: Spread, task: Any, options: dict[str, Any], said: str
) -> None:
    spread.items, spread.options, spread.task = [1, 2], options, task
    run_id = spread.engine.start("parent")
    outcome = spread.deliver(run_id)

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert said in str(outcome.error)
    assert spread.live() == []
    assert spread.engine.client.history(run_id).steps == []


def test_a_key_that_is_no_function_is_refused_before_anything_is_written(spread: Spread) -> None:
    spread.items, spread.key = [1], "id"  # type: ignore[assignment]  # as untyped code would
    run_id = spread.engine.start("parent")
    outcome = spread.deliver(run_id)
    assert isinstance(outcome, Finished)
    assert "step.map 'all': key must be a function" in str(outcome.error)
    assert spread.engine.client.history(run_id).steps == []


def test_two_items_of_one_key_are_refused_before_anything_is_written(spread: Spread) -> None:
    spread.items, spread.key = [1, 2, 3], lambda item: item % 2
    run_id = spread.engine.start("parent")
    outcome = spread.deliver(run_id)
    assert isinstance(outcome, Finished)
    assert "the key '1' comes twice" in str(outcome.error)
    assert spread.engine.client.history(run_id).steps == []


@pytest.mark.parametrize("concurrency", [None, 1])
def test_an_item_the_task_does_not_take_is_refused_with_its_key_before_anything_is_written(
    spread: Spread, concurrency: int | None
) -> None:
    spread.items, spread.options = [1, "two"], {"concurrency": concurrency}  # type: ignore[list-item]  # the point
    run_id = spread.engine.start("parent")
    outcome = spread.deliver(run_id)
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, InputError)
    assert outcome.error.__notes__ == ["in 'ktwo' of step.map 'all'"]
    assert spread.live() == []
    assert spread.engine.client.history(run_id).steps == []


@pytest.mark.parametrize("statement", ["send_step", "await_children", "insert_children", "COMMIT"])
def test_i17_i24_a_lost_reply_makes_no_twin_items(
    proxied_url: str, database_proxy: Proxy, schema: str, settings: Settings, statement: str
) -> None:
    through = Settings(database_url=proxied_url, schema=schema, embedded=False, lease_seconds=settings.lease_seconds)
    database = Database(through)
    spread = Spread(Engine(database, through))
    commit = statement == "COMMIT"
    cut = database_proxy.cut_after_commit(match=b"send_step") if commit else database_proxy.cut_reply(statement)

    spread.parent(1, 2)

    assert cut.fired == 1
    assert len(spread.live()) == 2
    spread.engine.close()
    database.close()


def test_a_step_that_is_done_is_not_asked_for_its_children_again(spread: Spread, clock: Clock) -> None:
    parent = spread.parent(1)
    spread.finish()
    spread.deliver(parent)
    states = {step.key: step.state for step in spread.engine.client.history(parent).steps}
    assert states["all"] is StepState.DONE
    assert spread.end(parent, clock).value == [1]
