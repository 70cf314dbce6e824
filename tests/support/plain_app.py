"""A Celery app that knows nothing of this package: its worker executes ordinary tasks, whoever awaits them.

`celery -A tests.support.plain_app:app worker` reads broker and result backend from the environment.
"""

from __future__ import annotations

import os

from celery import Celery

from tests.support import bodylog, gates

QUEUE = "umt-plain"

app = Celery("plain", broker=os.environ.get("CELERY_BROKER_URL"), backend=os.environ.get("CELERY_RESULT_BACKEND"))
app.conf.update(
    task_default_queue=QUEUE,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    task_store_errors_even_if_ignored=True,
)
if "UMT_TEST_REDELIVERY_SECONDS" in os.environ and os.environ["CELERY_BROKER_URL"].startswith("redis"):
    seconds = float(os.environ["UMT_TEST_REDELIVERY_SECONDS"])
    app.conf.broker_transport_options = {
        "visibility_timeout": seconds,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }


class LabelError(Exception):
    """What a failing task raises; the awaiting app has no such class."""


@app.task(name="plain.label", shared=False)
def label(order: str, gate: str = "") -> dict[str, object]:
    """Return a label for an order."""
    bodylog.write(f"label-{order}", "begin")
    gates.pass_through(gate)
    return {"order": order, "pages": [1, 2]}


@app.task(name="plain.late", acks_late=True, reject_on_worker_lost=True, shared=False)
def late(order: str, gate: str = "") -> dict[str, object]:
    """Return a label for an order, with its message acked at the end."""
    return dict(label(order, gate))


@app.task(name="plain.join", shared=False)
def join(values: list[dict[str, object]]) -> int:
    """Count the labels that the members of a chord made."""
    return len(values)


@app.task(name="plain.pages", shared=False)
def pages(made: dict[str, object]) -> int:
    """Count the pages of a label."""
    found = made["pages"]
    assert isinstance(found, list)
    return len(found)


@app.task(name="plain.boom", shared=False)
def boom(order: str, kind: str = "key") -> None:
    """Fail, by an exception that everybody has or by one of this app's own."""
    bodylog.write(f"boom-{order}", "begin")
    raise KeyError(order) if kind == "key" else LabelError(f"no label for {order}")
