"""The durable tasks that bring the answers of awaited tasks back.

They are the link and the errback of an awaited task. A worker without this package publishes them by name; their
message is then foreign and is taken in as a run, once, however often it comes. What they are told is believed only with
the token of the step they name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from celery import current_task

from umt_durable import codec
from umt_durable.bridge import ordinary
from umt_durable.bridge.task import DurableTask, durable_of
from umt_durable.engine import failures
from umt_durable.engine.answers import Answer, Place, bring
from umt_durable.engine.context import TaskContext
from umt_durable.engine.registry import TaskDefinition
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import EncodingError

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable


UNTIL_BROUGHT: Final = RetryPolicy(1_000_000, initial=timedelta(seconds=1), maximum=timedelta(minutes=1))


class Receiver(DurableTask):
    """A durable task of ours whose result nobody asks for."""

    abstract = True
    ignore_result = True


class FailureReceiver(Receiver):
    """The errback. A worker with this package calls it with the exception itself, which it then takes along."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute a delivery; called as an errback, start the run that brings the failure."""
        if len(args) == 3 and not isinstance(args[0], TaskContext):
            request, error, trace = args
            failure = ordinary.raised_failure(error, trace).to_bytes().decode()
            place = Place(kwargs["run"], kwargs["nesting"], kwargs["step"], kwargs.get("generation", 0))
            return self.apply_async(
                (str(request.id),),
                {**kwargs, "failure": failure},
                task_id=place.receiver(self.name),
                queue=kwargs.get("queue") or None,
            )
        return super().__call__(*args, **kwargs)


def install(durable: Durable) -> None:
    """Declare the receivers for an app. An app that has them already keeps them."""
    _declare(durable, ordinary.ANSWERED, _answered, Receiver, _answered)
    _declare(durable, ordinary.FAILED, _failed, FailureReceiver, _errback)


def _answered(
    ctx: TaskContext,
    value: Any = None,
    run: str = "",
    nesting: int = 0,
    step: str = "",
    token: str = "",
    generation: int = 0,
) -> bool:
    return _bring(ctx, Place(run, nesting, step, generation), token, Answer(value))


def _failed(
    ctx: TaskContext,
    task_id: str = "",
    run: str = "",
    nesting: int = 0,
    step: str = "",
    token: str = "",
    queue: str = "",
    failure: str | None = None,
    generation: int = 0,
) -> bool:
    """Bring a failure: what the worker handed over, or, where it knows us by name only, what the result backend has."""
    if failure is not None:
        found = Answer(failure=failures.from_bytes(failure.encode()))
    else:
        looked = ordinary.look(current_task.app, task_id)
        known = looked is not None and looked.failure is not None
        found = looked if looked is not None and known else Answer(failure=ordinary.unread_failure(task_id))
    return _bring(ctx, Place(run, nesting, step, generation), token, found)


def _errback(request: Any, error: Any, trace: Any, **said: Any) -> None:
    """Have the parameters by which Celery knows an errback that takes the exception."""


def _bring(ctx: TaskContext, place: Place, token: str, answer: Answer) -> bool:
    durable = durable_of(current_task.app)
    try:
        return bring(durable.database, durable.settings, place, token=token, answer=answer, by=ctx.run_id)
    except EncodingError as error:
        refused = Answer(failure=failures.capture(error))
        return bring(durable.database, durable.settings, place, token=token, answer=refused, by=ctx.run_id)


def _declare(durable: Durable, name: str, body: Any, base: type[DurableTask], header: Any) -> None:
    durable.tasks.add(
        TaskDefinition(
            name=name,
            version=1,
            body=body,
            schema=codec.InputSchema(body, task=name, skip_context=True),
            function=body,
            retry=UNTIL_BROUGHT,
            owner=f"{body.__module__}.{body.__qualname__}",
        )
    )
    durable.app.task(
        body,
        name=name,
        base=base,
        shared=False,
        durable_version=1,
        durable_takes_context=True,
        ignore_result=True,
        __header__=staticmethod(header),
    )
