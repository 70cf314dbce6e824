"""Closing a Celery app that a test has called tasks with: nothing of it is left to be collected during another test."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

from celery import Celery
from kombu import pools

_reset_pools: Final[Callable[[], None]] = pools.reset


def close_app(app: Celery) -> None:
    """Close the connections of an app to its broker and its Redis result backend."""
    gc.collect()  # results in cycles unsubscribe when they go, which needs their backend
    backend = app.backend
    backend.result_consumer.stop()
    backend.result_consumer._pubsub = None  # a result that is collected later would open it again
    backend.client.connection_pool.disconnect()
    app.pool.force_close_all()
    _reset_pools()  # kombu keeps producers by URL, for all apps of the process
    app.close()
