"""A worker of plain Celery takes a hint for what it says it is."""

from __future__ import annotations

import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.integration.publisher_kit import publishing
from tests.support.brokers import Broker
from tests.support.workers import Running
from umt_durable.bridge.message import Envelope, hint

APP = """
    from celery import Celery

    app = Celery("plain")

    @app.task(bind=True, name="plain.show")
    def show(self, *args, **kwargs):
        seen = {name: getattr(self.request, name) for name in SHOWN}
        return {"args": list(args), "kwargs": kwargs, **seen}

    SHOWN = (
        "id", "root_id", "parent_id", "group", "group_index", "shadow", "stamps", "stamped_headers", "timelimit",
        "retries", "reply_to", "correlation_id", "headers", "chord", "callbacks", "eta", "expires",
        "replaced_task_nesting",
    )
"""


@pytest.fixture
def queue() -> str:
    return f"plain-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def plain_worker(broker: Broker, redis_url: str, queue: str, tmp_path: Path) -> Iterator[Running]:
    """Give a solo worker of an app that knows nothing of us."""
    (tmp_path / "plain.py").write_text(textwrap.dedent(APP))
    settings = {"CELERY_BROKER_URL": broker.url, "CELERY_RESULT_BACKEND": redis_url, "PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, "-m", "celery", "-A", "plain", "worker", "-P", "solo", "-Q", queue, "-l", "INFO"]
    with Running(argv, env=settings, name="plain-worker", ready=" ready.", ready_timeout=30) as worker:
        yield worker


@pytest.mark.processes
def test_a_plain_worker_decodes_a_hint_and_executes_its_task(
    plain_worker: Running, broker: Broker, redis_url: str, queue: str
) -> None:
    app = Celery("producer", broker=broker.url, backend=redis_url, set_as_current=False)
    envelope = Envelope(
        root_id="root",
        parent_id="parent",
        group="g",
        group_index=0,
        shadow="shown",
        stamped_headers=["tenant"],
        stamps={"tenant": "t-1"},
        timelimit=(60, None),
        headers={"traceparent": "00-ab"},
        callbacks=[{"task": "plain.never", "args": [], "kwargs": {}, "options": {}}],
        eta="2999-01-01T00:00:00+00:00",
        expires="2000-01-01T00:00:00+00:00",
    )
    values: dict[str, Any] = {"nesting": 2, "task": "plain.show", "queue": queue, "gen": 7}
    batch = [
        hint(app, key=uuid.uuid4(), run_id="run-1", priority=None, envelope=envelope.to_bytes(), **values),
        hint(app, key=uuid.uuid4(), run_id="run-2", priority=5, envelope=None, **values),
    ]

    with publishing(app) as publisher:
        assert len(publisher.publish(batch).confirmed) == 2

    seen = app.AsyncResult("run-1").get(timeout=30)
    assert seen == {
        "args": [],
        "kwargs": {},
        "id": "run-1",
        "root_id": "root",
        "parent_id": "parent",
        "group": "g",
        "group_index": 0,
        "shadow": "shown",
        "stamps": {"tenant": "t-1"},
        "stamped_headers": ["tenant"],
        "timelimit": [60, None],
        "retries": 0,
        "reply_to": "",
        "correlation_id": "run-1",
        "headers": {"traceparent": "00-ab", "umt_durable": {"v": 1, "gen": 7}},
        "chord": None,
        "callbacks": None,
        "eta": None,
        "expires": None,
        "replaced_task_nesting": 2,
    }
    plainly = app.AsyncResult("run-2").get(timeout=30)
    assert (plainly["root_id"], plainly["group"], plainly["headers"]) == (
        "run-2",
        None,
        {"umt_durable": {"v": 1, "gen": 7}},
    )
    assert "shown[run-1]" in plain_worker.text()
    assert "never" not in plain_worker.text()
