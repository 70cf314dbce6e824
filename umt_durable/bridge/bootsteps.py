"""What runs in a worker's main process beside the pool, and in what order it starts and ends.

worker made      fit_worker: pool and settings fit, node id in the environment, schema fits (before any child forks)
pool started     lease, incidents, intake, then relay and maintenance; one line says what runs where
warm shutdown    bodies leave at their next call of the context and their runs are handed over; consuming ends, the
                 pool is joined, and only then, on `worker_shutdown`, the services end in reverse: a running task
                 keeps its lease, and a child lost in that time is still reported
soft shutdown    the same for as long as it may take, then as a cold one
cold shutdown    Celery sends no `worker_shutdown` then; the services end when the step is terminated
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final
from uuid import UUID, uuid4

import click
from celery import bootsteps, signals
from celery.utils.log import get_logger
from celery.worker import state as worker_state

from umt_durable.bridge import leaving
from umt_durable.bridge.broker_repairs import RestoreHints, repair_redis_channel, repair_redis_delivery
from umt_durable.bridge.children import ChildWatch, children_of
from umt_durable.bridge.intake import INTAKE, Intake
from umt_durable.bridge.request import DurableRequest
from umt_durable.bridge.revoke import speak_as, take_over_panel
from umt_durable.bridge.runtime import NODE_VARIABLE, VERSIONS_VARIABLE, DurableRuntime, Service, runtime_of
from umt_durable.bridge.unknown import UnknownMessages
from umt_durable.errors import ConfigurationError, DatabaseUnavailableError, DefinitionError, UnknownTaskError

logger = get_logger(__name__)

MANY_RESERVED: Final = 4

EVENTLET: Final = (
    "the eventlet pool is not supported: its hub blocks in the database driver, so leases expire under running tasks."
    " Use -P prefork, threads, gevent or solo"
)


VERSIONS: Final = click.Option(
    ["--versions", "durable_versions"],
    metavar="TASK[@N],...",
    help="Execute only these versions of durable tasks: charge@1, all of charge, all that match import_*.",
)


class UnfitWorkerError(ConfigurationError, click.ClickException):
    """A worker must not start; the command line shows the reason without a trace."""


class FitStep(bootsteps.Step):
    """Refuses to start where durable tasks cannot run, and gives the worker its node id, before children fork."""

    label = "Durable checks"

    def __init__(self, worker: Any, *, durable_versions: str | None = None, **options: Any) -> None:
        super().__init__(worker, **options)
        runtime = runtime_of(worker.app)
        refuse_pool(worker.pool_cls)
        take_versions(runtime, durable_versions)
        repair_redis_channel()
        repair_redis_delivery()
        pin_prefetch(worker)
        runtime.node = announce_node()
        leaving.announce(runtime.node)
        take_over_panel()
        speak_as(worker.hostname)
        try:
            runtime.check_tasks()
            runtime.check_schema()
        except (ConfigurationError, DefinitionError, DatabaseUnavailableError) as error:
            raise UnfitWorkerError(str(error)) from error
        setattr(worker, INTAKE, Intake(runtime, batch=1) if is_gevent(worker.pool_cls) else Intake(runtime))
        for text in warnings_for(worker):
            logger.warning(text)


class ServicesStep(bootsteps.StartStopStep):
    """Runs the services of a worker's main process from the start of its pool until its tasks have ended."""

    label = "Durable services"
    requires = ("celery.worker.components:Pool", FitStep, ChildWatch)

    reserved_seconds = 60.0
    """How long a hint may wait here for a pool slot before another worker may have it."""
    check_seconds = 5.0
    """How often that is looked at."""

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._running: list[Service] = []
        self._hostname = worker.hostname
        _leave_before_soft_shutdown(worker)

    def start(self, worker: Any) -> None:
        """Start the services and say in one line what runs where."""
        runtime = runtime_of(worker.app)
        signals.worker_shutdown.connect(self._on_worker_shutdown, sender=worker)
        signals.worker_shutting_down.connect(self._on_shutting_down, sender=self._hostname)
        for service in _services(runtime, getattr(worker, INTAKE)):
            service.start()
            self._running.append(service)
        # Celery has redirected sys.stdout into its log by now; its own banner goes here as well.
        click.echo(runtime.banner(), file=sys.__stdout__)

    def stop(self, worker: Any) -> None:
        """Leave the services running: the pool is joined after this."""

    def terminate(self, worker: Any) -> None:
        """End the services: nothing is told to anyone after this."""
        self._end()

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Have hints that wait too long for a slot given back, until the broker connection ends."""
        hub.call_repeatedly(self.check_seconds, give_back_waiting, self.reserved_seconds)

    def info(self, worker: Any) -> dict[str, Any]:
        """Return what `celery inspect stats` shows of this step."""
        intake: Intake = getattr(worker, INTAKE)
        return {"umt_durable": {"node": runtime_of(worker.app).node.hex, "intake_waiting": intake.waiting}}

    def _on_shutting_down(self, **_: Any) -> None:
        leaving.leave()

    def _on_worker_shutdown(self, sender: Any, **_: Any) -> None:
        children = children_of(sender)
        if children is not None:
            children.report_rest()
        self._end()

    def _end(self) -> None:
        leaving.forget()
        while self._running:
            service = self._running.pop()
            try:
                service.stop()
            except Exception:
                # The lease is ended last; it must be, whatever the others do.
                logger.exception("A service did not end: %r", service)


def install(app: Any) -> None:
    """Add the steps and options of this package to an app; its workers have them. Doing it twice changes nothing."""
    app.user_options["worker"].add(VERSIONS)
    app.steps["worker"].update({FitStep, ServicesStep, ChildWatch})
    app.steps["consumer"].update({UnknownMessages, RestoreHints})


def give_back_waiting(seconds: float) -> int:
    """Requeue the hints that have waited longer than that for a pool slot here, and return how many.

    Another worker may have room. Units: seconds of the monotonic clock since the message came.
    """
    reserved = worker_state.reserved_requests - worker_state.active_requests
    waiting = [request for request in reserved if isinstance(request, DurableRequest) and request.age > seconds]
    return sum(request.give_back() for request in waiting)


def announce_node() -> UUID:
    """Make a node id for this main process and put it where pool children find it, forked or spawned."""
    node = uuid4()
    os.environ[NODE_VARIABLE] = node.hex
    return node


def take_versions(runtime: DurableRuntime, text: str | None) -> None:
    """Have a worker take the versions that its command line names, and its spawned children as well.

    Errors: UnfitWorkerError says which there are.
    """
    os.environ.pop(VERSIONS_VARIABLE, None)
    if text is None:
        return
    try:
        runtime.take_versions(text)
    except (UnknownTaskError, DefinitionError) as error:
        raise UnfitWorkerError(f"--versions: {error}") from error
    os.environ[VERSIONS_VARIABLE] = text


def refuse_pool(pool: Any) -> None:
    """Return for a supported pool, given as a class.

    Errors: UnfitWorkerError for eventlet.
    """
    if _module(pool).endswith("eventlet"):
        raise UnfitWorkerError(EVENTLET)


def is_gevent(pool: Any) -> bool:
    """Say whether a pool, given as a class, is gevent's."""
    return _module(pool).endswith("gevent")


