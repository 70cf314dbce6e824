"""The verbs on runs for asyncio programs: the same as those of `Durable`, to be awaited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from umt_durable.engine.async_calls import in_thread
from umt_durable.engine.client import Client, History
from umt_durable.engine.explaining import Explanation
from umt_durable.records import Run
from umt_durable.states import RunState


class AsyncVerbs:
    """Mixed into `Durable`.

    Shape: `conn` is a SQLAlchemy AsyncSession or AsyncConnection, with any driver, or a psycopg AsyncConnection, with a
    transaction open, or what the plain verbs take.
    """

    if TYPE_CHECKING:

        @property
        def client(self) -> Client: ...

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
        ) -> str: ...

    async def asignal(
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
        return await in_thread(
            lambda own: self.client.signal(run_id, name, payload, conn=own, actor=actor, dedupe=dedupe), conn
        )

    async def acomplete(self, token: str, result: Any = None, *, conn: object = None, actor: str | None = None) -> UUID:
        """Say what the begun step of a token gave; see `Client.complete`."""
        return await in_thread(lambda own: self.client.complete(token, result, conn=own, actor=actor), conn)

    async def afail(self, token: str, error: str | Exception, *, conn: object = None, actor: str | None = None) -> UUID:
        """Say that the begun step of a token failed; see `Client.fail`."""
        return await in_thread(lambda own: self.client.fail(token, error, conn=own, actor=actor), conn)

    async def aemit(
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
        return await in_thread(
            lambda own: self.client.emit(name, key, payload, conn=own, actor=actor, dedupe=dedupe), conn
        )

    async def acancel(
        self,
        run_id: str,
        *,
        reason: str | None = None,
        conn: object = None,
        actor: str | None = None,
        compensate: bool = False,
    ) -> UUID:
        """Ask that a run end as cancelled; see `Client.cancel`."""
        return await in_thread(
            lambda own: self.client.cancel(run_id, reason=reason, conn=own, actor=actor, compensate=compensate), conn
        )

    async def aretry(
        self, run_id: str, *, actor: str, reason: str | None = None, version: int | None = None, conn: object = None
    ) -> str:
        """Have a run go on that stands still or ended without success; see `Client.retry`."""
        return await in_thread(
            lambda own: self.client.retry(run_id, actor=actor, reason=reason, version=version, conn=own), conn
        )

    async def afork(
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
        """Start a new run that begins where another was at a step; see `Durable.fork`."""
        return await in_thread(
            lambda own: self.fork(
                run_id, from_step=from_step, actor=actor, reason=reason, input=input, version=version, conn=own
            ),
            conn,
        )

    async def apause(self, run_id: str, *, actor: str, reason: str | None = None, conn: object = None) -> UUID:
        """Have a run stand still until it is resumed; see `Client.pause`."""
        return await in_thread(lambda own: self.client.pause(run_id, actor=actor, reason=reason, conn=own), conn)

    async def aresume(self, run_id: str, *, actor: str, reason: str | None = None, conn: object = None) -> UUID:
        """Let a paused run go on; see `Client.resume`."""
        return await in_thread(lambda own: self.client.resume(run_id, actor=actor, reason=reason, conn=own), conn)

    async def aget(self, run_id: str) -> Run:
        """Read one run; see `Client.get`."""
        return await in_thread(lambda _: self.client.get(run_id))

    async def ahistory(self, run_id: str) -> History:
        """Read what happened to a run; see `Client.history`."""
        return await in_thread(lambda _: self.client.history(run_id))

    async def aexplain(self, run_id: str) -> Explanation:
        """Say why a run stands where it stands, and what a person can do about it; see `Client.explain`."""
        return await in_thread(lambda _: self.client.explain(run_id))

    async def alist(
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
        return await in_thread(
            lambda _: self.client.list(task=task, states=states, ref=ref, before=before, limit=limit, internal=internal)
        )
