"""The engine without Celery: runs are enqueued, delivered and settled in the test's own process, on a real Postgres."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID, uuid4

import psycopg

from tests.support.clock import Clock
from umt_durable import codec
from umt_durable.database import Database
from umt_durable.engine.client import Client
from umt_durable.engine.executor import Executor
from umt_durable.engine.outcomes import Delivery, Outcome
from umt_durable.engine.registry import OnMismatch, TaskDefinition, TaskRegistry
from umt_durable.engine.retry import RetryPolicy
from umt_durable.records import Grant, NewRun
from umt_durable.services.lease import Lease
from umt_durable.services.router import Router
from umt_durable.services.takeover import Sweeper
from umt_durable.services.timers import Timers
from umt_durable.session import Binding
from umt_durable.settings import Settings
from umt_durable.states import RunState


@dataclass
class RecordingReporter:
    """Keeps what the engine would have stored in a result backend."""

    links: int = 0
    reports: bool = True
    wrote: bool = False
    trace_id: str | None = None
    states: list[str] = field(default_factory=list)
    ordinary: Any = None
    durable_tasks: Any = None

    def claimed(self, grant: Grant) -> None:
        """Keep nothing: there is no message."""

    def callbacks(self, state: RunState) -> int:
        """Return as many callbacks as the test asked for."""
        return self.links if state is RunState.SUCCEEDED else 0

    def started(self) -> None:
        """Keep that the run was started."""
        self.states.append("started")

    def suspending(self, state: RunState, until: str, cause: Exception | None = None) -> None:
        """Keep that the run is about to be parked."""
        self.wrote = True
        self.states.append(str(state))

    def check_sleep(self, seconds: float) -> None:
        """Allow any: nothing waits for the run."""


class Process:
    """One worker process, as the engine sees it: a lease and an executor."""

    def __init__(self, engine: Engine) -> None:
        self.node = uuid4()
        self.lease = Lease(engine.database, engine.settings, node=self.node)
        self.executor = Executor(engine.database, self.lease, engine.settings, engine.tasks, engine.bindings)

    def deliver(
        self, run_id: str, task: str, *, reporter: RecordingReporter | None = None, claim: UUID | None = None
    ) -> Outcome:
        """Deliver a hint of a run to this process and return what became of it."""
        delivery = Delivery(run_id, 0, task, claim or uuid4())
        return self.executor.execute(delivery, reporter or RecordingReporter())

    def freeze(self) -> None:
        """Fall silent, as under SIGSTOP: the lease is not renewed from now on, and the process knows nothing."""
        self.lease.stopping = True
        self.lease.wake.set()


class Engine:
    """Tasks, processes and services over one schema."""

    def __init__(self, database: Database, settings: Settings, bindings: Mapping[str, Binding] | None = None) -> None:
        self.database = database
        self.settings = settings
        self.bindings = dict(bindings or {})
        self.tasks = TaskRegistry()
        self.client = Client(database, settings)
        self._processes: list[Process] = []

    def task(
        self,
        name: str,
        *,
        version: int = 1,
        retry: RetryPolicy = RetryPolicy.NONE,
        raises: tuple[type[Exception], ...] = (),
        on_mismatch: OnMismatch = "park",
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a body as a durable task."""

        def declare(body: Callable[..., Any]) -> Callable[..., Any]:
            self.tasks.add(
                TaskDefinition(
                    name=name,
                    version=version,
                    body=body,
                    schema=codec.InputSchema(body, task=name, skip_context=True),
                    function=body,
                    retry=retry,
                    raises=raises,
                    on_mismatch=on_mismatch,
                    owner=f"{body.__qualname__}@{version}",
                )
            )
            return body

        return declare

    def process(self) -> Process:
        """Begin another worker process."""
        process = Process(self)
        self._processes.append(process)
        return process

    def start(
        self,
        task: str,
        *args: Any,
        conn: object = None,
        key: str | None = None,
        ttl: float | None = None,
        attach: bool = True,
        **kwargs: Any,
    ) -> str:
        """Enqueue a run and return its id."""
        definition = self.tasks.get(task)
        encoded = definition.schema.encode(*definition.schema.bind_and_validate(args, kwargs))
        new = NewRun(
            id=str(uuid4()),
            task=task,
            version=definition.version,
            queue="q",
            args=encoded.data,
            digest=encoded.digest,
            key=key,
            key_hash=None if key is None else definition.schema.input_hash(encoded.data),
            key_ttl_seconds=ttl,
            attach=attach,
        )
        return self.client.enqueue(new, conn=conn).id

    def run(self, task: str, *args: Any, **kwargs: Any) -> tuple[str, Outcome]:
        """Enqueue a run and deliver it once; return its id and what became of it."""
        run_id = self.start(task, *args, **kwargs)
        return run_id, self.process().deliver(run_id, task)

    def state(self, run_id: str) -> RunState:
        """Return where a run stands."""
        return self.client.get(run_id).state

    def timers(self) -> None:
        """Wake what is due."""
        Timers(self.database, self.settings).run_once()

    def route(self) -> None:
        """Apply all facts."""
        Router(self.database, self.settings).run_once()

    def sweep(self) -> None:
        """Take over what is lost."""
        Sweeper(self.database, self.settings).run_once()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.lease.stop()


