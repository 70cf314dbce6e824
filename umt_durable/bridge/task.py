"""The Celery task class of durable tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from celery import Task
from celery.exceptions import Ignore

from umt_durable.bridge.request import DurableRequest
from umt_durable.bridge.strategy import STRATEGY
from umt_durable.engine.context import has_context
from umt_durable.errors import ConfigurationError

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from umt_durable.bridge.durable import Durable


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
    tracks_started: bool = False

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Register the task with the app's `Durable` once Celery has bound it."""
        durable_of(app).adopt(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute one delivery; called directly, or by a durable body, it is the plain function."""
        request = self.request
        if request.called_directly or has_context():
            return self.run(*args, **kwargs)
        return durable_of(self.app).perform(self, request, args, kwargs)

    def enqueue(
        self,
        *args: Any,
        conn: object = None,
        idempotency_key: str | None = None,
        idempotency_ttl: float | None = None,
        ref: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncResult:
        """Start a run with these arguments; with `conn` it exists if and only if the caller commits (I2).

        Shape: `conn` is a SQLAlchemy Session or Connection, or a psycopg Connection, with a transaction open. The same
        `idempotency_key` gives the same run; `ref` and `attributes` are for the user's own look-ups. Celery's options
        (queue, priority, countdown …) are for `apply_async`, which takes these names as well.
        Units: `idempotency_ttl` is in seconds; without it a key is kept for ever.
        Errors: InputError names each argument that is refused; IdempotencyConflictError; AutocommitError;
        DatabaseUnavailableError.
        """
        return self.apply_async(
            args,
            kwargs,
            conn=conn,
            idempotency_key=idempotency_key,
            idempotency_ttl=idempotency_ttl,
            ref=ref,
            attributes=attributes,
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


def ignore(reason: str) -> Ignore:
    """Return what a delivery raises that is neither an outcome nor an error for Celery."""
    return Ignore(reason)
