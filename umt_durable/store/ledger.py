"""The op ledger: external effects by their keys. Writes of an attempt are fenced inside their statement (I15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from umt_durable import sql
from umt_durable.database import Connection
from umt_durable.records import Op
from umt_durable.states import OpState, RunState
from umt_durable.store.guard import Guard
from umt_durable.store.journal import Entry


@dataclass(frozen=True, slots=True)
class OpName:
    """The identity of an effect: its key, unique in a namespace, whatever run asks for it."""

    namespace: str
    op_key: str

    @property
    def parameters(self) -> dict[str, object]:
        """Return the identity as statement parameters."""
        return {"namespace": self.namespace, "op_key": self.op_key}


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer to who begins or takes an op: a cancel is pending, or the turn that is now his; neither: not his."""

    cancel: bool
    turn: int | None


def begin(guard: Guard, op: OpName, *, token: UUID, idem_key: UUID, request_digest: bytes | None) -> Begun | None:
    """Enter a new effect into the ledger; None when fenced."""
    row = sql.maybe(
        guard.conn,
        "begin_op",
        token=token,
        idem_key=idem_key,
        request_digest=request_digest,
        **op.parameters,
        **guard.key,
    )
    return None if row is None else Begun(bool(row[0]), 1 if row[1] else None)


def take(guard: Guard, op: OpName, *, held: UUID, token: UUID, request_digest: bytes | None) -> Begun | None:
    """Take an open row that was read with the token `held`, for the next turn; None when fenced.

    The caller has seen that the grant which holds the row has ended.
    """
    row = sql.maybe(
        guard.conn, "take_op", held=held, token=token, request_digest=request_digest, **op.parameters, **guard.key
    )
    return None if row is None else Begun(bool(row[0]), row[1])


def clear(guard: Guard, op: OpName, *, token: UUID, error: bytes) -> bool | None:
    """Note that nothing was applied so far; say whether a cancel is pending; None when fenced."""
    return _write(guard, "clear_op", op, token, error)


def fail(guard: Guard, op: OpName, *, token: UUID, error: bytes) -> bool | None:
    """Record that an effect was not applied and will not be; say whether a cancel is pending; None when fenced."""
    return _write(guard, "fail_op", op, token, error)


def doubt(guard: Guard, op: OpName, *, token: UUID, error: bytes) -> bool | None:
    """Leave an effect to a person; say whether a cancel is pending; None when fenced."""
    return _write(guard, "doubt_op", op, token, error)


def settle(guard: Guard, op: OpName, entry: Entry, *, token: UUID, result: bytes, digest: bytes) -> bool | None:
    """Record the answer of an effect and its step; say whether a cancel is pending; None when nothing was written.

    None means fenced, written before (`journal.look` tells), or that the row is somebody else's.
    """
    row = sql.maybe(
        guard.conn,
        "settle_op",
        token=token,
        result=result,
        digest=digest,
        **op.parameters,
        **entry.parameters,
        **guard.key,
    )
    return None if row is None else bool(row[0])


def read(conn: Connection, op: OpName) -> Op | None:
    """Read an op."""
    row = sql.maybe(conn, "read_op", **op.parameters)
    return None if row is None else _op(row)


def page(conn: Connection, namespace: str, *, states: Sequence[OpState], after: str, limit: int) -> list[Op]:
    """Read a page of the ops of a namespace in some states, in the order of their keys, after one of these."""
    unsettled = set(states) <= {OpState.OPEN, OpState.UNCERTAIN}
    names = [str(state) for state in states]
    rows = sql.many(conn, "list_ops", namespace=namespace, states=names, unsettled=unsettled, after=after, limit=limit)
    return [_op(row) for row in rows]


def wait_for_person(conn: Connection, op: OpName, run: int) -> bool:
    """Note that a locked run is parked for a person's decision; False when the op is not uncertain any more."""
    return sql.count(conn, "wait_for_person", run=run, **op.parameters) > 0


def resolve(
    conn: Connection,
    op: OpName,
    *,
    held: UUID,
    token: UUID,
    state: OpState,
    result: bytes | None = None,
    digest: bytes | None = None,
    error: bytes | None = None,
    actor: str,
    comment: str | None,
) -> bool:
    """Record what a person says of an op that was read with the token `held` and is held by no grant."""
    said = {"state": state, "result": result, "digest": digest, "error": error, "actor": actor, "comment": comment}
    return sql.maybe(conn, "resolve_op", held=held, token=token, **said, **op.parameters) is not None


def released(conn: Connection, *, limit: int) -> list[OpName]:
    """List ops that a person has decided about while runs are still parked for that."""
    return [OpName(row[0], row[1]) for row in sql.many(conn, "released_ops", limit=limit)]


def waiting(conn: Connection, op: OpName) -> list[int]:
    """List the runs, ascending, that are parked for an op which is not uncertain any more."""
    row = sql.maybe(conn, "waiting_runs", **op.parameters)
    return [] if row is None else list(row[0])


def forget_waiting(conn: Connection, op: OpName, runs: Sequence[int]) -> None:
    """Note that runs are not parked for an op any more."""
    sql.count(conn, "forget_waiting", runs=list(runs), **op.parameters)


def _write(guard: Guard, statement: str, op: OpName, token: UUID, error: bytes) -> bool | None:
    row = sql.maybe(guard.conn, statement, token=token, error=error, **op.parameters, **guard.key)
    return None if row is None else bool(row[0])


def _op(row: sql.Row) -> Op:
    return Op(*sql.typed(sql.typed(row, 2, OpState), 16, RunState))
