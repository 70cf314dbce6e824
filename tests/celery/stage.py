"""The test's side of tests/celery/recording.py: start workers, send messages, read what was recorded."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from celery import Celery
from celery.result import AsyncResult

from tests.celery import recording
from tests.support.closing import close_app
from tests.support.gates import VARIABLE as GATES
from tests.support.gates import Gates
from tests.support.wait import until
from tests.support.workers import Worker

Record = dict[str, Any]
HINT = {"umt_durable": {"v": 1, "gen": 1}}
EMPTY = b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'


class Broker(Protocol):
    """What a test needs of a broker (tests/support/brokers.py)."""

    @property
    def url(self) -> str: ...

    def depth(self, queue: str) -> int: ...

    def held(self, queue: str) -> int: ...


class Stage:
    """One broker, one queue, one file of records, and the workers that use them; leaving it ends the workers."""

    def __init__(self, broker: Broker, results: str, gates: Gates, folder: Path) -> None:
        self.broker = broker
        self.gates = gates
        self.queue = f"rec-{uuid.uuid4().hex[:12]}"
        self.file = folder / "records.jsonl"
        self.env = {
            "CELERY_BROKER_URL": broker.url,
            "CELERY_RESULT_BACKEND": results,
            GATES: str(gates.folder),
            recording.RECORDS: str(self.file),
            recording.QUEUE: self.queue,
        }
        self.app = Celery("stage", broker=broker.url, backend=results, set_as_current=False)
        self.app.conf.task_default_queue = self.queue
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gates.open_all()
        for worker in reversed(self._workers):
            if error is not None:
                error.add_note(f"--- {worker.name} ---\n{worker.tail()}")
            worker.close(grace=0.0)
        if error is not None and self.file.exists():
            error.add_note(f"--- records ---\n{self.file.read_text()}")
        close_app(self.app)

    # -- workers ------------------------------------------------------------------------------------------------------

    def worker(self, *, env: Mapping[str, str] | None = None, **options: Any) -> Worker:
        """Start a worker of the recording app and return once it is ready."""
        made = self.make_worker(env=env, **options)
        return made.start()

    def make_worker(self, *, env: Mapping[str, str] | None = None, **options: Any) -> Worker:
        """Return a worker that is not started yet."""
        chosen: dict[str, Any] = {"app": "tests.celery.recording:app", "concurrency": 1, **options}
        # A worker spends its first second on asking its neighbours, of which it has none.
        chosen["options"] = ["--without-mingle", "--without-gossip", *options.get("options", ())]
        worker = Worker(env={**self.env, **(env or {})}, **chosen)
        self._workers.append(worker)
        return worker

    def drop_connections(self) -> None:
        """Have a Redis broker close the connections of all its clients but the one that asks."""
        with self.app.connection_for_write() as connection:
            connection.default_channel.client.client_kill_filter(_type="normal")
            connection.default_channel.client.client_kill_filter(_type="pubsub")

    def ping(self, worker: Worker) -> bool:
        """Say whether the worker answers a remote control command."""
        return bool(self.app.control.ping(destination=[worker.node], timeout=5.0, limit=1))

    # -- messages -----------------------------------------------------------------------------------------------------

    def hint(self, task: str, run: str | None = None, **headers: object) -> str:
        """Send a hint as our relay would and return its id."""
        run = run or f"run.{uuid.uuid4().hex}"
        self.send(EMPTY, {"task": task, "id": run, **HINT, **headers})
        return run

    def foreign(self, task: str, run: str | None = None, **options: Any) -> str:
        """Send a message as a producer without our package would and return its id."""
        run = run or f"run.{uuid.uuid4().hex}"
        self.app.send_task(task, task_id=run, **options)
        return run

    def send(self, body: bytes | str, headers: Mapping[str, object], content_type: str = "application/json") -> None:
        """Send exactly these bytes and headers."""
        encoding = "binary" if content_type != "application/json" else "utf-8"
        with self.app.producer_or_acquire() as producer:
            producer.publish(
                body,
                exchange="",
                routing_key=self.queue,
                declare=[self.app.amqp.queues[self.queue]],
                content_type=content_type,
                content_encoding=encoding,
                headers=dict(headers),
                delivery_mode=2,
            )

    def push(self, *items: bytes) -> None:
        """Push items into the list that is the queue on a Redis broker."""
        with self.app.connection_for_write() as connection:
            connection.default_channel.client.lpush(self.queue, *items)

    def result(self, run: str) -> AsyncResult[Any]:
        """Return the caller's view of a run in the result backend."""
        return AsyncResult(run, app=self.app)

    # -- records ------------------------------------------------------------------------------------------------------

    def records(self, kind: str, **fields: object) -> list[Record]:
        """Return the records of a kind whose fields have these values, in the order they were written."""
        return [
            one
            for one in self.all_records()
            if one["kind"] == kind and all(one.get(name) == value for name, value in fields.items())
        ]

    def all_records(self) -> list[Record]:
        """Return everything that was recorded, in the order it was written."""
        lines = self.file.read_bytes().split(b"\n")[:-1] if self.file.exists() else []
        return [json.loads(line) for line in lines]

    def wait(self, kind: str, *, times: int = 1, timeout: float = 15.0, **fields: object) -> Record:
        """Return the last record of a kind with these values, once there are so many of them."""
        until(
            lambda: len(self.records(kind, **fields)) >= times,
            timeout=timeout,
            what=f"{times} record(s) {kind} with {fields}",
        )
        return self.records(kind, **fields)[-1]

    def wait_held(self, messages: int) -> None:
        """Return once the broker holds exactly so many messages, those handed out and not acked counted."""
        until(
            lambda: self.broker.held(self.queue) == messages,
            timeout=15.0,
            what=f"the broker to hold {messages} message(s)",
            diagnose=lambda: f"it holds {self.broker.held(self.queue)}",
        )

    def wait_reserved(self, run: str) -> None:
        """Return once some worker has received a message and no child has begun it."""
        said = f"[{run}] received"
        until(
            lambda: any(said in worker.text() for worker in self._workers),
            timeout=15.0,
            what=f"a worker to receive {run}",
        )
        assert self.records("body", id=run) == []

    def assert_works(self) -> None:
        """Assert that a hint sent now is executed to its end."""
        run = self.hint("rec.hold", f"open.{uuid.uuid4().hex}")
        self.wait("returned", id=run)
