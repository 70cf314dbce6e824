"""The names of the port that other durable-task packages have, over the one mechanism: nothing here is a second one.

define_task(...)            a definition, kept apart from any app until an engine has it
TaskRegistry                the definitions of a process (umt_durable.engine.registry)
create_default_registry()   an empty one: this package ships no tasks of its own
TaskEngine.connect(...)     a `Durable` with its Celery app: enqueue, signal, cancel, get, list, start_worker, stop
OutboxRelay(durable)        the relay of a `Durable`, as a thread of this process
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self
from uuid import UUID

from celery import Celery
from celery.worker import state as worker_state

from umt_durable import codec, migrate
from umt_durable.bridge.durable import Durable
from umt_durable.engine.functions import check_function
from umt_durable.engine.registry import TaskDefinition, TaskRegistry
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import DefinitionError, UnknownTaskError
from umt_durable.records import Run
from umt_durable.services.lease import Lease
from umt_durable.services.pulse import Pulse

__all__ = ["OutboxRelay", "TaskEngine", "TaskRegistry", "create_default_registry", "define_task"]

Handler = Callable[..., Any]


def define_task(
    name: str,
    version: int = 1,
    input_schema: Any = None,
    retry_policy: RetryPolicy | None = None,
    handler: Handler | None = None,
) -> Any:
    """Return the definition of a durable task; without a handler, a decorator that makes one of its function.

    Shape: with `input_schema` (a pydantic model, a dataclass, any annotation) a run has one argument, `input`, of that
    type, and the handler is called as `handler(ctx, input)`, or as `handler(ctx)` if it takes nothing else: `ctx.input`
    holds it too, under the name `input`. Without a schema the handler's own signature says what the arguments are.
    Errors: DefinitionError.
    """
    if handler is None:
        return lambda function: define_task(name, version, input_schema, retry_policy, function)
    check_function(f"task {name!r}", "handler", handler)
    if input_schema is not None:
        codec.check_annotation(input_schema, where=f"task {name!r}: input_schema")
    body = handler if input_schema is None else _with_input(name, handler, input_schema)
    return TaskDefinition(
        name=name,
        version=version,
        body=body,
        schema=codec.InputSchema(body, task=name, skip_context=True),
        function=body,
        retry=RetryPolicy.NONE if retry_policy is None else retry_policy,
        names_retry=retry_policy is not None,
        owner=f"{handler.__module__}.{handler.__qualname__}",
    )


def create_default_registry() -> TaskRegistry:
    """Return a registry without tasks, to which an application adds its own."""
    return TaskRegistry()


class TaskEngine:
    """A `Durable` seen as a port: what an application calls when it wants no more of Celery than its workers.

    Shape: `durable` and `durable.app` are the real thing and may be used beside this.
    """

    def __init__(self, durable: Durable, registry: Iterable[TaskDefinition] = ()) -> None:
        """Give the definitions of a registry to a `Durable`.

        Errors: DuplicateTaskError.
        """
        self.durable = durable
        self._worker_ended: threading.Event | None = None
        for definition in sorted(registry, key=lambda each: (each.name, each.version)):
            _register(durable, definition)

    @classmethod
    def connect(
        cls,
        database_url: str | None = None,
        *,
        registry: Iterable[TaskDefinition] = (),
        app: Celery | None = None,
        broker_url: str | None = None,
        **settings: Any,
    ) -> Self:
        """Return an engine for a database. Nothing is migrated and no server is spoken to yet.

        Shape: `app` is a Celery app without a `Durable`; by default one is made, on CELERY_BROKER_URL or
        `broker_url`. `settings` are those of `Durable`.
        """
        app = app or Celery("umt_durable_engine", broker=broker_url)
        return cls(Durable(app, database_url=database_url, **settings), registry)

    def enqueue(self, task: str, *args: Any, **options: Any) -> str:
        """Commit a run of a task and return its id.

        Shape: `options` are those of `DurableTask.apply_async` (`conn`, `idempotency_key`, `priority`, `countdown`, …);
        arguments are positional.
        Errors: UnknownTaskError; InputError; IdempotencyConflictError; DatabaseUnavailableError.
        """
        if not self.durable.has_task(task):
            raise UnknownTaskError(task, self.durable.tasks.declared())
        return str(self.durable.app.tasks[task].apply_async(args, **options).id)

    def signal(self, run_id: str, name: str, payload: Any = None, **options: Any) -> UUID:
        """Say a fact to one run; see `Client.signal`."""
        return self.durable.signal(run_id, name, payload, **options)

    def cancel(self, run_id: str, **options: Any) -> UUID:
        """Ask that a run end as cancelled; see `Client.cancel`."""
        return self.durable.cancel(run_id, **options)

    def get(self, run_id: str) -> Run:
        """Read one run; see `Client.get`."""
        return self.durable.client.get(run_id)

    def list(self, **filters: Any) -> Sequence[Run]:
        """Read a page of runs; see `Client.list`."""
        return self.durable.client.list(**filters)

    def migrate(self) -> str:
        """Bring the schema to the revision of this code and return it."""
        return migrate.migrate_engine_schema(self.durable.database.url, self.durable.settings.schema)

    def start_worker(self, versions: Sequence[str] | None = None, *, options: Sequence[str] = ()) -> None:
        """Be a Celery worker for these tasks, and return when it has ended.

        Shape: it is `celery worker` in this process and needs the main thread, since it takes over the signals.
        SIGTERM, Ctrl-C or a `stop` from another thread end it warmly. `versions` are `task@version` texts, `task` for
        all its versions or patterns such as `import_*`, and then only these are executed here; without them, all.
        `options` are those of `celery worker`: `["-P", "threads"]`.
        Errors: UnknownTaskError for a version that is not registered; DefinitionError outside the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise DefinitionError("start_worker needs the main thread; start `celery worker` in a process of its own")
        given = [] if versions is None else [f"--versions={self._chosen(versions)}"]
        self._worker_ended = ended = threading.Event()
        streams = sys.stdout, sys.stderr  # Celery puts its log in their place
        try:
            self.durable.app.worker_main(["worker", *given, *options])
        finally:
            sys.stdout, sys.stderr = streams
            ended.set()

    def stop(self) -> None:
        """End the worker of `start_worker`, once its tasks have ended, and close the connections. May be repeated."""
        ended, self._worker_ended = self._worker_ended, None
        if ended is not None and not ended.is_set():
            worker_state.should_stop = 0
            if threading.current_thread() is not threading.main_thread():
                ended.wait()
        self.durable.stop()

    def _chosen(self, versions: Sequence[str]) -> str:
        """Return the option that has the worker take these versions alone, once it is known that there are such."""
        text = ",".join(versions)
        self.durable.take_versions(text)
        return text


