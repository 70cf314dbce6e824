"""What the tests of the services share: runs in every state, attempts in flight, recording dispatcher and broker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from tests.support.postgres import make_schema
from umt_durable import failpoints, telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.errors import BrokerUnavailableError
from umt_durable.records import FinishedRun, Grant, NewRun, OutboxEntry, RunNo, Token
from umt_durable.services.lease import Lease
from umt_durable.settings import Settings
from umt_durable.states import RunState, StepKind, StepState, WaitState
from umt_durable.store import facts, journal, outbox, runs, waits, workers
from umt_durable.store.guard import Guard

_schemas: dict[str, str] = {}
_NO_ROWS = """
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables
                 WHERE schemaname = {literal} AND tablename NOT IN ('umt_version', 'setting')
    LOOP EXECUTE format('DELETE FROM %I.%I', {literal}, name); END LOOP;
END $$;
DELETE FROM {schema}.setting WHERE name = 'clock_offset';
"""
_STILL_CLOCK = """
CREATE OR REPLACE FUNCTION {schema}.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    AS 'SELECT clock_timestamp()';
"""


@pytest.fixture(name="schema")
def empty_schema(database_url: str) -> str:
    """Return an empty schema; one for all tests of a server, since making one takes longer than most of these tests."""
    if database_url not in _schemas:
        _schemas[database_url] = f"test_services_{uuid4().hex[:12]}"
        make_schema(database_url, _schemas[database_url])
    name = _schemas[database_url]
    with psycopg.connect(database_url, autocommit=True) as conn:
        delete_rows(conn, name)
        conn.execute(sql.SQL(_STILL_CLOCK).format(schema=sql.Identifier(name)))
    return name


def delete_rows(conn: psycopg.Connection[Any], schema: str) -> None:
    """Delete all that is in a schema, but for its revision and settings; a movable clock shows the time again."""
    conn.execute(sql.SQL(_NO_ROWS).format(literal=sql.Literal(schema), schema=sql.Identifier(schema)))


NODE = uuid4()
TASK, VERSION = "shop.fulfil", 1
DECLARED = (TASK, f"{TASK}@{VERSION}")
LEASE_SECONDS = 3.0


def enqueue(conn: Connection, **given: Any) -> NewRun:
    """Insert a run of TASK and its hint."""
    new = NewRun(**{"id": str(uuid4()), "task": TASK, "version": VERSION, "queue": "q", **given})
    runs.enqueue(conn, new, deliver_seconds=30.0)
    return new


def number(conn: Connection, run_id: str) -> int:
    """Return the no of a run."""
    return runs.of_id(conn, run_id)[0][0]


def worker(
    conn: Connection, *, versions: Sequence[str] = DECLARED, seconds: float = LEASE_SECONDS, pid: int = 4711
) -> UUID:
    """Insert a worker with a lease; its id is its node too."""
    id = uuid4()
    workers.register(conn, id=id, node=id, pid=pid, host="host-1", lease_seconds=seconds, versions=versions)
    return id


def claim(conn: Connection, run_id: str, by: UUID, *, limit_seconds: float | None = None) -> Grant:
    """Give a run to a worker."""
    grant = try_claim(conn, run_id, by, limit_seconds=limit_seconds)
    assert grant is not None
    return grant


def try_claim(conn: Connection, run_id: str, by: UUID, *, limit_seconds: float | None = None) -> Grant | None:
    """Ask for a run on behalf of a worker."""
    return runs.claim(
        conn,
        id=run_id,
        nesting=0,
        task=TASK,
        claim=uuid4(),
        worker=by,
        versions=[VERSION],
        limit_seconds=limit_seconds,
    )


def running(conn: Connection, **given: Any) -> tuple[NewRun, Grant, UUID]:
    """Insert a run that a new worker executes, its hint gone."""
    new, by = enqueue(conn, **given), worker(conn)
    drop_hints(conn)
    return new, claim(conn, new.id, by), by


def entry(key: str, seq: int = 0, kind: StepKind = StepKind.RUN) -> journal.Entry:
    """Return the identity of a step."""
    return journal.Entry(key, seq, kind, None)


def sleeping(conn: Connection, seconds: float) -> tuple[NewRun, int]:
    """Insert a run that was executed and now sleeps in a step."""
    new, grant, _ = running(conn)
    guard = Guard(conn, grant.token)
    journal.start_sleep(guard, entry("nap", kind=StepKind.SLEEP), duration=timedelta(seconds=seconds))
    assert runs.suspend(guard, state=RunState.SLEEPING, steps=["nap"], waits=[])
    return new, grant.token.run


def register(guard: Guard, key: str, address: str, *, timeout: float | None = None, mode: str = "first") -> bool:
    """Register a wait the way the engine does, and say whether its fact was there already."""
    with guard.conn.transaction():
        waits.lock_address(guard.conn, address)
        return register_locked(guard, key, address, timeout=timeout, mode=mode)


def register_locked(guard: Guard, key: str, address: str, *, timeout: float | None = None, mode: str = "first") -> bool:
    """Do the part of `register` that follows the address lock, inside the caller's transaction."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    assert waits.register(guard, key=key, seq=0, name=key, address=address, mode=mode, timeout=limit) is False
    of_run = address.startswith('["run"')
    fact = facts.look_for(guard.conn, address, run=guard.token.run, of_run=of_run, mode=mode)
    settled = fact and waits.settle(guard.conn, guard.token.run, key, state=WaitState.SATISFIED, fact=fact)
    return settled is True