class Gate:
    """A body stops here until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def pass_through(self, value: int = 0) -> int:
        """Tell the test, wait for it, and return the value."""
        self._reached.set()
        assert self._open.wait(30)
        return value

    def wait_reached(self) -> None:
        """Wait until a body is here."""
        assert self._reached.wait(30)

    def open(self) -> None:
        """Let the body go on, and all later ones pass."""
        self._open.set()


def take_over(engine: Engine, clock: Clock) -> None:
    """Let the leases of frozen processes end, take their runs over, and let the delay pass."""
    clock.advance(seconds=engine.settings.lease_seconds + 1)
    engine.sweep()
    clock.advance(seconds=1)


@contextmanager
def dying_at(name: str, nth: int = 1) -> Iterator[None]:
    """Have who comes to a fail point for the nth time be left by an exception that nothing handles, as if killed."""
    seen: list[str] = []

    def die(reached: str) -> None:
        if reached == name:
            seen.append(reached)
            if len(seen) == nth:
                raise KeyboardInterrupt

    with _at_points(die):
        yield


@contextmanager
def losing_at(name: str) -> Iterator[list[str]]:
    """Have who comes first to a fail point see its connection broken; give how often the point was reached."""
    seen: list[str] = []

    def lose(reached: str) -> None:
        if reached == name:
            seen.append(reached)
            if len(seen) == 1:
                raise psycopg.OperationalError(f"the connection broke at {name}")

    with _at_points(lose):
        yield seen


@contextmanager
def stopping_at(name: str, gate: Gate) -> Iterator[None]:
    """Have who comes first to a fail point stop at a gate."""
    seen: list[str] = []

    def stop(reached: str) -> None:
        if reached == name and not seen:
            seen.append(reached)
            gate.pass_through()

    with _at_points(stop):
        yield


@contextmanager
def _at_points(act: Callable[[str], None]) -> Iterator[None]:
    # Those modules that take the function itself hold the one of when they were imported.
    modules = [module for path, module in list(sys.modules.items()) if path.startswith("umt_durable")]
    before = [(module, module.point) for module in modules if hasattr(module, "point")]
    for module, _ in before:
        module.point = act  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, point in before:
            module.point = point  # type: ignore[attr-defined]


T = TypeVar("T")


def enter(log: list[Any], what: object, value: T) -> T:
    """Be a body that notes that it was entered."""
    log.append(what)
    return value


@contextmanager
def in_thread(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run work beside the test; its outcome, or the exception that left it, is the only item of the list afterwards."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the test, which looks at it
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield outcome
    thread.join(30)
    assert not thread.is_alive(), "the work beside the test did not end"
