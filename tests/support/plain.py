"""A Celery app that knows nothing of the product: a foreign producer, a foreign worker, a peer to compare with."""

from __future__ import annotations

import os

from celery import Celery

from tests.support import bodylog, gates
from tests.support.queues import QUEUE


def build(broker_url: str | None = None, result_backend: str | None = None) -> Celery:
    """Return an app with two ordinary tasks, for the given broker and backend or those of the environment."""
    app = Celery(
        "umt-plain",
        broker=broker_url or os.environ.get("CELERY_BROKER_URL"),
        backend=result_backend or os.environ.get("CELERY_RESULT_BACKEND"),
        set_as_current=False,
    )
    app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)

    @app.task(name="plain.add", shared=False)
    def add(left: int, right: int) -> int:
        return left + right

    @app.task(name="plain.stop_at", shared=False)
    def stop_at(gate: str) -> int:
        bodylog.write("stop_at", "begin")
        gates.pass_through(gate)
        bodylog.write("stop_at", "end")
        return os.getpid()

    return app


app = build()
