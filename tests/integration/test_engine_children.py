"""Child runs in the test's own process: each exists once, its parent goes on once, and its end is as was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.engine import Engine, RecordingReporter
from tests.support.proxy import Proxy
from umt_durable import ChildrenFailedError
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Outcome, Parked
from umt_durable.errors import DefinitionError
from umt_durable.records import NewRun
from umt_durable.services import router
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import facts


@dataclass(frozen=True)
class Call:
    """A call of a durable task, as a signature."""

    task: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class Offspring:
    """The durable tasks of an engine without Celery."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def plan(self, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], id: str, step: str) -> NewRun:
        """Make the run of a call."""
        if isinstance(task, Call):
            args, kwargs = task.args, task.kwargs
        definition = self._engine.tasks.get(self.name(task, step))
        encoded = definition.schema.encode(*definition.schema.bind_and_validate(args, kwargs))
        return NewRun(id=id, task=definition.name, version=1, queue="q", args=encoded.data, digest=encoded.digest)

    def name(self, task: Any, step: str) -> str:
        """Return the name of a task."""
        name = task.task if isinstance(task, Call) else task
        if not self._engine.tasks.has(name):
            raise DefinitionError(f"step {step!r}: {name} is no durable task")
        return str(name)

    def annotation(self, task: Any) -> Any:
        """Return what results are typed by."""
        return self._engine.tasks.get(self.name(task, "")).result


