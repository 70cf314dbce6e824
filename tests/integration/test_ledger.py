"""Transaction steps in another database: the user's rows and the ledger's entry there are committed once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine as SqlalchemyEngine
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from tests.support import sealing
from tests.support.clock import Clock
from tests.support.django_db import declared
from tests.support.engine import Engine, Gate, RecordingReporter, dying_at, in_thread, stopping_at, take_over
from tests.support.postgres import through
from tests.support.proxy import Proxy
from tests.support.wait import until
from umt_durable.database import Connection, Database
from umt_durable.engine import elsewhere
from umt_durable.engine.context import TaskContext
from umt_durable.engine.exits import Replaced
from umt_durable.engine.outcomes import Delivery, Dropped, Finished
from umt_durable.engine.retry import RetryPolicy
from umt_durable.errors import ConfigurationError, DefinitionError
from umt_durable.ledger import Ledger, install_ledger, ledger_sql
from umt_durable.payloads import Vault
from umt_durable.records import NewRun
from umt_durable.settings import Settings
from umt_durable.states import RunState

Books = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Return the settings with a lease that does not run out on a machine that is slow: these tests move the clock."""
    return replace(settings, lease_seconds=30.0)


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


@pytest.fixture
def books(other_database_url: str) -> Iterator[Books]:
    """Return a connection to the other database, with a ledger and a table of the application that shows doubles."""
    install_ledger(other_database_url)
    with psycopg.connect(other_database_url, autocommit=True) as conn:
        conn.execute("CREATE TABLE booking (id serial, amount int)")
        yield conn


@pytest.fixture
def ledger(other_database_url: str, books: Books) -> Ledger:
    return Ledger(other_database_url)


def book(tx: Any, amount: int) -> int:
    statement = f"INSERT INTO booking (amount) VALUES ({amount})"
    if isinstance(tx, Session):
        tx.connection().exec_driver_sql(statement)
    elif isinstance(tx, psycopg.Connection):
        tx.execute(statement.encode())
    else:
        with tx.cursor() as cursor:
            cursor.execute(statement)
    return amount * 2


def booked(books: Books) -> list[int]:
    return [row[0] for row in books.execute("SELECT amount FROM booking ORDER BY id").fetchall()]


def entries(books: Books) -> list[tuple[Any, ...]]:
    """Return (step, fence, result) of the ledger."""
    query = b"SELECT step, fence, convert_from(result, 'UTF8') FROM umt_durable_ledger.entry ORDER BY step"
    return books.execute(query).fetchall()


class Body:
    """A task of one step, which books the number of its entry in another database."""

    def __init__(self, engine: Engine, binding: Any, *, retry: RetryPolicy = RetryPolicy.NONE) -> None:
        self.entered = 0
        self.inside: Callable[[Any, int], object] = lambda tx, entered: None

        @engine.task("t", retry=retry)
        def body(ctx: TaskContext) -> int:
            return ctx.step.transaction("x", self.write, on=binding)

    def write(self, tx: Any) -> int:
        self.entered += 1
        mine = self.entered
        book(tx, mine)
        self.inside(tx, mine)
        return mine


def wait_until_blocked(books: Books) -> None:
    """Wait until a transaction waits for the lock of an entry."""
    query = b"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    until(lambda: books.execute(query).fetchone() == (1,), timeout=20, what="an attempt to wait for the entry")


# -- once -------------------------------------------------------------------------------------------------------------


@contextmanager
def bound(kind: str, url: str) -> Iterator[Any]:
    """Give a binding of a kind to a database."""
    source: SqlalchemyEngine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with declared("books", url, "public") as django:
        yield {
            "url": url,
            "callable": lambda: psycopg.connect(url),
            "engine": source,
            "sessionmaker": sessionmaker(source),
            "django": django,
        }[kind]
    source.dispose()


