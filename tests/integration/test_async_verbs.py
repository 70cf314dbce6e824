"""The verbs on runs from asyncio programs, in the caller's own async transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from umt_durable import AutocommitError, DefinitionError, Durable, TaskContext, UnknownRunError
from umt_durable.services.router import Router
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import outbox

Open = Callable[[], AbstractAsyncContextManager[Any]]


class GoneError(Exception):
    """Raised by these tests to roll back."""


@pytest.fixture
def durable(settings: Settings) -> Iterator[Durable]:
    """Return a Durable with a task that waits for a fact."""
    app = Celery("async-verbs", broker="memory://", backend="cache+memory://")
    durable = Durable(app, database_url=settings.database_url, schema=settings.schema, embedded=False)

    @durable.task(name="waits")
    def waits(ctx: TaskContext, number: int) -> Any:
        return ctx.step.wait_for_fact("go").payload

    yield durable
    durable.stop()
    app.close()


@pytest.fixture(params=["psycopg", "session", "connection", "asyncpg"])
def begun(request: pytest.FixtureRequest, settings: Settings) -> Open:
    """Return what opens a transaction of each kind; an exception inside rolls it back."""
    assert settings.database_url is not None
    url = settings.database_url
    driver = "asyncpg" if request.param == "asyncpg" else "psycopg"

    @asynccontextmanager
    async def open_psycopg() -> AsyncIterator[Any]:
        async with await psycopg.AsyncConnection.connect(url) as conn, conn.transaction():
            yield conn

    @asynccontextmanager
    async def open_sqlalchemy() -> AsyncIterator[Any]:
        engine = create_async_engine(make_url(url).set(drivername=f"postgresql+{driver}"))
        try:
            if request.param == "connection":
                async with engine.begin() as conn:
                    yield conn
            else:
                async with AsyncSession(engine) as session, session.begin():
                    yield session
        finally:
            await engine.dispose()

    return open_psycopg if request.param == "psycopg" else open_sqlalchemy


def test_i2_every_verb_joins_the_callers_async_transaction(durable: Durable, begun: Open) -> None:
    task = durable.app.tasks["waits"]

    async def use() -> tuple[str, str]:
        async with begun() as conn:
            kept = await task.aenqueue(1, conn=conn, idempotency_key="order:1", attributes={"a": 1})
        with suppress(GoneError):
            async with begun() as conn:
                lost = await task.aenqueue(2, conn=conn)
                await durable.asignal(kept.id, "go", "never", conn=conn)
                await durable.acancel(kept.id, conn=conn)
                await durable.aemit("price", "a", 1, conn=conn)
                raise GoneError
        async with begun() as conn:
            await durable.asignal(kept.id, "go", "yes", conn=conn, dedupe="once")
        return kept.id, lost.id

    kept, lost = asyncio.run(use())

    assert durable.get(kept).state is RunState.READY
    assert durable.get(kept).cancel_at is None
    with pytest.raises(UnknownRunError):
        durable.get(lost)


def test_without_a_transaction_each_verb_commits_by_itself(durable: Durable) -> None:
    task = durable.app.tasks["waits"]

    async def use() -> list[Any]:
        started = await asyncio.gather(*(task.aenqueue(number) for number in range(5)))
        ids = [result.id for result in started]
        await durable.acancel(ids[0], reason="customer")
        await durable.aemit("price", "a", 1)
        page = await durable.alist(task="waits", states=[RunState.READY])
        history = await durable.ahistory(ids[1])
        return [ids, (await durable.aget(ids[0])).state, len(page), history.run.id]

    ids, state, left, found = asyncio.run(use())

    assert (state, left, found) == (RunState.CANCELLED, 4, ids[1])


def test_bad_connections_are_refused_with_what_to_do(durable: Durable, settings: Settings) -> None:
    task = durable.app.tasks["waits"]
    assert settings.database_url is not None
    url = settings.database_url

    async def use() -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
            with pytest.raises(AutocommitError, match=r"async with conn\.transaction"):
                await task.aenqueue(1, conn=conn)
            with pytest.raises(DefinitionError, match="aenqueue"):
                task.enqueue(1, conn=conn)
        with pytest.raises(DefinitionError, match="conn must be"):
            await task.aenqueue(1, conn=object())

    asyncio.run(use())

    assert durable.list() == []


def test_i2_a_cancelled_call_ends_before_the_callers_rollback(durable: Durable, begun: Open) -> None:
    task = durable.app.tasks["waits"]

    async def use() -> int:
        async def enqueue() -> None:
            async with begun() as conn:
                await task.aenqueue(1, conn=conn, idempotency_key="order:1")
                await asyncio.shield(asyncio.sleep(0))

        tasks = [asyncio.ensure_future(enqueue()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks)
        async with begun() as conn:
            run = text("SELECT 1") if hasattr(conn, "run_sync") else "SELECT 1"
            await conn.execute(run)
        return len([one for one in tasks if one.cancelled()])

    assert asyncio.run(use()) == 1
    assert len(durable.list()) == 1


def test_i2_tasks_and_queues_are_paused_and_resumed_with_the_callers_async_transaction(
    durable: Durable, begun: Open
) -> None:
    async def use() -> None:
        with suppress(GoneError):
            async with begun() as conn:
                assert await durable.apause_task("waits", actor="ann", conn=conn)
                raise GoneError
        assert durable.pauses.list() == []
        async with begun() as conn:
            assert await durable.apause_task("waits", actor="ann", conn=conn)
            assert await durable.apause_queue(durable.queue_of("waits"), actor="ann", reason="away", conn=conn)
        assert [one.name for one in durable.pauses.list()] == ["waits", durable.queue_of("waits")]
        assert await durable.aresume_task("waits", actor="ann")
        assert await durable.aresume_queue(durable.queue_of("waits"), actor="ann")
        assert not await durable.aresume_queue(durable.queue_of("waits"), actor="ann")

    asyncio.run(use())


def test_i2_acts_on_ended_runs_and_what_leaves_join_the_callers_async_transaction(
    durable: Durable, begun: Open
) -> None:
    task = durable.app.tasks["waits"]

    async def use() -> tuple[str, str, str]:
        ended = await task.aenqueue(1)
        await durable.acancel(ended.id)
        assert durable.get(ended.id).state is RunState.CANCELLED
        kept = await task.aenqueue(2)
        with suppress(GoneError):
            async with begun() as conn:
                await durable.apause(kept.id, actor="ann", conn=conn)
                never = await durable.aretry(ended.id, actor="ann", conn=conn)
                await durable.outbox.aemit("happened", 1, conn=conn)
                await durable.outbox.asend(durable.app.signature("ordinary"), conn=conn)
                raise GoneError
        assert durable.get(kept.id).paused_at is None
        with pytest.raises(UnknownRunError):
            durable.get(never)
        async with begun() as conn:
            await durable.apause(kept.id, actor="ann", conn=conn)
            again = await durable.aretry(ended.id, actor="ann", conn=conn)
            event = await durable.outbox.aemit("happened", 1, conn=conn)
        assert durable.outbox.get(event).type == "happened"
        assert [one.act for one in (await durable.ahistory(ended.id)).audit] == ["retry"]
        Router(durable.database, durable.settings).run_once()
        assert (await durable.aexplain(kept.id)).because[0].why == "paused"
        await durable.aresume(kept.id, actor="ann")
        assert durable.get(kept.id).paused_at is None
        return ended.id, kept.id, again

    ended, kept, again = asyncio.run(use())

    assert {run.id for run in durable.list()} == {ended, kept, again}
    assert durable.database.do(outbox.status)[0] >= 1
