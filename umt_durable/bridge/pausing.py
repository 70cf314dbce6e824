"""The verbs that pause and resume a task or a queue as a whole."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from umt_durable.engine.async_calls import in_thread
from umt_durable.engine.pausing import Pauses
from umt_durable.errors import UnknownQueueError, UnknownTaskError
from umt_durable.states import Scope
from umt_durable.store import workers

if TYPE_CHECKING:
    from celery import Celery

    from umt_durable.database import Database
    from umt_durable.engine.client import Client
    from umt_durable.engine.registry import TaskRegistry
    from umt_durable.settings import Settings


class PauseVerbs:
    """Mixed into `Durable`.

    Shape: each verb says whether it changed anything. A pause keeps ready runs, and those that become ready, from being
    taken; sleeps, time-outs, facts and starts go on, and so does what is being executed. `conn` as for `Client.pause`.
    """

    if TYPE_CHECKING:
        app: Celery
        tasks: TaskRegistry

        @property
        def client(self) -> Client: ...
        @property
        def database(self) -> Database: ...
        @property
        def settings(self) -> Settings: ...
        def has_task(self, name: str) -> bool: ...
        def queue_of(self, task: str) -> str: ...
        def declared_queues(self) -> dict[str, str]: ...

    @cached_property
    def pauses(self) -> Pauses:
        """What is paused as a whole: `list` reads it."""
        return Pauses(self.database, self.settings)

    def pause_task(self, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Have the runs of a task wait until it is resumed.

        Errors: UnknownTaskError for a name that is neither declared here nor by a live worker, and of no run;
        DefinitionError; AutocommitError; DatabaseUnavailableError.
        """
        if isinstance(name, str) and not self._knows_task(name):
            raise UnknownTaskError(name, self.tasks.declared())
        return self.pauses.pause(Scope.TASK, name, actor=actor, reason=reason, conn=conn)

    def resume_task(self, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Let the runs of a paused task go on.

        Errors: DefinitionError; AutocommitError; DatabaseUnavailableError.
        """
        return self.pauses.resume(Scope.TASK, name, actor=actor, reason=reason, conn=conn)

    def pause_queue(self, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Have the runs in a queue wait until it is resumed.

        Errors: UnknownQueueError for a queue of no task and no run; DefinitionError; AutocommitError;
        DatabaseUnavailableError.
        """
        if isinstance(name, str):
            known = self._queues()
            if name not in known and not self.pauses.knows_queue(name):
                raise UnknownQueueError(name, known)
        return self.pauses.pause(Scope.QUEUE, name, actor=actor, reason=reason, conn=conn)

    def resume_queue(self, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Let the runs in a paused queue go on.

        Errors: DefinitionError; AutocommitError; DatabaseUnavailableError.
        """
        return self.pauses.resume(Scope.QUEUE, name, actor=actor, reason=reason, conn=conn)

    async def apause_task(self, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Have the runs of a task wait until it is resumed; see `pause_task`."""
        return await in_thread(lambda own: self.pause_task(name, actor=actor, reason=reason, conn=own), conn)

    async def aresume_task(self, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Let the runs of a paused task go on; see `resume_task`."""
        return await in_thread(lambda own: self.resume_task(name, actor=actor, reason=reason, conn=own), conn)

    async def apause_queue(self, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Have the runs in a queue wait until it is resumed; see `pause_queue`."""
        return await in_thread(lambda own: self.pause_queue(name, actor=actor, reason=reason, conn=own), conn)

    async def aresume_queue(self, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Let the runs in a paused queue go on; see `resume_queue`."""
        return await in_thread(lambda own: self.resume_queue(name, actor=actor, reason=reason, conn=own), conn)

    def _knows_task(self, name: str) -> bool:
        return (
            self.has_task(name)
            or name in self.database.do(workers.live_versions)
            or bool(self.client.list(task=name, limit=1, internal=True))
        )

    def _queues(self) -> set[str]:
        return {*map(str, self.app.amqp.queues), *self.declared_queues().values(), self.queue_of("")}
