"""`durable serve`: relay and maintenance in a process of their own, without Celery's worker.

Role relay publishes what the outbox holds; maintenance wakes, routes, takes over and redispatches; migrate brings the
schema up to date and ends; all does these three in one process. Only migrate and all change the schema: the others
refuse one that does not fit. Any number of processes of any role run side by side.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Final

import click
from celery.utils.log import get_logger

from umt_durable.bridge.app import whereabouts
from umt_durable.bridge.cli_schema import bring, told
from umt_durable.bridge.console import say
from umt_durable.bridge.durable import Durable
from umt_durable.bridge.project import project_of
from umt_durable.services.lease import Lease

logger = get_logger(__name__)

SERVICES: Final = ("relay", "maintenance")
ROLES: Final = (*SERVICES, "migrate", "all")
ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@click.command()
@click.option("--role", required=True, type=click.Choice(ROLES), help="What this process does.")
@click.option("-l", "--loglevel", default="INFO", show_default=True, type=click.Choice(LEVELS, case_sensitive=False))
@click.pass_context
def serve(ctx: click.Context, role: str, loglevel: str) -> None:
    """Run relay or maintenance, or both, until SIGTERM or Ctrl-C; or migrate the schema and end.

    Where these run, workers need not do it: set durable_worker_services = False for them.
    """
    project = project_of(ctx)
    if role == "migrate":
        durable = project.durable("database")
        say(told(durable.settings.schema, *bring(durable)))
        return
    durable = project.durable("all", tasks=True)
    if role == "all":
        bring(durable)
    else:
        durable.check_schema()
    durable.app.log.setup(loglevel=loglevel.upper(), redirect_stdouts=False)
    serve_until(durable, role, _asked_to_end())


def serve_until(durable: Durable, role: str, ending: SimpleQueue[int]) -> None:
    """Run the services of a role until a signal is queued, say in one line what runs where, and end them in order."""
    with ExitStack() as after:
        after.callback(durable.stop)
        after.enter_context(_seen(durable, role))
        pulse = durable.services(relay=role != "maintenance", maintenance=role != "relay")
        after.callback(pulse.stop)
        pulse.start()
        say(f"umt_durable: {_named(role)} ready · {whereabouts(durable)}")
        ending.get()
        logger.info("asked to end; finishing what is under way")


@contextmanager
def _seen(durable: Durable, role: str) -> Iterator[None]:
    """Keep a lease that declares the role and no task: by it others see this process, and its counters."""
    declared = [f"@{service}" for service in SERVICES if role in (service, "all")]
    if "@relay" in declared:
        declared += durable.declared_routes()
    lease = Lease(durable.database, durable.settings, node=durable.node, versions=declared)
    lease.start()
    try:
        yield
    finally:
        lease.stop()


def _asked_to_end() -> SimpleQueue[int]:
    """Return a queue that gets the signals which end a service.

    A queue and not an event: a handler interrupts the very thread that waits, and `Event.set` would ask for the lock
    that the thread holds while it begins to wait. Putting into this queue takes no such lock.
    """
    signals: SimpleQueue[int] = SimpleQueue()

    def end(number: int, frame: FrameType | None) -> None:
        signals.put(number)

    for one in ENDING:
        signal.signal(one, end)
    return signals


def _named(role: str) -> str:
    return "relay and maintenance" if role == "all" else role
