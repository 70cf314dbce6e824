"""The Celery app of a worker whose tasks fail as drivers do: with a DSN, and its password, in the exception's text.

`celery -A tests.support.leaking:app worker` reads broker, database and schema from the environment.
"""

from __future__ import annotations

from typing import Any, Final

from celery import Celery

from tests.support.queues import QUEUE
from umt_durable import Durable, TaskContext

CANARY: Final = "sup3r-canary-pw"


class DriverError(Exception):
    """What a driver raises that cannot connect."""


def fail(place: str) -> int:
    """Raise an error whose text holds the canary and says where it was raised."""
    raise DriverError(
        f"{place}-marker: cannot connect to postgresql://shop:{CANARY}@db.internal/shop password={CANARY}"
    )


def build() -> tuple[Celery, Durable]:
    """Return the app for this process's environment."""
    app = Celery("umt-leaking")
    app.conf.update(task_default_queue=QUEUE, broker_connection_retry_on_startup=True)
    durable = Durable(app)

    @durable.task(name="leaking.body")
    def in_body(ctx: TaskContext) -> int:
        return fail("body")

    @durable.task(name="leaking.step")
    def in_step(ctx: TaskContext) -> int:
        return ctx.step.run("connect", fail, "step")

    @durable.task(name="leaking.exit")
    def leave(ctx: TaskContext) -> int:
        try:
            return fail("cause")
        except DriverError as error:
            raise SystemExit(f"exit-marker postgresql://shop:{CANARY}@db/shop") from error

    @app.task(name="leaking.plain", shared=False)
    def plain() -> None:
        print(f"print-marker postgresql://shop:{CANARY}@db/shop")
        fail("plain")

    return app, durable


def __getattr__(name: str) -> Any:
    # Built when asked for: a test imports this module for the canary, without a broker or a database.
    if name in ("app", "durable"):
        globals()["app"], globals()["durable"] = build()
        return globals()[name]
    raise AttributeError(name)


def send(environ: dict[str, str], name: str) -> None:
    """Start a run of one of these tasks from a process with another environment."""
    app = Celery("umt-leaking-sender", broker=environ["CELERY_BROKER_URL"], set_as_current=False)
    try:
        app.send_task(name, queue=QUEUE)
    finally:
        app.close()
