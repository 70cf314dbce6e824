"""What a start says of its run, before anything is written: its version, and how large its arguments are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain

from umt_durable import Durable, TaskContext
from umt_durable.bridge import sending
from umt_durable.bridge.enqueuing import LARGE_INPUT_BYTES, run_of
from umt_durable.bridge.offspring import ChildTasks
from umt_durable.errors import DefinitionError, UnknownTaskError


@pytest.fixture
def task() -> Iterator[Any]:
    """Return a task in two versions, of which the second takes an argument more."""
    app = Celery("starting", broker="memory://", set_as_current=False)
    durable = Durable(app, database_url="postgresql://127.0.0.1:1/nowhere")

    @durable.task(name="starting.t", version=1)
    def first(ctx: TaskContext, text: str) -> str:
        return text

    @durable.task(name="starting.t", version=2)
    def second(ctx: TaskContext, text: str, more: str = "") -> bytes:
        return (text + more).encode()

    yield second
    durable.stop()
    app.close()


def version(task: Any, **options: Any) -> int | None:
    """Return the version of the run that a start would make."""
    run = run_of(lambda: task.apply_async(("a",), **options))
    assert run is not None
    return run.version


def test_f4_a_run_takes_the_highest_version_or_the_one_that_its_start_names(task: Any) -> None:
    assert version(task) == 2
    assert version(task, version=1) == 1
    signed = run_of(lambda: task.s("a").set(version=1).apply_async())
    assert signed is not None
    assert signed.version == 1


def test_f4_a_version_that_is_not_there_starts_nothing(task: Any) -> None:
    with pytest.raises(UnknownTaskError, match=r"starting\.t@3"):
        version(task, version=3)
    with pytest.raises(DefinitionError, match="whole number"):
        version(task, version="1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"countdown": "5"}, "countdown must be seconds, at most 36500 days, not '5'"),
        ({"countdown": math.nan}, "countdown must be seconds, at most 36500 days, not nan"),
        ({"countdown": True}, "countdown must be seconds"),
        ({"countdown": timedelta(hours=1)}, "countdown must be seconds"),
        ({"eta": "soon"}, "eta must be a datetime or ISO 8601 text, not 'soon'"),
        ({"eta": 5}, "eta must be a datetime or ISO 8601 text, not 5"),
        ({"expires": "5"}, "expires must be a datetime or ISO 8601 text, not '5'"),
        ({"expires": math.inf}, "expires must be seconds, at most 36500 days, not inf"),
        ({"eta": "9999-12-31T23:59:59-05:00"}, "eta must be a datetime or ISO 8601 text"),
        ({"priority": "high"}, "priority must be a whole number, not 'high'"),
        ({"priority": 1.5}, "priority must be a whole number, not 1.5"),
        ({"headers": [1]}, r"headers must be a dict with text keys, not \[1\]"),
        ({"headers": {1: 2}}, "headers must be a dict with text keys"),
        ({"exchange": 5}, "exchange must be a name or an Exchange, not 5"),
    ],
    ids=str,
)
def test_an_option_that_no_call_can_have_is_a_typed_error_that_names_it(
    task: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DefinitionError, match=rf"starting\.t: {said}"):
        run_of(lambda: task.apply_async(("a",), **options))


@pytest.mark.parametrize("options", [{"countdown": "5"}, {"eta": "soon"}, {"expires": "5"}, {"priority": 1.5}], ids=str)
def test_an_ordinary_task_is_kept_with_options_that_it_can_have(task: Any, options: dict[str, Any]) -> None:
    first, wrong = task.app.signature("plain.first"), task.app.signature("plain.label", ("a",)).set(**options)
    with pytest.raises(DefinitionError, match=rf"plain\.label: {next(iter(options))} must be"):
        sending.pack(task.app, chain(first, wrong), uuid4())
    with pytest.raises(DefinitionError, match=rf"plain\.label: {next(iter(options))} must be"):
        sending.pack(task.app, wrong, uuid4())


def test_what_celery_takes_as_nothing_said_or_as_a_number_is_taken(task: Any) -> None:
    taken: list[dict[str, Any]] = [{"countdown": False}, {"countdown": 0}, {"headers": []}, {"priority": "5"}]
    for options in taken:
        assert run_of(lambda options=options: task.apply_async(("a",), **options)) is not None  # type: ignore[misc]


def test_a_callback_is_checked_with_its_task(task: Any) -> None:
    linked = task.app.signature("plain.first").set(link=task.app.signature("plain.label").set(countdown="5"))
    with pytest.raises(DefinitionError, match=r"plain\.label: countdown must be seconds"):
        sending.pack(task.app, linked, uuid4())


def test_an_expiry_of_the_call_replaces_the_tasks_own(task: Any) -> None:
    durable = task.app.umt_durable

    @durable.task(name="starting.expiring", expires=3600)
    def expiring(ctx: TaskContext) -> None: ...

    durable.app.finalize()
    for given, expected in ((None, (None, None)), (10, (None, 10.0))):
        run = run_of(lambda given=given: durable.app.send_task("starting.expiring", expires=given))  # type: ignore[misc]
        assert run is not None
        assert (run.expires_at, run.expires_seconds) == expected
    own = run_of(lambda: durable.app.send_task("starting.expiring"))
    assert own is not None
    assert own.expires_at is not None


def test_times_of_a_call_are_read_in_the_zone_of_the_app(task: Any) -> None:
    task.app.conf.timezone = "Europe/Berlin"
    run = run_of(
        lambda: task.apply_async(("a",), eta="2026-07-01T12:00:00", expires=datetime.fromisoformat("2026-07-02T12:00"))
    )
    assert run is not None
    assert run.wake_at == datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert run.expires_at == datetime(2026, 7, 2, 10, tzinfo=UTC)


def test_f4_a_child_of_its_parents_own_task_takes_the_parents_version_unless_told(task: Any) -> None:
    durable = task.app.umt_durable

    @durable.task(name="starting.other", version=2)
    def other(ctx: TaskContext, text: str) -> str:
        return text

    def planned(parent: str, call: Any, args: tuple[Any, ...] = ()) -> int | None:
        children = ChildTasks(durable, parent)
        children.claimed(1)
        return children.plan(call, args, {}, "id", "step").version

    assert planned("starting.t", task, ("a",)) == 1
    assert planned("starting.t", "starting.t", ("a",)) == 1
    assert planned("starting.t", task.s("a")) == 1
    assert planned("starting.t", task.s("a", more="b").set(version=2)) == 2
    assert planned("starting.t", other, ("a",)) == 2, "each task counts its own versions"
    assert planned("starting.other", task, ("a",)) == 2
    with pytest.raises(UnknownTaskError, match=r"starting\.t@3"):
        planned("starting.t", task.s("a").set(version=3))


def test_f4_the_result_of_a_child_is_typed_by_the_version_it_takes(task: Any) -> None:
    children = ChildTasks(task.app.umt_durable, "starting.t")
    assert children.annotation(task) is bytes
    children.claimed(1)
    assert children.annotation(task) is str
    assert children.annotation(task.s("a").set(version=2)) is bytes
    assert children.annotation(task.s("a").set(version=7)) is bytes, (
        "a child of a version that was drained is read back"
    )


def test_e1_large_arguments_are_reported_once_a_task(task: Any, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("an id", "x" * LARGE_INPUT_BYTES, "y" * LARGE_INPUT_BYTES):
        assert run_of(lambda text=text: task.apply_async((text,))) is not None  # type: ignore[misc]

    told = [record.getMessage() for record in caplog.records if "arguments" in record.getMessage()]
    assert told == ["starting.t is started with 64 KiB of arguments: give ids, and have a step read the rows"]
