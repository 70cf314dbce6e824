"""What people look at: the server, and what stands still in the schema."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from umt_durable import sql
from umt_durable.database import Connection
from umt_durable.errors import JournalCorruptError, PayloadKeyError
from umt_durable.payloads import key_of, plain
from umt_durable.records import RunNo
from umt_durable.states import RunState


@dataclass(frozen=True, slots=True)
class StillRuns:
    """Runs that stand still for one reason. `version` is None where none is pinned yet; `example` is the id of one."""

    task: str
    version: int | None
    reason: str | None
    runs: int
    example: str


@dataclass(frozen=True, slots=True)
class RunsOfVersion:
    """Live runs of one version in one state, or `paused`. `version` is None where none is pinned yet."""

    task: str
    version: int | None
    state: str
    runs: int


@dataclass(frozen=True, slots=True)
class ParkedInChord:
    """Runs that chords wait for and that are parked for long; `example` is the id of the one with most `seconds`."""

    runs: int
    seconds: float
    example: str


@dataclass(frozen=True, slots=True)
class RunsWithPriority:
    """Runs of a task under way that have a priority. `queue` is None where routing decides at each hint."""

    queue: str | None
    task: str
    runs: int
    example: str


@dataclass(frozen=True, slots=True)
class DeadEvents:
    """Outbox rows of one type that were given up for one reason; `doubtful`: nobody knows whether these left."""

    type: str
    reason: str
    rows: int
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    """The server as a connection of ours sees it.

    Units: `clock` is its own clock in epoch seconds.
    """

    version: int
    encoding: str
    is_standby: bool
    fsync: str
    synchronous_commit: str
    full_page_writes: str
    backend: int
    clock: float
    connections: int
    max_connections: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What decides when a run goes on.

    Shape: `hint_at` is when the message of a ready run is to be published, None where it was; `unreported` messages
    about its end have not left; `children` counts the live ones by the step that awaits them; `host` and `pid` are of
    the process that executes it, if that `is_held` by a lease.
    """

    deliver_by: datetime | None
    redelivers: int
    expires_at: datetime | None
    attempt_deadline: datetime | None
    host: str | None
    pid: int | None
    is_held: bool
    hint_at: datetime | None
    unreported: int
    has_dead_hint: bool
    children: dict[str, int]
    now: datetime
    state: str
    fence: int


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that has begun and has no outcome yet; `wake_at` ends a sleep, or is when it is tried again."""

    key: str
    kind: str
    failures: int
    wake_at: datetime | None
    started_at: datetime | None


@dataclass(frozen=True, slots=True)
class OpenWait:
    """A wait that nothing has settled yet; a group has `need`, the number of its parts that settle it."""

    key: str
    name: str
    mode: str
    address: str
    deadline: datetime | None
    need: int | None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The time limits of a connection, in milliseconds; zero means none."""

    statement: float
    lock: float
    idle_in_transaction: float


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction of somebody's that is open, and for how many seconds."""

    pid: int
    application: str
    state: str
    seconds: float


def arguments(conn: Connection, run: RunNo) -> tuple[bytes, int] | None:
    """Read the stored arguments of a run and their codec."""
    row = sql.maybe(conn, "read_arguments", run=run)
    return None if row is None or row[0] is None else (row[0], row[1])


def standing(conn: Connection, run: RunNo) -> Standing | None:
    """Read what decides when a run goes on."""
    row = sql.maybe(conn, "standing_of_run", run=run)
    return None if row is None else Standing(*row)


def open_steps(conn: Connection, run: RunNo, *, limit: int = 50) -> list[OpenStep]:
    """Read the steps of a run that have begun and have no outcome yet."""
    return [OpenStep(*row) for row in sql.many(conn, "open_steps_of_run", run=run, limit=limit)]


def open_waits(conn: Connection, run: RunNo, *, limit: int = 50) -> list[OpenWait]:
    """Read what a run waits for, a group before its parts."""
    return [OpenWait(*row) for row in sql.many(conn, "open_waits_of_run", run=run, limit=limit)]


def blocked(conn: Connection, *, own: str | None = None) -> list[StillRuns]:
    """Count the ready runs that no live worker can take; tasks whose names begin with `own` are left out."""
    return [
        StillRuns(task, version, None, runs, example)
        for task, version, runs, example in sql.many(conn, "blocked_runs", own=own)
    ]