class OutboxRelay:
    """The relay of a `Durable`, as a thread of this process."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._pulse: Pulse = durable.services(relay=True, maintenance=False)
        self._lease: Lease | None = None

    def start(self) -> None:
        """Start to publish what the outbox holds. Other processes see this relay, and the routes it has."""
        if self._lease is None:
            declared = ["@relay", *self._durable.declared_routes()]
            durable = self._durable
            self._lease = Lease(durable.database, durable.settings, node=durable.node, versions=declared)
            self._lease.start()
        self._pulse.start()

    def stop(self) -> None:
        """End after the batch under way."""
        self._pulse.stop()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.stop()


def _register(durable: Durable, definition: TaskDefinition) -> None:
    """Make a Celery task of a definition."""
    declare = durable.task(
        name=definition.name,
        version=definition.version,
        retry=definition.retry if definition.names_retry else None,
        raises=definition.raises,
        on_mismatch=definition.on_mismatch,
    )
    declare(definition.function)


def _with_input(name: str, handler: Handler, schema: Any) -> Handler:
    """Return a body with one argument, `input`, of the type that a schema says."""
    parameters = list(inspect.signature(handler).parameters.values())
    takes_input = len(parameters) > 1 or any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)

    def body(ctx: Any, input: Any) -> Any:
        return handler(ctx, input) if takes_input else handler(ctx)

    result = codec.return_annotation(handler)
    body.__annotations__ = {"ctx": Any, "input": schema}
    if result is not codec.EMPTY:
        body.__annotations__["return"] = result
    body.__module__, body.__qualname__, body.__name__ = handler.__module__, handler.__qualname__, handler.__name__
    body.__doc__ = handler.__doc__ or f"{name}, a durable task."
    return body
