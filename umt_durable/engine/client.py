"""What callers do with runs: start, signal, cancel, look. Every request is one INSERT in the caller's transaction."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID, uuid4

from umt_durable import codec, telemetry, texts
from umt_durable.database import Connection, Database
from umt_durable.engine import failures
from umt_durable.engine.failures import Failure
from umt_durable.engine.ops import Ops
from umt_durable.engine.waitables import check_name
from umt_durable.errors import DefinitionError, IdempotencyConflictError, RunExistsError, UnknownRunError
from umt_durable.failpoints import point
from umt_durable.records import AttemptRecord, Enqueued, NewRun, Run, StepEntry, WaitEntry
from umt_durable.services import router
from umt_durable.session import Caller, caller
from umt_durable.settings import Settings
from umt_durable.sql import statements
from umt_durable.states import RunState
from umt_durable.store import attempts, facts, journal, runs, waits

T = TypeVar("T")

NOTIFY_EVERY_SECONDS = 0.005
CALL_SECONDS = 10.0
"""How long a caller is kept waiting for a database that does not answer."""
MAX_PAGE = 1000


@dataclass(frozen=True, slots=True)
class History:
    """What happened to a run: its grants, its steps and its waits, each in order."""

    run: Run
    attempts: list[AttemptRecord]
    steps: list[StepEntry]
    waits: list[WaitEntry]


class Access:
    """How a caller's requests reach one schema: in the caller's transaction, or in a short one of its own."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._notified = 0.0
        self.ops = Ops(database, settings)
        """The external effects of the runs, and what people say of them."""

    def _do(self, work: Callable[[Connection], T]) -> T:
        return self._database.do(work, seconds=CALL_SECONDS)

    def _call(self, who: Caller, name: str, parameters: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Run one of our statements in a caller's transaction."""
        row = who.one(statements(self._database.schema)[name].text.decode(), parameters)
        if self._settings.notify == "after_commit":
            who.after_commit(self._notify)
        elif self._settings.notify == "transaction":
            who.one("SELECT pg_notify(%(channel)s, '')", {"channel": self._settings.channel})
        return row

    def _notify(self) -> None:
        """Wake the relay, at most once per 5 ms: it looks again a little later by itself."""
        now = time.monotonic()
        if now - self._notified >= NOTIFY_EVERY_SECONDS:
            self._notified = now
            self._database.notify()


class Client(Access):
    """The verbs on runs, for one schema.

    Shape: `conn` is a SQLAlchemy Session or Connection or a psycopg Connection with a transaction open; the request
    then exists if and only if the caller commits (I2). Without it each call is a short transaction of its own.
    """

    def enqueue(self, new: NewRun, *, conn: object = None) -> Enqueued:
        """Insert a run and its hint.

        Errors: IdempotencyConflictError when the key was used with other input; RunExistsError when it was used at all
        and the run is not to attach; DefinitionError for a name, key, ref or
        attributes that cannot be stored; AutocommitError; DatabaseUnavailableError.
        """
        _check_run(new)
        parameters = runs.enqueue_parameters(new, deliver_seconds=self._settings.deliver_seconds)
        point("enqueue.commit.b")
        if conn is None:
            done = self._do(lambda own: runs.enqueue(own, new, deliver_seconds=self._settings.deliver_seconds))
        else:
            row = self._call(caller(conn), "enqueue_run", parameters)
            assert row is not None
            done = Enqueued(*row)
        point("enqueue.commit.a")
        if done.outcome == "conflict":
            assert new.key is not None
            raise IdempotencyConflictError(new.task, new.key, done.id)
        # With our own id it is our own run, of a commit whose reply was lost.
        if done.outcome == "existing" and not new.attach and new.key is not None and done.id != new.id:
            raise RunExistsError(new.task, new.key, done.id)
        if done.outcome == "created":
            telemetry.count(telemetry.Counter.ENQUEUED_RUN)
        if conn is None:
            self._notify()
        return done

    def signal(
        self,
        run_id: str,
        name: str,
        payload: Any = None,
        *,
        conn: object = None,
        actor: str | None = None,
        dedupe: str | None = None,
    ) -> UUID:
        """Say a fact to one run and return the fact's id. A second one with the same `dedupe` changes nothing and gives
        the id of the first.

        Errors: UnknownRunError; DefinitionError for a reserved name, or an actor or dedupe that cannot be stored;
        EncodingError for a payload that cannot be stored.
        """
        check_name(name)
        data = codec.encode(payload, codec.EMPTY, where=f"the payload of signal {name!r}").data
        return self._say(run_id, name, data, conn=conn, actor=actor, dedupe=dedupe)

    def cancel(self, run_id: str, *, reason: str | None = None, conn: object = None, actor: str | None = None) -> UUID:
        """Ask that a run end as cancelled, and return the id of the fact that says so.

        A parked or waiting run ends at once (with `conn`: when a router sees the caller's commit), a running one at its
        next step; a terminal one is left as it is.
        Errors: UnknownRunError.
        """
        return self._say(run_id, "umt.cancel", _cancel_payload(reason), conn=conn, actor=actor, dedupe=None)

    def emit(
        self,
        name: str,
        key: str,
        payload: Any = None,
        *,
        conn: object = None,
        actor: str | None = None,
        dedupe: str | None = None,
    ) -> UUID:
        """Say a fact under a name and key, for every run that waits for it now or later, and return the fact's id.

        A second one with the same `dedupe` changes nothing and gives the id of the first.
        Errors: DefinitionError for a reserved name, or a key, actor or dedupe that cannot be stored; EncodingError for
        a payload that cannot be stored.
        """
        check_name(name)
        if key is None:
            raise DefinitionError(f"the key of fact {name!r} is missing")
        for field, value in (("name", name), ("key", key), ("actor", actor), ("dedupe", dedupe)):
            texts.check(f"{field} of fact {name!r}", value)
        data = codec.encode(payload, codec.EMPTY, where=f"the payload of fact {name!r}").data
        parameters = {"name": name, "key": key, "payload": data, "actor": actor, "dedupe": dedupe, "fact": uuid4()}
        if conn is None:
            fact = self._do(lambda own: facts.emit(own, parameters))
            point("signal.commit.a")
            self._route(fact)
            return fact
        row = self._call(caller(conn), "emit_fact", parameters)
        assert row is not None
        return UUID(str(row[0]))

    def get(self, run_id: str) -> Run:
        """Read one run.

        Errors: UnknownRunError.
        """
        found = self._do(lambda conn: runs.get(conn, _checked(run_id)))
        if found is None:
            raise UnknownRunError(run_id)
        return found

    def list(
        self,
        *,
        task: str | None = None,
        states: Sequence[RunState | str] | None = None,
        ref: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[Run]:
        """Read a page of runs, the newest first. `before` is the `no` of the last run of the page before.

        Errors: DefinitionError for a limit outside 1 to 1000, a state that is none, a task or ref that no run can have.
        """
        texts.check("task", task)
        texts.check("ref", ref, least=0)
        if not 1 <= limit <= MAX_PAGE:
            raise DefinitionError(f"limit must be from 1 to {MAX_PAGE}, not {limit}")
        try:
            wanted = None if states is None else [RunState(state) for state in states]
        except ValueError as error:
            raise DefinitionError(str(error)) from None
        return self._do(lambda conn: runs.page(conn, task=task, states=wanted, ref=ref, before=before, limit=limit))

    def history(self, run_id: str) -> History:
        """Read what happened to a run.

        Errors: UnknownRunError.
        """
        run = self.get(run_id)

        def read(conn: Connection) -> History:
            return History(run, attempts.of_run(conn, run.no), journal.read(conn, run.no), waits.of_run(conn, run.no))

        return self._do(read)

    def counts(self) -> dict[str, int]:
        """Count runs by state, paused ones under `paused`."""
        return self._do(runs.count_by_state)

    def result(self, run: Run, annotation: Any = codec.EMPTY) -> Any:
        """Return the result of a succeeded run, typed by an annotation if one is given."""
        return None if run.result is None else codec.decode(run.result, annotation, run.codec)

    def failure(self, run: Run) -> Failure | None:
        """Return what is kept of a run's last error."""
        return None if run.error is None else failures.from_bytes(run.error)

    def _say(
        self, run_id: str, name: str, payload: bytes, *, conn: object, actor: str | None, dedupe: str | None
    ) -> UUID:
        for field, value in (("name", name), ("actor", actor), ("dedupe", dedupe)):
            texts.check(f"{field} of fact {name!r}", value)
        parameters = {
            "run": _checked(run_id),
            "name": name,
            "payload": payload,
            "actor": actor,
            "dedupe": dedupe,
            "fact": uuid4(),
        }
        point("signal.commit.b")
        if conn is None:
            fact = self._do(lambda own: facts.signal(own, parameters))
        else:
            row = self._call(caller(conn), "signal_run", parameters)
            fact = None if row is None or row[0] is None else UUID(str(row[0]))
        point("signal.commit.a")
        if fact is None:
            raise UnknownRunError(run_id)
        if conn is None:
            self._route(fact)
        return fact

    def _route(self, fact: UUID) -> None:
        """Apply a fact of our own transaction at once; where someone else does it, or nothing can, a router will."""
        router.route(self._database, self._settings, fact)
        self._notify()


def new_run_id() -> str:
    """Return a fresh run id, of the form Celery gives its tasks."""
    return str(uuid4())


def _checked(run_id: str) -> str:
    if not isinstance(run_id, str) or not 0 < len(run_id) <= texts.LONGEST or not texts.is_storable(run_id):
        raise UnknownRunError(run_id)
    return run_id


def _check_run(new: NewRun) -> None:
    for field in ("id", "task", "queue", "key", "ref"):
        label = {"id": "task_id", "key": "idempotency_key"}.get(field, field)
        texts.check(label, getattr(new, field), least=int(field != "ref"))
    if new.attributes is not None and "\\u" in new.attributes:
        texts.check_json("attributes", json.loads(new.attributes))


def _cancel_payload(reason: str | None) -> bytes:
    """Return the payload of a cancel fact."""
    return json.dumps({"reason": reason}).encode()
