"""`durable.outbox`: events and ordinary tasks that leave if and only if the caller's transaction commits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4

from celery.canvas import Signature, maybe_signature

from umt_durable import codec, tracing
from umt_durable.bridge import calls, enqueuing, sending
from umt_durable.bridge.outgoing import Outgoing
from umt_durable.engine.async_calls import in_thread
from umt_durable.engine.outbox import OutboxClient, check_type
from umt_durable.errors import DefinitionError, DuplicateOutboxRouteError, InputError, UnknownTaskError
from umt_durable.records import NewRun, OutboxEntry, OutboxEvent

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Route:
    """What an event of one type starts: a task by its name. `unpack`: the payload's entries are its arguments."""

    task: str
    unpack: bool


class Outbox:
    """The outbox of one `Durable`: `emit`, `route` and `on`, `send`, `get`, `dead`, `replay`."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self.routes = Routes(durable)
        """The routes of this process, for its relay."""

    @cached_property
    def client(self) -> OutboxClient:
        """The verbs without Celery."""
        return OutboxClient(self._durable.database, self._durable.settings)

    def route(self, type: str, task: T, *, unpack: bool = False) -> T:
        """Give the events of a type to a task, in every process that loads this code and has a relay; return the task.

        Shape: `task` is a durable task, of which each event starts exactly one run, or an ordinary one, or the name of
        one, which gets a message. Its one argument is the payload; with `unpack` the payload is an object and its
        entries are the task's arguments by name.
        Errors: DuplicateOutboxRouteError naming both tasks; DefinitionError for a reserved type.
        """
        self.routes.add(type, task, unpack=unpack)
        return task

    def on(self, type: str, *, unpack: bool = False) -> Callable[[T], T]:
        """Give the events of a type to the task below; as `route`, and written above the task's own decorator."""
        return lambda task: self.route(type, task, unpack=unpack)

    def emit(self, type: str, payload: Any = None, *, conn: object = None, idempotency_key: str | None = None) -> UUID:
        """Keep an event for the task its type is routed to; see `OutboxClient.emit`."""
        return self.client.emit(type, payload, conn=conn, idempotency_key=idempotency_key)

    def send(self, signature: Any, *, conn: object = None, task_id: str | None = None) -> Any:
        """Send a task of any kind, a chain, a group or a chord, if and only if the caller's transaction commits.

        Shape: returns its AsyncResult (a GroupResult for a group), whose id is known at once; `task_id` is that id. A
        durable task alone becomes a run in the same transaction. Anything else is kept, and published by a relay, under
        the same ids however often; a countdown or an eta is waited for in Postgres.
        Errors: EncodingError, naming the path, for what JSON cannot hold; InputError for arguments that a task which is
        registered here does not take; of a durable task those of `enqueue`;
        AutocommitError; DatabaseUnavailableError.
        """
        app = self._durable.app
        if not isinstance(signature, Mapping):
            raise DefinitionError(f"send needs a signature, such as task.s(…), not {type(signature).__name__}")
        wanted = maybe_signature(signature, app=app)
        named = {} if task_id is None else {"task_id": task_id}
        if app.conf.task_always_eager:
            return wanted.apply_async(**named)
        if type(wanted) is Signature and self._durable.has_task(wanted.task):
            return wanted.apply_async(**named, conn=conn)
        if type(wanted) is Signature:
            calls.check(app, wanted.task, wanted.args, wanted.kwargs)
        id = uuid4()
        kept = sending.pack(app, wanted, id, task_id=task_id)
        enqueuing.prepare_reply(app, wanted.options)
        self.client.keep_message(id, kept.payload, due=kept.due, delay=kept.delay, conn=conn)
        result = sending.result_of(app, kept)
        if app.current_worker_task:
            app.current_worker_task.add_trail(result)
        return result

    async def aemit(
        self, type: str, payload: Any = None, *, conn: object = None, idempotency_key: str | None = None
    ) -> UUID:
        """Keep an event, in the caller's async transaction where one is given; see `emit` and `Durable.aenqueue`."""
        return await in_thread(lambda own: self.emit(type, payload, conn=own, idempotency_key=idempotency_key), conn)

    async def asend(self, signature: Any, *, conn: object = None, task_id: str | None = None) -> Any:
        """Send a task, a chain, a group or a chord, in the caller's async transaction; see `send`."""
        return await in_thread(lambda own: self.send(signature, conn=own, task_id=task_id), conn)

    def get(self, event: UUID | str) -> OutboxEvent:
        """Read one row; see `OutboxClient.get`."""
        return self.client.get(event)

    def dead(self, *, type: str | None = None, limit: int = 100, before: UUID | str | None = None) -> list[OutboxEvent]:
        """Read a page of the rows that were given up; see `OutboxClient.dead`."""
        return self.client.dead(type=type, limit=limit, before=before)

    def replay(self, event: UUID | str | None = None, *, type: str | None = None) -> int:
        """Put a dead row, or all dead rows of a type, back; see `OutboxClient.replay`."""
        return self.client.replay(event, type=type)


