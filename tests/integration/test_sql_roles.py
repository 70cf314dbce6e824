"""What each database role may do, and nothing more: the privilege matrix, and each kind of process at its work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.integration import service_kit as kit
from tests.integration.cli_kit import cli_for, one_line
from tests.support.engine import Engine
from tests.support.roles import Roles, four_roles
from umt_durable import grants
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outbox import OutboxClient
from umt_durable.engine.outcomes import Finished
from umt_durable.errors import ConfigurationError, PrivilegeError, SchemaError
from umt_durable.grants import Role
from umt_durable.migrate import migrate_engine_schema
from umt_durable.settings import Settings
from umt_durable.sql import quote, statements
from umt_durable.states import RunState

CANARY = "hunter2-canary"


@pytest.fixture
def roles(database_url: str, settings: Settings) -> Iterator[Roles]:
    """Return four roles, and a schema that their owner has made."""
    with four_roles(settings) as roles:
        yield roles


@pytest.fixture
def admin(roles: Roles) -> Iterator[Connection]:
    """Return a connection of the superuser to the roles' schema."""
    database = Database(roles.admin)
    with database.connect() as conn:
        yield conn
    database.close()


class At:
    """The engine of a process that logs in as one role."""

    def __init__(self, roles: Roles, who: Role) -> None:
        self.settings = roles.settings(who)
        self.database = Database(self.settings)
        self.engine = Engine(self.database, self.settings)
        self.outbox = OutboxClient(self.database, self.settings)

        @self.engine.task("t")
        def body(ctx: TaskContext, order: int, secret: str = "") -> dict[str, Any]:
            ctx.step.run("charge", lambda: {"secret": secret})
            said = ctx.step.wait_for_fact("approved").payload
            if order < 0:
                raise ValueError(f"no such order, {secret}")
            return {"order": order, "said": said, "secret": secret}

    def close(self) -> None:
        self.engine.close()
        self.database.close()


@pytest.fixture
def at(roles: Roles) -> Iterator[dict[Role, At]]:
    """Return a process of each role."""
    made = {role: At(roles, role) for role in Role}
    yield made
    for one in made.values():
        one.close()


# -- the matrix -------------------------------------------------------------------------------------------------------

TABLES = {
    "run": "SIU",
    "attempt": "SIUD",
    "step": "SIUD",
    "progress": "SIUD",
    "wait": "SIUD",
    "fact": "SIU",
    "fact_read": "SI",
    "outbox_event": "SIUD",
    "op_ledger": "SIU",
    "worker": "SIUD",
    "pause": "SIUD",
    "idempotency_key": "SU",
    "broker_marker": "SIU",
    "setting": "S",
    "audit": "SI",
    "umt_version": "S",
}
"""What a worker may do with each table; nobody else may do anything with them, but read the revision."""
VIEWS = [
    *(f"{name}_view" for name in ("run", "attempt", "step", "wait", "fact", "outbox", "op", "worker", "key", "audit")),
    "progress_view",
    "pause_view",
    "payload_keys",
]
OPEN = {
    *("enqueue", "signal", "emit", "cancel", "emit_outbox", "lookup", "check_text", "check_payload", "check_start"),
    *("enqueue_run", "signal_run", "emit_fact", "emit_event", "keep_message", "now", "complete_step", "signing_key"),
}
"""What an app may call."""
RIGHTS = {"S": "SELECT", "I": "INSERT", "U": "UPDATE", "D": "DELETE"}


def expected(role: Role, relation: str) -> set[str]:
    if role is Role.WORKER:
        return {RIGHTS[letter] for letter in TABLES.get(relation, "S")}
    seen = {Role.APP: {"run_view", "umt_version"}, Role.UI: {*VIEWS, "umt_version"}}
    return {"SELECT"} if relation in seen[role] else set()


