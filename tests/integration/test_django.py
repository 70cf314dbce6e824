"""Django's connections and ORM: calls in the transaction of a caller, and the transaction of a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import django.db
import psycopg
import pytest
from django.db import IntegrityError, InterfaceError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError

from tests.integration.outbox_kit import Shop
from tests.integration.test_service_lease import forked
from tests.support.clock import Clock
from tests.support.django_db import Booking, declared
from tests.support.engine import Engine, Gate, in_thread, take_over
from tests.support.proxy import Proxy
from umt_durable import session
from umt_durable.database import Connection, Database
from umt_durable.django_session import DjangoCaller
from umt_durable.engine.async_calls import in_thread as awaited
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Dropped, Finished
from umt_durable.errors import AutocommitError, DefinitionError, SchemaError, UnknownRunError
from umt_durable.settings import Settings
from umt_durable.states import RunState

TASK = "django.wait"
ALIAS = "shop"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Return the settings with a lease that does not run out on a machine that is slow: these tests move the clock."""
    return replace(settings, lease_seconds=30.0)


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    """Return an engine with one task, which waits for a fact."""
    engine = Engine(database, settings)

    @engine.task(TASK)
    def body(ctx: TaskContext) -> None:
        ctx.step.wait_for_fact("go")

    yield engine
    engine.close()


@pytest.fixture
def shop(database_url: str, schema: str, conn: Connection) -> Iterator[Any]:
    """Return this thread's Django connection to the database of the runs, with the application's table."""
    conn.execute(f'CREATE TABLE "{schema}".booking (id serial PRIMARY KEY, amount int NOT NULL)'.encode())
    with declared(ALIAS, database_url, schema) as wrapper:
        yield wrapper


def book(tx: Any, amount: int) -> int:
    Booking.objects.using(tx.alias).create(amount=amount)
    return amount


def booked(conn: Connection, schema: str) -> list[int]:
    rows = conn.execute(f'SELECT amount FROM "{schema}".booking ORDER BY id'.encode()).fetchall()
    return [row[0] for row in rows]


def count(conn: Connection, schema: str, table: str) -> int:
    row = conn.execute(f'SELECT count(*) FROM "{schema}".{table}'.encode()).fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def rolled_back(alias: str) -> Iterator[None]:
    """Open an atomic block, perhaps in another one, and leave it by an error."""
    with suppress(ZeroDivisionError), transaction.atomic(using=alias):
        yield
        raise ZeroDivisionError


def assert_unknown(engine: Engine, run_id: str) -> None:
    with pytest.raises(UnknownRunError):
        engine.client.get(run_id)


# -- a caller's transaction -------------------------------------------------------------------------------------------


def test_b7_i2_a_django_connection_starts_a_run_with_its_rows_and_none_with_its_rollback(
    engine: Engine, shop: Any, conn: Connection, schema: str
) -> None:
    with transaction.atomic(using=ALIAS):
        book(shop, 1)
        kept = engine.start(TASK, conn=shop)
    with rolled_back(ALIAS):
        book(shop, 2)
        lost = engine.start(TASK, conn=shop)

    assert engine.state(kept) is RunState.READY
    assert_unknown(engine, lost)
    assert booked(conn, schema) == [1]


def test_i2_a_django_savepoint_that_is_rolled_back_takes_its_run_with_it(engine: Engine, shop: Any) -> None:
    with transaction.atomic(using=ALIAS):
        kept = engine.start(TASK, conn=shop)
        with rolled_back(ALIAS):
            lost = engine.start(TASK, conn=shop)

    assert engine.state(kept) is RunState.READY
    assert_unknown(engine, lost)


def test_i2_a_django_connection_signals_emits_cancels_and_writes_to_the_outbox_with_its_commit(
    engine: Engine, shop: Any, conn: Connection, schema: str, settings: Settings, database: Database
) -> None:
    run_id = engine.start(TASK)
    app = Shop(settings, database)
    before = count(conn, schema, "outbox_event")

    for ends in (False, True):
        with transaction.atomic(using=ALIAS):
            engine.client.signal(run_id, "go", conn=shop)
            engine.client.emit("paid", "order-1", conn=shop)
            engine.client.cancel(run_id, conn=shop)
            app.durable.outbox.emit("order.paid", {"order": 1}, conn=shop)
            app.durable.outbox.send(app.print_label.s(1), conn=shop)
            app.paid.enqueue({"order": 1}, conn=shop)
            assert count(conn, schema, "fact") == 0
            transaction.set_rollback(not ends, using=ALIAS)
    app.durable.stop()

    assert count(conn, schema, "fact") == 3
    assert count(conn, schema, "run") == 2
    assert count(conn, schema, "outbox_event") == before + 3


