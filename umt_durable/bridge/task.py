"""The Celery task class of durable tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from celery import Task

from umt_durable.bridge.deliver import is_settled
from umt_durable.bridge.replacing import leave_for
from umt_durable.bridge.request import DurableRequest
from umt_durable.bridge.storing import guarded
from umt_durable.bridge.strategy import STRATEGY
from umt_durable.engine.async_calls import in_thread
from umt_durable.engine.context import TaskContext, current_context, has_context
from umt_durable.engine.registry import OnMismatch
from umt_durable.errors import ConfigurationError

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from umt_durable.bridge.durable import Durable


CELERYS_OWN = "celery."
"""How the names of Celery's own tasks begin; these are never durable."""


class DurableTask(Task):
    """A Celery task whose calls are runs in Postgres.

    `@durable.task` makes these; existing tasks take it as `@app.task(base=DurableTask, bind=True)` and reach their
    context by `current_context()`. A body that calls no step is one step.
    """

    abstract = True
    Request = f"{DurableRequest.__module__}:{DurableRequest.__qualname__}"
    Strategy = STRATEGY

    # The row is the truth and the Request acks; these keep Celery's own handling out of the way.
    acks_late = True
    reject_on_worker_lost = True
    retry_on_worker_lost = False
    track_started = False
    typing = False  # arguments are validated by the task's own schema, which names the field

    durable_version: int = 1
    durable_takes_context: bool = False
    durable_on_mismatch: OnMismatch = "park"
    tracks_started: bool = False
    is_ordinary: bool = False
    """Whether the task only has this class because its app makes all tasks of it: Celery's own stay what they are."""

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Register the task with the app's `Durable` once Celery has bound it.

        An app without one is left alone: a shared task is bound to every app of its process, and a `Durable` that is
        made later looks for what was bound before.
        """
        if cls.name is not None and cls.name.startswith(CELERYS_OWN):
            _make_ordinary(cls, app)
        elif getattr(app, "umt_durable", None) is not None:
            durable_of(app).adopt(cls)

    @property
    def backend(self) -> Any:
        """The result backend, which stores what a run ended in, and nothing else for it."""
        return guarded(super().backend)

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute one delivery. Called directly it is the plain function, as Celery's tasks are.

        A task that takes a context gets that of the durable body that calls it, whose journal it then writes to; called
        from elsewhere it is executed here as a run of its own, as by `apply`.
        Errors: DurableError when such a run is parked.
        """
        request = self.request
        inside = has_context() and current_context().run_id == request.id
        if not (self.is_ordinary or request.called_directly or inside or is_settled(request)):
            return durable_of(self.app).perform(self, request, args, kwargs)
        if not self.durable_takes_context or (args and isinstance(args[0], TaskContext)):
            return super().__call__(*args, **kwargs)
        if has_context():
            return super().__call__(current_context(), *args, **kwargs)
        return self.apply(args, kwargs, throw=True).get(disable_sync_subtasks=False)

    def on_replace(self, sig: Any) -> Any:
        """End the current run in favour of a signature; see Celery's `replace`, which calls this.

        Keeps: the run ends and its successor begins, or is kept in the outbox, in one transaction.
        """
        request = self.request
        if request.is_eager:
            return sig.apply().get(disable_sync_subtasks=False)  # Celery's own refuses to wait inside an eager call
        if not has_context() or current_context().run_id != request.id:
            return super().on_replace(sig)
        return leave_for(durable_of(self.app), sig)

    def enqueue(
        self,
        *args: Any,
        conn: object = None,
        idempotency_key: str | None = None,
        idempotency_ttl: float | timedelta | None = None,
        idempotency_policy: Literal["attach", "reject"] = "attach",
        ref: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncResult:
        """Start a run with these arguments; with `conn` it exists if and only if the caller commits (I2).

        Shape: `conn` is a SQLAlchemy Session or Connection, or a psycopg Connection, with a transaction open. The same
        `idempotency_key` gives the same run, or with `idempotency_policy="reject"` an error; `ref` and `attributes`
        are for the user's own look-ups. Celery's options (queue, priority, countdown …) are for `apply_async`, which
        takes these names as well.
        Units: `idempotency_ttl` is a timedelta or seconds; without it a key is kept for ever.
        Errors: InputError names each argument that is refused; IdempotencyConflictError; RunExistsError;
        AutocommitError; DatabaseUnavailableError.
        """
        return self.apply_async(
            args,
            kwargs,
            conn=conn,
            idempotency_key=idempotency_key,
            idempotency_ttl=idempotency_ttl,
            idempotency_policy=idempotency_policy,
            ref=ref,
            attributes=attributes,
        )

    async def aenqueue(
        self,
        *args: Any,
        conn: object = None,
        idempotency_key: str | None = None,
        idempotency_ttl: float | timedelta | None = None,
        idempotency_policy: Literal["attach", "reject"] = "attach",
        ref: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncResult:
        """Start a run from an asyncio program; see `enqueue`.

        Shape: `conn` is a SQLAlchemy AsyncSession or AsyncConnection, with any driver, or a psycopg AsyncConnection,
        with a transaction open, or what `enqueue` takes.
        """
        return await in_thread(
            lambda own: self.apply_async(
                args,
                kwargs,
                conn=own,
                idempotency_key=idempotency_key,
                idempotency_ttl=idempotency_ttl,
                idempotency_policy=idempotency_policy,
                ref=ref,
                attributes=attributes,
            ),
            conn,
        )

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Start a run as Celery's `apply_async` does; it is committed when this returns, with no broker involved.

        Errors: as `enqueue`.
        """
        durable = durable_of(self.app)
        with durable.enqueuing(options):
            return super().apply_async(
                args,
                kwargs,
                task_id=task_id,
                producer=producer,
                link=link,
                link_error=link_error,
                shadow=shadow,
                **options,
            )

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Start a run with these arguments."""
        return self.apply_async(args, kwargs)


def durable_of(app: Any) -> Durable:
    """Return the `Durable` of an app.

    Errors: ConfigurationError where there is none.
    """
    durable = getattr(app, "umt_durable", None)
    if durable is None:
        raise ConfigurationError(f"the Celery app {app.main!r} has durable tasks but no `Durable(app)`")
    return cast("Durable", durable)


def _make_ordinary(task: type[DurableTask], app: Any) -> None:
    """Give a task of Celery's own what Celery's task class would have given it."""
    task.is_ordinary = True
    task.Request, task.Strategy = Task.Request, Task.Strategy
    task.acks_late, task.reject_on_worker_lost = app.conf.task_acks_late, app.conf.task_reject_on_worker_lost
    task.retry_on_worker_lost = app.conf.get("task_retry_on_worker_lost")
    task.track_started = app.conf.task_track_started
    task.typing = app.strict_typing