def pin_prefetch(worker: Any) -> None:
    """Reserve one message per slot unless the user asked for another number: hints in hand are hints others lack.

    The command line passes the configured number on as if it were given, so Celery's own default counts as not asked.
    """
    conf = worker.app.conf
    is_default = "worker_prefetch_multiplier" not in conf.without_defaults()
    if is_default and worker.prefetch_multiplier == conf.worker_prefetch_multiplier:
        worker.prefetch_multiplier = 1


def warnings_for(worker: Any) -> list[str]:
    """Return a line for each setting under which durable tasks do not do what they promise."""
    conf = worker.app.conf
    found = []
    if conf.task_always_eager:
        found.append("task_always_eager is on: durable tasks called in this process run at once, in the caller")
    if not 0 < worker.prefetch_multiplier <= MANY_RESERVED:
        found.append(
            f"worker_prefetch_multiplier is {worker.prefetch_multiplier}: this worker holds hints that others could run"
        )
    if worker.app.connection_for_read().transport.driver_type not in ("amqp", "redis"):
        found.append("this broker is not supported: durable tasks are tested with RabbitMQ and Redis or Valkey")
    if is_gevent(worker.pool_cls):
        found.append("gevent: a body that blocks its thread blocks every other task, and time limits do not stop it")
    return found


def _leave_before_soft_shutdown(worker: Any) -> None:
    """Have a worker say that it leaves before it waits for its tasks: Celery sends its signal only after that wait."""
    stock = worker.wait_for_soft_shutdown

    def wait() -> None:
        leaving.leave()
        stock()

    worker.wait_for_soft_shutdown = wait


def _services(runtime: DurableRuntime, intake: Intake) -> list[Service]:
    """Return what runs in the main process, in the order of its start; the end is in reverse."""
    pulse = [runtime.pulse] if runtime.settings.worker_services else []
    return [runtime.lease, *pulse, runtime.incidents, intake]


def _module(pool: Any) -> str:
    return pool if isinstance(pool, str) else str(pool.__module__)
