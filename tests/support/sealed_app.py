"""An app whose payloads are sealed, with one task that puts a secret everywhere a value of a user's can be put."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery

from tests.support.queues import QUEUE
from tests.support.sealing import CANARY
from umt_durable import Durable, OpInfo, Policy, RetryPolicy, TaskContext

CODEC = "DURABLE_PAYLOAD_CODEC"


@dataclass(frozen=True)
class Sealed:
    """The app and its tasks, built for one environment."""

    app: Celery
    durable: Durable
    secretive: Any
    broken: Any
    child: Any
    note: Any


def build(environ: Mapping[str, str] | None = None) -> Sealed:
    """Return an app with all tasks for an environment, that of this process when none is given."""
    environ = os.environ if environ is None else environ
    app = Celery("umt-sealed", broker=environ.get("CELERY_BROKER_URL"), backend=environ.get("CELERY_RESULT_BACKEND"))
    app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
    names = ("DATABASE_URL", "SCHEMA", "LEASE_SECONDS", "EMBEDDED", "PAYLOAD_CODEC")
    given: dict[str, Any] = {name.lower(): environ[f"DURABLE_{name}"] for name in names if f"DURABLE_{name}" in environ}
    durable = Durable(app, **given)

    @app.task(name="sealed.note", shared=False)
    def note(*values: object) -> str:
        return f"noted {CANARY}"

    @durable.task(name="sealed.child")
    def child(ctx: TaskContext, card: str) -> str:
        return ctx.step.run("keep", lambda: f"child {card}")

    @durable.task(name="sealed.broken", retry=RetryPolicy(2, initial=timedelta(0)))
    def broken(ctx: TaskContext, card: str) -> None:
        raise RuntimeError(f"declined {card}")

    @durable.task(name="sealed.paid")
    def paid(ctx: TaskContext, event: dict[str, str]) -> str:
        return event["card"]

    durable.outbox.route("sealed.event", paid)

    @durable.task(name="sealed.secretive")
    def secretive(ctx: TaskContext, card: str) -> list[str]:
        def fails() -> None:
            raise ValueError(f"refused {card}")

        def pays(info: OpInfo) -> str:
            return f"paid {card}"

        found = [
            ctx.step.run("keep", lambda: card),
            ctx.step.effect("pay", pays, policy=Policy.IDEMPOTENT_KEY),
            ctx.step.transaction("book", lambda tx: card),
            *ctx.step.map("all", lambda item: f"{item} {card}", ["a", "b"], key=str),
            ctx.step.call("child", child, card),
            ctx.step.task("note", note.s(card)),
            str(ctx.step.wait_for_fact("seen").payload),
        ]
        try:
            ctx.step.run("fail", fails)
        except ValueError as error:
            found.append(str(error))
        return found

    return Sealed(app, durable, secretive, broken, child, note)


def __getattr__(name: str) -> Any:
    """Build the app when a worker asks for it."""
    if name == "app":
        globals().update(app=build().app)
        return globals()[name]
    raise AttributeError(name)
