"""What the tests of the outbox share: an app with durable and ordinary tasks, its relays, what is in the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery

from tests.integration import service_kit as kit
from tests.integration.publisher_kit import drain
from umt_durable import Durable, TaskContext
from umt_durable.bridge.dispatch import CeleryDispatcher
from umt_durable.bridge.publisher import Publisher
from umt_durable.database import Connection, Database
from umt_durable.services.relay import Relay
from umt_durable.settings import Settings


class Shop:
    """An app with the durable task `shop.paid`, of `{"order": int}`, and the ordinary ones `print_label` and `pack`."""

    def __init__(self, settings: Settings, database: Database, broker: str | None = None) -> None:
        self.app = app = Celery(
            "shop", broker=broker or f"memory://{uuid4().hex}", backend="cache+memory://", set_as_current=False
        )
        app.conf.task_default_queue = f"shop-{uuid4().hex}"
        self.durable = durable = Durable(
            app, database_url=settings.database_url, schema=settings.schema, max_publish_attempts=3
        )
        self._database = database

        @app.task(name="print_label", shared=False)
        def print_label(*given: Any) -> None: ...

        @app.task(name="pack", shared=False)
        def pack(order: int) -> None: ...

        @durable.task(name="shop.paid")
        def paid(ctx: TaskContext, event: dict[str, int]) -> int:
            return event["order"]

        self.print_label, self.pack, self.paid = print_label, pack, paid

    def relay(self) -> Relay:
        """Return a relay that has this app's routes."""
        dispatcher = CeleryDispatcher(self.durable, Publisher(self.app))
        return Relay(self._database, self.durable.settings, dispatcher, self.durable.outbox.routes)

    def sent(self) -> list[Any]:
        """Take the messages of the app's queue."""
        return list(drain(self.app, str(self.app.conf.task_default_queue)))


@pytest.fixture(name="shop")
def make_shop(settings: Settings, database: Database) -> Iterator[Shop]:
    """Return the app, whose queue is its own."""
    shop = Shop(settings, database)
    yield shop
    shop.durable.stop()


def event(conn: Connection, id: UUID) -> tuple[Any, ...]:
    """Return (status, attempts, idempotency key, whether it was published, reason) of a row."""
    columns = "status, attempts, idempotency_key, published_at IS NOT NULL, reason"
    return kit.table(conn, f"SELECT {columns} FROM {{}}.outbox_event WHERE id = %s", id)[0]


def run_ids(conn: Connection, task: str = "shop.paid") -> list[str]:
    """Return the ids of all runs of a task."""
    return [row[0] for row in kit.table(conn, "SELECT id FROM {}.run WHERE task = %s ORDER BY no", task)]
