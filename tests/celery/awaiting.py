"""A Celery project with async durable tasks; `celery -A tests.celery.awaiting:app worker` runs it."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from tests.support import bodylog, gates
from tests.support.queues import QUEUE
from umt_durable import AsyncTaskContext, Durable

app = Celery(
    "awaiting",
    broker=os.environ["CELERY_BROKER_URL"],
    backend=os.environ["CELERY_RESULT_BACKEND"],
    include=["tests.celery.awaiting"],
)
app.conf.update(task_default_queue=QUEUE, broker_connection_retry_on_startup=True)
durable = Durable(app)


async def log_and_pass(step: str, value: int, gate: str = "") -> int:
    """Be the coroutine of most steps: log the entry, stop at a gate without stopping the loop, return the value."""
    with bodylog.body(step):
        await asyncio.to_thread(gates.pass_through, gate)
        return value


@durable.task(name="awaiting.steps")
async def steps(ctx: AsyncTaskContext, gate: str = "", sleep: float = 0.0) -> list[int]:
    """Await three steps, the second of which may stop at a gate, and a sleep."""
    first = await ctx.step.run("step-1", log_and_pass, "step-1", 1)
    second = await ctx.step.run("step-2", log_and_pass, "step-2", 2, gate)
    await ctx.step.sleep("nap", timedelta(seconds=sleep))
    return [first, second, await ctx.step.run("step-3", log_and_pass, "step-3", 3)]


@durable.task(name="awaiting.limited")
async def limited(ctx: AsyncTaskContext) -> str:
    """Run into a soft time limit while a coroutine waits."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await ctx.step.run("clean-up", log_and_pass, "clean-up", 1)
        raise
    except SoftTimeLimitExceeded:  # raised in the thread that waits for this body, not here
        return "wrong"
    return "late"
