"""Ordinary Celery tasks in the outbox: kept with a transaction, published with confirms, under ids that stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain, chord, group

from tests.integration import service_kit as kit
from tests.integration.publisher_kit import drain
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from umt_durable import Durable, codec
from umt_durable.bridge import sending
from umt_durable.bridge.dispatch import CeleryDispatcher
from umt_durable.bridge.publisher import Publisher
from umt_durable.database import Connection, Database
from umt_durable.errors import EncodingError
from umt_durable.services.relay import Relay
from umt_durable.settings import Settings
from umt_durable.store import outbox

QUEUE = "outbox-messages"


@pytest.fixture(name="app")
def ordinary_app(settings: Settings) -> Iterator[Celery]:
    app = Celery("ordinary", broker=f"memory://{uuid4().hex}", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = f"{QUEUE}-{uuid4().hex}"
    app.conf.broker_connection_retry_on_startup = False
    durable = Durable(app, database_url=settings.database_url, schema=settings.schema)

    @app.task(name="print_label", shared=False)
    def print_label(*given: Any) -> None: ...

    yield app
    durable.stop()


def keep(conn: Connection, app: Celery, signature: Any, **given: Any) -> sending.Kept:
    """Keep a signature in the outbox."""
    id = uuid4()
    kept = sending.pack(app, signature, id, **given)
    assert outbox.keep_message(conn, id, kept.payload, due=kept.due, delay=kept.delay)
    return kept


def relay_of(app: Any, database: Database, settings: Settings) -> Relay:
    """Return a relay that publishes for an app."""
    return Relay(database, settings, CeleryDispatcher(app.umt_durable, Publisher(app)))


def sent(app: Celery) -> list[Any]:
    """Take the messages of the app's queue."""
    return list(drain(app, str(app.conf.task_default_queue)))


def test_c6_a_kept_task_is_published_once_and_its_row_goes(
    conn: Connection, database: Database, settings: Settings, app: Celery
) -> None:
    kept = keep(conn, app, app.tasks["print_label"].s(7).set(priority=4), task_id="label-7")
    relay = relay_of(app, database, settings)

    counts = relay.run_once()

    assert (counts.claimed, counts.published) == (1, 1)
    (message,) = sent(app)
    assert message.headers["id"] == kept.signature.id == "label-7"
    assert json.loads(message.body)[0] == [7]
    assert kit.events(conn, "celery") == []
    assert relay.run_once().claimed == 0


def test_i24_a_repeated_publish_is_the_same_messages(conn: Connection, app: Celery) -> None:
    label = app.tasks["print_label"]
    shapes = [
        chain(label.s(1), label.s()),
        group(label.s(1), label.s(2)),
        chord([label.s(1), label.s(2)], chain(label.s(), label.s())),
        group(label.s(1), label.s(2)) | label.s().set(link=label.s()),
    ]

    for shape in shapes:
        id = uuid4()
        kept = sending.pack(app, shape, id)
        first, second = (sending.messages(app, id, kept.payload, age_seconds=0.0) for _ in range(2))
        assert [(one.key, one.headers["id"]) for one in first] == [(one.key, one.headers["id"]) for one in second]
        assert [one.body for one in first] == [one.body for one in second]


def test_a_countdown_waits_in_the_outbox_and_not_in_the_broker(
    conn: Connection, database: Database, settings: Settings, app: Celery, clock: Clock
) -> None:
    keep(conn, app, app.tasks["print_label"].s(7).set(countdown=60, expires=90))
    relay = relay_of(app, database, settings)
    assert relay.run_once().claimed == 0

    clock.advance(seconds=61)

    assert relay.run_once().published == 1
    (message,) = sent(app)
    assert message.headers["eta"] is None
    assert 0 < int(message.properties["expiration"]) <= 29_000


def test_what_json_cannot_hold_is_refused_by_its_path(app: Celery) -> None:
    with pytest.raises(EncodingError, match=r"\$\.args\[0\]\.lines\[1\]"):
        sending.pack(app, app.tasks["print_label"].s({"lines": [1, {2, 3}]}), uuid4())


def test_i26_what_is_too_large_is_refused_at_the_call(app: Celery) -> None:
    with pytest.raises(EncodingError, match="bytes, more than"):
        sending.pack(app, app.tasks["print_label"].s("x" * (codec.MAX_BYTES + 1)), uuid4())


def test_i26_a_row_that_is_no_signature_is_dead_at_once_and_stops_no_other(
    conn: Connection, database: Database, settings: Settings, app: Celery
) -> None:
    outbox.keep_message(conn, uuid4(), b"[]")
    keep(conn, app, app.tasks["print_label"].s(7))

    counts = relay_of(app, database, settings).run_once()

    assert (counts.published, counts.refused) == (1, 1)
    ((_, status, _, _),) = kit.events(conn, "celery")
    assert status == "dead"
