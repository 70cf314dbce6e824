"""What a start says of its run, before anything is written: its version, and how large its arguments are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from umt_durable import Durable, TaskContext
from umt_durable.bridge.enqueuing import LARGE_INPUT_BYTES, run_of
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
    def second(ctx: TaskContext, text: str, more: str = "") -> str:
        return text + more

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


def test_e1_large_arguments_are_reported_once_a_task(task: Any, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("an id", "x" * LARGE_INPUT_BYTES, "y" * LARGE_INPUT_BYTES):
        assert run_of(lambda text=text: task.apply_async((text,))) is not None  # type: ignore[misc]

    told = [record.getMessage() for record in caplog.records if "arguments" in record.getMessage()]
    assert told == ["starting.t is started with 64 KiB of arguments: give ids, and have a step read the rows"]