@pytest.mark.parametrize("role", list(Role))
def test_the_matrix_of_roles_and_relations_is_exactly_this(roles: Roles, admin: Connection, role: Role) -> None:
    every = ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"]
    found = kit.table(
        admin,
        "SELECT c.relname::text, array(SELECT r FROM unnest(%s::text[]) AS r WHERE has_table_privilege(%s, c.oid, r)),"
        " array(SELECT r FROM unnest(%s::text[]) AS r WHERE has_any_column_privilege(%s, c.oid, r))"
        "  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relkind IN ('r', 'v')",
        *(every, roles.names[role], every[:3], roles.names[role], admin.schema),
    )

    assert {name for name, *_ in found} == {*TABLES, *VIEWS}
    assert {name: set(rights) for name, rights, _ in found} == {name: expected(role, name) for name, *_ in found}
    assert {name: set(some) - set(rights) for name, rights, some in found if set(some) - set(rights)} == {}


@pytest.mark.parametrize("role", list(Role))
def test_the_matrix_of_roles_and_functions_is_exactly_this(roles: Roles, admin: Connection, role: Role) -> None:
    found = kit.table(
        admin,
        "SELECT p.proname::text, has_function_privilege(%s, p.oid, 'EXECUTE'), p.prosecdef"
        "  FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = %s",
        *(roles.names[role], admin.schema),
    )
    every = {name for name, *_ in found}
    allowed = {Role.APP: OPEN, Role.WORKER: every, Role.UI: {"now", "key_of"}}[role]

    assert {name for name, may, _ in found if may} == allowed
    assert {name for name, _, definer in found if definer} == {
        *("enqueue_run", "signal_run", "emit_fact", "emit_event", "keep_message", "lookup"),
        *("complete_step", "signing_key"),
    }