class Routes:
    """Which task gets the events of which type, in this process; `Events` of the relay."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._routes: dict[str, Route] = {}

    @property
    def types(self) -> Collection[str]:
        """The types of events that have a route here."""
        return self._routes.keys()

    def add(self, type: str, task: Any, *, unpack: bool) -> None:
        """Give the events of a type to a task; doing it again with the same task changes nothing.

        Errors: DuplicateOutboxRouteError naming both; DefinitionError for a reserved type or what is no task.
        """
        check_type(type)
        name = task if isinstance(task, str) else getattr(task, "name", None)
        if not isinstance(name, str) or not name:
            raise DefinitionError(f"events of type {type!r} need a task or a task's name, not {task!r}")
        route = Route(name, unpack)
        known = self._routes.setdefault(type, route)
        if known != route:
            raise DuplicateOutboxRouteError(type, _told(known), _told(route))

    def run_of(self, event: OutboxEntry) -> NewRun | None:
        """Make the run that an event starts; None where its task is an ordinary one.

        Errors: InputError, EncodingError, DecodingError.
        """
        route = self._routes[event.type]
        if not self._durable.has_task(route.task):
            return None
        args, kwargs = _arguments(route, event)
        task = self._durable.app.tasks[route.task]
        with tracing.in_trace_of(event.trace):
            run = enqueuing.run_of(
                lambda: task.apply_async(args, kwargs, task_id=sending.derive(event.id), idempotency_key=event.key)
            )
        if run is None:
            raise UnknownTaskError(route.task, self._durable.tasks.declared())
        return run

    def messages(self, event: OutboxEntry) -> list[Outgoing]:
        """Make the message of the ordinary task that an event starts, under an id that is derived from the event.

        Errors: UnknownTaskError for an event without a route; InputError; DecodingError.
        """
        route = self._routes.get(event.type)
        if route is None:
            raise UnknownTaskError(f"for events of type {event.type}")
        args, kwargs = _arguments(route, event)
        app = self._durable.app
        calls.check(app, route.task, args, kwargs)
        with tracing.in_trace_of(event.trace), sending.collecting(app, event.id) as found:
            app.signature(route.task, args=args, kwargs=kwargs).apply_async(task_id=sending.derive(event.id))
        return found


def _arguments(route: Route, event: OutboxEntry) -> tuple[Sequence[Any], Mapping[str, Any]]:
    payload = codec.decode(event.payload or b"null", codec.EMPTY)
    if not route.unpack:
        return (payload,), {}
    if not isinstance(payload, dict):
        raise InputError(route.task, [("payload", f"must be an object, as its route unpacks it, not {payload!r:.50}")])
    return (), payload


def _told(route: Route) -> str:
    return f"{route.task} (unpacked)" if route.unpack else route.task
