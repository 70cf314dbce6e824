"""Runs: their insertion, their grants and the ends of these, and the scans that find work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias
from uuid import UUID

from umt_durable import sql, texts
from umt_durable.codec import Encoded
from umt_durable.database import Connection
from umt_durable.payloads import PLAIN, Sealed, Vault
from umt_durable.records import (
    Child,
    Enqueued,
    FinishedRun,
    ForkedRun,
    Grant,
    LockedRun,
    NewRun,
    Progress,
    RetriedRun,
    Run,
    RunNo,
    RunOwner,
    Token,
)
from umt_durable.states import AttemptOutcome, Reason, RunState, Scope
from umt_durable.store.guard import Guard

Candidate: TypeAlias = tuple[RunNo, int]  # run and the fence it was seen with


def enqueue_parameters(new: NewRun, *, deliver_seconds: float) -> dict[str, Any]:
    """Return the named parameters of the SQL function `enqueue_run` for a new run."""
    return {
        "id": new.id,
        "nesting": new.nesting,
        "task": new.task,
        "version": new.version,
        "queue": new.queue,
        "priority": new.priority,
        "args": new.args,
        "codec": new.codec,
        "digest": new.digest,
        "envelope": new.envelope,
        "wake_at": new.wake_at,
        "delay": _interval(new.delay_seconds),
        "expires_at": new.expires_at,
        "expires_in": _interval(new.expires_seconds),
        "ref": new.ref,
        "attributes": new.attributes,
        "deliver": timedelta(seconds=deliver_seconds),
        "key": new.key,
        "key_hash": new.key_hash,
        "key_ttl": _interval(new.key_ttl_seconds),
    }


def enqueue(conn: Connection, new: NewRun, *, deliver_seconds: float) -> Enqueued:
    """Insert a run and its hint, once per id and once per idempotency key."""
    return Enqueued(*sql.one(conn, "enqueue_run", **enqueue_parameters(new, deliver_seconds=deliver_seconds)))


def intake(conn: Connection, new: NewRun, *, deliver_seconds: float) -> bool:
    """Insert the run of a foreign message; False when it is there already (I3)."""
    parameters = enqueue_parameters(new, deliver_seconds=deliver_seconds)
    wanted = (
        "id",
        "nesting",
        "task",
        "queue",
        "priority",
        "args",
        "codec",
        "digest",
        "envelope",
        "wake_at",
        "deliver",
        "expires_at",
    )
    return sql.maybe(conn, "intake_run", **{name: parameters[name] for name in wanted}) is not None


def claim(
    conn: Connection,
    *,
    id: str,
    nesting: int,
    task: str,
    claim: UUID,
    worker: UUID,
    versions: Sequence[int],
    limit_seconds: float | None,
    takes_new: bool = True,
) -> Grant | None:
    """Give a ready run to a worker; the same claim again gives the same grant; None when it cannot be had.

    Shape: `versions` are those the worker takes; with `takes_new` a run without one gets the highest of them.
    Units: `limit_seconds` is the attempt's own deadline, if its task declares one.
    """
    row = sql.maybe(
        conn,
        "claim_run",
        id=id,
        nesting=nesting,
        task=task,
        claim=claim,
        worker=worker,
        version=max(versions, default=None),
        versions=list(versions),
        new=takes_new,
        limit=_interval(limit_seconds),
    )
    if row is None:
        return None
    no, fence, *rest = row
    return Grant(Token(RunNo(no), fence, claim), *rest)


def pin_input(guard: Guard, *, digest: bytes, key_hash: bytes) -> bool:
    """Record what a run that SQL started was given, for later starts with its key; False when the grant has ended."""
    return sql.maybe(guard.conn, "pin_input", digest=digest, key_hash=key_hash, **guard.key) is not None


def prove(guard: Guard) -> bool | None:
    """Say whether a cancel is pending; None when the grant has ended."""
    row = sql.maybe(guard.conn, "prove_grant", **guard.key)
    return None if row is None else bool(row[0])


def lock_grant(guard: Guard) -> bool | None:
    """The same, with the run locked until the caller commits."""
    row = sql.maybe(guard.conn, "lock_grant", **guard.key)
    return None if row is None else bool(row[0])


def suspend(
    guard: Guard, *, state: RunState, steps: Sequence[str], waits: Sequence[str], poll: timedelta | None = None
) -> bool:
    """Park the run until the earliest of its open steps, waits and the poll; False when fenced or to be cancelled."""
    row = sql.maybe(
        guard.conn, "suspend_run", state=state, steps=list(steps), waits=list(waits), poll=poll, **guard.key
    )
    return row is not None


def ripe(conn: Connection, run: int, *, steps: Sequence[str], waits: Sequence[str]) -> list[str]:
    """List the keys of these steps and waits of a run that are over, or due."""
    return [row[0] for row in sql.many(conn, "ripe_of_run", run=run, steps=list(steps), waits=list(waits))]


def hand_over(guard: Guard, *, deliver_seconds: float) -> bool:
    """Make the run ready for another process, with a hint; False when fenced or to be cancelled."""
    return sql.maybe(guard.conn, "hand_over_run", deliver=timedelta(seconds=deliver_seconds), **guard.key) is not None


def retry(guard: Guard, *, delay_seconds: float, error: bytes, summary: str, changed: Encoded | None = None) -> bool:
    """Make the run due again after a failure, with other arguments if there are any; False when fenced or cancelled."""
    row = sql.maybe(
        guard.conn,
        "retry_run",
        delay=timedelta(seconds=delay_seconds),
        error=error,
        summary=texts.storable(summary),
        args=None if changed is None else changed.data,
        codec=None if changed is None else changed.codec,
        digest=None if changed is None else changed.digest,
        **guard.key,
    )
    return row is not None


def quarantine(guard: Guard, *, reason: Reason, error: bytes, summary: str) -> bool:
    """Park the run for a person; False when fenced or a cancel is pending."""
    row = sql.maybe(
        guard.conn, "quarantine_run", reason=reason, error=error, summary=texts.storable(summary), **guard.key
    )
    return row is not None


def continue_as_new(
    guard: Guard, *, arguments: Encoded, version: int | None, unread: Sequence[str], deliver_seconds: float
) -> int | None:
    """Make the run ready for its next generation, whose number is returned; None when fenced or to be cancelled.

    Shape: `version` None stays with the one the run has; `unread` are waits that were settled without the body knowing.
    The caller holds the run's lock, taken in an earlier statement: what was settled before it is then seen here.
    """
    row = sql.maybe(
        guard.conn,
        "continue_run",
        args=arguments.data,
        codec=int(arguments.codec),
        digest=arguments.digest,
        version=version,
        unread=list(unread),
        deliver=timedelta(seconds=deliver_seconds),
        **guard.key,
    )
    return None if row is None else int(row[0])


def insert_children(
    guard: Guard,
    children: Sequence[NewRun],
    *,
    key: str | None,
    first: int,
    on_parent_end: str,
    deliver_seconds: float,
) -> int:
    """Insert the children of a step and their hints under the parent's grant; return how many were new.

    Shape: `key` is the step that awaits them, None where none does; `first` is the place of the first of them.
    """
    row = sql.one(
        guard.conn,
        "insert_children",
        key=key,
        first=first,
        on_parent_end=on_parent_end,
        deliver=timedelta(seconds=deliver_seconds),
        ids=[child.id for child in children],
        tasks=[child.task for child in children],
        versions=[child.version for child in children],
        queues=[child.queue for child in children],
        priorities=[child.priority for child in children],
        args=[child.args for child in children],
        codecs=[int(child.codec) for child in children],
        digests=[child.digest for child in children],
        envelopes=[child.envelope for child in children],
        **guard.key,
    )
    return int(row[0])


def hand_on_parent(conn: Connection, run: int, id: str, nesting: int) -> None:
    """Make the run that takes a child's place the child, in the transaction that ends the other."""
    sql.count(conn, "hand_on_parent", run=run, id=id, nesting=nesting)