@pytest.mark.parametrize("role", list(Role))
def test_no_role_makes_or_owns_anything_in_the_schema(roles: Roles, admin: Connection, role: Role) -> None:
    name = roles.names[role]
    made = (
        "SELECT has_schema_privilege(%s, oid, 'USAGE'), has_schema_privilege(%s, oid, 'CREATE'),"
        " nspowner::regrole::text FROM pg_namespace WHERE nspname = %s"
    )
    owners = "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = %s::text::regnamespace"

    assert kit.table(admin, made, name, name, admin.schema) == [(True, False, roles.owner)]
    assert kit.table(admin, owners, quote(admin.schema)) == [(roles.owner,)]
    with roles.connect(role) as conn:
        for text in ("CREATE TABLE {}.mine (n int)", "DROP TABLE {}.run", "ALTER TABLE {}.run ADD mine int"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(sql.SQL(text).format(sql.Identifier(admin.schema)))


APP_STATEMENTS = {
    *("enqueue_run", "signal_run", "emit_fact", "emit_event", "keep_message", "may_apply"),
    *("complete_step", "signing_key"),
    *("get_run", "list_runs", "count_by_state", "runs_of_id", "live_runs_by_version", "quarantined_runs"),
}
"""What an app's processes say to the database, of all named statements that touch the schema."""
UI_STATEMENTS = {
    *("list_runs", "count_by_state", "runs_of_id", "list_workers", "live_versions", "sum_counters", "outbox_status"),
    *("blocked_runs", "quarantined_runs", "live_runs_by_version", "dead_events", "list_pauses", "knows_queue"),
}
ANYBODY = {"may_apply", "missing_rights", "read_server", "limit_lock_wait", "oldest_transaction"} | {
    *(
        "now",
        "read_clock_offset",
        "read_server_settings",
        "read_timeouts",
        "lock_address",
        "lock_addresses",
        "try_lock_address",
    )
}
"""Statements that look at the server, the clock or the rights, or take an address lock, and at no row of ours."""


@pytest.mark.parametrize("role", list(Role))
def test_the_matrix_of_roles_and_statements_is_exactly_this(roles: Roles, role: Role) -> None:
    """Each named statement of the product is planned and opened as each role: that is where Postgres checks rights."""
    allowed, failed = set(), {}
    with roles.connect(role) as conn:
        for name, statement in statements(roles.admin.schema).items():
            try:
                with conn.transaction(force_rollback=True):
                    conn.execute(b"EXPLAIN " + statement.text, _Nulls())
            except psycopg.errors.InsufficientPrivilege:
                continue
            except psycopg.Error as error:
                failed[name] = str(error)
            allowed.add(name)

    assert failed == {}
    wanted = {
        Role.APP: APP_STATEMENTS | ANYBODY,
        Role.UI: UI_STATEMENTS | ANYBODY,
        Role.WORKER: set(statements(roles.admin.schema)),
    }
    assert sorted(allowed ^ wanted[role]) == []


class _Nulls(dict[str, None]):
    """Gives a null for every parameter."""

    def __missing__(self, key: str) -> None:
        return None


def test_a_worker_may_do_what_its_statements_do_and_nothing_else() -> None:
    """The grants follow the statements: a new one that writes another table shows here."""
    texts = [one.text.decode() for one in statements("s").values()]
    patterns = {
        "INSERT": r'INSERT INTO "s"\.(\w+)',
        "UPDATE": r'UPDATE "s"\.(\w+)',
        "DELETE": r'DELETE FROM "s"\.(\w+)',
    }
    upsert = r'INSERT INTO "s"\.(\w+)(?:(?!INSERT INTO).)*?DO UPDATE'
    written = {(name, "UPDATE") for text in texts for name in re.findall(upsert, text, re.DOTALL)} | {
        (name, right) for right, pattern in patterns.items() for text in texts for name in re.findall(pattern, text)
    }
    granted = {(name, right) for name, given in grants.RELATIONS[Role.WORKER].items() for right in given}

    assert written == {pair for pair in granted if pair[1] != "SELECT"}


def test_nobody_else_may_call_anything(roles: Roles, admin: Connection) -> None:
    functions = (
        "SELECT p.proname FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = %s"
    )
    everybody = " AND EXISTS (SELECT FROM aclexplode(p.proacl) AS a WHERE a.grantee = 0)"

    assert kit.table(admin, functions + everybody, admin.schema) == []
    assert kit.table(admin, functions + " AND p.proacl IS NULL", admin.schema) == []


# -- each at its work -------------------------------------------------------------------------------------------------


def test_d7_b5_an_app_starts_signals_cancels_and_looks_up_and_a_worker_does_the_rest(
    roles: Roles, at: dict[Role, At], admin: Connection
) -> None:
    app, worker = at[Role.APP].engine, at[Role.WORKER].engine
    kit.table(admin, "CREATE TABLE {}.orders (id int)")
    kit.table(admin, f"GRANT INSERT ON {{}}.orders TO {roles.names[Role.APP]}")

    with psycopg.connect(str(roles.settings(Role.APP).database_url)) as mine:
        mine.execute(f"INSERT INTO {quote(admin.schema)}.orders VALUES (7)".encode())
        run_id = app.start("t", 7, key="order:7", conn=mine)
    assert app.start("t", 7, key="order:7") == run_id
    gone = app.start("t", 8)
    worker.process().deliver(run_id, "t")
    app.client.cancel(gone, reason="too late")
    app.client.signal(run_id, "approved", "yes")
    app.client.emit("any", "key")
    at[Role.APP].outbox.emit("order.paid", {"order": 7})
    assert app.state(run_id) is RunState.WAITING  # the app's user may say the fact, and not apply it
    worker.route()
    outcome = worker.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert app.client.result(app.client.get(run_id)) == {"order": 7, "said": "yes", "secret": ""}
    assert {run.id: run.state for run in app.client.list()} == {
        run_id: RunState.SUCCEEDED,
        gone: RunState.CANCELLED,
    }
    assert app.client.counts() == {"cancelled": 1, "succeeded": 1}


def test_an_app_completes_a_begun_step_with_its_token_and_a_worker_does_the_rest(
    roles: Roles, at: dict[Role, At], admin: Connection
) -> None:
    worker, tokens = at[Role.WORKER].engine, list[str]()

    @worker.task("begins")
    def body(ctx: TaskContext) -> Any:
        return ctx.step.begin("review", on_created=tokens.append)

    run_id, _ = worker.run("begins")
    at[Role.APP].engine.client.complete(tokens[0], "yes")
    assert worker.state(run_id) is RunState.WAITING  # the app's user may say it, and not apply it
    worker.route()
    outcome = worker.process().deliver(run_id, "begins")

    assert isinstance(outcome, Finished)
    assert outcome.value == "yes"
    with pytest.raises(PrivilegeError):
        at[Role.UI].engine.client.complete(tokens[0], "yes")


@pytest.mark.parametrize("what", ["pause", "resume", "retry", "history", "dead", "replay", "claim"])
def test_d7_an_app_may_not_operate_read_a_journal_or_execute(at: dict[Role, At], what: str) -> None:
    app = at[Role.APP]
    run_id = app.engine.start("t", 7)
    acts: dict[str, Callable[[], object]] = {
        "pause": lambda: app.engine.client.pause(run_id, actor="app"),
        "resume": lambda: app.engine.client.resume(run_id, actor="app"),
        "retry": lambda: app.engine.client.retry(run_id, actor="app"),
        "history": lambda: app.engine.client.history(run_id),
        "dead": app.outbox.dead,
        "replay": lambda: app.outbox.replay(type="run"),
        "claim": lambda: app.engine.process().deliver(run_id, "t"),
    }

    with pytest.raises(
        PrivilegeError, match=r"this database user may not do that: permission denied .*umt-durable grants"
    ):
        acts[what]()

    assert app.engine.state(run_id) is RunState.READY


def test_an_app_may_start_from_plain_sql_and_write_no_row_by_hand(roles: Roles, admin: Connection) -> None:
    name = quote(admin.schema)
    with roles.connect(Role.APP) as conn:
        started = conn.execute(f"SELECT {name}.enqueue('t', '[7]', idempotency_key => 'k')".encode()).fetchone()
        assert started is not None
        conn.execute(f"SELECT {name}.signal(%s, 'approved', '1')".encode(), started)
        conn.execute(f"SELECT {name}.emit('any', 'key', '1'), {name}.emit_outbox('order.paid', '1')".encode())
        conn.execute(f"SELECT {name}.cancel(%s)".encode(), started)
        assert conn.execute(f"SELECT state FROM {name}.lookup(%s)".encode(), started).fetchone() == ("ready",)
        for table in TABLES:
            for text in (
                "INSERT INTO {} DEFAULT VALUES",
                "DELETE FROM {}",
                "TRUNCATE {}",
                "SELECT 1 FROM {} FOR UPDATE",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(text.replace("{}", f"{name}.{table}").encode())
        for call in (
            "ask_run('x', 'umt.pause', NULL, NULL, NULL, gen_random_uuid())",
            "say('a', 'n', NULL, NULL, NULL, gen_random_uuid())",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(f"SELECT {name}.{call}".encode())


def test_a_worker_may_not_change_the_audit(roles: Roles, at: dict[Role, At], admin: Connection) -> None:
    worker = at[Role.WORKER].engine
    run_id = worker.start("t", 7)
    worker.client.pause(run_id, actor="ann")
    assert [entry.act for entry in worker.client.history(run_id).audit] == ["pause"]

    with roles.connect(Role.WORKER) as conn:
        for text in ("UPDATE {}.audit SET actor = 'bob'", "DELETE FROM {}.audit", "TRUNCATE {}.audit"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(sql.SQL(text).format(sql.Identifier(admin.schema)))


def test_i27_a_page_sees_every_run_and_no_payload(roles: Roles, at: dict[Role, At], admin: Connection) -> None:
    worker = at[Role.WORKER].engine
    for order in (7, -7):
        run_id = worker.start("t", order, CANARY)
        worker.process().deliver(run_id, "t")
        worker.client.signal(run_id, "approved", {"password": CANARY}, actor="ann")
        worker.route()
        worker.process().deliver(run_id, "t")
    at[Role.WORKER].outbox.emit("order.paid", {"secret": CANARY})
    states = {run.state for run in worker.client.list()}

    with roles.connect(Role.UI) as conn:
        rows = {view: conn.execute(f"SELECT * FROM {quote(admin.schema)}.{view}".encode()).fetchall() for view in VIEWS}
    kinds = kit.table(
        admin,
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = %s"
        " AND table_name LIKE '%%\\_view' AND (data_type = 'bytea' OR column_name IN ('claim', 'token', 'idem_key'))",
        admin.schema,
    )

    assert states == {RunState.SUCCEEDED, RunState.FAILED}
    assert CANARY in str(kit.table(admin, "SELECT convert_from(args, 'UTF8') FROM {}.run"))
    assert CANARY not in str(rows)
    assert kinds == []
    assert {view for view, found in rows.items() if found} >= {
        "run_view",
        "attempt_view",
        "step_view",
        "wait_view",
        "fact_view",
    }
    assert [row[-1] for row in rows["attempt_view"] if row[-1]] == ["ValueError"]


def test_s20_a_page_lists_and_counts_runs_with_the_products_own_commands(roles: Roles, at: dict[Role, At]) -> None:
    run_id = at[Role.APP].engine.start("t", 7, CANARY)

    with cli_for(roles.settings(Role.UI)) as cli:
        listed, status = cli("runs", "--json").stdout, cli("status", "--json").stdout
        versions = cli("versions").stdout
        refused = [one_line(cli(*call, status=1)) for call in (("show", run_id), ("cancel", run_id))]

    assert [run["id"] for run in json.loads(listed)["runs"]] == [run_id]
    assert (json.loads(status)["runs"]["ready"], json.loads(status)["blocked"]) == (1, 1)
    assert "t" in versions
    assert CANARY not in listed + status
    assert all("this database user may not do that" in line for line in refused)


# -- granting ---------------------------------------------------------------------------------------------------------


def rights_of(conn: Connection, role: str) -> set[tuple[str, str]]:
    """Return what a role has in the schema: (relation or function, right)."""
    query = """
        SELECT c.relname::text, a.privilege_type FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace,
               aclexplode(c.relacl) AS a WHERE n.nspname = %s AND a.grantee = %s::regrole
        UNION ALL
        SELECT p.proname::text, a.privilege_type FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace,
               aclexplode(p.proacl) AS a WHERE n.nspname = %s AND a.grantee = %s::regrole"""
    return set(kit.table(conn, query, conn.schema, role, conn.schema, role))


def cli_as(roles: Roles, who: str) -> Any:
    """Return the command line of a process that logs in under a name."""
    return cli_for(roles.settings(who))


def test_granting_takes_away_what_a_role_should_not_have(roles: Roles, admin: Connection) -> None:
    app = roles.names[Role.APP]
    before = rights_of(admin, app)
    kit.table(admin, f"GRANT SELECT ON {{}}.run TO {app}")
    kit.table(admin, f"REVOKE EXECUTE ON FUNCTION {{}}.emit FROM {app}")

    with cli_as(roles, roles.owner) as cli:
        told = cli("grants", "--app-role", app).stdout

    assert told == f"{app} may do in schema '{admin.schema}' what an app does: start, signal, cancel and look up runs\n"
    assert rights_of(admin, app) == before


def test_the_printed_statements_do_the_same(roles: Roles, admin: Connection) -> None:
    before = {role: rights_of(admin, name) for role, name in roles.names.items()}
    options = [text for role, name in roles.names.items() for text in (f"--{role}-role", name)]
    for name in roles.names.values():
        kit.table(admin, f"REVOKE ALL ON ALL TABLES IN SCHEMA {{}} FROM {name}")
        kit.table(admin, f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {{}} FROM {name}")

    with cli_as(roles, roles.owner) as cli:
        printed = cli("grants", "--sql", *options).stdout
        assert cli("grants", "--sql", "--json", status=2).stdout == ""
    with roles.connect(roles.owner) as conn:
        conn.execute(printed.encode())

    assert {role: rights_of(admin, name) for role, name in roles.names.items()} == before


def test_a_migration_grants_again_what_was_granted_and_leaves_out_roles_that_are_gone(
    roles: Roles, admin: Connection
) -> None:
    ui, worker = roles.names[Role.UI], roles.names[Role.WORKER]
    before = rights_of(admin, worker)
    kit.table(admin, f"REVOKE INSERT ON {{}}.run FROM {worker}")
    kit.table(admin, f"DROP OWNED BY {ui}")
    kit.table(admin, f"DROP ROLE {ui}")

    migrate_engine_schema(str(roles.settings(roles.owner).database_url), admin.schema)

    assert rights_of(admin, worker) == before


def test_a_role_that_does_not_exist_is_named_with_the_statement_that_makes_it(roles: Roles, admin: Connection) -> None:
    before = rights_of(admin, roles.names[Role.APP])

    with cli_as(roles, roles.owner) as cli:
        told = one_line(cli("grants", "--app-role", "no such", "--ui-role", roles.names[Role.UI], status=1))

    assert 'there is no database role no such: a superuser makes it by CREATE ROLE "no such";' in told
    assert rights_of(admin, roles.names[Role.APP]) == before


def test_only_the_owner_grants_and_only_where_there_is_a_schema(roles: Roles) -> None:
    owner, worker = (str(roles.settings(who).database_url) for who in (roles.owner, Role.WORKER))

    with pytest.raises(SchemaError, match="done by its owner, the user who migrates"):
        grants.apply(worker, roles.admin.schema, roles.names)
    with pytest.raises(SchemaError, match="after `umt-durable migrate`"):
        grants.apply(owner, "nowhere", roles.names)
    with pytest.raises(ConfigurationError, match="CREATE ROLE"):
        grants.apply(owner, roles.admin.schema, {Role.APP: "no such"})


def test_without_names_the_usual_ones_are_meant(roles: Roles) -> None:
    with cli_as(roles, roles.owner) as cli:
        printed = cli("grants", "--sql", "--schema", "shop").stdout

    for name in ("umt_app", "umt_worker", "umt_ui"):
        assert f'GRANT USAGE ON SCHEMA "shop" TO "{name}";' in printed


@pytest.mark.parametrize(
    ("role", "level", "text"),
    [
        (Role.WORKER, "ok", "this user may do what a worker does"),
        (Role.APP, "fail", "this user lacks rights that a worker needs"),
        (Role.UI, "fail", "this user lacks rights that a worker needs"),
    ],
)
def test_doctor_says_whether_its_user_may_do_what_a_worker_does(
    roles: Roles, role: Role, level: str, text: str
) -> None:
    with cli_for(roles.settings(role)) as cli:
        found = json.loads(cli("doctor", "--json", status=None).stdout)["findings"]

    [rights] = [one for one in found if one["check"] == "rights"]
    assert rights["level"] == level
    assert text in rights["what"]
    assert not [one for one in found if "refuses a question" in one["what"]]


def test_b2_a_role_sees_only_the_schema_it_was_granted(roles: Roles, conn: Connection) -> None:
    """A second install in the same database is closed to the roles of the first."""
    with roles.connect(Role.WORKER) as mine, pytest.raises(psycopg.errors.InsufficientPrivilege):
        mine.execute(f"SELECT 1 FROM {quote(conn.schema)}.run_view".encode())