def test_the_default_connection_of_django_is_taken_through_its_proxy(
    engine: Engine, database_url: str, schema: str
) -> None:
    with declared("default", database_url, schema):
        with transaction.atomic():
            run_id = engine.start(TASK, conn=django.db.connection)

        assert engine.state(run_id) is RunState.READY


def test_a_relay_is_woken_once_after_djangos_commit_and_not_for_a_savepoint_that_is_rolled_back(shop: Any) -> None:
    called: list[str] = []

    def hook() -> None:
        called.append("hook")

    with transaction.atomic(using=ALIAS):
        with rolled_back(ALIAS):
            session.caller(shop).after_commit(hook)
        for _ in range(3):
            session.caller(shop).after_commit(hook)
        assert called == []
    with rolled_back(ALIAS):
        session.caller(shop).after_commit(hook)

    assert called == ["hook"]


def test_a_django_connection_outside_atomic_is_refused_and_starts_nothing(engine: Engine, shop: Any) -> None:
    with pytest.raises(AutocommitError, match=r"transaction\.atomic\(using='shop'\)"):
        engine.start(TASK, conn=shop)

    assert engine.client.list() == []


def test_a_django_transaction_that_is_broken_is_refused_as_django_does(engine: Engine, shop: Any) -> None:
    with transaction.atomic(using=ALIAS):
        transaction.set_rollback(True, using=ALIAS)
        with pytest.raises(TransactionManagementError):
            engine.start(TASK, conn=shop)

    assert engine.client.list() == []


def test_a_connection_to_a_database_without_the_schema_is_refused_by_name(
    database: Database, database_url: str, shop: Any
) -> None:
    elsewhere = Engine(database, Settings(database_url=database_url, schema="not_here", embedded=False))
    elsewhere.client._database = Database(elsewhere.settings)

    @elsewhere.task(TASK)
    def body(ctx: TaskContext) -> None: ...

    with pytest.raises(SchemaError, match="'not_here'"), transaction.atomic(using=ALIAS):
        elsewhere.start(TASK, conn=shop)
    with psycopg.connect(database_url) as user, pytest.raises(SchemaError, match="'not_here'"):
        elsewhere.start(TASK, conn=user)