def children(conn: Connection, run: int, key: str) -> list[Child]:
    """Read the children of a step in the order they were asked for."""
    return [Child(*sql.typed(row, 2, RunState)) for row in sql.many(conn, "children_of_step", run=run, key=key)]


def is_joined(conn: Connection, run: int, key: str) -> bool:
    """Say whether no child of a step is live."""
    return bool(sql.one(conn, "is_joined", run=run, key=key)[0])


def finish(
    guard: Guard,
    *,
    state: RunState,
    result: bytes | None = None,
    error: bytes | None = None,
    summary: str | None = None,
    report: bool,
    callbacks: int,
    hold_seconds: float,
    repair_seconds: float,
) -> RunState | None:
    """Make the run terminal and return the state it ended in; None when fenced.

    Shape: `callbacks` rows leave beside the result (if `report`), claimed by this attempt for `hold_seconds`.
    """
    row = sql.maybe(
        guard.conn,
        "finish_run",
        state=state,
        result=result,
        error=error,
        summary=texts.storable(summary),
        report=report,
        callbacks=callbacks,
        hold=timedelta(seconds=hold_seconds),
        repair=timedelta(seconds=repair_seconds),
        **guard.key,
    )
    return None if row is None else RunState(row[0])


def lock(conn: Connection, run: int) -> LockedRun | None:
    """Lock one run for the rest of the transaction."""
    row = sql.maybe(conn, "lock_run", run=run)
    if row is None:
        return None
    no, id, nesting, state, *rest = row
    return LockedRun(RunNo(no), id, nesting, RunState(state), *rest)


