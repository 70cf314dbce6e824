"""Starting, signalling and cancelling runs from SQL: as from Python, in whoever's transaction it is (B7, D12)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.support.clock import Clock
from tests.support.engine import Engine, in_thread
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.errors import IdempotencyConflictError
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import outbox, runs, workers

START = "SELECT {}.enqueue('t', %s::jsonb)"
KEYED = "SELECT {}.enqueue('t', %s::jsonb, idempotency_key => 'k')"


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)

    @engine.task("t")
    def body(ctx: TaskContext, order: int = 1, *, note: str = "") -> list[Any]:
        return [order, note]

    yield engine
    engine.close()


def one(conn: psycopg.Connection[Any], query: str, schema: str, *params: object) -> Any:
    """Run a query that gives one value; `{}` stands for the schema."""
    row = conn.execute(query.replace("{}", f'"{schema}"').encode(), params).fetchone()
    assert row is not None
    return row[0]


def start(conn: Connection, query: str, *params: object) -> str:
    """Start a run and return its id."""
    return str(one(conn, query, conn.schema, *params))


# -- starts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", ['{"order": 7, "note": "x"}', '{"note": "x", "order": "7"}'])
def test_b7_a_run_that_sql_started_gets_its_arguments_by_name(engine: Engine, conn: Connection, args: str) -> None:
    run_id = start(conn, START, args)

    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.value == [7, "x"]


def test_b7_a_run_that_sql_started_gets_its_arguments_by_place_or_none(engine: Engine, conn: Connection) -> None:
    by_place, without = start(conn, START, "[7]"), start(conn, "SELECT {}.enqueue('t')")

    values = [engine.process().deliver(run_id, "t") for run_id in (by_place, without)]

    assert [one.value for one in values if isinstance(one, Finished)] == [[7, ""], [1, ""]]


def test_b7_i2_a_start_exists_if_and_only_if_its_transaction_commits(
    engine: Engine, database: Database, schema: str
) -> None:
    with psycopg.connect(database.url) as mine:
        gone = one(mine, START, schema, "[1]")
        mine.rollback()
        kept = one(mine, START, schema, "[2]")
        assert engine.client.list() == []
        mine.commit()

    assert [run.id for run in engine.client.list()] == [kept]
    assert gone != kept


def test_b7_sql_leaves_the_same_rows_as_python_but_for_what_it_leaves_open(engine: Engine, conn: Connection) -> None:
    by_python, by_sql = engine.start("t", 1), start(conn, START, "[1]")

    def row(run_id: str) -> dict[str, Any]:
        columns = (
            "to_jsonb(r) - '{id,no,created_at,deliver_by,snapshot,args,digest}'::text[]"
            " || jsonb_build_object('args', convert_from(args, 'UTF8')::jsonb,"
            " 'deliver', deliver_by - created_at < interval '31 s')"
        )
        return dict(kit.table(conn, f"SELECT {columns} FROM {{}}.run AS r WHERE id = %s", run_id)[0][0])

    hints = kit.table(
        conn,
        "SELECT o.id = {}.event_id(r.no, 0, 'run', 0), o.type, o.status, o.priority, o.next_attempt_at <= {}.now()"
        " FROM {}.run AS r JOIN {}.outbox_event AS o ON o.run = r.no ORDER BY r.no",
    )
    assert hints == [(True, "run", "pending", 0, True)] * 2
    opened = {"version": (1, None), "queue": ("q", None)}
    python, from_sql = row(by_python), row(by_sql)
    assert {name: (python[name], from_sql[name]) for name in python if python[name] != from_sql[name]} == opened


def test_b7_the_first_claim_settles_version_and_queue(conn: Connection) -> None:
    run_id = start(conn, f"SELECT {{}}.enqueue('{kit.TASK}')")
    workers.register(
        conn,
        id=kit.NODE,
        node=kit.NODE,
        pid=1,
        host="h",
        lease_seconds=30,
        versions=kit.DECLARED,
        queues={kit.TASK: "orders"},
    )

    [hint] = outbox.claim(conn, relay=kit.NODE, limit=10, hold_seconds=15.0)
    before = kit.table(conn, "SELECT version, queue FROM {}.run")
    grant = kit.claim(conn, run_id, kit.NODE)

    assert (hint.queue, hint.live) == ("orders", True)
    assert before == [(None, None)]
    assert (grant.version, grant.queue) == (kit.VERSION, "orders")
    assert kit.table(conn, "SELECT version, queue FROM {}.run") == [(kit.VERSION, "orders")]


def test_b7_a_hint_without_a_queue_counts_for_the_queue_that_workers_declare(conn: Connection) -> None:
    start(conn, f"SELECT {{}}.enqueue('{kit.TASK}')")
    start(conn, f"SELECT {{}}.enqueue('{kit.TASK}', queue => 'urgent')")
    workers.register(
        conn,
        id=kit.NODE,
        node=kit.NODE,
        pid=1,
        host="h",
        lease_seconds=30,
        versions=kit.DECLARED,
        queues={kit.TASK: "orders"},
    )
    kit.drop_hints(conn)
    kit.table(conn, "UPDATE {}.run SET deliver_by = {}.now()")

    assert sorted(runs.count_ready(conn)) == [("orders", kit.TASK, 1), ("urgent", kit.TASK, 1)]
    assert {row[1] for row in runs.overdue_ready(conn, limit=10)} == {"orders", "urgent"}


def test_b7_a_start_may_say_when_where_how_urgently_and_for_what(
    engine: Engine, conn: Connection, clock: Clock
) -> None:
    run_id = start(
        conn,
        "SELECT {}.enqueue('t', '{\"order\": 7}'::jsonb, task_id => 'mine', queue => 'orders', priority => 9,"
        " countdown => interval '1 minute', expires => {}.now() + interval '1 hour', ref => 'order:7',"
        " attributes => '{\"customer\": 7}')",
    )

    run = engine.client.get("mine")
    assert (run_id, run.state, run.queue, run.priority, run.ref) == ("mine", RunState.SLEEPING, "orders", 9, "order:7")
    assert run.attributes == {"customer": 7}
    clock.advance(seconds=61)
    engine.timers()
    assert isinstance(engine.process().deliver("mine", "t"), Finished)
    due = start(conn, "SELECT {}.enqueue('t', eta => {}.now() + interval '1 minute')")
    assert engine.state(due) is RunState.SLEEPING


def test_b7_the_same_task_id_is_the_same_run(engine: Engine, conn: Connection) -> None:
    twice = [start(conn, "SELECT {}.enqueue('t', task_id => 'mine')") for _ in range(2)]

    assert twice == ["mine", "mine"]
    assert [run.id for run in engine.client.list()] == ["mine"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ('{"order": "many", "colour": "red"}', ["order: ", "colour: is not a parameter"]),
        ("[1, 2]", ["argument 2: takes 1 positional"]),
        ('{"order": {"$umt.date": "never"}}', ["order: "]),
    ],
)
def test_d1_input_that_does_not_fit_quarantines_the_run_and_names_each_field(
    engine: Engine, conn: Connection, args: str, named: list[str]
) -> None:
    run_id = start(conn, KEYED, args)

    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Parked)
    run = engine.client.get(run_id)
    failure = engine.client.failure(run)
    assert (run.state, run.reason) == (RunState.QUARANTINED, "bad_input")
    assert failure is not None
    assert failure.type in ("InputError", "DecodingError")
    assert [text for text in named if text not in failure.message] == []
    assert kit.table(conn, "SELECT input_hash FROM {}.idempotency_key") == [(None,)]


@pytest.mark.parametrize("args", ["[" * 150 + "]" * 150, f"[1{'0' * 5000}]"])
def test_d1_i26_what_no_python_start_could_say_parks_its_run_and_no_other(
    engine: Engine, conn: Connection, args: str
) -> None:
    odd, good = start(conn, START, args), start(conn, START, "[3]")

    outcomes = [engine.process().deliver(run_id, "t") for run_id in (odd, good)]

    assert isinstance(outcomes[0], Parked)
    assert engine.client.get(odd).reason == "bad_input"
    assert isinstance(outcomes[1], Finished)


REFUSED = {
    "task => ''": "task must have 1 to 255 characters",
    "task => NULL": "task must have 1 to 255 characters",
    "task => 't@1'": "a name without a version",
    "task => repeat('é', 255) || 'x'": "task must have 1 to 255 characters",
    "task => repeat('日', 255), ref => repeat('\U0001f600', 200)": "ref must have at most 765 bytes in UTF-8, not 800",
    "task => 't', args => '7'": "JSON object (arguments by name) or array (arguments by place), not number",
    "task => 't', args => NULL": "args must be a JSON object",
    "task => 't', args => jsonb_build_array(repeat('x', 17000000))": "more than the 16777216 allowed",
    "task => 't', task_id => ''": "task_id must have 1 to 255 characters",
    "task => 't', queue => ''": "queue must have 1 to 255",
    "task => 't', priority => 10": "priority must be from 0 to 9, not 10",
    "task => 't', countdown => interval '1 s', eta => now()": "countdown and eta both say when",
    "task => 't', attributes => '[]'": "attributes must be a JSON object",
    "task => 't', idempotency_key => ''": "idempotency_key must have 1 to 255",
    "task => 't', idempotency_policy => 'reject'": "there is none",
    "task => 't', idempotency_ttl => interval '1 s'": "there is none",
    "task => 't', idempotency_key => 'k', idempotency_ttl => interval '0'": "must be more than zero",
    "task => 't', idempotency_key => 'k', idempotency_policy => 'ignore'": "one of attach, reject, not 'ignore'",
}


@pytest.mark.parametrize("arguments", list(REFUSED))
def test_b7_a_wrong_argument_is_an_sql_error_that_names_it_and_nothing_is_written(
    schema: str, conn: Connection, arguments: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        start(conn, f"SELECT {{}}.enqueue({arguments})")

    assert REFUSED[arguments] in str(refused.value)
    for table in ("run", "outbox_event", "idempotency_key"):
        assert kit.table(conn, f"SELECT count(*) FROM {{}}.{table}") == [(0,)]


# -- keys -------------------------------------------------------------------------------------------------------------


def test_g4_a_key_used_again_attaches_and_with_other_input_is_refused(engine: Engine, conn: Connection) -> None:
    first = start(conn, KEYED, '{"order": 7, "note": "x"}')

    assert start(conn, KEYED, '{"note": "x",    "order": 7}') == first
    with pytest.raises(psycopg.errors.UniqueViolation) as conflict:
        start(conn, KEYED, '{"order": 8}')
    with pytest.raises(psycopg.errors.UniqueViolation, match="was used before, by run " + first):
        start(
            conn,
            "SELECT {}.enqueue('t', %s::jsonb, idempotency_key => 'k', idempotency_policy => 'reject')",
            '{"order": 7, "note": "x"}',
        )

    assert f"idempotency key 'k' of t belongs to run {first}, which was made with other input" in str(conflict.value)
    assert [run.id for run in engine.client.list()] == [first]
    assert start(conn, "SELECT {}.enqueue('u', idempotency_key => 'k')") != first


def test_g4_the_worker_that_takes_the_run_settles_what_python_is_compared_to(engine: Engine, conn: Connection) -> None:
    first = start(conn, KEYED, '{"order": "7"}')
    attached = engine.start("t", 8, key="k")  # nobody has read the arguments yet: they are not compared

    engine.process().deliver(first, "t")

    assert attached == first
    assert engine.start("t", 7, key="k") == first
    assert engine.start("t", order=7, key="k") == first
    with pytest.raises(IdempotencyConflictError) as conflict:
        engine.start("t", 8, key="k")
    assert conflict.value.run == first
    assert kit.table(conn, "SELECT digest = sha256(args) FROM {}.run") == [(True,)]


def test_g4_sql_attaches_to_what_python_started_with_the_key(engine: Engine, conn: Connection) -> None:
    first = engine.start("t", 7, key="k")

    assert start(conn, KEYED, '{"order": 7}') == first
    assert [run.id for run in engine.client.list()] == [first]


def test_g4_after_its_lifetime_a_key_starts_a_new_run_and_is_settled_by_that(
    engine: Engine, conn: Connection, clock: Clock
) -> None:
    lasting = "SELECT {}.enqueue('t', %s::jsonb, idempotency_key => 'k', idempotency_ttl => interval '1 minute')"
    first = start(conn, lasting, "[7]")
    clock.advance(seconds=61)
    second = start(conn, lasting, "[8]")

    engine.process().deliver(first, "t")

    assert second != first
    assert kit.table(conn, "SELECT run, input_hash FROM {}.idempotency_key") == [(second, None)]
    engine.process().deliver(second, "t")
    assert engine.start("t", 8, key="k", ttl=60) == second


def test_g4_of_two_transactions_with_one_key_the_second_waits_for_the_first(
    engine: Engine, database: Database, conn: Connection, schema: str
) -> None:
    with psycopg.connect(database.url) as mine:
        first = one(mine, KEYED, schema, "[7]")
        with in_thread(lambda: start(conn, KEYED, "[7]")) as second:
            mine.commit()

    assert second == [first]


def test_g4_i23_a_key_that_an_open_transaction_takes_over_keeps_no_worker_waiting(
    engine: Engine, database: Database, conn: Connection, schema: str, clock: Clock
) -> None:
    lasting = "SELECT {}.enqueue('t', %s::jsonb, idempotency_key => 'k', idempotency_ttl => interval '1 minute')"
    first = start(conn, lasting, "[7]")
    clock.advance(seconds=61)

    with psycopg.connect(database.url) as mine:
        one(mine, lasting, schema, "[8]")
        outcome = engine.process().deliver(first, "t")
        mine.rollback()

    assert isinstance(outcome, Finished)


# -- facts and cancels ------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(engine: Engine) -> str:
    """Return a run that waits for the fact `approved`, and if its key is given for that."""

    @engine.task("w")
    def body(ctx: TaskContext, key: str | None = None) -> Any:
        return ctx.step.wait_for_fact("approved", key=key).payload

    run_id, _ = engine.run("w")
    return run_id


def test_d12_a_signal_from_sql_wakes_its_run_with_its_payload(engine: Engine, conn: Connection, waiting: str) -> None:
    say = "SELECT {}.signal(%s, 'approved', '{\"by\": \"ann\"}', actor => 'ann', dedupe => 'd')"
    twice = [kit.table(conn, say, waiting) for _ in range(2)]

    engine.route()
    outcome = engine.process().deliver(waiting, "w")

    assert twice[0] == twice[1]
    assert isinstance(outcome, Finished)
    assert outcome.value == {"by": "ann"}
    assert kit.table(conn, "SELECT actor FROM {}.fact") == [("ann",)]


def test_d12_i2_a_signal_or_cancel_that_rolled_back_has_no_effect(
    engine: Engine, database: Database, conn: Connection, waiting: str, schema: str
) -> None:
    with psycopg.connect(database.url) as mine:
        one(mine, "SELECT {}.signal(%s, 'approved')", schema, waiting)
        one(mine, "SELECT {}.cancel(%s)", schema, waiting)
        one(mine, "SELECT {}.emit('approved', 'k')", schema)
        mine.rollback()
    engine.route()

    assert engine.state(waiting) is RunState.WAITING
    assert kit.table(conn, "SELECT count(*) FROM {}.fact") == [(0,)]


def test_d12_a_fact_emitted_from_sql_wakes_who_waits_for_its_key(
    engine: Engine, conn: Connection, waiting: str
) -> None:
    run_id, _ = engine.run("w", "order:7")

    kit.table(conn, "SELECT {}.emit('approved', 'order:7')")
    engine.route()
    outcome = engine.process().deliver(run_id, "w")

    assert isinstance(outcome, Finished)
    assert outcome.value is None
    assert engine.state(waiting) is RunState.WAITING


def test_n4_a_cancel_from_sql_ends_its_run_and_keeps_who_and_why(
    engine: Engine, conn: Connection, waiting: str
) -> None:
    kit.table(conn, "SELECT {}.cancel(%s, 'too late', 'ann')", waiting)
    engine.route()

    history = engine.client.history(waiting)
    assert (history.run.state, history.run.reason) == (RunState.CANCELLED, "too late")
    assert [(entry.act, entry.actor, entry.reason) for entry in history.audit] == [("cancel", "ann", "too late")]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("signal('x', '')", "name must have 1 to 255 characters"),
        ("signal('x', 'umt.pause')", "names under umt. are reserved: 'umt.pause'"),
        ("signal_run('x', 'umt.join', NULL, NULL, NULL, gen_random_uuid())", "names under umt. are reserved"),
        ("emit('umt.join', 'k')", "names under umt. are reserved: 'umt.join'"),
        ("emit('n', '')", "key must have 1 to 255 characters"),
        ("emit('n', NULL)", "key must have 1 to 255 characters"),
        ("signal('x', 'n', dedupe => '')", "dedupe must have 1 to 255 characters"),
        ("cancel('x', repeat('r', 1001))", "reason must have at most 1000 characters, not 1001"),
        ("cancel('x', actor => '')", "actor must have 1 to 255 characters"),
    ],
)
def test_d12_what_no_fact_can_say_is_an_sql_error(conn: Connection, call: str, text: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=text.replace(".", r"\.")):
        kit.table(conn, f"SELECT {{}}.{call}")

    assert kit.table(conn, "SELECT count(*) FROM {}.fact") == [(0,)]


@pytest.mark.parametrize("call", ["signal('nowhere', 'n')", "cancel('nowhere')"])
def test_d12_a_run_that_does_not_exist_is_an_sql_error_that_names_it(conn: Connection, call: str) -> None:
    with pytest.raises(psycopg.errors.NoDataFound, match="no run with id 'nowhere'"):
        kit.table(conn, f"SELECT {{}}.{call}")


# -- where it is called from ------------------------------------------------------------------------------------------

TRIGGER = """
CREATE TABLE {}.orders (id int PRIMARY KEY, paid boolean NOT NULL DEFAULT false);
CREATE FUNCTION {}.begin_order() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        PERFORM {}.enqueue('t', jsonb_build_object('order', NEW.id), idempotency_key => 'order:' || NEW.id);
    ELSIF NEW.paid THEN
        PERFORM {}.emit('paid', 'order:' || NEW.id, to_jsonb(NEW));
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER begin_order AFTER INSERT OR UPDATE ON {}.orders FOR EACH ROW EXECUTE FUNCTION {}.begin_order();
"""


def test_b7_i2_a_trigger_starts_one_run_for_each_row_that_is_kept(engine: Engine, conn: Connection) -> None:
    kit.table(conn, TRIGGER)

    with conn.transaction():
        kit.table(conn, "INSERT INTO {}.orders (id) VALUES (1), (2)")
        with pytest.raises(psycopg.errors.UniqueViolation), conn.transaction():
            kit.table(conn, "INSERT INTO {}.orders (id) VALUES (3), (1)")
    kit.table(conn, "UPDATE {}.orders SET paid = true WHERE id = 2")

    args = "SELECT convert_from(args, 'UTF8')::json -> 'kwargs' ->> 'order' FROM {}.run ORDER BY no"
    assert kit.table(conn, args) == [("1",), ("2",)]
    [(address, payload)] = kit.table(conn, "SELECT address, convert_from(payload, 'UTF8') FROM {}.fact")
    assert json.loads(address) == ["key", "paid", "order:2"]
    assert json.loads(payload) == {"id": 2, "paid": True}


HOSTILE = """
CREATE FUNCTION {}.gen_random_uuid() RETURNS uuid LANGUAGE plpgsql AS $$ BEGIN RAISE 'hijacked'; END $$;
CREATE FUNCTION {}.starts_with(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'hijacked'; END $$;
CREATE FUNCTION {}.same(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'hijacked'; END $$;
CREATE OPERATOR {}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {}.same);
CREATE OPERATOR {}.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = {}.same);
CREATE TEMPORARY TABLE run (id text);
"""


def test_i27_a_callers_search_path_decides_nothing_inside_the_functions(
    database_url: str, conn: Connection, schema: str
) -> None:
    evil = f"{schema}_evil"
    conn.execute(f'CREATE SCHEMA "{evil}"'.encode())
    try:
        with psycopg.connect(database_url, autocommit=True) as mine:
            mine.execute(HOSTILE.replace("{}", f'"{evil}"').encode())
            mine.execute(f'SET search_path = "{evil}", pg_catalog'.encode())
            run_id = one(mine, KEYED, schema, "[7]")
            again = one(mine, KEYED, schema, "[7]")
            one(mine, "SELECT {}.signal(%s::text, 'n'::text)", schema, run_id)
            one(mine, "SELECT {}.emit('n'::text, 'k'::text)", schema)
            one(mine, "SELECT {}.cancel(%s::text)", schema, run_id)
            one(mine, "SELECT {}.emit_outbox('order.paid', '{}'::jsonb)".replace("'{}'", "'[]'"), schema)
            found = one(mine, "SELECT state FROM {}.lookup(%s)", schema, run_id)
    finally:
        conn.execute(f'DROP SCHEMA "{evil}" CASCADE'.encode())

    assert again == run_id
    assert found == "ready"


def test_i27_every_function_has_its_search_path_pinned_or_was_bound_when_it_was_made(conn: Connection) -> None:
    loose = kit.table(
        conn,
        "SELECT p.proname FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = %s"
        " AND p.prosqlbody IS NULL AND NOT coalesce(p.proconfig @> ARRAY['search_path=pg_catalog, pg_temp'], false)",
        conn.schema,
    )

    assert loose == []
