"""The journal: the recorded steps of a run. Every write is fenced inside its statement (I5, I6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from umt_durable import sql
from umt_durable.database import Connection
from umt_durable.records import StepEntry
from umt_durable.states import StepKind, StepState
from umt_durable.store.guard import Guard

INLINE_BYTES: Final = 262_144
"""Longer values stay in the database until they are asked for: a run with a thousand of them resumes without them."""
MOST_BYTES: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """The identity of a step in its run's journal, with the name of its undo if it has one."""

    key: str
    seq: int
    kind: StepKind
    fingerprint: bytes | None
    failures: int = 0
    undo: str | None = None

    @property
    def parameters(self) -> dict[str, object]:
        """Return the identity as statement parameters."""
        return {
            "key": self.key,
            "seq": self.seq,
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "failures": self.failures,
            "undo": self.undo,
        }


@dataclass(frozen=True, slots=True)
class Due:
    """When a sleep or a further try is due: seconds from now, by the database clock. None: it is over."""

    cancel: bool
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Started:
    """The answer to who asks to enter a body or sends its work off. Neither a cancel nor granted: that was done."""

    cancel: bool
    granted: bool


def start(guard: Guard, entry: Entry) -> Started | None:
    """Record that a body starts, unless a cancel is pending or the step has its outcome; None when fenced."""
    row = sql.maybe(guard.conn, "start_step", **entry.parameters, **guard.key)
    return None if row is None else Started(bool(row[0]), bool(row[1]))


def mark_started(guard: Guard, entry: Entry, *, age_seconds: float) -> None:
    """Show a body that has been running for a while."""
    sql.count(guard.conn, "mark_started", age=timedelta(seconds=age_seconds), **entry.parameters, **guard.key)


def commit(
    guard: Guard,
    entry: Entry,
    *,
    state: StepState,
    result: bytes | None = None,
    digest: bytes | None = None,
    error: bytes | None = None,
) -> bool | None:
    """Record the outcome of a body, once; say whether a cancel is pending; None when nothing was written.

    None means fenced, or written before: `look` tells which.
    """
    row = sql.maybe(
        guard.conn,
        "commit_step",
        state=state,
        result=result,
        digest=digest,
        error=error,
        **entry.parameters,
        **guard.key,
    )
    return None if row is None else bool(row[0])


@dataclass(frozen=True, slots=True)
class Written:
    """One outcome to be recorded: of which step, and what."""

    entry: Entry
    state: StepState
    result: bytes | None = None
    digest: bytes | None = None
    error: bytes | None = None


def commit_many(guard: Guard, outcomes: Sequence[Written]) -> tuple[bool, list[str]] | None:
    """Record the outcomes of several bodies in one statement, each once; None when fenced.

    Shape: (a cancel is pending, the keys that were written now). The others were written before: `look_many` tells.
    """
    row = sql.maybe(
        guard.conn,
        "commit_steps",
        keys=[one.entry.key for one in outcomes],
        seqs=[one.entry.seq for one in outcomes],
        kinds=[str(one.entry.kind) for one in outcomes],
        states=[str(one.state) for one in outcomes],
        fingerprints=[one.entry.fingerprint for one in outcomes],
        failures=[one.entry.failures for one in outcomes],
        results=[one.result for one in outcomes],
        digests=[one.digest for one in outcomes],
        errors=[one.error for one in outcomes],
        **guard.key,
    )
    return None if row is None else (bool(row[0]), list(row[1]))


def look_many(guard: Guard, keys: Sequence[str]) -> list[str]:
    """List those steps whose outcome this grant itself recorded: the answer to a lost reply (I24)."""
    return [row[0] for row in sql.many(guard.conn, "look_steps", keys=list(keys), **guard.key)]


def look(guard: Guard, key: str) -> StepState | None:
    """Say what this grant itself recorded for a step: the answer to a lost reply (I24)."""
    row = sql.maybe(guard.conn, "look_step", key=key, **guard.key)
    return None if row is None else StepState(row[0])


def start_sleep(
    guard: Guard, entry: Entry, *, duration: timedelta | None = None, until: datetime | None = None
) -> Due | None:
    """Fix when a sleep ends, once, and say when that is; None when fenced."""
    parameters = {name: entry.parameters[name] for name in ("key", "seq", "fingerprint")}
    row = sql.maybe(guard.conn, "start_sleep", duration=duration, until=until, **parameters, **guard.key)
    return None if row is None else Due(bool(row[0]), row[1])


def end_sleep(guard: Guard, key: str) -> Due | None:
    """Record that a sleep is over, if it is, and say when it ends; None when fenced."""
    row = sql.maybe(guard.conn, "end_sleep", key=key, **guard.key)
    return None if row is None else Due(bool(row[0]), row[1])


def record_try(guard: Guard, entry: Entry, *, delay_seconds: float, error: bytes, age_seconds: float) -> Due | None:
    """Record a failed try, begun `age_seconds` ago, that another will follow, and say when; None when fenced."""
    delay, age = timedelta(seconds=delay_seconds), timedelta(seconds=age_seconds)
    row = sql.maybe(guard.conn, "record_try", delay=delay, age=age, error=error, **entry.parameters, **guard.key)
    return None if row is None else Due(bool(row[0]), row[1])


def send(guard: Guard, entry: Entry, *, again: timedelta | None) -> Started | None:
    """Record that a step's work is sent elsewhere; `granted` says that this call did it; None when fenced.

    Units: after `again` without an answer it is sent again; None means never.
    """
    parameters = {name: entry.parameters[name] for name in ("key", "seq", "kind", "fingerprint")}
    row = sql.maybe(guard.conn, "send_step", again=again, **parameters, **guard.key)
    return None if row is None else Started(bool(row[0]), bool(row[1]))


def resend(guard: Guard, entry: Entry, *, again: timedelta) -> Started | None:
    """Count the message of a step as lost; `granted` says that this call did it; None when fenced."""
    row = sql.maybe(guard.conn, "resend_step", key=entry.key, failures=entry.failures, again=again, **guard.key)
    return None if row is None else Started(bool(row[0]), bool(row[1]))


def read(conn: Connection, run: int, *, inline: int | None = INLINE_BYTES) -> list[StepEntry]:
    """Read the journal of a run in the order of its steps.

    Units: results of more than `inline` bytes are left out; None: none is.
    """
    rows = sql.many(conn, "read_journal", run=run, inline=MOST_BYTES if inline is None else inline)
    return [StepEntry(*sql.typed(row, 3, StepState)) for row in rows]


def read_under(conn: Connection, run: int, keys: Sequence[str]) -> list[StepEntry]:
    """Read what is recorded for some items or branches of a step, and for all that was done within them."""
    rows = sql.many(conn, "read_journal_under", run=run, keys=list(keys), inline=INLINE_BYTES)
    return [StepEntry(*sql.typed(row, 3, StepState)) for row in rows]


def result(conn: Connection, run: int, key: str) -> bytes:
    """Read a result that the journal was read without."""
    data: bytes = sql.one(conn, "read_result", run=run, key=key)[0]
    return data
