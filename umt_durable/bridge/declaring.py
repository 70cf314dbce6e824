"""How functions and existing Celery tasks become durable tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from celery.exceptions import Ignore, Reject, Retry
from celery.utils.functional import head_from_fun

from umt_durable import codec
from umt_durable.bridge.mapping import take_over_maps
from umt_durable.bridge.task import DurableTask
from umt_durable.bridge.values import argument, result_of
from umt_durable.engine.context import current_context
from umt_durable.engine.exits import Released, Replaced
from umt_durable.engine.failures import is_recorded
from umt_durable.engine.registry import OnMismatch, TaskDefinition
from umt_durable.engine.replay import StepKey
from umt_durable.engine.retry import RetryAfter, RetryPolicy
from umt_durable.errors import DefinitionError

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable

RETRIES: Final = ("durable_retry", "autoretry_for", "max_retries")
"""The attributes by which an existing task names when it is tried again."""

REJECTED = "umt.rejected"
"""The step that says that a body has put its message back into the queue."""

BY_CELERY = RetryPolicy(1_000_000, retry_on=RetryAfter)
"""The policy of an existing task: Celery's `self.retry()` and `autoretry_for` decide, and count, by themselves."""


_VALUES = (str, int, float, bool, bytes, dict, list, tuple, set, Decimal, UUID, datetime, date)
_PLAIN: Final = frozenset(one.__name__ for one in _VALUES)
"""Types by name, as annotations may be text: what values are declared as, and a context never is."""


def declare(
    durable: Durable,
    body: Callable[..., Any],
    *,
    name: str | None,
    version: int,
    retry: RetryPolicy | None,
    raises: Sequence[type[Exception]],
    on_mismatch: OnMismatch,
    options: Mapping[str, Any],
) -> Any:
    """Make a durable task of a function that takes the context first; of several versions Celery has the highest.

    Errors: DuplicateTaskError; DefinitionError.
    """
    _check_context(body)
    app = durable.app
    task_name = name or app.gen_task_name(body.__name__, body.__module__)
    _check_raises(task_name, raises)
    known = durable.tasks.versions(task_name)
    durable.tasks.add(
        TaskDefinition(
            name=task_name,
            version=version,
            body=body,
            schema=codec.InputSchema(body, task=task_name, skip_context=True),
            function=body,
            retry=RetryPolicy.NONE if retry is None else retry,
            names_retry=retry is not None,
            limit_seconds=options.get("time_limit"),
            raises=tuple(raises),
            on_mismatch=on_mismatch,
            owner=f"{body.__module__}.{body.__qualname__}",
        )
    )
    if known and version < max(known):
        return app.tasks[task_name]
    if known:
        app.tasks.unregister(task_name)
    return app.task(
        body,
        name=task_name,
        base=DurableTask,
        shared=False,  # Celery would register it with every other app of the process, which has no Durable
        durable_version=version,
        durable_takes_context=True,
        # As if it were bound, without the context: by it Celery tells errbacks that take an id from others.
        __header__=head_from_fun(body, bound=True),
        **options,
    )


def _check_raises(task: str, raises: object) -> None:
    """Refuse what are no exception classes."""
    given = raises if isinstance(raises, list | tuple | set | frozenset) else (None,)
    if not all(isinstance(one, type) and issubclass(one, Exception) for one in given):
        raise DefinitionError(f"{task}: raises is a list of exception classes, not {raises!r:.100}")


def _check_context(body: Callable[..., Any]) -> None:
    """Refuse a body whose first parameter is declared as something that is no context."""
    first = next(iter(inspect.signature(body).parameters.values()), None)
    declared = None if first is None else getattr(first.annotation, "__name__", first.annotation)
    if isinstance(declared, str) and declared in _PLAIN:
        raise DefinitionError(
            f"{body.__qualname__}: the first parameter of a durable task is its TaskContext, and not {first}"
        )


def adopt(durable: Durable, task: Any) -> None:
    """Register a task class that derives from DurableTask, once Celery has bound it."""
    if task.name is None or task.__dict__.get("abstract"):
        return
    task.tracks_started = bool(durable.app.conf.task_track_started)
    task.track_started = False  # the tracer would store it before the claim, over the outcome of a faster attempt
    if durable.tasks.has(task.name):
        return
    run = inspect.getattr_static(task, "run")
    function = run.__func__ if isinstance(run, staticmethod) else run
    durable.tasks.add(
        TaskDefinition(
            name=task.name,
            version=task.durable_version,
            body=partial(_run, durable.app, task.name),
            schema=codec.InputSchema(function, task=task.name, skip_context=function is run),
            function=function,
            takes_context=False,
            retry=getattr(task, "durable_retry", BY_CELERY),
            names_retry=any(name in vars(one) for one in _own_classes(task) for name in RETRIES),
            limit_seconds=task.time_limit,
            on_mismatch=task.durable_on_mismatch,
            carry=argument,
            checks_calls=durable.app.strict_typing and task.__dict__.get("typing", True) is not False,
            owner=f"{task.__module__}.{task.__qualname__}",
        )
    )


def _own_classes(task: type) -> list[type]:
    """Return the classes of a task that are not Celery's and not of this package."""
    return [one for one in task.__mro__ if one not in DurableTask.__mro__]


def _run(app: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call what an existing task does, bound to its instance, with the wrappers Celery put around it.

    Its `self.retry()` becomes a durable retry of the run, and what it returns is what Celery would have stored.
    """
    redelivered = _note_redelivery(app.tasks[name].request)
    try:
        value = app.tasks[name].run(*args, **kwargs)
    except Ignore:
        current_context()._pass.leave(Replaced())  # Celery stores nothing then, and nothing follows
    except Reject as error:
        if not error.requeue:
            raise
        if not redelivered:
            current_context().step.value(REJECTED, lambda: True, bool)
        current_context()._pass.leave(Released())
    except Retry as error:
        if is_recorded(error.exc):
            raise error.exc from None  # a replay would meet the same record: final, whatever the task's own count says
        wait = error.when
        seconds = (wait - app.now()).total_seconds() if isinstance(wait, datetime) else float(wait or 0)
        raise RetryAfter(max(0.0, seconds), str(error)) from error.exc
    return result_of(app.umt_durable.tasks.get(name), value)


def _note_redelivery(request: Any) -> bool:
    """Say in the request, as brokers do, that the message was handed out before and rejected; return whether it was."""
    context = current_context()
    if StepKey(REJECTED, None, 1).text not in context._pass.journal:
        return False
    context.step.value(REJECTED, lambda: True, bool)
    request.delivery_info = {**(request.delivery_info or {}), "redelivered": True}
    return True


def take_over_tasks(durable: Durable) -> None:
    """Adopt the tasks that were bound before the `Durable` was made; take over Celery's maps once the app has them."""
    app = durable.app
    for task in list(app._tasks.values()):
        if isinstance(task, DurableTask) and not task.is_ordinary:
            adopt(durable, type(task))
    if app.finalized:
        take_over_maps(durable, app)
    else:
        app.on_after_finalize.connect(lambda **_: take_over_maps(durable, app), weak=False)