def waiting(
    conn: Connection, name: str = "approved", *, timeout: float | None = None, key: str | None = None
) -> tuple[NewRun, int]:
    """Insert a run that is parked until a fact comes."""
    new, grant, _ = running(conn)
    guard = Guard(conn, grant.token)
    address = waits.run_address(new.id, name) if key is None else waits.key_address(name, key)
    assert not register(guard, name, address, timeout=timeout)
    assert runs.suspend(guard, state=RunState.WAITING, steps=[], waits=[name])
    return new, grant.token.run


def signal(conn: Connection, run_id: str, name: str = "approved", payload: bytes | None = b"{}") -> UUID:
    """Say a fact to a run."""
    given = {"run": run_id, "name": name, "payload": payload, "actor": None, "dedupe": None, "fact": uuid4()}
    fact = facts.signal(conn, given)
    assert fact is not None
    return fact


def emit(conn: Connection, name: str, key: str) -> UUID:
    """Say a fact under a key."""
    given = {"name": name, "key": key, "payload": b"{}", "actor": None, "dedupe": None, "fact": uuid4()}
    return facts.emit(conn, given)


def finish(conn: Connection, token: Token, state: RunState = RunState.SUCCEEDED, callbacks: int = 0) -> RunState | None:
    """End a run the way the engine does."""
    return runs.finish(
        Guard(conn, token),
        state=state,
        result=b"1",
        report=True,
        callbacks=callbacks,
        hold_seconds=15.0,
        repair_seconds=6.0,
    )


def drop_hints(conn: Connection) -> None:
    """Lose everything that is in the outbox."""
    table(conn, "DELETE FROM {}.outbox_event")


def table(conn: Connection, query: str, *params: object) -> list[tuple[Any, ...]]:
    """Run a query on our tables; `{}` stands for the schema."""
    cursor = conn.execute(query.replace("{}", f'"{conn.schema}"').encode(), params)
    return [] if cursor.description is None else cursor.fetchall()


def state(conn: Connection, run: int | str) -> str:
    """Return where a run stands, by its no or id."""
    column = "no" if isinstance(run, int) else "id"
    return str(table(conn, f"SELECT state FROM {{}}.run WHERE {column} = %s ORDER BY nesting DESC", run)[0][0])


def wait_states(conn: Connection, run: int) -> dict[str, str]:
    """Return the state of each wait of a run."""
    return {wait.key: str(wait.state) for wait in waits.of_run(conn, run)}


def events(conn: Connection, kind: str = "run") -> list[tuple[Any, ...]]:
    """Return (run, status, attempts, claim) of the outbox rows of one type."""
    return table(
        conn, "SELECT run, status, attempts, claim FROM {}.outbox_event WHERE type = %s ORDER BY run, ordinal", kind
    )


def claimed(conn: Connection, relay: UUID) -> list[OutboxEntry]:
    """Claim what is due, as another relay."""
    return outbox.claim(conn, relay=relay, limit=100, hold_seconds=15.0)


@dataclass(frozen=True)
class Report:
    """What became of a batch."""

    confirmed: frozenset[UUID]
    refused: dict[UUID, str]
    hopeless: dict[UUID, str] = field(default_factory=dict)
    doubtful: frozenset[UUID] = frozenset()


