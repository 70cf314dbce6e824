"""A pytest plug-in that makes every task of Celery's suite durable, and suspends each run once on its first delivery.

The suite's apps come from `celery.contrib.testing`: each gets a `Durable` and a task class of ours. Its tasks are
shared ones, which follow the class of the app; those with a class of their own derive from `celery.Task`, which is ours
as well, as if their author had changed that import.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from typing import Any

import celery
from celery.contrib.testing import app as testing

from umt_durable import Durable, DurableTask, TaskContext, current_context
from umt_durable.engine.context import has_context

NAP = timedelta(milliseconds=10)

_suspended: ContextVar[TaskContext | None] = ContextVar("celery_suite.suspended", default=None)


class SuspendingTask(DurableTask):
    """A durable task whose run is parked before its own body begins."""

    abstract = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        run = cls.__dict__.get("run")
        if isinstance(run, staticmethod):
            cls.run = staticmethod(suspending(run.__func__))
        elif run is not None:
            cls.run = suspending(run)


def suspending(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a body that parks its run first, once: on the next delivery the wait's end stands in the journal."""

    @wraps(body)
    def first_suspend(*args: Any, **kwargs: Any) -> Any:
        suspend_once()
        return body(*args, **kwargs)

    return first_suspend


def suspend_once() -> None:
    """Park the run that is delivered here, unless this pass has done so: a body may call other tasks as functions.

    A task that is called directly or eagerly has no delivery to suspend.
    """
    if not has_context() or celery.current_task.request.is_eager:
        return
    context = current_context()
    if _suspended.get() is not context:
        _suspended.set(context)
        # A sleep so short would not park: this waits for a fact that nobody says, and a timer of the journal wakes it.
        context.step.wait_for_fact("celery-suite-first-delivery", timeout=NAP, default=None)


def make_durable(make_app: Callable[..., Any]) -> Callable[..., Any]:
    """Return a maker of test apps whose apps are durable until they are closed."""

    @wraps(make_app)
    def make(*args: Any, **options: Any) -> Any:
        app = make_app(*args, **{"task_cls": SuspendingTask, **options})
        durable = Durable(app)
        close = app.close

        def stop_and_close() -> None:
            durable.stop()
            close()

        app.close = stop_and_close
        return app

    return make


celery.Task = SuspendingTask
testing.TestApp = make_durable(testing.TestApp)
