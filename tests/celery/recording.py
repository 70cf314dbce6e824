"""A Celery app whose worker bridge is the product's and whose engine is a file: what is asked of it is written down.

`celery -A tests.celery.recording:app worker` runs it. Every record is one JSON line, on disk before the caller goes on,
so a process that is killed has said what it did. Gates (tests/support/gates.py) stop bodies and the intake where a test
wants them; a closed gate `outage` makes the database of this engine fail.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from celery import Celery, Task, signals

from tests.support import gates
from umt_durable.bridge import bootsteps
from umt_durable.bridge.incidents import IncidentThread
from umt_durable.bridge.runtime import CLAIM_KEY, NODE_VARIABLE, CancelAsked, ChildLost, HintRefused, Incident
from umt_durable.errors import SchemaError
from umt_durable.settings import Settings
from umt_durable.states import RunState

RECORDS = "UMT_TEST_RECORDS"
QUEUE = "UMT_TEST_QUEUE"
SCHEMA_PROBLEM = "UMT_TEST_SCHEMA_PROBLEM"
RESERVED_SECONDS = "UMT_TEST_RESERVED_SECONDS"


def record(kind: str, **fields: object) -> None:
    """Append one record and return once it is on disk. Its `at` is in seconds of the machine's monotonic clock."""
    line = json.dumps({"kind": kind, "pid": os.getpid(), "at": time.monotonic(), **fields}) + "\n"
    file = os.open(os.environ[RECORDS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


def gate_is_closed(name: str) -> bool:
    """Say whether a gate is closed, without stopping at it."""
    return (Path(os.environ[gates.VARIABLE]) / f"{name}.closed").exists()


class Noted:
    """A service that only writes down when it starts and stops."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> None:
        record("service", name=self.name, act="start")

    def stop(self) -> None:
        record("service", name=self.name, act="stop")


class NotedIncidents(IncidentThread):
    """The product's incident thread, with its start and end written down."""

    def start(self) -> None:
        super().start()
        record("service", name="incidents", act="start")

    def stop(self) -> None:
        super().stop()
        record("service", name="incidents", act="stop")


class Recording:
    """A `DurableRuntime` that writes down what it is asked."""

    def __init__(self) -> None:
        self.node = UUID(int=0)
        self.settings = Settings()
        self.lease = Noted("lease")
        self.pulse = Noted("pulse")
        self.incidents = NotedIncidents(note_incident)

    def take_in(self, batch: Sequence[Any]) -> None:
        ids = [message.id for message in batch]
        record("intake_try", ids=ids)
        if gate_is_closed("outage"):
            raise psycopg.OperationalError("the server closed the connection unexpectedly")
        if "unstorable" in ids:
            raise psycopg.DataError("a value cannot be stored")
        gates.pass_through("intake")
        record("taken_in", ids=ids, node=self.node.hex)

    def has_run(self, run_id: str) -> bool:
        record("asked", id=run_id)
        return run_id.startswith("known")

    def take_versions(self, text: str) -> None:
        raise AssertionError("no worker of these tests is told its versions")

    def check_tasks(self) -> None:
        """Ask nothing of the tasks: these have no engine."""

    def check_schema(self) -> None:
        if problem := os.environ.get(SCHEMA_PROBLEM):
            raise SchemaError(problem)

    def banner(self) -> str:
        return "umt_durable: recording"


def note_incident(incident: Incident) -> None:
    """Write an incident down."""
    if isinstance(incident, CancelAsked):
        record("cancel_asked", ids=list(incident.ids), reason=incident.reason)
        incident.found.update(dict.fromkeys(incident.ids, RunState.RUNNING))
        incident.done.set()
        return
    if isinstance(incident, HintRefused):
        record("hint_refused", id=incident.run, nesting=incident.nesting)
        return
    delivery = incident.delivery
    found: dict[str, object] = {} if delivery is None else {"claim": delivery.claim.hex, "id": delivery.run}
    if isinstance(incident, ChildLost):
        record("child_lost", lost=incident.pid, status=incident.status, **found)
    else:
        record("delivery_ended", reason=incident.reason, known_dead=incident.known_dead, **found)


class RecordedTask(Task):
    """A durable task as the main process sees one; its body runs once for each delivery, unclaimed."""

    Request = "umt_durable.bridge.request:DurableRequest"
    Strategy = "umt_durable.bridge.strategy:durable_strategy"
    acks_late = True
    reject_on_worker_lost = True
    track_started = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        record(
            "body",
            id=request.id,
            task=self.name,
            claim=request.get(CLAIM_KEY),
            node=os.environ.get(NODE_VARIABLE),
            eta=request.eta,
        )
        result = super().__call__(*args, **kwargs)
        record("returned", id=request.id)
        return result


app = Celery("recording", broker=os.environ.get("CELERY_BROKER_URL"), backend=os.environ.get("CELERY_RESULT_BACKEND"))
app.conf.update(
    task_default_queue=os.environ.get(QUEUE, "umt-recording"),
    broker_connection_retry_on_startup=True,
    worker_soft_shutdown_timeout=0,
    result_backend_transport_options={"retry_policy": {"timeout": 5.0}},
)
app.umt_durable = Recording()
bootsteps.install(app)
if RESERVED_SECONDS in os.environ:
    bootsteps.ServicesStep.reserved_seconds = float(os.environ[RESERVED_SECONDS])
    bootsteps.ServicesStep.check_seconds = 0.1


def gate_of(task_id: str) -> str:
    """Return the gate at which the body of a delivery stops: the arguments of a hint are not in its message."""
    return task_id.partition(".")[0]


@app.task(name="rec.hold", base=RecordedTask, bind=True)
def hold(self: Any) -> str:
    """Stop at the gate that the id names."""
    gates.pass_through(gate_of(self.request.id))
    return "held"


@app.task(name="rec.limited", base=RecordedTask, bind=True, time_limit=1)
def limited(self: Any) -> None:
    """Stop at the gate that the id names, for a second at most."""
    gates.pass_through(gate_of(self.request.id))


@app.task(name="rec.fail", base=RecordedTask, bind=True)
def fail(self: Any) -> None:
    """Fail as applications do."""
    raise ValueError(f"{self.request.id} is not wanted")


@app.task(name="rec.leave", base=RecordedTask)
def leave() -> None:
    """Leave the process in the middle of a body."""
    sys.exit(3)


@app.task(name="rec.plain")
def plain(*values: object) -> None:
    """Be a callback of another task: say that it was called."""
    record("callback", values=[repr(value) for value in values])


@signals.task_failure.connect
def _on_failure(sender: Any = None, task_id: str | None = None, **_: object) -> None:
    record("signal", name="task_failure", id=task_id, task=sender.name)


@signals.task_revoked.connect
def _on_revoked(sender: Any = None, request: Any = None, **_: object) -> None:
    record("signal", name="task_revoked", id=request.id, task=sender.name)


@signals.task_retry.connect
def _on_retry(sender: Any = None, request: Any = None, **_: object) -> None:
    record("signal", name="task_retry", id=request.id, task=sender.name)