class Family:
    """A parent and its children, delivered as the test wants."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.passes = 0

        @engine.task("double", raises=(LookupError,))
        def double(ctx: TaskContext, value: int) -> int:
            if value < 0:
                raise LookupError(f"no double of {value}")
            return ctx.step.run("only", lambda: value * 2)

        @engine.task("parent")
        def parent(ctx: TaskContext, values: list[int]) -> list[int]:
            self.passes += 1
            return ctx.step.gather("all", [Call("double", (value,)) for value in values])

        @engine.task("single")
        def single(ctx: TaskContext, value: int) -> int:
            self.passes += 1
            result: int = ctx.step.call("one", "double", value)
            return result

        @engine.task("loose")
        def loose(ctx: TaskContext, on_parent_end: str) -> str:
            child = ctx.step.spawn("one", "double", 4, on_parent_end=on_parent_end)
            ctx.step.wait_for_fact("end")
            return child

    def deliver(self, run_id: str) -> Outcome:
        """Deliver a hint of a run."""
        task = self.engine.client.get(run_id).task
        reporter = RecordingReporter(durable_tasks=Offspring(self.engine))
        return self.engine.process().deliver(run_id, task, reporter=reporter)

    def children(self) -> list[str]:
        """Return the ids of the children that are there, the first one first."""
        return [run.id for run in reversed(self.engine.client.list(task="double"))]


def make(database: Database, settings: Settings) -> Family:
    """Return a family on an engine."""
    return Family(Engine(database, settings))


@pytest.fixture
def family(database: Database, settings: Settings) -> Iterator[Family]:
    """Return a family."""
    family = make(database, settings)
    yield family
    family.engine.close()


def test_i17_a_fan_out_wakes_its_parent_once_when_all_have_ended(family: Family, conn: Connection) -> None:
    parent = family.engine.start("parent", [1, 2, 3])
    assert isinstance(family.deliver(parent), Parked)
    first, *others = family.children()

    family.deliver(first)
    family.engine.route()
    assert family.engine.state(parent) is RunState.WAITING
    for child in others:
        family.deliver(child)
    family.engine.route()
    family.engine.route()

    assert facts.unrouted(conn, limit=10) == []
    assert family.engine.state(parent) is RunState.READY
    outcome = family.deliver(parent)
    assert isinstance(outcome, Finished)
    assert outcome.value == [2, 4, 6]
    assert family.passes == 2
    assert len(family.children()) == 3


def test_i17_no_children_need_no_wait(family: Family) -> None:
    outcome = family.deliver(family.engine.start("parent", []))
    assert isinstance(outcome, Finished)
    assert outcome.value == []
    assert family.passes == 1


@pytest.mark.parametrize("statement", ["send_step", "await_children", "insert_children", "COMMIT"])
def test_i17_i24_a_lost_reply_makes_no_twin_children(
    proxied_url: str, database_proxy: Proxy, schema: str, settings: Settings, statement: str
) -> None:
    through = Settings(database_url=proxied_url, schema=schema, embedded=False, lease_seconds=settings.lease_seconds)
    database = Database(through)
    family = make(database, through)
    commit = statement == "COMMIT"
    cut = database_proxy.cut_after_commit(match=b"send_step") if commit else database_proxy.cut_reply(statement)

    assert isinstance(family.deliver(family.engine.start("parent", [1, 2])), Parked)

    assert cut.fired == 1
    assert len(family.children()) == 2
    family.engine.close()
    database.close()


def test_i17_a_call_gives_the_result_or_the_failure_of_its_child(family: Family) -> None:
    runs = [family.engine.start("single", value) for value in (4, -1)]
    for run in runs:
        family.deliver(run)
    for child in family.children():
        family.deliver(child)
    family.engine.route()
    done, failed = (family.deliver(run) for run in runs)

    assert isinstance(done, Finished)
    assert done.value == 8
    assert isinstance(failed, Finished)
    assert isinstance(failed.error, LookupError)
    assert str(failed.error) == "no double of -1"


def test_failures_of_children_are_named_together(family: Family) -> None:
    parent = family.engine.start("parent", [1, -2, -3, 4])
    family.deliver(parent)
    *others, last = family.children()
    for child in others:
        family.deliver(child)
    family.engine.client.cancel(last, reason="not wanted")
    family.engine.route()
    outcome = family.deliver(parent)

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, ChildrenFailedError)
    said = str(outcome.error)
    assert "3 of 4 children failed" in said
    for child, why in zip(others[1:], ("no double of -2", "no double of -3"), strict=True):
        assert f"double ({child}) failed: LookupError: {why}" in said
    assert f"double ({last}) was cancelled: not wanted" in said


def test_a_cancel_of_the_parent_ends_its_children(family: Family) -> None:
    parent = family.engine.start("parent", [1, 2])
    family.deliver(parent)
    family.engine.client.cancel(parent)
    family.engine.route()
    assert family.engine.state(parent) is RunState.CANCELLED
    assert {family.engine.state(child) for child in family.children()} == {RunState.CANCELLED}


def test_a_cancel_reaches_all_generations_with_no_router_alive(
    family: Family, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    @family.engine.task("grandparent")
    def grandparent(ctx: TaskContext) -> list[int]:
        ctx.step.spawn("loose", "double", 9)
        return ctx.step.gather("all", [Call("parent", ([value, value],)) for value in (1, 2)])

    monkeypatch.setattr(router, "FOLLOWED", 5)
    oldest = family.engine.start("grandparent")
    family.deliver(oldest)
    parents = [run.id for run in family.engine.client.list(task="parent")]
    for parent in parents:
        family.deliver(parent)
    abandoned, *awaited = family.children()

    family.engine.client.cancel(oldest)

    states = [family.engine.state(run_id) for run_id in (oldest, *parents, *awaited)]
    assert states[:3] == [RunState.CANCELLED] * 3
    assert sorted(states[3:]) == [RunState.CANCELLED] * 3 + [RunState.READY]  # the sixth is left to a router
    family.engine.route()
    assert [family.engine.state(run_id) for run_id in awaited] == [RunState.CANCELLED] * 4
    assert family.engine.state(abandoned) is RunState.READY


@pytest.mark.parametrize(("policy", "state"), [("abandon", RunState.READY), ("cancel", RunState.CANCELLED)])
@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_what_is_spawned_lives_on_or_ends_with_its_parent(
    family: Family, policy: str, state: RunState, end: str
) -> None:
    parent = family.engine.start("loose", policy)
    assert isinstance(family.deliver(parent), Parked)
    (child,) = family.children()
    if end == "cancel":
        family.engine.client.cancel(parent)
    else:
        family.engine.client.signal(parent, "end")
        outcome = family.deliver(parent)
        assert isinstance(outcome, Finished)
        assert outcome.value == child
    family.engine.route()
    assert family.engine.state(child) is state
    assert family.children() == [child]


@pytest.mark.parametrize(
    ("asked", "end", "said"),
    [("nothing", "cancel", "is no durable task"), ("double", "whatever", "on_parent_end must be")],
)
def test_bad_children_are_refused_before_anything_is_written(family: Family, asked: str, end: str, said: str) -> None:
    @family.engine.task("bad")
    def bad(ctx: TaskContext) -> str:
        return ctx.step.spawn("one", asked, 1, on_parent_end=end)

    outcome = family.deliver(family.engine.start("bad"))
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert said in str(outcome.error)
    assert family.children() == []


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda step: step.call("one", Call("double", (1,)), 2), "step 'one': a signature brings arguments of its own"),
        (lambda step: step.spawn("one", Call("double", (1,)), value=2), "'one': a signature brings arguments"),
        (lambda step: step.gather("all", ["double"]), "step 'all': give signatures, such as task.s(...), not 'double'"),
    ],
)
def test_arguments_that_would_be_lost_are_refused_before_anything_is_written(
    family: Family, bad: Callable[[Any], Any], said: str
) -> None:
    @family.engine.task("bad")
    def body(ctx: TaskContext) -> None:
        bad(ctx.step)

    run_id = family.engine.start("bad")
    outcome = family.deliver(run_id)

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert said in str(outcome.error)
    assert (family.children(), family.engine.client.history(run_id).steps) == ([], [])


def test_a_call_of_a_signature_is_known_by_the_arguments_it_brings(family: Family) -> None:
    given = [1]

    @family.engine.task("signed")
    def signed(ctx: TaskContext) -> Any:
        return ctx.step.call("one", Call("double", (given[0],)))

    run_id = family.engine.start("signed")
    family.deliver(run_id)
    (child,) = family.children()
    family.deliver(child)
    family.engine.route()
    given[0] = 2
    family.deliver(run_id)

    assert family.engine.client.get(run_id).reason == "nondeterminism"