def cancel_parked(conn: Connection, run: int, *, reason: str | None, repair_seconds: float) -> bool:
    """Finalise a locked run that nobody owns."""
    repair = timedelta(seconds=repair_seconds)
    return sql.maybe(conn, "cancel_parked_run", run=run, reason=texts.storable(reason), repair=repair) is not None


def flag_cancel(conn: Connection, run: int, *, reason: str | None, compensate: bool = False) -> bool:
    """Ask the owner of a locked, running run to stop; False when its undos are being executed."""
    given = {"run": run, "reason": texts.storable(reason), "compensate": compensate}
    return sql.maybe(conn, "flag_cancel", **given) is not None


def compensate(
    conn: Connection,
    run: int,
    *,
    deliver_seconds: float,
    reason: str | None = None,
    delay_seconds: float = 0.0,
    outcome: AttemptOutcome = AttemptOutcome.LOST,
) -> bool:
    """Have the undos of what a locked run has done executed; False when there are none, or this is not asked for.

    Shape: `outcome` is that of its grant, if it has one. Units: before `delay_seconds` nobody claims it.
    """
    times = {"deliver": timedelta(seconds=deliver_seconds), "delay": timedelta(seconds=delay_seconds)}
    row = sql.maybe(conn, "compensate_run", run=run, reason=texts.storable(reason), outcome=outcome, **times)
    return row is not None


def wake(conn: Connection, run: int, *, deliver_seconds: float) -> bool:
    """Make a locked, parked run ready; False when it is not parked."""
    return sql.maybe(conn, "wake_run", run=run, deliver=timedelta(seconds=deliver_seconds)) is not None


def release(conn: Connection, run: int, *, reason: Reason, deliver_seconds: float) -> bool:
    """Make a locked run that is quarantined for a reason ready; False when it is not, or for another one."""
    deliver = timedelta(seconds=deliver_seconds)
    return sql.maybe(conn, "release_run", run=run, reason=reason, deliver=deliver) is not None


def release_quarantined(
    conn: Connection, run: int, *, deliver_seconds: float, version: int | None = None
) -> str | None:
    """Make a locked, quarantined run ready with a new crash budget; why it was quarantined, None where it is not."""
    deliver = timedelta(seconds=deliver_seconds)
    row = sql.maybe(conn, "release_quarantined_run", run=run, deliver=deliver, version=version)
    return None if row is None else str(row[0])


def pause(conn: Connection, run: int) -> bool:
    """Keep a locked run from being claimed; False where it is paused already, or over."""
    return sql.maybe(conn, "pause_run", run=run) is not None


def resume(conn: Connection, run: int, *, deliver_seconds: float) -> RunState | None:
    """Let a locked, paused run go on; the state it is in, None where it is not paused."""
    row = sql.maybe(conn, "resume_run", run=run, deliver=timedelta(seconds=deliver_seconds))
    return None if row is None else RunState(row[0])


def to_retry(conn: Connection, id: str) -> RetriedRun | None:
    """Read what decides how a run is retried."""
    row = sql.maybe(conn, "run_to_retry", run=id)
    return None if row is None else read_to_retry(row)


def insert_retry(conn: Connection, parameters: dict[str, Any]) -> bool:
    """Insert the run that takes up an ended one; False when it is there already."""
    return sql.maybe(conn, "insert_retry", **parameters) is not None


def read_to_retry(row: Sequence[Any], vault: Vault = PLAIN) -> RetriedRun:
    """Read a row of the statement `run_to_retry`; the vault is for one that a caller's connection has read."""
    no, id, nesting, state, envelope, compensated = row
    return RetriedRun(RunNo(no), id, nesting, RunState(state), _held(envelope, vault), compensated)


