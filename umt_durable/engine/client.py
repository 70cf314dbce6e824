"""What callers do with runs: start, signal, cancel, look. Every request is one INSERT in the caller's transaction."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid4, uuid5

from umt_durable import codec, telemetry, texts
from umt_durable.bound import Caller
from umt_durable.database import Connection, Database
from umt_durable.engine import failures, forking
from umt_durable.engine.answers import PREFIX, Answer
from umt_durable.engine.completing import Completing
from umt_durable.engine.explaining import Explanation, explain
from umt_durable.engine.failures import Failure
from umt_durable.engine.ids import NAMESPACE
from umt_durable.engine.ops import Ops, check_page
from umt_durable.engine.tokens import Tokens
from umt_durable.engine.waitables import MISSING, RESERVED, check_name
from umt_durable.errors import (
    DefinitionError,
    IdempotencyConflictError,
    RunExistsError,
    SchemaError,
    UnknownRunError,
    UnknownStepError,
    WrongStatusError,
)
from umt_durable.failpoints import point
from umt_durable.payloads import opened
from umt_durable.records import (
    AttemptRecord,
    AuditRecord,
    Enqueued,
    ForkedRun,
    NewRun,
    Progress,
    RetriedRun,
    Run,
    StepEntry,
    WaitEntry,
)
from umt_durable.services import router
from umt_durable.services.acts import MAX_REASON, Kind
from umt_durable.session import caller, is_elsewhere
from umt_durable.settings import Settings
from umt_durable.sql import statements
from umt_durable.states import OWN, RunState, WaitState, divide
from umt_durable.store import attempts, audit, diagnosis, facts, journal, pauses, progress, runs, waits, workers

T = TypeVar("T")

NOTIFY_EVERY_SECONDS = 0.005
CALL_SECONDS = 10.0
"""How long a caller is kept waiting for a database that does not answer."""
LARGEST_NO = 2**63 - 1
LOOKS = 5
"""How often a run that goes on meanwhile is looked at anew, to be explained as it stands at one moment."""


@dataclass(frozen=True, slots=True)
class History:
    """What happened to a run: its grants, its steps, its waits, and what people did to it, each in order.

    Shape: `progress` is what its bodies said of how far they are, that of the run itself first.
    """

    run: Run
    attempts: list[AttemptRecord]
    steps: list[StepEntry]
    waits: list[WaitEntry]
    audit: list[AuditRecord]
    progress: list[Progress]


class Access:
    """How a caller's requests reach one schema: in the caller's transaction, or in a short one of its own."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._notified = 0.0
        self._may_apply: bool | None = None
        self._tokens = Tokens(database, settings)
        self.ops = Ops(database, settings)
        """The external effects of the runs, and what people say of them."""

    def _do(self, work: Callable[[Connection], T], at: str | None = None) -> T:
        """Run work in a transaction of its own; `at` is the prefix of the fail points around its commit."""
        if at is None:
            return self._database.do(work, seconds=CALL_SECONDS)

        def once(conn: Connection) -> T:
            reply = work(conn)
            point(f"{at}.r")
            return reply

        point(f"{at}.b")
        reply = self._database.do(once, seconds=CALL_SECONDS)
        point(f"{at}.a")
        return reply

    def _call(self, who: Caller, name: str, parameters: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Run one of our statements in a caller's transaction.

        Errors: SchemaError when the caller's database does not hold our schema.
        """
        try:
            row = who.one(self._text(name), self._database.vault.sealed(parameters))
        except Exception as error:
            if not is_elsewhere(error):
                raise
            raise SchemaError(
                f"conn leads to a database where schema {self._database.schema!r} is missing or not at this code's"
                " revision: it has to be the database that holds the runs"
            ) from error
        if self._settings.notify == "after_commit":
            who.after_commit(self._notify)
        elif self._settings.notify == "transaction":
            who.one("SELECT pg_notify(%(channel)s, '')", {"channel": self._settings.channel})
        return row

    def _text(self, name: str) -> str:
        return statements(self._database.schema)[name].text.decode()

    def _notify(self) -> None:
        """Wake the relay, at most once per 5 ms: it looks again a little later by itself."""
        now = time.monotonic()
        if now - self._notified >= NOTIFY_EVERY_SECONDS:
            self._notified = now
            self._database.notify()


class Client(Completing, Access):
    """The verbs on runs, for one schema.

    Shape: `conn` is a SQLAlchemy Session or Connection, a psycopg Connection or a Django connection with a transaction
    open; the request then exists if and only if the caller commits (I2). Without it each call is a short transaction of
    its own. Errors: SchemaError when it leads to another database than that of the runs.
    """

    def enqueue(self, new: NewRun, *, conn: object = None) -> Enqueued:
        """Insert a run and its hint.

        Errors: IdempotencyConflictError when the key was used with other input; RunExistsError when it was used at all
        and the run is not to attach; DefinitionError for a name, key, ref or
        attributes that cannot be stored; AutocommitError; DatabaseUnavailableError.
        """
        _check_run(new)
        parameters = runs.enqueue_parameters(new, deliver_seconds=self._settings.deliver_seconds)
        if conn is None:
            done = self._do(
                lambda own: runs.enqueue(own, new, deliver_seconds=self._settings.deliver_seconds), "enqueue.commit"
            )
        else:
            row = self._call(caller(conn), "enqueue_run", parameters)
            assert row is not None
            done = Enqueued(*row)
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

    def cancel(
        self,
        run_id: str,
        *,
        reason: str | None = None,
        conn: object = None,
        actor: str | None = None,
        compensate: bool = False,
    ) -> UUID:
        """Ask that a run end as cancelled, and return the id of the fact that says so.

        A parked or waiting run ends at once (with `conn`: when a router sees the caller's commit), a running one at its
        next step; a terminal one is left as it is. With `compensate` the recorded steps that were declared with an
        undo are undone before that, the last one first, by a worker. The first cancel of a run decides how it ends.
        Errors: UnknownRunError; DefinitionError for an actor or reason that cannot be stored.
        """
        check_reason(reason)
        return self._say(
            run_id, Kind.CANCEL.fact, _because(reason, compensate=compensate), conn=conn, actor=actor, dedupe=None
        )

    def retry(
        self,
        run_id: str,
        *,
        actor: str,
        reason: str | None = None,
        version: int | None = None,
        conn: object = None,
    ) -> str:
        """Have a run go on that stands still or ended without success, and return the id under which it does.

        A quarantined run is made ready with a new crash budget (with `conn`: when a router sees the caller's commit). A
        failed or cancelled one stays as it is (I12): a new run takes up what it had done. That one has an id derived
        from the first, so asking twice makes one; asked again after it has ended too, the retry of the retry is made.
        With `version` it goes on with that code. Without, it keeps its version; but one that is quarantined as
        `bad_input` before its first step takes the highest there is, as a new run does.
        Errors: UnknownRunError; WrongStatusError for a run that succeeded or is under way; DefinitionError for an
        actor, reason or version that cannot be stored.
        """
        check_person(actor, reason)
        forking.check_version(version)
        who = None if conn is None else caller(conn)
        found = self._to_retry(_checked(run_id), who)
        while found is not None and found.state in (RunState.FAILED, RunState.CANCELLED):
            forking.check_kept(found)
            again = str(uuid5(NAMESPACE, json.dumps(["retry", found.id, found.nesting])))
            after = self._to_retry(again, who)
            if after is None:
                self._insert_retry(found, again, who, actor, reason, version)
                return again
            found = after
        if found is None:
            raise UnknownRunError(run_id)
        if found.state is RunState.QUARANTINED:
            asked = _because(reason, version=version)
            self._say(found.id, Kind.RETRY.fact, asked, conn=conn, actor=actor, dedupe=None)
        elif found.state.is_terminal or found.id == run_id:
            raise WrongStatusError(
                found.id, found.state, "only a quarantined, failed or cancelled run can be retried" + _as(found, run_id)
            )
        return found.id

    def fork(
        self,
        run_id: str,
        *,
        from_step: str,
        actor: str,
        reason: str | None = None,
        arguments: codec.Encoded | None = None,
        version: int | None = None,
        conn: object = None,
    ) -> str:
        """Start a new run that begins where another was at a step, and return its id.

        It has the outcomes of the steps and waits that were reached before that step, which is executed anew with all
        that follows. The other run stays as it is; each call makes a fork of its own.
        Shape: `from_step` is a key as in the history, or that of a map or parallel step. `arguments`, encoded, and
        `version` replace those of the first run.
        Errors: UnknownRunError; UnknownStepError; WrongStatusError for a run that is under way; DefinitionError for an
        actor, reason or version that cannot be stored.
        """
        check_person(actor, reason)
        forking.check(from_step, version)
        id, who = _checked(run_id), None if conn is None else caller(conn)
        found = self._to_fork(id, from_step, who)
        if found is None:
            raise UnknownRunError(run_id)
        forking.check_kept(found)
        forking.check_found(found, from_step)
        parameters = runs.fork_parameters(
            found,
            id=new_run_id(),
            step=from_step,
            around=forking.around(from_step),
            arguments=arguments,
            version=version,
            envelope=forking.message_of(found.envelope),
            deliver_seconds=self._settings.deliver_seconds,
            audit=uuid4(),
            actor=actor,
            reason=reason,
        )
        if who is not None:
            self._call(who, "insert_fork", parameters)
        else:
            if self._do(lambda own: runs.insert_fork(own, parameters)):
                telemetry.count(telemetry.Counter.ENQUEUED_RUN)
            self._notify()
        return str(parameters["id"])

    def _to_fork(self, run_id: str, step: str, who: Caller | None) -> ForkedRun | None:
        if who is None:
            return self._do(lambda own: runs.to_fork(own, run_id, step))
        row = who.one(self._text("run_to_fork"), {"run": run_id, "step": step})
        return None if row is None else runs.read_to_fork(row, self._database.vault)

    def pause(self, run_id: str, *, actor: str, reason: str | None = None, conn: object = None) -> UUID:
        """Have a run stand still until it is resumed, and return the id of the fact that says so.

        No process takes it from then on; one that executes it ends the step in flight, and lets go of it. Its sleeps
        and time-outs go on, and facts reach it. A run that is paused already stays so.
        Errors: UnknownRunError; WrongStatusError for a run that has ended; DefinitionError as for `retry`.
        """
        return self._ask(Kind.PAUSE, run_id, actor, reason, conn)

    def resume(self, run_id: str, *, actor: str, reason: str | None = None, conn: object = None) -> UUID:
        """Let a paused run go on, and return the id of the fact that says so. One that is not paused stays as it is.

        Errors: as for `pause`.
        """
        return self._ask(Kind.RESUME, run_id, actor, reason, conn)

    def _ask(self, kind: Kind, run_id: str, actor: str, reason: str | None, conn: object) -> UUID:
        check_person(actor, reason)
        found = self._to_retry(_checked(run_id), None if conn is None else caller(conn))
        if found is None:
            raise UnknownRunError(run_id)
        if found.state.is_terminal:
            raise WrongStatusError(run_id, found.state, f"it has ended, there is nothing to {kind}")
        return self._say(run_id, kind.fact, _because(reason), conn=conn, actor=actor, dedupe=None)

    def _to_retry(self, run_id: str, who: Caller | None) -> RetriedRun | None:
        if who is None:
            return self._do(lambda own: runs.to_retry(own, run_id))
        row = who.one(self._text("run_to_retry"), {"run": run_id})
        return None if row is None else runs.read_to_retry(row, self._database.vault)

    def _insert_retry(
        self, found: RetriedRun, id: str, who: Caller | None, actor: str, reason: str | None, version: int | None
    ) -> None:
        parameters = runs.retry_parameters(
            found.no,
            id=id,
            envelope=forking.without(found.envelope, forking.NOT_RETRIED),
            version=version,
            deliver_seconds=self._settings.deliver_seconds,
            audit=uuid4(),
            actor=actor,
            reason=reason,
        )
        if who is not None:
            self._call(who, "insert_retry", parameters)
            return
        if self._do(lambda own: runs.insert_retry(own, parameters)):
            telemetry.count(telemetry.Counter.ENQUEUED_RUN)
        self._notify()

    def resolve_step(
        self,
        run_id: str,
        step: str,
        *,
        result: Any = MISSING,
        error: str | None = None,
        actor: str | None = None,
        reason: str | None = None,
    ) -> UUID:
        """Say how the task that a step awaits has ended, and return the id of the fact that says so.

        Exactly one of `result` and `error` is given; the step gives that result, or fails with StepFailedError. It is
        for a run that is quarantined as `uncertain_op`, and holds as soon as the step waits; what came first counts.
        Shape: `step` is the step's key as in the history. The audit keeps who is named as `actor`, with the `reason`.
        Errors: UnknownRunError; UnknownStepError when no such step waits for an answer; DefinitionError.
        """
        if (result is MISSING) == (error is None):
            raise DefinitionError(f"step {step!r}: give its result, or the error it is to fail with, and not both")
        if actor is not None or reason is not None:
            check_person(actor, reason)
        run = self.get(run_id)
        if not isinstance(step, str) or not texts.is_storable(step):
            raise UnknownStepError(run_id, step)
        found = self._do(lambda conn: waits.awaited(conn, run_id, None, PREFIX + str(step)))
        if found is None or found.state is not WaitState.PENDING:
            raise UnknownStepError(run_id, step)
        answer = Answer(result) if error is None else Answer(failure=failures.decided(error))
        payload = answer.to_bytes(f"the result of step {step!r}")
        name, id = json.loads(found.address)[2], uuid4()
        parameters = {"run": run.id, "name": name, "payload": payload, "actor": actor, "dedupe": None, "fact": id}

        def say(conn: Connection) -> None:
            with conn.transaction():
                if facts.ask(conn, parameters) is None:
                    raise UnknownRunError(run_id)
                if actor is not None:
                    detail = f"step {step}: {'result' if error is None else 'error'}"
                    audit.add(conn, id, "resolve", run=run.no, actor=actor, reason=reason, detail=detail)

        self._do(say, "signal.commit")
        self._route(id)
        return id

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
            fact = self._do(lambda own: facts.emit(own, parameters), "signal.commit")
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
        return replace(found, result=opened(found.result), error=opened(found.error))

    def list(
        self,
        *,
        task: str | None = None,
        states: Sequence[RunState | str] | str | None = None,
        ref: str | None = None,
        before: int | None = None,
        limit: int = 100,
        internal: bool = False,
    ) -> list[Run]:
        """Read a page of runs, the newest first. `before` is the `no` of the last run of the page before.

        Shape: `states` are one state or several, `paused` among them: it stands for the live runs that are paused,
        whatever their state. The runs of this package's own tasks are left out unless `internal` asks for them, or
        `task` names one.
        Errors: DefinitionError for a limit outside 1 to 1000, a state that is none, a task or ref that no run can have.
        """
        texts.check("task", task)
        texts.check("ref", ref, least=0)
        check_page(limit)
        if before is not None and (not isinstance(before, int) or not 0 <= before <= LARGEST_NO):
            raise DefinitionError(f"before is the number of a run, not {before!r:.100}")
        try:
            wanted, paused = divide([states] if isinstance(states, str) else states or ())
        except (ValueError, TypeError) as error:
            raise DefinitionError(str(error)) from None
        given: dict[str, Any] = {"task": task, "ref": ref, "before": before, "limit": limit}
        given |= {
            "states": None if states is None else wanted,
            "paused": paused,
            "own": hidden(task, internal=internal),
        }
        return self._do(lambda conn: runs.page(conn, **given))

    def history(self, run_id: str) -> History:
        """Read what happened to a run.

        Errors: UnknownRunError.
        """
        run = self.get(run_id)

        def read(conn: Connection) -> History:
            return History(
                run,
                attempts.of_run(conn, run.no),
                [
                    replace(step, result=opened(step.result), error=opened(step.error))
                    for step in journal.read(conn, run.no, inline=None)
                ],
                [replace(wait, payload=opened(wait.payload)) for wait in waits.of_run(conn, run.no, inline=None)],
                audit.of_run(conn, run.no),
                [replace(said, payload=opened(said.payload)) for said in progress.of_run(conn, run.no)],
            )

        return self._do(read)

    def explain(self, run_id: str) -> Explanation:
        """Say why a run stands where it stands, what it goes on with, and what a person can do about it.

        Shape: `str()` of it is for people; `because` holds the reasons, the first of which keeps it, with their codes.
        Errors: UnknownRunError.
        """
        found, is_of_one_moment = self._do(partial(self._explained, self.get(run_id)))
        for _ in range(LOOKS):
            if is_of_one_moment:
                break
            found, is_of_one_moment = self._do(partial(self._explained, self.get(run_id)))
        return found

    def _explained(self, run: Run, conn: Connection) -> tuple[Explanation, bool]:
        """Explain a run as it was read, and say whether all that was read is of one moment of it."""
        before = diagnosis.standing(conn, run.no)
        if before is None:
            raise UnknownRunError(run.id)
        found = explain(
            run,
            before,
            diagnosis.open_steps(conn, run.no),
            diagnosis.open_waits(conn, run.no),
            paused=pauses.listed(conn),
            versions=workers.live_versions(conn),
        )
        after = diagnosis.standing(conn, run.no)
        moment = None if after is None else (after.state, after.fence)
        return found, moment == (before.state, before.fence) and before.state == run.state

    def counts(self, *, internal: bool = False) -> dict[str, int]:
        """Count runs by state, paused ones under `paused`; those of this package's own tasks only as for `list`."""
        return self._do(lambda conn: runs.count_by_state(conn, own=hidden(None, internal=internal)))

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
        # A role that may only signal and cancel has no right to what else is asked by reserved names.
        is_open = name == Kind.CANCEL.fact or not name.startswith(RESERVED)
        if conn is None:
            at = "cancel.commit" if name == Kind.CANCEL.fact else "signal.commit"
            fact = self._do(lambda own: (facts.signal if is_open else facts.ask)(own, parameters), at)
        else:
            row = self._call(caller(conn), "signal_run" if is_open else "ask_run", parameters)
            fact = None if row is None or row[0] is None else UUID(str(row[0]))
        if fact is None:
            raise UnknownRunError(run_id)
        if conn is None:
            self._route(fact)
        return fact

    def _route(self, fact: UUID) -> None:
        """Apply a fact of our own transaction at once; where someone else does it, or nothing can, a router will.

        An application's database user may only say it: a router applies it, woken by the notification.
        """
        if self._may_apply is None:
            self._may_apply = self._do(facts.may_apply)
        if self._may_apply:
            router.route(self._database, self._settings, fact)
        self._notify()


def hidden(task: str | None, *, internal: bool) -> str | None:
    """Return how the names of tasks begin whose runs are not shown: this package's own, unless they are asked for."""
    return None if internal or (task is not None and task.startswith(OWN)) else OWN


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


def _because(reason: str | None, *, version: int | None = None, compensate: bool = False) -> bytes:
    """Return the payload of a fact that asks something of a run."""
    asked: dict[str, object] = {"reason": reason} if version is None else {"reason": reason, "version": version}
    if compensate:
        asked["compensate"] = True
    return json.dumps(asked).encode()


def check_person(actor: object, reason: object) -> None:
    """Refuse who does something, and why, as the audit cannot keep them.

    Errors: DefinitionError.
    """
    if actor is None:
        raise DefinitionError("actor is missing: the audit keeps who did it")
    texts.check("actor", actor)
    check_reason(reason)


def check_reason(reason: object) -> None:
    """Refuse a reason that the audit cannot keep.

    Errors: DefinitionError.
    """
    if reason is not None and not isinstance(reason, str):
        raise DefinitionError(f"reason must be text, not {type(reason).__name__}")
    if reason is not None and len(reason) > MAX_REASON:
        raise DefinitionError(f"reason must have at most {MAX_REASON} characters, not {len(reason)}")


def _as(found: RetriedRun, run_id: str) -> str:
    return "" if found.id == run_id else f"; it is the retry of {run_id}"