@pytest.mark.parametrize("kind", ["url", "callable", "engine", "sessionmaker", "django"])
def test_i16_e7_rows_in_another_database_and_its_ledger_commit_together_through_every_kind_of_binding(
    engine: Engine, books: Books, other_database_url: str, kind: str
) -> None:
    with bound(kind, other_database_url) as binding:
        engine.bindings["books"] = Ledger(binding)

        @engine.task("t")
        def body(ctx: TaskContext) -> int:
            return ctx.step.transaction("x", book, 4, on="books")

        run_id, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 8
    assert booked(books) == [4]
    assert entries(books) == [("x", 1, "8")]
    [step] = engine.client.history(run_id).steps
    assert (step.state, step.result) == ("done", b"8")


@pytest.mark.parametrize(
    ("point", "entered"),
    [("ledger.user_sql.a", 2), ("ledger.commit.b", 2), ("ledger.commit.a", 1), ("ledger.record.a", 1)],
)
def test_i16_a_process_that_dies_around_the_two_commits_leaves_one_row(
    engine: Engine, ledger: Ledger, books: Books, clock: Clock, point: str, entered: int
) -> None:
    body = Body(engine, ledger)
    run_id, dead = engine.start("t"), engine.process()
    with dying_at(point), pytest.raises(KeyboardInterrupt):
        dead.deliver(run_id, "t")
    dead.freeze()
    take_over(engine, clock)

    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == entered
    assert body.entered == entered
    assert booked(books) == [entered]


@pytest.mark.parametrize("kind", ["url", "engine", "django"])
@pytest.mark.parametrize("committed", [True, False])
def test_i16_i24_a_commit_whose_reply_was_lost_is_looked_up_in_the_ledger(
    engine: Engine, books: Books, other_database_url: str, database_proxy: Proxy, committed: bool, kind: str
) -> None:
    with bound(kind, through(other_database_url, database_proxy)) as binding:
        body = Body(engine, Ledger(binding))
        if committed:
            cut = database_proxy.cut_after_commit(match=b"settle_entry")
        else:
            cut = database_proxy.cut_before("settle_entry")
        _, outcome = engine.run("t")

    assert cut.fired == 1
    assert isinstance(outcome, Finished)
    assert outcome.value == (1 if committed else 2)
    assert booked(books) == [outcome.value]
    assert body.entered == outcome.value


def test_i16_each_generation_of_a_run_has_entries_of_its_own(engine: Engine, ledger: Ledger, books: Books) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, turn: int) -> int:
        done = ctx.step.transaction("x", book, turn, on=ledger)
        if turn < 2:
            ctx.continue_as_new(turn + 1)
        return done

    run_id, _ = engine.run("t", 1)
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 4
    assert booked(books) == [1, 2]
    assert len(entries(books)) == 2


def test_two_installations_share_a_ledger_under_names_of_their_own(
    engine: Engine, other_database_url: str, books: Books
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> list[int]:
        first, second = (Ledger(other_database_url, name=name) for name in ("north", "south"))
        return [ctx.step.transaction("x", book, 1, on=first), ctx.step.transaction("x", book, 2, on=second)]

    run_id, _ = engine.run("t")

    rows = books.execute("SELECT ledger, run_id, step FROM umt_durable_ledger.entry ORDER BY ledger").fetchall()
    assert rows == [("north", run_id, "x"), ("south", run_id, "x#2")]


# -- attempts that overlap --------------------------------------------------------------------------------------------


def test_i5_i16_a_zombie_in_its_transaction_there_is_waited_for_and_rolls_back(
    engine: Engine, ledger: Ledger, books: Books, clock: Clock
) -> None:
    gate, body = Gate(), Body(engine, ledger)
    body.inside = lambda tx, entered: None if entered > 1 else gate.pass_through()
    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()

    with in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        with in_thread(lambda: heir.deliver(run_id, "t")) as outcome:
            wait_until_blocked(books)
            gate.open()

    assert isinstance(late[0], Dropped)
    assert isinstance(outcome[0], Finished)
    assert outcome[0].value == 2
    assert booked(books) == [2]


def test_i16_a_commit_that_is_still_on_its_way_is_waited_for_and_found(
    engine: Engine, ledger: Ledger, books: Books, clock: Clock
) -> None:
    gate, body = Gate(), Body(engine, ledger)
    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()

    with stopping_at("ledger.commit.b", gate), in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        with in_thread(lambda: heir.deliver(run_id, "t")) as outcome:
            wait_until_blocked(books)
            gate.open()

    assert isinstance(late[0], Dropped)
    assert isinstance(outcome[0], Finished)
    assert outcome[0].value == 1
    assert body.entered == 1
    assert booked(books) == [1]


@pytest.mark.parametrize("fails", [True, False])
def test_i5_i16_a_zombie_that_comes_after_a_later_attempt_has_begun_commits_nothing(
    engine: Engine, other_database_url: str, books: Books, clock: Clock, fails: bool
) -> None:
    gate, opened = Gate(), [0]

    def connect() -> Any:
        opened[0] += 1
        if opened[0] == 1:
            gate.pass_through()
        return psycopg.connect(other_database_url)

    def fail(tx: Any, entered: int) -> None:
        if fails:
            raise ZeroDivisionError

    body = Body(engine, Ledger(connect), retry=RetryPolicy(max_attempts=2, initial=timedelta(minutes=1)))
    body.inside = fail
    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, "t")) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        heir.deliver(run_id, "t")
        before = (body.entered, booked(books))
        gate.open()

    assert engine.state(run_id) is (RunState.RETRYING if fails else RunState.SUCCEEDED)
    assert isinstance(late[0], Dropped)
    assert before == (1, [] if fails else [1])
    assert (body.entered, booked(books)) == before