def retry_parameters(
    run: int,
    *,
    id: str,
    envelope: bytes | None,
    version: int | None,
    deliver_seconds: float,
    audit: UUID,
    actor: str,
    reason: str | None,
) -> dict[str, Any]:
    """Return the named parameters of the statement `insert_retry`: `id` and `version` are the new run's."""
    kept = {"actor": texts.storable(actor), "reason": texts.storable(reason)}
    deliver = timedelta(seconds=deliver_seconds)
    made = {"id": id, "envelope": envelope, "version": version}
    return {"run": run, **made, "deliver": deliver, "audit": audit, **kept}


def to_fork(conn: Connection, id: str, step: str) -> ForkedRun | None:
    """Read what decides how a run is forked from a step."""
    row = sql.maybe(conn, "run_to_fork", run=id, step=step)
    return None if row is None else read_to_fork(row)


def insert_fork(conn: Connection, parameters: dict[str, Any]) -> bool:
    """Insert the run that begins where another was at a step; False when it is there already, or the other goes on."""
    return sql.maybe(conn, "insert_fork", **parameters) is not None


def read_to_fork(row: Sequence[Any], vault: Vault = PLAIN) -> ForkedRun:
    """Read a row of the statement `run_to_fork`; the vault is for one that a caller's connection has read."""
    no, id, nesting, state, envelope, seq, compensated = row
    return ForkedRun(RunNo(no), id, nesting, RunState(state), _held(envelope, vault), seq, compensated)


def _held(data: Any, vault: Vault) -> bytes | None:
    return data if data is None or isinstance(data, Sealed) else vault.hold(bytes(data))


def fork_parameters(
    found: ForkedRun,
    *,
    id: str,
    step: str,
    around: Sequence[str],
    arguments: Encoded | None,
    version: int | None,
    envelope: bytes | None,
    deliver_seconds: float,
    audit: UUID,
    actor: str,
    reason: str | None,
) -> dict[str, Any]:
    """Return the named parameters of the statement `insert_fork`.

    Shape: `id` is the new run's; `around` are the branches that the step is in; without `arguments` or `version` the
    new run has those of the first.
    """
    return {
        "run": found.no,
        "id": id,
        "step": step,
        "seq": found.seq,
        "around": list(around),
        "args": None if arguments is None else arguments.data,
        "codec": None if arguments is None else int(arguments.codec),
        "digest": None if arguments is None else arguments.digest,
        "version": version,
        "envelope": envelope,
        "deliver": timedelta(seconds=deliver_seconds),
        "audit": audit,
        "actor": texts.storable(actor),
        "reason": texts.storable(reason),
    }


def wake_due(conn: Connection, *, limit: int, deliver_seconds: float) -> int:
    """Make due sleeping and retrying runs ready; return how many."""
    return len(sql.many(conn, "wake_due_runs", limit=limit, deliver=timedelta(seconds=deliver_seconds)))


def overdue_waiting(conn: Connection, *, limit: int) -> list[int]:
    """List waiting runs whose deadline has passed."""
    return [row[0] for row in sql.many(conn, "overdue_waiting_runs", limit=limit)]


def expired(conn: Connection, *, limit: int) -> list[int]:
    """List runs that were never started and may not start any more."""
    return [row[0] for row in sql.many(conn, "expired_runs", limit=limit)]


def of_id(conn: Connection, id: str) -> list[tuple[int, RunState]]:
    """List (no, state) of the runs of one id, the highest nesting first."""
    return [(row[0], RunState(row[1])) for row in sql.many(conn, "runs_of_id", id=id)]


def arguments(conn: Connection, id: str, nesting: int) -> tuple[bytes, int] | None:
    """Read the arguments of a run and their codec; None when there is no such run."""
    row = sql.maybe(conn, "arguments_of_run", id=id, nesting=nesting)
    return None if row is None else (row[0], int(row[1]))


def lost(conn: Connection, *, limit: int, after: int = 0) -> list[Candidate]:
    """List running runs, beyond a given number, without a live owner or past their attempt's deadline."""
    return [(RunNo(row[0]), row[1]) for row in sql.many(conn, "lost_runs", limit=limit, after=after)]


def owner(conn: Connection, candidate: Candidate) -> RunOwner | None:
    """Say who holds a run and in which step it was last seen; None when that grant has ended."""
    row = sql.maybe(conn, "owner_of_run", run=candidate[0], fence=candidate[1])
    return None if row is None else RunOwner(*row)


