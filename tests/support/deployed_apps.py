"""An app whose code is what an environment variable says was deployed last."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from celery import Celery

from tests.support.apps import log_and_pass
from tests.support.queues import QUEUE
from umt_durable import Durable, TaskContext

DEPLOYED: Final = "UMT_TESTS_DEPLOYED"
"""Which code: `1`, `2`, `1 2` for both versions side by side, or `patched`, which is the first with a patch."""


def build(environ: Mapping[str, str]) -> tuple[Celery, Durable]:
    """Return the app and its `Durable`, with the task in the versions that were deployed."""
    app = Celery("deployed", broker=environ["CELERY_BROKER_URL"], backend=environ["CELERY_RESULT_BACKEND"])
    app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
    durable = Durable(
        app,
        database_url=environ["DURABLE_DATABASE_URL"],
        schema=environ["DURABLE_SCHEMA"],
        lease_seconds=environ["DURABLE_LEASE_SECONDS"],
        embedded=False,
    )
    for version in environ.get(DEPLOYED, "1").split():
        _declare(durable, version)
    app.task(plain, name="tests.plain")
    return app, durable


def plain() -> int:
    """Return the process that executed this ordinary task."""
    return os.getpid()


def _declare(durable: Durable, version: str) -> None:
    def first(ctx: TaskContext, seconds: float) -> list[str]:
        return go(ctx, seconds, checks=False)

    def second(ctx: TaskContext, seconds: float) -> list[str]:
        return go(ctx, seconds, checks=True)

    def patched(ctx: TaskContext, seconds: float) -> list[str]:
        return go(ctx, seconds, checks=ctx.patched("check before the nap"))

    def go(ctx: TaskContext, seconds: float, *, checks: bool) -> list[str]:
        done = [ctx.step.run("book", log_and_pass, "book", 1)]
        if checks:
            done.append(ctx.step.run("check", log_and_pass, "check", 2))
        ctx.step.sleep("nap", timedelta(seconds=seconds))
        return [*map(str, done), f"version {ctx.version}"]

    bodies: dict[str, Any] = {"1": first, "2": second, "patched": patched}
    durable.task(bodies[version], name="tests.deployed", version=2 if version == "2" else 1)


def __getattr__(name: str) -> Any:
    """Make the app of this process at its first use, which is a worker's."""
    if name == "app":
        app, _ = build(os.environ)
        globals()["app"] = app
        return app
    raise AttributeError(name)