def by_version(conn: Connection, task: str | None, *, own: str | None = None) -> list[RunsOfVersion]:
    """Count the runs, of one task or of all, that have not ended; tasks whose names begin with `own` are left out."""
    return [RunsOfVersion(*row) for row in sql.many(conn, "live_runs_by_version", task=task, own=own)]


def select_runs(
    conn: Connection,
    *,
    states: Collection[RunState],
    or_paused: bool,
    task: str | None,
    queue: str | None,
    paused: bool | None,
    age: timedelta | None,
    own: str | None,
    after: int,
    limit: int,
) -> list[tuple[int, str]]:
    """List (no, id) of the next runs beyond a number: in such a state, of a task, in a queue, paused or not, so old.

    Shape: `or_paused` adds the paused runs to those in these states; tasks whose names begin with `own` are left out.
    """
    rows = sql.many(
        conn,
        "select_runs",
        states=[str(one) for one in states],
        or_paused=or_paused,
        task=task,
        queue=queue,
        paused=paused,
        age=age,
        own=own,
        after=after,
        limit=limit,
    )
    return [(row[0], row[1]) for row in rows]


def sealed(conn: Connection, *, limit: int = 500) -> tuple[list[str], list[PayloadKeyError]]:
    """Look at the payloads of the newest and oldest runs: which keys can be opened here, and why others cannot.

    Shape: (keys, errors); a payload that was changed counts as neither.
    """
    known, unknown = [], []
    for (frame,) in sql.many(conn, "sealed_samples", limit=limit):
        try:
            plain(frame)
        except PayloadKeyError as error:
            unknown.append(error)
        except JournalCorruptError:
            continue
        else:
            known.append(key_of(frame))
    return known, unknown


def quarantined(conn: Connection) -> list[StillRuns]:
    """Count the runs that wait for a person."""
    return [
        StillRuns(task, None, reason, runs, example)
        for task, reason, runs, example in sql.many(conn, "quarantined_runs")
    ]


def dead_events(conn: Connection) -> list[DeadEvents]:
    """Count the outbox rows that were given up."""
    return [DeadEvents(*row) for row in sql.many(conn, "dead_events")]


def longest_parked(conn: Connection) -> float | None:
    """Return the seconds from the enqueuing of a run to the end of the longest sleep or wait there is now."""
    seconds: float | None = sql.one(conn, "longest_parked")[0]
    return seconds


def parked_in_chords(
    conn: Connection, kept_seconds: float, is_awaited: Callable[[bytes], bool]
) -> ParkedInChord | None:
    """Find the runs that chords wait for and that are parked for longer than a backend keeps these."""
    rows = sql.many(conn, "parked_in_chords", kept=kept_seconds)
    found = [(id, seconds) for id, seconds, sealed in rows if sealed is None or is_awaited(sealed)]
    return ParkedInChord(len(found), found[0][1], found[0][0]) if found else None


def with_priority(conn: Connection) -> list[RunsWithPriority]:
    """Count the runs under way that have a priority, by queue and task."""
    return [RunsWithPriority(*row) for row in sql.many(conn, "runs_with_priority")]


def server(conn: Connection) -> Server:
    """Read the server's settings and clock."""
    return Server(*sql.one(conn, "read_server_settings"))


def clock_offset(conn: Connection) -> float:
    """Return by how many seconds the schema's clock is moved from the server's: zero but in tests."""
    seconds: float = sql.one(conn, "read_clock_offset")[0]
    return seconds


def timeouts(conn: Connection) -> Timeouts:
    """Read the time limits of this connection."""
    return Timeouts(*sql.one(conn, "read_timeouts"))


def missing_rights(conn: Connection, tables: Sequence[str], rights: Sequence[str]) -> list[str]:
    """List which rights this user lacks: of those given, each on the table at its place, and to call functions.

    Shape: `name (RIGHT, RIGHT)`.
    """
    rows = sql.many(conn, "missing_rights", name=conn.schema, tables=list(tables), rights=list(rights))
    return [row[0] for row in rows]


def oldest_transaction(conn: Connection) -> OpenTransaction | None:
    """Find the transaction that has been open longest."""
    row = sql.maybe(conn, "oldest_transaction")
    return None if row is None else OpenTransaction(*row)