def of_workers(conn: Connection, workers: Sequence[UUID]) -> list[Candidate]:
    """List the runs that given workers hold."""
    return [(RunNo(row[0]), row[1]) for row in sql.many(conn, "runs_of_workers", workers=list(workers))]


def of_claim(conn: Connection, claim: UUID) -> Candidate | None:
    """Find the run held under a claim."""
    row = sql.maybe(conn, "run_of_claim", claim=claim)
    return None if row is None else (RunNo(row[0]), row[1])


def take_over(
    conn: Connection,
    candidate: Candidate,
    *,
    only_dead: bool,
    delay_seconds: float,
    deliver_seconds: float,
    budget: int,
    why: str,
    error: bytes,
    counts: bool = True,
) -> tuple[bool, RunState] | None:
    """End the grant of a lost run; None when it was not lost any more (RG-1) or is locked.

    Shape: (cancel pending: the caller finalises it in this transaction, the state it is in now).
    Units: `delay_seconds` keeps the run unclaimable until no proof of the old owner can hold; zero only where that
    process is known to have ended. Without `counts` it was no crash, and uses none of the budget.
    """
    run, fence = candidate
    row = sql.maybe(
        conn,
        "take_over_run",
        run=run,
        fence=fence,
        only_dead=only_dead,
        delay=timedelta(seconds=delay_seconds),
        deliver=timedelta(seconds=deliver_seconds),
        budget=budget,
        why=texts.storable(why),
        error=error,
        counts=counts,
    )
    return None if row is None else (bool(row[1]), RunState(row[2]))


def rehint(conn: Connection, id: str, nesting: int) -> bool:
    """Put the hint of a ready run back into the outbox."""
    return sql.maybe(conn, "rehint_run", id=id, nesting=nesting) is not None


def overdue_ready(conn: Connection, *, limit: int) -> list[tuple[int, str | None, str, bool, bool]]:
    """List ready runs whose hint is overdue and not in the outbox.

    Shape: (run, queue, task, a live worker can take it, the hint is known to be nowhere).
    """
    rows = sql.many(conn, "overdue_ready_runs", limit=limit)
    return [(row[0], row[1], row[2], bool(row[3]), bool(row[4])) for row in rows]


def redispatch(conn: Connection, runs: Sequence[int], *, deliver_seconds: float) -> int:
    """Write new hints for overdue ready runs, with twice the time; return how many."""
    return len(sql.many(conn, "redispatch_runs", runs=list(runs), deliver=timedelta(seconds=deliver_seconds)))


def postpone(conn: Connection, runs: Sequence[int], *, deliver_seconds: float) -> int:
    """Give the hints of ready runs twice the time, without new ones; return how many."""
    return sql.count(conn, "postpone_redispatch", runs=list(runs), deliver=timedelta(seconds=deliver_seconds))


def rehint_ready(conn: Connection, *, after: int, limit: int, deliver_seconds: float) -> list[int]:
    """Write fresh hints for the next ready runs after a number, whatever became of their old ones."""
    deliver = timedelta(seconds=deliver_seconds)
    return sorted(row[0] for row in sql.many(conn, "rehint_ready_runs", after=after, limit=limit, deliver=deliver))


def shelve(conn: Connection, runs: Sequence[int]) -> set[int]:
    """Note for ready runs that no live worker can take them, so that whoever can finds them; return which these are."""
    return {row[0] for row in sql.many(conn, "shelve_runs", runs=list(runs))}


def refuse_hint(
    conn: Connection,
    id: str,
    nesting: int,
    *,
    task: str | None,
    versions: Sequence[int],
    spread_seconds: float,
    deliver_seconds: float,
    takes_new: bool = True,
) -> tuple[bool, bool] | None:
    """Have the hint of a ready run come back later that this process cannot take.

    Shape: `task`, `versions` and `takes_new` are what it takes, `spread_seconds` is how much later at least. The
    reply: the hint is written again, since a live worker has the code; it is not, since task or queue is paused. None:
    the run is not ready, or it was no refusal.
    """
    row = sql.maybe(
        conn,
        "refuse_hint",
        id=id,
        nesting=nesting,
        task=task,
        versions=list(versions),
        new=takes_new,
        spread=timedelta(seconds=spread_seconds),
        deliver=timedelta(seconds=deliver_seconds),
    )
    return None if row is None else (bool(row[0]), bool(row[1]))


