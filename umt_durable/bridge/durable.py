"""`Durable(app)`: durable execution for one Celery app."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, overload
from uuid import UUID, uuid4

from celery import Celery, signals
from celery.utils.log import get_logger

from umt_durable import codec, migrate, redaction, tracing
from umt_durable.bridge import deliver, enqueuing, receivers, revoke
from umt_durable.bridge.async_verbs import AsyncVerbs
from umt_durable.bridge.bootsteps import install
from umt_durable.bridge.declaring import adopt, declare, take_over_tasks
from umt_durable.bridge.dispatch import CeleryDispatcher
from umt_durable.bridge.eager import perform_eagerly
from umt_durable.bridge.incidents import IncidentThread
from umt_durable.bridge.leaving import Watch, is_leaving
from umt_durable.bridge.logs import redact_worker_logs
from umt_durable.bridge.main_process import MainLease, handle_incident, reserved_hints
from umt_durable.bridge.message import TaskMessage
from umt_durable.bridge.outbox import Outbox
from umt_durable.bridge.pausing import PauseVerbs
from umt_durable.bridge.publisher import Publisher
from umt_durable.bridge.reporter import CeleryReporter
from umt_durable.bridge.runtime import NODE_VARIABLE, VERSIONS_VARIABLE
from umt_durable.bridge.runtime import Delivery as MainDelivery
from umt_durable.bridge.sealing import vault_of
from umt_durable.bridge.spawned import worker_app
from umt_durable.bridge.task import DurableTask
from umt_durable.bridge.typed import AsyncBody, Body, DurableTaskOf, P, R, TaskMaker
from umt_durable.database import Database
from umt_durable.engine.client import Client, History
from umt_durable.engine.executor import Executor
from umt_durable.engine.explaining import Explanation
from umt_durable.engine.ops import Ops
from umt_durable.engine.registry import OnMismatch, TaskRegistry
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.waitables import MISSING
from umt_durable.errors import (
    ConfigurationError,
    DatabaseUnavailableError,
    DecodingError,
    DefinitionError,
    PayloadKeyError,
)
from umt_durable.records import Run
from umt_durable.redaction import redact_url
from umt_durable.services import events
from umt_durable.services.intake import take_in
from umt_durable.services.lease import Lease
from umt_durable.services.maintenance import Maintenance
from umt_durable.services.pulse import Pulse
from umt_durable.services.refusals import Refusals
from umt_durable.services.relay import Relay
from umt_durable.session import Binding
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import runs

if TYPE_CHECKING:
    from celery.app.task import Context

logger = get_logger(__name__)


class Durable(AsyncVerbs, PauseVerbs):
    """The durable side of a Celery app: its tasks, its database, and the verbs on runs.

    Shape: make it right after the app, before any task of the app is used. Settings are given here by name, or as
    `DURABLE_*` in the environment, or as `durable_*` in the app's configuration; they are read at first use.
    `bindings` names the databases that `step.transaction` can write to.
    Errors: ConfigurationError when the app has a Durable already.
    """

    def __init__(self, app: Celery, *, bindings: Mapping[str, Binding] | None = None, **settings: Any) -> None:
        if getattr(app, "umt_durable", None) is not None:
            raise ConfigurationError(f"the Celery app {app.main!r} has a Durable already")
        self.app = app
        self.node = UUID(hex=os.environ[NODE_VARIABLE]) if os.environ.get(NODE_VARIABLE) else uuid4()
        self.tasks = TaskRegistry()
        self.bindings = dict(bindings or {})
        self._given = settings
        self._leases: dict[int, Lease] = {}
        self._take_over()
        copy = worker_app(app)
        self._spawned = copy is not None
        if copy is not None:
            self.app = copy
            self._take_over()
        deliver.connect_signals()
        redact_worker_logs()
        signals.worker_process_shutdown.connect(self._on_process_shutdown, weak=False)

    def _take_over(self) -> None:
        """Lead what the app does with durable tasks through here."""
        self.app.umt_durable = self
        enqueuing.take_over(self)
        revoke.take_over(self.app)
        take_over_tasks(self)
        receivers.install(self)
        install(self.app)

    # -- declaring -------------------------------------------------------------------------------------------------

    @overload
    def task(
        self,
        function: AsyncBody[P, R],
        *,
        name: str | None = None,
        version: int = 1,
        retry: RetryPolicy | None = None,
        raises: Sequence[type[Exception]] = (),
        on_mismatch: OnMismatch = "park",
        **options: Any,
    ) -> DurableTaskOf[P, R]: ...
    @overload
    def task(
        self,
        function: Body[P, R],
        *,
        name: str | None = None,
        version: int = 1,
        retry: RetryPolicy | None = None,
        raises: Sequence[type[Exception]] = (),
        on_mismatch: OnMismatch = "park",
        **options: Any,
    ) -> DurableTaskOf[P, R]: ...
    @overload
    def task(
        self,
        function: None = None,
        *,
        name: str | None = None,
        version: int = 1,
        retry: RetryPolicy | None = None,
        raises: Sequence[type[Exception]] = (),
        on_mismatch: OnMismatch = "park",
        **options: Any,
    ) -> TaskMaker: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        version: int = 1,
        retry: RetryPolicy | None = None,
        raises: Sequence[type[Exception]] = (),
        on_mismatch: OnMismatch = "park",
        **options: Any,
    ) -> Any:
        """Make a durable task of a function, or a coroutine function, that takes the context first.

        Shape: `retry` is the policy of the run and of each step without one of its own, by default `NONE`; `raises` are
        exception classes that come back as themselves from the journal; `on_mismatch` says what becomes of a run whose
        code asks for another step than is recorded: `park` it for a person, `fail` it, or `warn` and go on, the step
        being executed beside what is recorded. Other options are Celery's. Two versions of one name may be declared
        side by side: new runs take the highest.
        Errors: DuplicateTaskError; DefinitionError.
        """

        def make(body: Callable[..., Any]) -> Any:
            return declare(
                self,
                body,
                name=name,
                version=version,
                retry=retry,
                raises=raises,
                on_mismatch=on_mismatch,
                options=options,
            )

        return make if function is None else make(function)

    def adopt(self, task: Any) -> None:
        """Register a task class that derives from DurableTask, once Celery has bound it."""
        adopt(self, task)

    def has_task(self, name: str) -> bool:
        """Say whether a name is a durable task of this app."""
        if self.tasks.has(name):
            return True
        task = self.app._tasks.get(name)
        return isinstance(task, DurableTask) and not task.is_ordinary

    # -- the verbs -------------------------------------------------------------------------------------------------

    @cached_property
    def client(self) -> Client:
        """The verbs on runs; `signal`, `emit`, `cancel`, `get`, `list` and `history` are its methods."""
        return Client(self.database, self.settings)

    @cached_property
    def outbox(self) -> Outbox:
        """Events and ordinary tasks that leave if and only if the caller's transaction commits."""
        return Outbox(self)

    def signal(
        self,
        run_id: str,
        name: str,
        payload: Any = None,
        *,
        conn: object = None,
        actor: str | None = None,
        dedupe: str | None = None,
    ) -> UUID:
        """Say a fact to one run; see `Client.signal`."""
        return self.client.signal(run_id, name, payload, conn=conn, actor=actor, dedupe=dedupe)

    def complete(self, token: str, result: Any = None, *, conn: object = None, actor: str | None = None) -> UUID:
        """Say what the begun step of a token gave; see `Client.complete`."""
        return self.client.complete(token, result, conn=conn, actor=actor)

    def fail(self, token: str, error: str | Exception, *, conn: object = None, actor: str | None = None) -> UUID:
        """Say that the begun step of a token failed; see `Client.fail`."""
        return self.client.fail(token, error, conn=conn, actor=actor)

    def resolve_step(
        self,
        run_id: str,
        step: str,
        *,
        result: Any = MISSING,
        error: str | None = None,
        actor: str | None = None,
        reason: str | None = None,
    ) -> UUID:
        """Say how the task that a step awaits has ended; see `Client.resolve_step`."""
        return self.client.resolve_step(run_id, step, result=result, error=error, actor=actor, reason=reason)

    def emit(
        self,
        name: str,
        key: str,
        payload: Any = None,
        *,
        conn: object = None,
        actor: str | None = None,
        dedupe: str | None = None,
    ) -> UUID:
        """Say a fact under a name and key; see `Client.emit`."""
        return self.client.emit(name, key, payload, conn=conn, actor=actor, dedupe=dedupe)

    def cancel(
        self,
        run_id: str,
        *,
        reason: str | None = None,
        conn: object = None,
        actor: str | None = None,
        compensate: bool = False,
    ) -> UUID:
        """Ask that a run end as cancelled; see `Client.cancel`."""
        return self.client.cancel(run_id, reason=reason, conn=conn, actor=actor, compensate=compensate)

    def retry(
        self, run_id: str, *, actor: str, reason: str | None = None, version: int | None = None, conn: object = None
    ) -> str:
        """Have a run go on that stands still or ended without success; see `Client.retry`."""
        return self.client.retry(run_id, actor=actor, reason=reason, version=version, conn=conn)

    def fork(
        self,
        run_id: str,
        *,
        from_step: str,
        actor: str,
        reason: str | None = None,
        input: Mapping[str, Any] | None = None,
        version: int | None = None,
        conn: object = None,
    ) -> str:
        """Start a new run that begins where another was at a step, and return its id; see `Client.fork`.

        Shape: `input` are all arguments of the task, by name; without it those of the first run.
        Errors: as `Client.fork`; InputError names each argument that the task refuses, in the version of the new run;
        EncodingError; UnknownTaskError where that version is not declared here.
        """
        arguments = None if input is None else self._encode_input(run_id, input, version)
        return self.client.fork(
            run_id, from_step=from_step, actor=actor, reason=reason, arguments=arguments, version=version, conn=conn
        )

    def _encode_input(self, run_id: str, input: Mapping[str, Any], version: int | None) -> codec.Encoded:
        if not isinstance(input, Mapping) or not all(isinstance(name, str) for name in input):
            raise DefinitionError(
                f"input: a mapping of the names of the task's parameters to values, not {input!r:.100}"
            )
        run = self.get(run_id)
        return self.tasks.get(run.task, run.version if version is None else version).encode_call((), input)

    def pause(self, run_id: str, *, actor: str, reason: str | None = None, conn: object = None) -> UUID:
        """Have a run stand still until it is resumed; see `Client.pause`."""
        return self.client.pause(run_id, actor=actor, reason=reason, conn=conn)

    def resume(self, run_id: str, *, actor: str, reason: str | None = None, conn: object = None) -> UUID:
        """Let a paused run go on; see `Client.resume`."""
        return self.client.resume(run_id, actor=actor, reason=reason, conn=conn)

    def get(self, run_id: str) -> Run:
        """Read one run; see `Client.get`."""
        return self.client.get(run_id)

    def history(self, run_id: str) -> History:
        """Read what happened to a run; see `Client.history`."""
        return self.client.history(run_id)

    def explain(self, run_id: str) -> Explanation:
        """Say why a run stands where it stands, and what a person can do about it; see `Client.explain`."""
        return self.client.explain(run_id)

    def list(
        self,
        *,
        task: str | None = None,
        states: Sequence[RunState | str] | str | None = None,
        ref: str | None = None,
        before: int | None = None,
        limit: int = 100,
        internal: bool = False,
    ) -> list[Run]:
        """Read a page of runs; see `Client.list`."""
        return self.client.list(task=task, states=states, ref=ref, before=before, limit=limit, internal=internal)

    @property
    def ops(self) -> Ops:
        """The external effects of the runs: `list`, `get` and `resolve`; see `Ops`."""
        return self.client.ops

    def stop(self) -> None:
        """Give up this process's lease and close its connections. Calling it again changes nothing."""
        for lease in self._own_leases():
            lease.stop()
        self._leases.clear()
        self.database.close()

    # -- what the worker uses --------------------------------------------------------------------------------------

    @cached_property
    def settings(self) -> Settings:
        """The settings in force. The first look at them may start the embedded pair of the library's own app."""
        conf = self.app.conf
        found = Settings.load(self._given, {key: conf[key] for key in conf if str(key).startswith("durable_")})
        redaction.DEFAULT.learn(found.redact_keys or ())
        return found

    @cached_property
    def database(self) -> Database:
        """The connections of this process."""
        return Database(self.settings, vault_of(self.settings.payload_codec))

    @cached_property
    def lease(self) -> MainLease:
        """The lease of a worker's main process, as a service of its worker."""
        return MainLease(self)

    @property
    def process_lease(self) -> Lease:
        """The lease of this process: made at first use, so that each pool child has its own."""
        pid = os.getpid()
        if pid not in self._leases:
            self._leases = {pid: Lease(self.database, self.settings, node=self.node)}
        return self._leases[pid]

    @cached_property
    def leaving(self) -> Watch:
        """Asks the bodies of this process to leave when its worker shuts down."""
        return Watch(lambda: self.process_lease)

    @cached_property
    def incidents(self) -> IncidentThread:
        """Takes what the main process sees happen to its children."""
        return IncidentThread(partial(handle_incident, self))

    @cached_property
    def refusals(self) -> Refusals:
        """Has hints come back that this process cannot use."""
        return Refusals(self.database, self.settings)

    @cached_property
    def pulse(self) -> Pulse:
        """Relay and maintenance of this process."""
        return self.services(relay=True, maintenance=True)

    def services(self, *, relay: bool, maintenance: bool) -> Pulse:
        """Make the loops of a relay, of maintenance, or of both."""
        publisher = partial(Publisher, self.app, schema=self.settings.schema)
        duties = None
        if maintenance:
            duties = Maintenance(
                self.database,
                self.settings,
                broker=publisher(),
                broker_name=self.broker_name,
                default_queue=self.queue_of,
            )
        relays = None
        if relay:
            dispatcher = CeleryDispatcher(self, publisher())
            relays = Relay(self.database, self.settings, dispatcher, self.outbox.routes)
        return Pulse(self.database, self.settings, relays, duties)

    @property
    def broker_name(self) -> str:
        """The broker's address without its password: what runs and loss markers know it by."""
        return redact_url(str(self.app.connection_for_write().as_uri()))

    @contextmanager
    def enqueuing(self, options: dict[str, Any]) -> Iterator[None]:
        """Take our own options out of a call's options, for the publishing inside."""
        with enqueuing.enqueuing(options):
            yield

    def perform(self, task: DurableTask, request: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute one delivery of a run and tell Celery what became of it."""
        reporter = CeleryReporter(self, task, request)
        delivery = deliver.delivery_of(task, request)
        if request.is_eager:
            return perform_eagerly(self, task, delivery, args, kwargs)
        # Where nothing has begun a trace for the delivery, its steps belong to that of its message.
        with tracing.continued(request.__dict__, outermost=True):
            try:
                with self.leaving.over():
                    outcome = self.executor().execute(delivery, reporter)
            except DatabaseUnavailableError as error:
                logger.warning("a delivery of %s is dropped, its run goes on later: %s", delivery.run_id, error)
                raise deliver.ignored(request, "dropped: the database is away") from error
            except BaseException as error:
                raise deliver.broken_off(request, error) from error
            return deliver.settle(self, task, request, reporter, outcome)

    def executor(self) -> Executor:
        """Return what executes deliveries in this process."""
        if self._spawned and self.tasks.selection is None and os.environ.get(VERSIONS_VARIABLE):
            self.take_versions(os.environ[VERSIONS_VARIABLE])
        return Executor(
            self.database,
            self.process_lease,
            self.settings,
            self.tasks,
            self.bindings,
            refusals=self.refusals,
            is_leaving=is_leaving,
        )

    def take_in(self, batch: Sequence[TaskMessage]) -> None:
        """Commit the runs of foreign messages, once per (id, nesting), in one transaction."""
        made = [
            enqueuing.foreign_run(
                item, codec.encode_arguments(item.args, item.kwargs, where=f"the arguments of {item.task}")
            )
            for item in batch
        ]
        take_in(self.database, self.settings, made)

    def cancel_runs(self, ids: Sequence[str], reason: str) -> Mapping[str, RunState]:
        """Commit that runs are to end as cancelled; return where each of them stands that exists."""
        return revoke.cancel_all(self, ids, reason)

    def has_run(self, run_id: str) -> bool:
        """Say whether a run with this id exists."""
        return bool(self.database.do(lambda conn: runs.of_id(conn, run_id)))

    def arguments_of(self, delivery: MainDelivery) -> tuple[Sequence[object], Mapping[str, object]] | None:
        """Read what a run was called with, for people; None when it has no row or cannot be read."""
        found = self.database.do(lambda conn: runs.arguments(conn, delivery.run, delivery.nesting))
        try:
            return None if found is None else deliver.plain_arguments(*found)
        except (DecodingError, PayloadKeyError):
            return None

    def check_schema(self) -> None:
        """Refuse a schema that does not fit this code.

        Errors: SchemaError with the command to run; DatabaseUnavailableError.
        """
        migrate.check_schema(self.database.url, self.settings.schema)

    def queue_of(self, task: str) -> str:
        """Return the queue that Celery's routing gives a task."""
        route = self.app.amqp.router.route({}, task)
        queue = route.get("queue")
        return str(getattr(queue, "name", queue) or self.app.conf.task_default_queue)

    def banner(self) -> str:
        """Say in one line what runs where, without secrets."""
        services = "relay and maintenance here" if self.settings.worker_services else "relay and maintenance elsewhere"
        where = redact_url(self.database.url)
        journal = f"journal in {where}, schema {self.settings.schema}"
        taken = "" if self.tasks.selection is None else f" · takes {self.tasks.selection}"
        return f"umt_durable: {journal} · broker {self.broker_name} · {services}{taken}"

    def take_versions(self, text: str) -> None:
        """Have this worker take some versions of its tasks only: `charge@1,charge@2,import_*`.

        Errors: UnknownTaskError says which versions there are; DefinitionError where the text names none.
        """
        self.app.finalize(auto=True)  # tasks are declared once Celery has evaluated them
        self.tasks.take_only(text.split(","))

    def check_tasks(self) -> None:
        """Return if each task names its retry policy, or need not.

        Errors: DefinitionError names those that do not.
        """
        self.app.finalize(auto=True)
        if self.settings.strict_retry and (names := self.tasks.without_retry()):
            raise DefinitionError(
                f"strict_retry is on, and no retry policy is named by {', '.join(names)}; give each one retry=, such as"
                " RetryPolicy.NETWORK or RetryPolicy.NONE, and an existing task durable_retry=, autoretry_for= or"
                " max_retries="
            )

    def declare_versions(self) -> Lease:
        """Make a lease for this process that declares what it takes, and return it."""
        self.app.finalize(auto=True)  # tasks are declared once Celery has evaluated them
        versions = [*self.tasks.offered(), *(self.declared_routes() if self.settings.worker_services else ())]
        lease = Lease(
            self.database,
            self.settings,
            node=self.node,
            versions=versions,
            queues=self.declared_queues(),
            reserved=reserved_hints,
        )
        self._leases = {os.getpid(): lease}
        return lease

    def declared_queues(self) -> dict[str, str]:
        """Return the queue of each durable task here, for relays elsewhere that publish runs started without one."""
        return {task.name: self.queue_of(task.name) for task in self.tasks}

    def declared_routes(self) -> Sequence[str]:
        """Return what a process with a relay declares of its routes, so that others leave those events to it."""
        return events.declared(self.outbox.routes.types)

    def _own_leases(self) -> Sequence[Lease]:
        return [lease for pid, lease in self._leases.items() if pid == os.getpid()]

    def _on_process_shutdown(self, **_: Any) -> None:
        """A pool child that ends normally forgets what it published first: left behind, it would be published again."""
        for lease in self._own_leases():
            lease.stop()