@dataclass
class RecordingDispatcher:
    """Keeps what it was given; `refuses` and `breaks_on` name runs; `down`: it is away after that many rows."""

    hints: list[OutboxEntry] = field(default_factory=list)
    reports: list[tuple[OutboxEntry, FinishedRun]] = field(default_factory=list)
    others: list[OutboxEntry] = field(default_factory=list)
    refuses: dict[int, str] = field(default_factory=dict)
    breaks_on: set[int] = field(default_factory=set)
    down: int | None = None
    during: Callable[[], object] = lambda: None

    def dispatch(
        self,
        hints: Sequence[OutboxEntry],
        reports: Sequence[tuple[OutboxEntry, FinishedRun]],
        others: Sequence[OutboxEntry],
    ) -> Report:
        rows = [*hints, *(entry for entry, _ in reports), *others]
        for row in rows:
            if row.run in self.breaks_on:
                raise RuntimeError(f"cannot make a message of run {row.run}")
        if self.down is not None:
            arrived = [row.id for row in rows[: self.down]]
            self.hints += [row for row in hints if row.id in arrived]
            raise BrokerUnavailableError("connection refused", arrived)
        self.during()
        refused = {row.id: self.refuses[row.run] for row in rows if row.run in self.refuses}
        self.hints += [row for row in hints if row.id not in refused]
        self.reports += reports
        self.others += others
        return Report(frozenset(row.id for row in rows if row.id not in refused), refused)

    @property
    def hinted(self) -> list[int | None]:
        """The runs whose hints were published, in that order."""
        return [row.run for row in self.hints]


@dataclass
class RecordingBroker:
    """A broker that holds its markers and as many messages as the test says."""

    depths: dict[str, int | None] = field(default_factory=dict)
    markers: set[str] = field(default_factory=set)
    up: bool = True
    asked: list[str] = field(default_factory=list)

    def depth(self, queue: str) -> int | None:
        self._answer()
        self.asked.append(queue)
        return self.depths.get(queue)

    def incarnation(self, expected: str) -> str | None:
        self._answer()
        return expected if expected in self.markers else None

    def mark(self, value: str) -> None:
        self._answer()
        self.markers.add(value)

    def wipe(self) -> None:
        """Lose everything."""
        self.markers.clear()
        self.depths = dict.fromkeys(self.depths, 0)

    def _answer(self) -> None:
        if not self.up:
            raise BrokerUnavailableError("connection refused")


@contextmanager
def failing(text: str) -> Iterator[None]:
    """Have fail points act in this process."""
    failpoints.install(text)
    try:
        yield
    finally:
        failpoints.install("")


@contextmanager
def counted(counter: telemetry.Counter) -> Iterator[Callable[[], int]]:
    """Give a function that says how often something was counted since."""
    before = telemetry.snapshot()[counter]
    yield lambda: telemetry.snapshot()[counter] - before


class Beside:
    """Work in a thread beside the test."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, timeout: float = 30.0) -> Any:
        """Return what the work returned, once it has ended; raise what it raised."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the work beside the test did not end"
        if isinstance(self._outcome[0], BaseException):
            raise self._outcome[0]
        return self._outcome[0]

    @property
    def is_busy(self) -> bool:
        """Say whether the work is still going on."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._outcome.append(self._work())
        except BaseException as error:  # noqa: BLE001 - handed to the test, which looks at it
            self._outcome.append(error)


def lock_waiters(conn: Connection) -> int:
    """Count the sessions of this database that wait for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return int(table(conn, query)[0][0])


class Attempt:
    """An attempt in flight that keeps what it was told."""

    def __init__(self, token: Token | None = None, step: journal.Entry | None = None) -> None:
        self.token = token or Token(RunNo(1), 1, uuid4())
        self.told: list[tuple[str, float]] = []
        self._bodies = [] if step is None else [(step, boottime() - 1.0)]

    def abort(self, reason: str) -> None:
        self.told.append((reason, boottime()))

    def bodies(self) -> list[tuple[journal.Entry, float]]:
        return self._bodies

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.told]


@pytest.fixture(name="make")
def make_lease(database: Database, settings: Settings) -> Iterator[Callable[..., Lease]]:
    """Return a function that makes leases, which end with the test."""
    made: list[Lease] = []

    def lease(**given: Any) -> Lease:
        made.append(Lease(given.pop("database", database), settings, **{"node": NODE, **given}))
        return made[-1]

    yield lease
    for one in made:
        one.stop()


def row(conn: Connection, run: int, *columns: str) -> tuple[Any, ...]:
    """Return columns of a run."""
    return table(conn, f"SELECT {', '.join(columns)} FROM {{}}.run WHERE no = %s", run)[0]


def commit_step(conn: Connection, grant: Any, key: str) -> bool | None:
    """Record a step as done."""
    return journal.commit(Guard(conn, grant.token), entry(key), state=StepState.DONE, result=b"1", digest=b"d")