def test_other_databases_drivers_threads_and_loops_are_refused(shop: Any) -> None:
    connections.settings["file"] = connections.configure_settings(
        {"default": {}, "file": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    )["file"]
    older = SimpleNamespace(vendor="postgresql", Database=object(), alias="older")

    with pytest.raises(DefinitionError, match="'file' is sqlite"):
        session.caller(connections["file"])
    with pytest.raises(DefinitionError, match="psycopg 2"):
        DjangoCaller(older)

    async def start() -> None:
        await awaited(lambda joined: None, shop)

    with pytest.raises(DefinitionError, match="sync_to_async"):
        asyncio.run(start())
    with in_thread(lambda: session.caller(shop)) as outcome:
        pass
    assert isinstance(outcome[0], django.db.DatabaseError)
    connections["file"].close()
    del connections["file"], connections.settings["file"]


# -- the transaction of a step ----------------------------------------------------------------------------------------


def test_i16_e7_django_rows_result_and_what_is_enqueued_commit_together_once(
    engine: Engine, shop: Any, conn: Connection, schema: str
) -> None:
    hooks: list[str] = []

    def order(tx: Any, amount: int) -> int:
        with transaction.atomic(using=tx.alias):
            book(tx, amount)
        with rolled_back(tx.alias):
            book(tx, -1)
        engine.start(TASK, conn=tx)
        engine.client.emit("paid", "order-1", conn=tx)
        tx.on_commit(lambda: hooks.append(f"{booked(conn, schema)}"))
        assert hooks == []
        return amount * 2

    @engine.task("t")
    def body(ctx: TaskContext, amount: int) -> int:
        return ctx.step.transaction("order", order, amount, on=shop)

    run_id, outcome = engine.run("t", 21)

    assert isinstance(outcome, Finished)
    assert outcome.value == 42
    assert booked(conn, schema) == [21]
    assert hooks == ["[21]"]
    assert len([run for run in engine.client.list() if run.task == TASK]) == 1
    assert count(conn, schema, "fact") == 1
    assert [step.state for step in engine.client.history(run_id).steps] == ["done"]


def test_a_named_binding_may_be_django_and_stands_for_the_connection_of_the_thread(
    database: Database, settings: Settings, shop: Any, conn: Connection, schema: str
) -> None:
    engine = Engine(database, settings, {"shop": shop})
    seen: list[Any] = []

    def write(tx: Any) -> int:
        seen.append(tx)
        return book(tx, 5)

    @engine.task("t")
    def body(ctx: TaskContext) -> dict[str, int]:
        return ctx.step.parallel({"a": lambda: ctx.step.transaction("x", write, on="shop")})

    _, outcome = engine.run("t")
    engine.close()

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.SUCCEEDED
    assert booked(conn, schema) == [5]
    assert seen[0] is not shop
    assert seen[0].connection is None, "the connection of a thread that has ended is closed"


def test_i16_a_function_that_raises_takes_its_django_rows_and_hooks_with_it(
    engine: Engine, shop: Any, conn: Connection, schema: str
) -> None:
    hooks: list[str] = []

    def order(tx: Any) -> None:
        book(tx, 1)
        engine.start(TASK, conn=tx)
        tx.on_commit(lambda: hooks.append("hook"))
        Booking.objects.using(tx.alias).create(amount=None)

    @engine.task("t", raises=(IntegrityError,))
    def body(ctx: TaskContext) -> None:
        ctx.step.transaction("order", order, on=shop)

    run_id, _ = engine.run("t")

    assert engine.state(run_id) is RunState.FAILED
    assert booked(conn, schema) == []
    assert hooks == []
    assert [run.id for run in engine.client.list()] == [run_id]


@pytest.mark.parametrize(
    "end",
    [
        lambda tx: transaction.commit(using=tx.alias),
        lambda tx: transaction.rollback(using=tx.alias),
        lambda tx: transaction.set_rollback(True, using=tx.alias),
        lambda tx: tx.close(),
        lambda tx: tx.cursor().execute("COMMIT"),
        lambda tx: tx.cursor().execute("ROLLBACK"),
    ],
    ids=["commit", "rollback", "set_rollback", "close", "commit statement", "rollback statement"],
)
def test_i16_a_function_that_ends_djangos_transaction_fails_with_nothing_recorded(
    end: Callable[[Any], None], engine: Engine, shop: Any
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        def write(tx: Any) -> None:
            book(tx, 1)
            end(tx)

        ctx.step.transaction("x", write, on=shop)

    run_id, _ = engine.run("t")

    assert engine.state(run_id) is RunState.FAILED
    assert [step.state for step in engine.client.history(run_id).steps] != ["done"]


def test_i16_a_zombies_django_transaction_is_rolled_back_whole(
    engine: Engine, shop: Any, conn: Connection, schema: str, clock: Clock
) -> None:
    gate = Gate()
    entered = [0]

    def write(tx: Any) -> int:
        entered[0] += 1
        mine = entered[0]
        book(tx, mine)
        if mine == 1:
            gate.pass_through()
        return mine

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.transaction("x", write, on=shop)

    run_id, zombie, heir = engine.start("t"), engine.process(), engine.process()

    def late_delivery() -> Any:
        try:
            return zombie.deliver(run_id, "t")
        finally:
            session.leave_thread()

    with in_thread(late_delivery) as late:
        gate.wait_reached()
        zombie.freeze()
        take_over(engine, clock)
        outcome = heir.deliver(run_id, "t")
        gate.open()

    assert isinstance(outcome, Finished)
    assert outcome.value == 2
    assert isinstance(late[0], Dropped)
    assert booked(conn, schema) == [2]


@pytest.mark.parametrize("committed", [True, False])
def test_i16_i24_a_django_commit_whose_reply_was_lost_is_looked_up_and_its_hooks_are_called_once(
    engine: Engine, shop: Any, proxied_url: str, database_proxy: Proxy, conn: Connection, schema: str, committed: bool
) -> None:
    entered, hooks = [0], list[int]()

    def write(tx: Any) -> int:
        entered[0] += 1
        mine = entered[0]
        tx.on_commit(lambda: hooks.append(mine))
        return book(tx, mine)

    with declared("proxied", proxied_url, schema) as wrapper:

        @engine.task("t")
        def body(ctx: TaskContext) -> int:
            return ctx.step.transaction("x", write, on=wrapper)

        if committed:
            cut = database_proxy.cut_after_commit(match=b"commit_step")
        else:
            cut = database_proxy.cut_before("commit_step")
        _, outcome = engine.run("t")

    mine = 1 if committed else 2
    assert cut.fired == 1
    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.SUCCEEDED
    assert booked(conn, schema) == [mine]
    assert hooks == [mine]


def test_i16_a_hook_that_fails_after_djangos_commit_leaves_the_step_done(
    engine: Engine, shop: Any, conn: Connection, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks: list[str] = []

    def write(tx: Any) -> int:
        tx.on_commit(lambda: 1 // 0)
        tx.on_commit(lambda: hooks.append("second"))
        return book(tx, 7)

    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.transaction("x", write, on=shop)

    _, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert outcome.value == 7
    assert booked(conn, schema) == [7]
    assert hooks == ["second"]
    assert "a hook after the commit of step 'x' failed" in caplog.text


def test_i16_a_transaction_that_is_open_on_the_django_connection_is_not_joined_by_a_step(
    engine: Engine, shop: Any, conn: Connection, schema: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> int:
        return ctx.step.transaction("x", book, 1, on=shop)

    with transaction.atomic(using=ALIAS):
        run_id, _ = engine.run("t")

    assert engine.state(run_id) is RunState.FAILED
    assert booked(conn, schema) == []


def test_a_database_with_autocommit_off_is_refused_for_a_step_and_joined_by_a_call(
    engine: Engine, shop: Any, database_url: str, schema: str
) -> None:
    with declared("manual", database_url, schema, AUTOCOMMIT=False) as manual:
        with (
            pytest.raises(DefinitionError, match="AUTOCOMMIT is off"),
            session.transaction(manual, schema),
        ):
            raise AssertionError("not reached")
        kept = engine.start(TASK, conn=manual)
        manual.commit()
        lost = engine.start(TASK, conn=manual)
        manual.rollback()

    assert engine.state(kept) is RunState.READY
    assert_unknown(engine, lost)


def test_a_binding_to_another_database_fails_the_step_by_name_and_leaves_no_row(
    engine: Engine, shop: Any, other_database_url: str
) -> None:
    with declared("other", other_database_url, "public") as other:
        with other.cursor() as cursor:
            cursor.execute("CREATE TABLE booking (id serial PRIMARY KEY, amount int)")

        @engine.task("t", raises=(SchemaError,))
        def body(ctx: TaskContext) -> int:
            return ctx.step.transaction("x", book, 1, on=other)

        run_id, _ = engine.run("t")

        [step] = engine.client.history(run_id).steps
        assert engine.state(run_id) is RunState.FAILED
        assert step.error is not None
        assert b"SchemaError" in step.error
        assert Booking.objects.using("other").count() == 0


# -- the life of Django's connections ---------------------------------------------------------------------------------


def pid_of_step(wrapper: Any, schema: str) -> int:
    with session.transaction(wrapper, schema) as tx:
        row = tx.bound.execute(b"SELECT pg_backend_pid()").fetchone()
    return int(row[0])


def test_conn_max_age_decides_how_long_a_django_connection_is_kept_between_steps(
    shop: Any, database_url: str, schema: str
) -> None:
    with declared("kept", database_url, schema, CONN_MAX_AGE=None) as kept:
        assert pid_of_step(kept, schema) == pid_of_step(kept, schema)

    pid_of_step(shop, schema)
    assert shop.connection is None, "CONN_MAX_AGE is 0 by default: closed after the step"


def test_a_kept_django_connection_that_the_server_has_closed_is_replaced(
    engine: Engine, shop: Any, conn: Connection, database_url: str, schema: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, amount: int) -> int:
        return ctx.step.transaction("x", book, amount, on=kept)

    with declared("kept", database_url, schema, CONN_MAX_AGE=None) as kept:
        pid = pid_of_step(kept, schema)
        conn.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        _, outcome = engine.run("t", 4)
        kept.connection.close()
        _, again = engine.run("t", 5)

    assert isinstance(outcome, Finished)
    assert isinstance(again, Finished)
    assert (outcome.value, again.value) == (4, 5)
    assert booked(conn, schema) == [4, 5]


def test_djangos_own_pool_is_used_and_given_back(shop: Any, database_url: str, schema: str) -> None:
    with declared("pooled", database_url, schema, OPTIONS={"pool": {"min_size": 1, "max_size": 1}}) as pooled:
        assert pid_of_step(pooled, schema) == pid_of_step(pooled, schema)
        assert pooled.connection is None


def test_errors_of_django_that_mean_a_lost_connection_are_known(shop: Any) -> None:
    lost, refused = OperationalError("lost"), OperationalError("refused")
    lost.__cause__, refused.__cause__ = psycopg.OperationalError(), psycopg.errors.StatementTooComplex()

    assert session.is_lost(lost)
    assert session.is_lost(InterfaceError("connection already closed"))
    assert not session.is_lost(refused)
    assert not session.is_lost(IntegrityError("double"))


def test_a_thread_that_ends_leaves_no_django_connection(shop: Any, schema: str) -> None:
    seen: list[Any] = []

    def work() -> None:
        connections[ALIAS].ensure_connection()
        seen.append(connections[ALIAS])
        session.leave_thread()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)

    assert seen[0].connection is None


def test_a_forked_child_leaves_the_django_connection_of_its_parent_alone(
    shop: Any, database_url: str, schema: str
) -> None:
    with declared("kept", database_url, schema, CONN_MAX_AGE=None) as kept:
        mine = pid_of_step(kept, schema)
        with forked(lambda: str(pid_of_step(kept, schema))) as answer:
            theirs = int(answer)

        assert theirs != mine
        assert pid_of_step(kept, schema) == mine
