"""The store and the services under whatever order of events Hypothesis comes up with, on a real Postgres.

The model beside them knows of each run who holds it, what its steps gave, how its waits ended, and whether it is over;
each rule does one thing to the database and compares. At the end of each example the faults stop, and everything has to
come to rest: that is what the liveness promises say.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import hypothesis
import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.integration import service_kit as kit
from tests.integration.service_kit import empty_schema  # noqa: F401  a fixture
from tests.support.clock import Clock
from umt_durable.database import Connection, Database
from umt_durable.engine.client import Client
from umt_durable.records import RunNo, Token
from umt_durable.services.redispatch import Redispatch
from umt_durable.services.relay import Relay
from umt_durable.services.router import Router
from umt_durable.services.takeover import Sweeper
from umt_durable.services.timers import Timers
from umt_durable.settings import Settings
from umt_durable.states import RunState, StepKind, StepState, WaitState
from umt_durable.store import journal, outbox, runs, waits, workers
from umt_durable.store.guard import Guard

EXAMPLES = int(os.environ.get("UMT_TEST_EXAMPLES", "40"))
STEPS = int(os.environ.get("UMT_TEST_MACHINE_STEPS", "40"))
NAMES = st.sampled_from(["go", "stop"])
KEYS = st.sampled_from(["a", "b", "c"])
ENDS = st.sampled_from(["commit", "rollback"])
ENOUGH = 60
"""After so many rounds without faults everything has to be at rest."""


@dataclass
class Known:
    """What the model knows of one run."""

    id: str
    no: RunNo
    holder: Token | None = None
    fences: set[int] = field(default_factory=set)
    steps: dict[str, bytes] = field(default_factory=dict)
    settled: dict[str, str] = field(default_factory=dict)
    asleep_until: datetime | None = None
    is_cancelled: bool = False
    end: str | None = None


@dataclass(frozen=True)
class World:
    """The database of the test, and what works on it."""

    conn: Connection
    database: Database
    settings: Settings
    clock: Clock


class Protocol(RuleBasedStateMachine):
    """Rules and a model of the protocol."""

    world: World

    found = Bundle("found")
    grants = Bundle("grants")
    hired = Bundle("hired")
    open = Bundle("open")

    def __init__(self) -> None:
        super().__init__()
        world = self.world
        self.conn, self.clock = world.conn, world.clock
        self.known: dict[RunNo, Known] = {}
        self.broker: list[tuple[str, int]] = []
        self.transactions: list[psycopg.Connection[tuple[object, ...]]] = []
        self.client = Client(world.database, world.settings)

    @initialize()
    def begin(self) -> None:
        kit.delete_rows(self.conn, self.conn.schema)

    # -- starts and workers -------------------------------------------------------------------------------------------

    @rule(target=found, how=ENDS)
    def start(self, how: str) -> object:
        """Enqueue a run, in a transaction that is committed or not (I2)."""
        with self.conn.transaction(force_rollback=how == "rollback"):
            new = kit.enqueue(self.conn)
        if how == "rollback":
            assert runs.of_id(self.conn, new.id) == []
            return multiple()
        no = RunNo(kit.number(self.conn, new.id))
        self.known[no] = Known(new.id, no)
        return no

    @rule(target=hired)
    def hire(self) -> UUID:
        """Have a worker begin."""
        return self._hire()

    def _hire(self) -> UUID:
        return kit.worker(self.conn, seconds=self.world.settings.lease_seconds)

    @rule(worker=hired)
    def die(self, worker: UUID) -> None:
        """End a worker's lease: its process is dead, or frozen."""
        workers.end(self.conn, worker)

    # -- attempts -----------------------------------------------------------------------------------------------------

    @rule(target=grants, no=found, worker=hired)
    def deliver(self, no: RunNo, worker: UUID) -> object:
        """Deliver a hint, wanted or not."""
        return self._claim(no, worker)

    @rule(target=grants, worker=hired, place=st.integers(0, 5), is_kept=st.booleans())
    def take_hint(self, worker: UUID, place: int, is_kept: bool) -> object:
        """Deliver a hint that the broker has, perhaps not for the last time."""
        if place >= len(self.broker):
            return multiple()
        run_id, _ = self.broker[place] if is_kept else self.broker.pop(place)
        return self._claim(RunNo(kit.number(self.conn, run_id)), worker)

    def _claim(self, no: RunNo, worker: UUID) -> object:
        run = self.known[no]
        is_live, now = workers.is_live(self.conn, worker), self.clock.now()
        state, due = kit.row(self.conn, no, "state", "coalesce(wake_at <= {}.now(), true)".replace("{}", self._schema))
        grant = runs.claim(
            self.conn, id=run.id, nesting=0, task=kit.TASK, claim=uuid4(), worker=worker, versions=[kit.VERSION],
            limit_seconds=None,
        )  # fmt: skip
        assert (grant is not None) == (state == "ready" and due and is_live)
        if grant is None:
            return multiple()
        assert run.holder is None, "I4: two grants at once"
        assert run.end is None, "I12: an ended run was granted"
        assert grant.token.fence not in run.fences, "I4: a fence was given twice"
        assert run.asleep_until is None or run.asleep_until <= now + timedelta(seconds=1), "I10: a sleep ended early"
        assert all(grant.token.fence > fence for fence in run.fences)
        run.fences.add(grant.token.fence)
        run.holder, run.asleep_until = grant.token, None
        return grant.token

    @rule(token=grants, key=KEYS)
    def begin_step(self, token: Token, key: str) -> None:
        """Ask for the grant to enter a body (I7, I11)."""
        run = self.known[token.run]
        reply = journal.start(Guard(self.conn, token), kit.entry(key))
        assert (reply is not None) == (run.holder == token), "I5"
        if reply is not None:
            assert reply.cancel == run.is_cancelled
            assert reply.granted == (not run.is_cancelled and key not in run.steps)

    @rule(token=grants, key=KEYS, value=st.binary(max_size=3))
    def commit_step(self, token: Token, key: str, value: bytes) -> None:
        """Record the outcome of a body (I5, I6)."""
        run = self.known[token.run]
        reply = journal.commit(Guard(self.conn, token), kit.entry(key), state=StepState.DONE, result=value, digest=b"d")
        assert (reply is not None) == (run.holder == token and key not in run.steps)
        if reply is not None:
            run.steps[key] = value

    @rule(token=grants, seconds=st.integers(1, 100))
    def sleep(self, token: Token, seconds: int) -> None:
        """Park a run for a while."""
        run, guard = self.known[token.run], Guard(self.conn, token)
        begun = journal.start_sleep(guard, kit.entry("nap", kind=StepKind.SLEEP), duration=timedelta(seconds=seconds))
        assert (begun is not None) == (run.holder == token)
        parked = runs.suspend(guard, state=RunState.SLEEPING, steps=["nap"], waits=[])
        assert parked == (run.holder == token and not run.is_cancelled), "I11: parked despite a cancel"
        if parked:
            run.holder = None
            if begun is not None and begun.seconds is not None and begun.seconds > 0:
                run.asleep_until = self.clock.now() + timedelta(seconds=begun.seconds)

    @rule(token=grants, name=NAMES, timeout=st.sampled_from([None, 30.0]))
    def wait(self, token: Token, name: str, timeout: float | None) -> None:
        """Register a wait and park, unless it is settled at once (I8, RG-9)."""
        run, guard = self.known[token.run], Guard(self.conn, token)
        if run.holder != token or run.is_cancelled:
            return
        kit.register(guard, name, waits.run_address(run.id, name), timeout=timeout)
        with self.conn.transaction():
            assert runs.lock_grant(guard) is False
            if not waits.count_settled(self.conn, token.run, [name]):
                assert runs.suspend(guard, state=RunState.WAITING, steps=[], waits=[name])
                run.holder = None

    @rule(token=consumes(grants))
    def finish(self, token: Token) -> None:
        """End a run (I11, I12)."""
        run = self.known[token.run]
        state = kit.finish(self.conn, token)
        assert (state is not None) == (run.holder == token)
        if state is not None:
            assert state is (RunState.CANCELLED if run.is_cancelled else RunState.SUCCEEDED)
            run.holder, run.end = None, str(state)

    @rule(token=grants)
    def fail(self, token: Token) -> None:
        """End an attempt with a failure that is tried again."""
        run = self.known[token.run]
        done = runs.retry(Guard(self.conn, token), delay_seconds=5.0, error=b"{}", summary="an error")
        assert done == (run.holder == token and not run.is_cancelled)
        if done:
            run.holder = None

    # -- what is said -------------------------------------------------------------------------------------------------

    @rule(target=open, no=found, name=NAMES)
    def say(self, no: RunNo, name: str) -> psycopg.Connection[tuple[object, ...]]:
        """Say a fact in a transaction of somebody's, which stays open (I2, I23)."""
        user: psycopg.Connection[tuple[object, ...]] = psycopg.connect(str(self.world.settings.database_url))
        self.transactions.append(user)
        self.client.signal(self.known[no].id, name, {"said": name}, conn=user)
        return user

    @rule(user=consumes(open), how=ENDS)
    def decide(self, user: psycopg.Connection[tuple[object, ...]], how: str) -> None:
        """Commit such a transaction, or roll it back."""
        getattr(user, how)()
        self._close(user)

    @rule(no=found)
    def cancel(self, no: RunNo) -> None:
        """Cancel a run; a running one is told, any other ends (I11)."""
        run = self.known[no]
        self.client.cancel(run.id)
        if run.end is None:
            run.is_cancelled = True
        self._sync()
        assert run.holder is not None or run.end is not None, "I11: a cancelled run that nobody holds is live"

    # -- services -----------------------------------------------------------------------------------------------------

    @rule()
    def route(self) -> None:
        """Have a router look."""
        Router(self.world.database, self.world.settings).run_once()
        self._sync()

    @rule(seconds=st.integers(1, 60))
    def tick(self, seconds: int) -> None:
        """Let time pass, and timers look."""
        self.clock.advance(seconds=seconds)
        Timers(self.world.database, self.world.settings).run_once()
        self._sync()

    @rule()
    def sweep(self) -> None:
        """Have a sweeper look; what it takes over was held by nobody who lives."""
        before = {run.no: run.holder for run in self.known.values() if run.holder is not None}
        live = {no: self._is_live(no) for no in before}
        Sweeper(self.world.database, self.world.settings).run_once()
        self._sync()
        for no, token in before.items():
            if live[no]:
                assert self.known[no].holder == token, "RG-1: a run was taken from a live worker"

    @rule(is_killed=st.booleans())
    def relay(self, is_killed: bool) -> None:
        """Have a relay publish, or die with rows in its hands."""
        if is_killed:
            kit.claimed(self.conn, uuid4())
            return
        sent = kit.RecordingDispatcher()
        Relay(self.world.database, self.world.settings, sent).run_once()
        self.broker += [(str(row.run_id), int(row.fence or 0)) for row in sent.hints]

    @rule()
    def wipe(self) -> None:
        """Lose all the broker has."""
        self.broker.clear()

    @rule()
    def redispatch(self) -> None:
        """Have overdue hints written anew."""
        Redispatch(self.world.database, self.world.settings).run_once()

    # -- what always holds --------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Take in what services did, and check that none of it goes back on anything."""
        for run in self.known.values():
            state, claim = kit.row(self.conn, run.no, "state", "claim")
            if run.end is not None:
                assert state == run.end, "I12: an ended run has come back"
            elif RunState(state).is_terminal:
                assert state == "cancelled", "only attempts end runs otherwise"
                run.end, run.holder = state, None
            elif run.holder is not None and run.holder.claim != claim:
                run.holder = None
            for wait in waits.of_run(self.conn, run.no):
                seen = run.settled.get(wait.key)
                assert seen is None or seen == f"{wait.state} {wait.fact}", "I9: a wait has two outcomes"
                if wait.state is not WaitState.PENDING:
                    run.settled[wait.key] = f"{wait.state} {wait.fact}"
            recorded = {step.key: step.result for step in journal.read(self.conn, run.no) if step.kind == "run"}
            done = {key: value for key, value in recorded.items() if value is not None}
            assert done == run.steps, "I6: a step's result is another one"

    def _is_live(self, no: RunNo) -> bool:
        (worker,) = kit.row(self.conn, no, "worker")
        return worker is not None and workers.is_live(self.conn, worker)

    @property
    def _schema(self) -> str:
        return f'"{self.conn.schema}"'

    def _close(self, user: psycopg.Connection[tuple[object, ...]]) -> None:
        user.close()
        self.transactions.remove(user)

    # -- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Stop all faults and have everything come to rest (I1, I8, I13)."""
        try:
            for user in list(self.transactions):
                self._close(user)
            self._sync()
            self._come_to_rest()
        finally:
            for user in list(self.transactions):
                self._close(user)

    def _come_to_rest(self) -> None:
        world = self.world
        while Router(world.database, world.settings).run_once().work:
            pass
        missed = (
            f"SELECT w.run, w.key FROM {self._schema}.wait AS w JOIN {self._schema}.run AS r ON r.no = w.run"
            f" JOIN {self._schema}.fact AS f ON f.address = w.address"
            " WHERE w.state = 'pending' AND r.finished_at IS NULL"
        )
        assert self.conn.execute(missed.encode()).fetchall() == [], "I8: a fact has not woken who waits for it"
        self._sync()
        self.conn.execute(f"UPDATE {self._schema}.worker SET lease_until = '-infinity'".encode())
        for _ in range(ENOUGH):
            live = [run for run in self.known.values() if run.end is None]
            parked = {run.no: kit.row(self.conn, run.no, "state")[0] for run in live}
            if all(state == "quarantined" for state in parked.values()) and outbox.status(self.conn)[0] == 0:
                break
            for run in live:
                if parked[run.no] == "waiting":
                    for name in ("go", "stop"):
                        self.client.signal(run.id, name)
            Sweeper(world.database, world.settings).run_once()
            Router(world.database, world.settings).run_once()
            self.clock.advance(seconds=61)
            worker = self._hire()
            Timers(world.database, world.settings).run_once()
            Redispatch(world.database, world.settings).run_once()
            self._sync()
            sent = kit.RecordingDispatcher()
            Relay(world.database, world.settings, sent).run_once()
            for row in sent.hints:
                token = self._claim(RunNo(int(row.run or 0)), worker)
                if isinstance(token, Token):
                    self.finish(token)
        left = {run.id: kit.row(self.conn, run.no, "state")[0] for run in self.known.values() if run.end is None}
        assert all(state == "quarantined" for state in left.values()), f"I1: these runs never end: {left}"
        assert outbox.status(self.conn)[0] == 0, "I13: something of them never leaves"


def test_i1_i2_i4_i5_i6_i8_i9_i10_i11_i12_hold_in_whatever_order_things_happen(
    conn: Connection, database: Database, settings: Settings, clock: Clock
) -> None:
    class Here(Protocol):
        world = World(conn, database, settings, clock)

    chosen = hypothesis.settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_machine(Here, settings=chosen)
