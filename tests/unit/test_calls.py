"""Whether tasks take the arguments they are to get: each of a signature's, with what the task before it gives."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain, chord, group

from umt_durable.bridge import calls
from umt_durable.errors import InputError


@pytest.fixture
def app() -> Celery:
    app = Celery("calls", broker="memory://", set_as_current=False)

    @app.task(name="label", shared=False)
    def label(order: str, copies: int = 1) -> None: ...

    @app.task(name="bound", bind=True, shared=False)
    def bound(self: Any, order: str) -> None: ...

    @app.task(name="loose", typing=False, shared=False)
    def loose(order: str) -> None: ...

    return app


def test_calls_that_fit_pass(app: Celery) -> None:
    label, bound, loose = (app.tasks[name] for name in ("label", "bound", "loose"))
    for fits in (
        label.s("A"),
        label.s("A", copies=2),
        bound.s("A"),
        loose.s(),
        app.signature("unknown", (1, 2, 3)),
        chain(label.s("A"), bound.s()),
        chain(label.s("A"), label.si("B")),
        chord([label.s("A"), bound.s("B")], label.s(copies=2)),
        chain(label.s("A"), group(label.s(), bound.s()), label.s()),
        chain(label.s("A"), group(label.s(), label.s(2))),
    ):
        calls.check_all(app, fits, step="print")


@pytest.mark.parametrize(
    ("make", "task", "field"),
    [
        (lambda label, bound: label.s(), "label", "order"),
        (lambda label, bound: label.s("A", pages=2), "label", "pages"),
        (lambda label, bound: label.s("A", order="B"), "label", "order"),
        (lambda label, bound: label.s("A", 1, 2), "label", "arguments"),
        (lambda label, bound: bound.s(), "bound", "order"),
        (lambda label, bound: chain(label.s("A"), bound.si()), "bound", "order"),
        (lambda label, bound: chain(label.s("A"), bound.s("B")), "bound", "arguments"),
        (lambda label, bound: chord([label.s("A"), label.s()], bound.s()), "label", "order"),
        (lambda label, bound: chord([label.s("A"), label.s("B")], bound.s("C")), "bound", "arguments"),
        (lambda label, bound: chain(label.s("A"), group(label.s(), label.s(1, 2))), "label", "arguments"),
    ],
)
def test_calls_that_do_not_fit_are_refused_by_step_task_and_argument(
    app: Celery, make: Any, task: str, field: str
) -> None:
    with pytest.raises(InputError, match=rf"step 'print': arguments of {task} refused: {field}: ") as refused:
        calls.check_all(app, make(app.tasks["label"], app.tasks["bound"]), step="print")

    assert (refused.value.step, refused.value.task) == ("print", task)
    assert [problem[0] for problem in refused.value.problems] == [field]
