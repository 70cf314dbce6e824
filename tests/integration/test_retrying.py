"""Retries by a person: what stands still goes on, what has ended is taken up by a linked run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.support.clock import Clock
from tests.support.engine import Engine, take_over
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished
from umt_durable.errors import DefinitionError, UnknownRunError, WrongStatusError
from umt_durable.settings import Settings
from umt_durable.states import Reason, RunState
from umt_durable.store import runs
from umt_durable.store.guard import Guard


class ShopClosedError(Exception):
    """A business failure of these tests."""


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def failing_once(engine: Engine) -> tuple[str, list[str]]:
    """Run a task whose last step fails the first time; return the id and what was entered."""
    entered: list[str] = []

    def charge() -> int:
        entered.append("charge")
        return 40

    def ship() -> str:
        entered.append("ship")
        if entered.count("ship") == 1:
            raise ShopClosedError("closed")
        return "shipped"

    @engine.task("shop.fulfil")
    def body(ctx: TaskContext) -> str:
        ctx.step.run("charge", charge)
        ctx.step.wait_for_fact("approved", timeout=timedelta(days=1))
        return ctx.step.run("ship", ship)

    run_id = engine.start("shop.fulfil")
    engine.client.signal(run_id, "approved", {"by": "ann"})
    engine.process().deliver(run_id, "shop.fulfil")
    assert engine.state(run_id) is RunState.FAILED
    return run_id, entered


def test_i12_j15_a_failed_run_is_taken_up_by_a_linked_one_that_repeats_no_done_step(
    engine: Engine, conn: Connection
) -> None:
    run_id, entered = failing_once(engine)
    before = kit.table(conn, "SELECT * FROM {}.run")

    again = engine.client.retry(run_id, actor="ann", reason="open again")
    outcome = engine.process().deliver(again, "shop.fulfil")

    assert isinstance(outcome, Finished)
    assert outcome.value == "shipped"
    assert entered == ["charge", "ship", "ship"]
    assert kit.table(conn, "SELECT * FROM {}.run WHERE id = %s", run_id) == before
    assert engine.client.get(again).retry_of == run_id
    assert kit.table(conn, "SELECT min(fence) FROM {}.attempt WHERE run = %s", kit.number(conn, again)) == [(2,)]
    [kept] = engine.client.history(run_id).audit
    assert (kept.act, kept.actor, kept.reason, kept.detail) == ("retry", "ann", "open again", f"as run {again}")


def test_a_retry_is_sent_like_any_run(engine: Engine, conn: Connection) -> None:
    run_id, _ = failing_once(engine)
    kit.drop_hints(conn)

    again = kit.number(conn, engine.client.retry(run_id, actor="ann"))

    assert kit.events(conn) == [(again, "pending", 0, None)]
    assert kit.row(conn, again, "state", "deliver_by IS NOT NULL") == ("ready", True)


def test_retries_of_one_run_at_the_same_time_make_one_run(engine: Engine, conn: Connection) -> None:
    run_id, _ = failing_once(engine)

    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda name: engine.client.retry(run_id, actor=name), "abcd"))

    assert len(made) == 1
    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(2,)]
    assert len(engine.client.history(run_id).audit) == 1


def test_a_retry_that_has_failed_too_is_the_one_that_is_taken_up(engine: Engine) -> None:
    run_id, _ = failing_once(engine)
    first = engine.client.retry(run_id, actor="ann")
    engine.client.cancel(first)

    second = engine.client.retry(run_id, actor="ann")

    assert engine.client.get(second).retry_of == first
    assert engine.client.retry(first, actor="bob") == second


def test_a_retry_in_a_callers_transaction_exists_if_he_commits(engine: Engine, conn: Connection) -> None:
    run_id, _ = failing_once(engine)

    with psycopg.connect(engine.database.url) as own:
        rolled_back = engine.client.retry(run_id, actor="ann", conn=own)
        own.rollback()
        assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(1,)]
        assert engine.client.history(run_id).audit == []
        committed = engine.client.retry(run_id, actor="ann", conn=own)

    assert rolled_back == committed
    assert engine.client.get(committed).state is RunState.READY


def test_a_fact_said_before_a_run_failed_is_said_to_its_retry_too(engine: Engine) -> None:
    opens = [False]

    def look() -> None:
        if not opens[0]:
            raise ShopClosedError("closed")

    @engine.task("shop.fulfil")
    def body(ctx: TaskContext) -> object:
        ctx.step.run("look", look)
        return [ctx.step.wait_for_fact("approved").payload, ctx.step.wait_for_fact("paid", key="order-1").payload]

    run_id = engine.start("shop.fulfil")
    engine.client.signal(run_id, "approved", "by ann")
    engine.client.emit("paid", "order-1", 40)
    engine.process().deliver(run_id, "shop.fulfil")
    opens[0] = True

    outcome = engine.process().deliver(engine.client.retry(run_id, actor="ann"), "shop.fulfil")

    assert isinstance(outcome, Finished)
    assert outcome.value == ["by ann", 40]


def test_the_retry_has_the_runs_message_but_not_its_chord_which_failed_with_it(
    engine: Engine, conn: Connection
) -> None:
    run_id, _ = failing_once(engine)
    message = {"callbacks": [{"task": "told"}], "chord": {"task": "body"}, "group": "g", "group_index": 0, "retries": 2}
    kit.table(conn, "UPDATE {}.run SET envelope = %s, ref = 'order:1'", json.dumps(message).encode())

    again = kit.number(conn, engine.client.retry(run_id, actor="ann"))

    envelope, ref = kit.row(conn, again, "envelope", "ref")
    assert json.loads(bytes(envelope)) == {"callbacks": [{"task": "told"}]}
    assert ref == "order:1"


def test_i14_a_quarantined_run_is_released_with_a_new_crash_budget(
    engine: Engine, clock: Clock, conn: Connection
) -> None:
    stops = [True]

    @engine.task("shop.fulfil")
    def body(ctx: TaskContext) -> int:
        return ctx.step.run("charge", lambda: 40)

    run_id = engine.start("shop.fulfil")
    no = kit.number(conn, run_id)
    while stops[0]:
        process = engine.process()
        runs.claim(
            conn, id=run_id, nesting=0, task="shop.fulfil", claim=uuid4(), worker=process.lease.ensure(),
            versions=[1], limit_seconds=None,
        )  # fmt: skip
        process.freeze()
        take_over(engine, clock)
        stops[0] = engine.state(run_id) is not RunState.QUARANTINED
    kit.drop_hints(conn)

    assert engine.client.retry(run_id, actor="ann", reason="fixed") == run_id

    assert kit.row(conn, no, "state", "crashes", "reason") == ("ready", 0, None)
    assert [run for run, *_ in kit.events(conn)] == [no]
    [kept] = engine.client.history(run_id).audit
    assert (kept.act, kept.actor, kept.reason) == ("retry", "ann", "fixed")
    assert kept.detail == f"was quarantined: {Reason.CRASH_BUDGET}"
    outcome = engine.process().deliver(run_id, "shop.fulfil")
    assert isinstance(outcome, Finished)
    assert outcome.value == 40


def test_i23_a_release_in_a_callers_open_transaction_blocks_nobody_and_applies_when_he_commits(
    engine: Engine, conn: Connection
) -> None:
    new, grant, _ = kit.running(conn)
    runs.quarantine(Guard(conn, grant.token), reason=Reason.BAD_INPUT, error=b"{}", summary="bad")

    with psycopg.connect(engine.database.url) as own:
        engine.client.retry(new.id, actor="ann", conn=own)
        with conn.transaction():
            assert runs.lock(conn, grant.token.run) is not None
        engine.route()
        assert kit.state(conn, new.id) == "quarantined"
    engine.route()

    assert kit.state(conn, new.id) == "ready"


@pytest.mark.parametrize("state", ["ready", "running", "sleeping", "succeeded"])
def test_n10_a_run_that_lives_or_succeeded_is_refused_and_the_error_names_its_state(
    state: str, engine: Engine, conn: Connection
) -> None:
    match state:
        case "ready":
            new = kit.enqueue(conn)
        case "sleeping":
            new, _ = kit.sleeping(conn, 60)
        case _:
            new, grant, _ = kit.running(conn)
            if state == "succeeded":
                kit.finish(conn, grant.token)
    before = kit.table(conn, "SELECT * FROM {}.run")

    with pytest.raises(WrongStatusError, match=f"run {new.id} is {state}") as refused:
        engine.client.retry(new.id, actor="ann")

    assert (refused.value.code, refused.value.state) == ("wrong_status", state)
    assert kit.table(conn, "SELECT * FROM {}.run") == before
    assert kit.table(conn, "SELECT * FROM {}.audit") == []


def test_an_unknown_run_or_an_actor_that_cannot_be_kept_is_refused(engine: Engine) -> None:
    run_id, _ = failing_once(engine)

    with pytest.raises(UnknownRunError):
        engine.client.retry("nobody", actor="ann")
    with pytest.raises(DefinitionError, match="actor"):
        engine.client.retry(run_id, actor="a\0b")
    with pytest.raises(DefinitionError, match="reason"):
        engine.client.retry(run_id, actor="ann", reason="x" * 1001)


def test_d7_n4_a_cancel_by_a_person_is_in_the_audit(engine: Engine, conn: Connection) -> None:
    new = kit.enqueue(conn)

    engine.client.cancel(new.id, actor="ann", reason="changed her mind")

    [kept] = engine.client.history(new.id).audit
    assert (kept.act, kept.actor, kept.reason, kept.detail) == ("cancel", "ann", "changed her mind", "was ready")


def test_a_group_of_waits_keeps_its_outcome_in_the_retry_and_an_open_one_finds_its_facts(engine: Engine) -> None:
    opens = [False]

    def look() -> None:
        if not opens[0]:
            raise ShopClosedError("closed")

    @engine.task("shop.fulfil")
    def body(ctx: TaskContext) -> object:
        won = ctx.step.wait_any({"yes": "approved", "no": "refused", "late": timedelta(days=1)})
        ctx.step.run("look", look)
        both = ctx.step.wait_all({"paid": "paid", "packed": "packed"})
        return [won.label, won.payload, both["paid"].payload, both["packed"].payload]

    run_id = engine.start("shop.fulfil")
    for name in ("approved", "paid", "packed"):
        engine.client.signal(run_id, name, name)
    engine.process().deliver(run_id, "shop.fulfil")
    assert engine.state(run_id) is RunState.FAILED
    opens[0] = True

    again = engine.client.retry(run_id, actor="ann")
    engine.client.signal(again, "refused", "too late")
    outcome = engine.process().deliver(again, "shop.fulfil")

    assert isinstance(outcome, Finished)
    assert outcome.value == ["yes", "approved", "paid", "packed"]


def two_versions(engine: Engine) -> None:
    """Declare a task whose first version takes a number, and whose second takes a text too."""

    @engine.task("shop.price", version=1)
    def first(ctx: TaskContext, amount: int) -> str:
        return f"one {amount}"

    @engine.task("shop.price", version=2)
    def second(ctx: TaskContext, amount: int | str) -> str:
        return f"two {amount}"


def misfit(engine: Engine, conn: Connection, *, version: int) -> tuple[str, int]:
    """Start a run whose stored input no longer fits its version, and have it quarantined for that."""
    run_id = engine.start("shop.price", amount=1)
    no = kit.number(conn, run_id)
    wrong = b'{"args":[],"kwargs":{"amount":"much"}}'
    kit.table(conn, "UPDATE {}.run SET version = %s, args = %s RETURNING 1", version, wrong)
    engine.process().deliver(run_id, "shop.price")
    assert kit.row(conn, no, "state", "reason") == ("quarantined", "bad_input")
    return run_id, no


def test_f4_a_run_whose_input_did_not_fit_takes_the_highest_version_when_it_is_retried(
    engine: Engine, conn: Connection
) -> None:
    two_versions(engine)
    run_id, no = misfit(engine, conn, version=1)

    engine.client.retry(run_id, actor="ann")

    assert kit.row(conn, no, "state", "version") == ("ready", None)
    outcome = engine.process().deliver(run_id, "shop.price")
    assert isinstance(outcome, Finished)
    assert outcome.value == "two much"


def test_a_run_is_retried_with_the_version_that_is_named(engine: Engine, conn: Connection) -> None:
    two_versions(engine)
    run_id, no = misfit(engine, conn, version=1)

    engine.client.retry(run_id, actor="ann", version=2)

    assert kit.row(conn, no, "state", "version") == ("ready", 2)
    [kept] = engine.client.history(run_id).audit
    assert kept.detail == "was quarantined: bad_input, goes on with version 2"


def test_a_run_that_has_done_something_keeps_its_version_unless_another_is_named(
    engine: Engine, conn: Connection
) -> None:
    two_versions(engine)
    run_id, no = misfit(engine, conn, version=1)
    kit.table(
        conn,
        "INSERT INTO {}.step (run, key, seq, kind, state, fence) VALUES (%s, 'a', 1, 'run', 'done', 1) RETURNING 1",
        no,
    )

    engine.client.retry(run_id, actor="ann")

    assert kit.row(conn, no, "state", "version") == ("ready", 1)


def test_a_cancelled_run_is_taken_up_with_the_version_that_is_named(engine: Engine, conn: Connection) -> None:
    two_versions(engine)
    run_id = engine.start("shop.price", amount=1)
    engine.client.cancel(run_id)

    again = engine.client.retry(run_id, actor="ann", version=1)

    assert engine.client.get(again).version == 1


@pytest.mark.parametrize("version", [0, -1, True, "2", 1.0, 2**31])
def test_what_is_no_version_is_refused_before_anything_is_written(
    engine: Engine, conn: Connection, version: object
) -> None:
    two_versions(engine)
    run_id, no = misfit(engine, conn, version=1)

    with pytest.raises(DefinitionError, match="version: versions count from 1"):
        engine.client.retry(run_id, actor="ann", version=version)  # type: ignore[arg-type]

    assert kit.row(conn, no, "state", "version") == ("quarantined", 1)