def test_i11_a_cancel_that_comes_before_the_commit_there_rolls_it_back(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    body, run_ids = Body(engine, ledger), list[str]()

    def cancel(tx: Any, entered: int) -> None:
        engine.client.cancel(run_ids[0])
        engine.route()

    body.inside = cancel
    run_ids.append(engine.start("t"))
    engine.process().deliver(run_ids[0], "t")

    assert engine.state(run_ids[0]) is RunState.CANCELLED
    assert booked(books) == []


# -- failures ---------------------------------------------------------------------------------------------------------


def test_i16_what_the_function_raises_rolls_the_rows_back_and_is_tried_again(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    body = Body(engine, ledger, retry=RetryPolicy(max_attempts=2, initial=timedelta(milliseconds=1)))

    def fail_first(tx: Any, entered: int) -> None:
        if entered == 1:
            raise ZeroDivisionError

    body.inside = fail_first
    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 2
    assert booked(books) == [2]


def test_i16_a_commit_that_the_other_database_refuses_fails_the_step_with_no_row(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    books.execute("CREATE TABLE parent (id int PRIMARY KEY)")
    books.execute("CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    body = Body(engine, ledger)
    body.inside = lambda tx, entered: tx.execute("INSERT INTO child VALUES (7)")

    run_id, _ = engine.run("t")

    [step] = engine.client.history(run_id).steps
    assert engine.state(run_id) is RunState.FAILED
    assert step.error is not None
    assert b"ForeignKeyViolation" in step.error
    assert booked(books) == []


def test_i16_a_hook_that_fails_after_the_commit_there_leaves_the_step_done(
    engine: Engine, books: Books, other_database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks: list[int] = []
    with declared("books", other_database_url, "public") as django:
        body = Body(engine, Ledger(django))

        def hook(tx: Any, entered: int) -> None:
            tx.on_commit(lambda: 1 // 0)
            tx.on_commit(lambda: hooks.append(entered))

        body.inside = hook
        _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 1
    assert booked(books) == [1]
    assert hooks == [1]
    assert "a hook after the commit of step 'x' failed" in caplog.text


def test_an_outage_of_the_other_database_is_the_steps_failure_where_nothing_can_be_committed(
    engine: Engine, other_database_url: str, books: Books, monkeypatch: pytest.MonkeyPatch, database_proxy: Proxy
) -> None:
    monkeypatch.setattr(elsewhere, "RETRY_SECONDS", -1.0)
    database_proxy.refuse()
    body = Body(engine, Ledger(through(other_database_url, database_proxy)))

    run_id, _ = engine.run("t")

    assert engine.state(run_id) is RunState.FAILED
    assert body.entered == 0


def test_i16_an_outage_that_leaves_a_commit_in_doubt_parks_the_run_and_uses_no_attempt(
    engine: Engine,
    other_database_url: str,
    books: Books,
    monkeypatch: pytest.MonkeyPatch,
    database_proxy: Proxy,
    clock: Clock,
) -> None:
    monkeypatch.setattr(elsewhere, "RETRY_SECONDS", -1.0)
    body = Body(engine, Ledger(through(other_database_url, database_proxy)))
    database_proxy.cut_after_commit(match=b"settle_entry")
    body.inside = lambda tx, entered: database_proxy.refuse()

    run_id, _ = engine.run("t")
    first = engine.state(run_id)
    clock.advance(seconds=10)
    engine.timers()
    engine.process().deliver(run_id, "t")
    second = engine.state(run_id)
    database_proxy.heal()
    clock.advance(seconds=10)
    engine.timers()
    outcome = engine.process().deliver(run_id, "t")

    assert (first, second) == (RunState.RETRYING, RunState.RETRYING)
    assert isinstance(outcome, Finished)
    assert outcome.value == 1
    assert booked(books) == [1]
    assert body.entered == 1


def test_a_database_without_a_ledger_fails_the_step_with_the_command_that_installs_one(
    engine: Engine, other_database_url: str
) -> None:
    body = Body(engine, Ledger(other_database_url))

    run_id, _ = engine.run("t")

    [step] = engine.client.history(run_id).steps
    assert step.error is not None
    assert b"SchemaError" in step.error
    assert b"umt-durable ledger install URL" in step.error
    assert body.entered == 0


@pytest.mark.parametrize("kind", ["url", "engine", "django"])
def test_a_role_without_rights_in_the_ledger_is_told_so_and_with_those_of_install_it_may(
    engine: Engine, books: Books, other_database_url: str, kind: str
) -> None:
    role = f"clerk_{hashlib.sha256(other_database_url.encode()).hexdigest()[:12]}"
    books.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'pw'".encode())
    try:
        books.execute(f"GRANT ALL ON booking, booking_id_seq TO {role}".encode())
        address = other_database_url.rpartition("@")[2]
        with bound(kind, f"postgresql://{role}:pw@{address}") as binding:
            body = Body(engine, Ledger(binding))
            refused, _ = engine.run("t")
            install_ledger(other_database_url, role=role)
            allowed, _ = engine.run("t")

        [step] = engine.client.history(refused).steps
        assert step.error is not None
        assert b"PrivilegeError" in step.error
        assert engine.state(allowed) is RunState.SUCCEEDED
        assert body.entered == 1
    finally:
        books.execute(f"DROP OWNED BY {role}".encode())
        books.execute(f"DROP ROLE {role}".encode())


def test_a_run_enqueued_with_a_connection_to_another_database_is_refused(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    body = Body(engine, ledger)
    body.inside = lambda tx, entered: engine.start("t", conn=tx)

    run_id, _ = engine.run("t")

    [step] = engine.client.history(run_id).steps
    assert step.error is not None
    assert b"it has to be the database that holds the runs" in step.error
    assert booked(books) == []


def test_an_entry_that_does_not_match_its_digest_is_not_believed(
    engine: Engine, ledger: Ledger, books: Books, clock: Clock
) -> None:
    Body(engine, ledger)
    run_id, dead = engine.start("t"), engine.process()
    with dying_at("ledger.commit.a"), pytest.raises(KeyboardInterrupt):
        dead.deliver(run_id, "t")
    dead.freeze()
    take_over(engine, clock)
    books.execute("UPDATE umt_durable_ledger.entry SET result = '9'")

    engine.process().deliver(run_id, "t")

    assert engine.state(run_id) is RunState.QUARANTINED


# -- sealed -----------------------------------------------------------------------------------------------------------


def test_a_result_is_sealed_in_the_ledger_as_in_the_journal_and_found_after_a_crash(
    settings: Settings, ledger: Ledger, books: Books, conn: Connection, clock: Clock
) -> None:
    database = Database(settings, Vault(sealing.BOTH))
    engine = Engine(database, settings)
    entered: list[str] = []

    def write(tx: Any) -> str:
        entered.append("x")
        book(tx, 1)
        return sealing.CANARY

    @engine.task("t")
    def body(ctx: TaskContext) -> str:
        return ctx.step.transaction("x", write, on=ledger)

    run_id, dead = engine.start("t"), engine.process()
    with dying_at("ledger.commit.a"), pytest.raises(KeyboardInterrupt):
        dead.deliver(run_id, "t")
    dead.freeze()
    take_over(engine, clock)
    outcome = engine.process().deliver(run_id, "t")
    engine.close()
    database.close()

    assert isinstance(outcome, Finished)
    assert outcome.value == sealing.CANARY
    assert entered == ["x"]
    assert booked(books) == [1]
    assert sealing.leaks(books, "umt_durable_ledger") == []
    [(result, digest)] = books.execute("SELECT result, digest FROM umt_durable_ledger.entry").fetchall()
    assert hashlib.sha256(result).digest() == digest
    query = f'SELECT result, digest FROM "{settings.schema}".step'
    assert conn.execute(query.encode()).fetchall() == [(result, digest)]


# -- what is refused, and installing ----------------------------------------------------------------------------------


def test_an_effect_cannot_commit_in_another_database(engine: Engine, ledger: Ledger, books: Books) -> None:
    called: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.effect("op", lambda info: called.append("do"), commit=lambda tx, result: None, on=ledger)

    run_id, _ = engine.run("t")

    assert engine.state(run_id) is RunState.FAILED
    assert called == []
    assert engine.client.history(run_id).steps == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ledger(None),
        lambda: Ledger("books"),
        lambda: Ledger(Ledger("postgresql://x")),
        lambda: Ledger(3),
        lambda: install_ledger(None),  # type: ignore[arg-type]
        lambda: install_ledger("postgresql://x", role=""),
        lambda: install_ledger("postgresql://x", role=3),  # type: ignore[arg-type]
        lambda: Ledger("postgresql://x", name=""),
        lambda: Ledger("postgresql://x", name="a\0b"),
        lambda: Ledger("postgresql://x", schema="x" * 64),
    ],
)
def test_a_ledger_that_could_not_work_is_refused_where_it_is_made(make: Callable[[], Ledger]) -> None:
    with pytest.raises((DefinitionError, ConfigurationError)):
        make()


@pytest.mark.parametrize("place", ["umt_durable_ledger", "with space", "50%", 'say "it"', "o'clock", "Ünï"])
def test_a_ledger_is_installed_once_by_any_number_at_once_under_any_name(
    engine: Engine, other_database_url: str, place: str
) -> None:
    with (
        in_thread(lambda: install_ledger(other_database_url, place)),
        in_thread(lambda: install_ledger(other_database_url, place)),
    ):
        install_ledger(other_database_url, place)
    with psycopg.connect(other_database_url, autocommit=True) as conn:
        conn.execute(ledger_sql(place).encode())
        conn.execute("CREATE TABLE booking (id serial, amount int)")
        body = Body(engine, Ledger(other_database_url, schema=place))
        _, outcome = engine.run("t")

        assert isinstance(outcome, Finished)
        assert outcome.value == 1
        assert booked(conn) == [1]
    assert body.entered == 1


def test_a_step_of_a_run_that_takes_anothers_place_is_not_that_ones_step_of_the_same_key(
    engine: Engine, books: Books, ledger: Ledger
) -> None:
    @engine.task("first")
    def first(ctx: TaskContext) -> None:
        ctx.step.transaction("book", book, 1, on=ledger)
        given = b'{"args": [], "kwargs": {}}'
        ctx._pass.leave(Replaced(run=NewRun(id=ctx.run_id, task="second", nesting=1, version=1, queue="q", args=given)))

    @engine.task("second")
    def second(ctx: TaskContext) -> int:
        return int(ctx.step.transaction("book", book, 2, on=ledger))

    run_id, process = engine.start("first"), engine.process()
    process.deliver(run_id, "first")

    outcome = process.executor.execute(Delivery(run_id, 1, "second", uuid4()), RecordingReporter())

    assert isinstance(outcome, Finished)
    assert (outcome.value, booked(books)) == (4, [1, 2])


def test_what_is_no_binding_is_refused_before_anything_is_written(engine: Engine) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.transaction("book", book, 1, on=3)

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert "on: int is no binding" in str(outcome.error)
    assert engine.client.history(run_id).steps == []