ReadyPlace: TypeAlias = tuple[datetime, int]  # deliver_by and number of a ready run
FIRST_READY: Final[ReadyPlace] = (datetime.min.replace(tzinfo=UTC), 0)


def bring_versions(
    conn: Connection, versions: Sequence[str], *, after: ReadyPlace = FIRST_READY, limit: int
) -> tuple[int, ReadyPlace | None]:
    """Make ready runs that waited for these versions due for delivery at once, among the next ones after a place.

    Shape: (how many, where to go on; None when that was the last of them).
    """
    names = list(versions)
    row = sql.one(conn, "bring_versions", versions=names, after=after[0], after_no=after[1], limit=limit)
    deliver_by, no, looked_at, brought = row
    return brought, (deliver_by, no) if looked_at == limit else None


def bring_resumed(
    conn: Connection, scope: Scope, name: str, *, after: ReadyPlace = FIRST_READY, limit: int
) -> tuple[int, ReadyPlace | None]:
    """Make ready runs of a task or queue that was resumed due for delivery at once; the shape is `bring_versions`'s."""
    given = {"scope": str(scope), "name": name, "after": after[0], "after_no": after[1], "limit": limit}
    deliver_by, no, looked_at, brought = sql.one(conn, "bring_resumed", **given)
    return brought, (deliver_by, no) if looked_at == limit else None


def count_ready(conn: Connection) -> list[tuple[str | None, str, int]]:
    """Count, as (queue, task, number), the ready runs whose hints should be with the broker."""
    return [(row[0], row[1], row[2]) for row in sql.many(conn, "count_ready")]


def stamped(conn: Connection, *, after: int, limit: int) -> list[tuple[int, str, bytes]]:
    """List (no, id, envelope) of the next live runs, beyond a given number, whose message has stamps or is sealed."""
    return [(row[0], row[1], row[2]) for row in sql.many(conn, "stamped_runs", after=after, limit=limit)]


def asked_claims(conn: Connection, worker: UUID) -> list[tuple[UUID, str | None, str]]:
    """List (claim, reason, `cancel` or `pause`) of the runs a worker holds that were asked to stop."""
    return [(row[0], row[1], row[2]) for row in sql.many(conn, "asked_claims", worker=worker)]


def get(conn: Connection, id: str) -> Run | None:
    """Read one run."""
    row = sql.maybe(conn, "get_run", id=id)
    return None if row is None else _run(conn, row)


def page(
    conn: Connection,
    *,
    task: str | None = None,
    states: Sequence[RunState] | None = None,
    paused: bool = False,
    own: str | None = None,
    ref: str | None = None,
    before: int | None = None,
    limit: int = 100,
) -> list[Run]:
    """Read a page of runs, the newest first, below the number of the last one seen.

    Shape: `paused` adds the paused runs to those in these states; tasks whose names begin with `own` are left out.
    """
    given = {"task": task, "ref": ref, "before": before, "limit": limit, "paused": paused, "own": own}
    names = None if states is None else [str(state) for state in states]
    return [_run(conn, row) for row in sql.many(conn, "list_runs", states=names, **given)]


def count_by_state(conn: Connection, *, own: str | None = None) -> dict[str, int]:
    """Count runs by state, paused ones under `paused`; tasks whose names begin with `own` are left out."""
    return dict(sql.many(conn, "count_by_state", own=own))


def due_work(conn: Connection) -> tuple[bool, bool, bool, bool, bool, bool, bool, bool]:
    """Say which duties have work: outbox, timers, take-over, router, redispatch, expiry, release, ended pauses."""
    outbox, timers, lost_runs, facts, hints, expiry, release, resumed = sql.one(conn, "due_work")
    return outbox, timers, lost_runs, facts, hints, expiry, release, resumed


def for_report(conn: Connection, run: int) -> FinishedRun | None:
    """Read what backend and callbacks of a terminal run need."""
    row = sql.maybe(conn, "run_for_report", run=run)
    return None if row is None else FinishedRun(*sql.typed(row, 7, RunState))


def _run(conn: Connection, row: sql.Row) -> Run:
    *columns, status, done, total, noted_at = sql.typed(row, 7, RunState)
    run = Run(*columns)
    if noted_at is None:
        return run
    return replace(run, progress=Progress("", conn.vault.readable(status) or None, done, total, None, noted_at))


def _interval(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
