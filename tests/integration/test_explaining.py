"""Why a run stands where it stands: each reason, of real rows, with what a person can do about it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from tests.integration import service_kit as kit
from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, in_thread
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.explaining import Why
from umt_durable.engine.outcomes import Parked
from umt_durable.engine.pausing import Pauses
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.waitables import FactWait, Timer, Waitable
from umt_durable.errors import UnknownRunError
from umt_durable.settings import Settings
from umt_durable.states import RunState, Scope

HOURLY = RetryPolicy(max_attempts=2, initial=timedelta(hours=1), maximum=timedelta(hours=1))


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def whys(engine: Engine, run_id: str) -> list[Why]:
    """Return the codes of the reasons of a run."""
    return [one.why for one in engine.client.explain(run_id).because]


def told(engine: Engine, run_id: str) -> str:
    """Return an explanation as people read it."""
    return str(engine.client.explain(run_id))


def test_f5_a_ready_run_names_what_keeps_it(engine: Engine, conn: Connection, settings: Settings) -> None:
    run = kit.enqueue(conn, task="shop.pay", version=7, queue="bulk")

    assert whys(engine, run.id) == [Why.MISSING_CODE, Why.HINT_PENDING]
    assert "no live worker declares shop.pay@7. To do: start a worker with that code" in told(engine, run.id)
    kit.worker(conn, versions=["shop.pay@7"])
    assert whys(engine, run.id) == [Why.HINT_PENDING]
    kit.drop_hints(conn)
    sent = engine.client.explain(run.id).because
    assert [one.why for one in sent] == [Why.HINT_SENT]
    assert sent[0].until is not None
    Pauses(engine.database, settings).pause(Scope.QUEUE, "bulk", actor="ann", reason="the bank is away")
    assert whys(engine, run.id)[0] is Why.PAUSED
    assert "paused by ann" in told(engine, run.id)
    assert "`umt-durable queue resume bulk`" in told(engine, run.id)
    engine.client.pause(run.id, actor="ann")
    assert f"`umt-durable resume {run.id}`" in told(engine, run.id)


def test_a_running_run_names_its_process_and_step_and_whether_that_is_gone(
    engine: Engine, conn: Connection, clock: Clock
) -> None:
    gate = Gate()

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.options(key="k").run("read", gate.pass_through)

    run_id, process = engine.start("t"), engine.process()
    with in_thread(lambda: process.deliver(run_id, "t")):
        gate.wait_reached()
        assert whys(engine, run_id)[0] is Why.RUNNING
        engine.client.cancel(run_id)
        assert whys(engine, run_id)[:2] == [Why.CANCEL_ASKED, Why.RUNNING]
        process.freeze()
        clock.advance(seconds=engine.settings.lease_seconds + 1)
        assert Why.OWNER_GONE in whys(engine, run_id)
        gate.open()


def test_a_parked_run_names_what_it_waits_for(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, how: str) -> Any:
        match how:
            case "sleep":
                return ctx.step.sleep("cooling off", timedelta(hours=1))
            case "fact":
                return ctx.step.wait_for_fact("approved", timeout=timedelta(days=1)).payload
            case "key":
                return ctx.step.wait_for_fact("paid", key="order:7").payload
            case "group":
                either: dict[str, Waitable] = {"ok": FactWait("approved"), "late": Timer(timedelta(days=2))}
                return ctx.step.wait_any(either, timeout=timedelta(days=3))
            case "begun":
                return ctx.step.begin("scan", on_created=lambda token: None)
        return None

    found = {}
    for how in ("sleep", "fact", "key", "group", "begun"):
        run_id, outcome = engine.run("t", how)
        assert isinstance(outcome, Parked)
        found[how] = engine.client.explain(run_id)
    reasons = {how: [one.why for one in one.because] for how, one in found.items()}
    assert reasons == {
        "sleep": [Why.SLEEPING],
        "fact": [Why.FACT],
        "key": [Why.FACT],
        "group": [Why.GROUP, Why.FACT, Why.SLEEPING],
        "begun": [Why.ANSWER],
    }
    assert found["sleep"].because[0].until is not None
    assert "sleep 'cooling off', until 2" in str(found["sleep"])
    assert f"`umt-durable signal {found['fact'].run.id} approved`" in str(found["fact"])
    assert "it waits for fact 'paid' of key 'order:7'. To do: `durable.emit('paid', 'order:7')`" in str(found["key"])
    assert "goes on with 1 of what follows" in str(found["group"])
    clock.advance(seconds=3601)
    assert whys(engine, found["sleep"].run.id)[0] is Why.OVERDUE


def test_a_retrying_and_a_quarantined_run_say_what_comes_next(engine: Engine, conn: Connection) -> None:
    @engine.task("t", retry=HOURLY)
    def body(ctx: TaskContext) -> None:
        raise ConnectionError("the line is bad")

    run_id, outcome = engine.run("t")
    assert isinstance(outcome, Parked)
    assert whys(engine, run_id) == [Why.RETRYING]
    assert "it failed 1 time(s) and is tried again, until" in told(engine, run_id)

    @engine.task("steps", retry=HOURLY)
    def steps(ctx: TaskContext) -> None:
        def one() -> None:
            raise ConnectionError("the line is bad")

        ctx.step.run("charge", one)

    run_id, outcome = engine.run("steps")
    assert isinstance(outcome, Parked)
    assert whys(engine, run_id) == [Why.STEP]
    assert "step 'charge' is tried again, after 1 failed tries, until" in told(engine, run_id)

    parked, _, _ = kit.running(conn)
    kit.table(
        conn,
        "UPDATE {}.run SET state = 'quarantined', reason = 'crash_budget', claim = NULL, worker = NULL, crashes = 5"
        " WHERE id = %s RETURNING no",
        parked.id,
    )
    assert whys(engine, parked.id) == [Why.QUARANTINED]
    assert f"then `umt-durable retry {parked.id}`" in told(engine, parked.id)


def test_an_ended_run_says_so_and_whether_its_report_has_left(engine: Engine, conn: Connection) -> None:
    run, grant, _ = kit.running(conn)
    kit.finish(conn, grant.token)

    assert whys(engine, run.id) == [Why.ENDED, Why.REPORT_PENDING]
    kit.drop_hints(conn)
    assert whys(engine, run.id) == [Why.ENDED]
    with pytest.raises(UnknownRunError):
        engine.client.explain(str(uuid4()))
    assert engine.state(run.id) is RunState.SUCCEEDED


def test_a_refused_hint_an_expiry_and_an_undoing_are_told(engine: Engine, conn: Connection) -> None:
    kit.worker(conn)
    run = kit.enqueue(conn, expires_seconds=60.0)
    kit.table(conn, "UPDATE {}.outbox_event SET status = 'dead', reason = 'no such exchange' RETURNING id")

    assert whys(engine, run.id) == [Why.HINT_REFUSED, Why.EXPIRES]
    kit.table(conn, "UPDATE {}.run SET compensate_at = {}.now(), expires_at = NULL RETURNING no")
    assert whys(engine, run.id)[0] is Why.UNDOING


def test_a_parent_counts_the_children_that_its_step_awaits(engine: Engine, conn: Connection) -> None:
    parent, _, _ = kit.running(conn)
    no = kit.number(conn, parent.id)
    for key in ("invoice", "invoice", "label", None):
        child = kit.enqueue(conn)
        kit.table(
            conn, "UPDATE {}.run SET parent_no = %s, parent_key = %s WHERE id = %s RETURNING no", no, key, child.id
        )
    columns, address = "run, key, seq, name, address, mode", f'["join", {no}, "invoice"]'
    wait = f"INSERT INTO {{}}.wait ({columns}) VALUES (%s, 'umt.join/invoice', 1, 'invoice', %s, 'join') RETURNING run"
    kit.table(conn, wait, no, address)
    kit.table(conn, "UPDATE {}.run SET state = 'waiting', claim = NULL, worker = NULL WHERE no = %s RETURNING no", no)

    assert whys(engine, parent.id) == [Why.CHILDREN]
    assert "step 'invoice' waits for 2 child run(s)" in told(engine, parent.id)
