"""Payloads through a codec: sealed in every table, opened by any key of the ring, parked and not lost without it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from tests.integration import service_kit as kit
from tests.integration.cli_kit import cli_for
from tests.support.clock import Clock
from tests.support.engine import Engine
from tests.support.sealing import BOTH, CANARY, IN_CLEAR, ONLY_NEW, ONLY_OLD, WITH_OLD, leaks
from umt_durable import OpInfo, Policy, sql, telemetry
from umt_durable.contrib.encryption import Encryption
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outbox import OutboxClient
from umt_durable.engine.outcomes import Finished, Parked
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.tokens import Begun, Tokens, sign
from umt_durable.errors import IdempotencyConflictError, OpConflictError, PayloadKeyError
from umt_durable.payloads import Vault
from umt_durable.settings import Settings
from umt_durable.states import RunState

Make = Callable[[Encryption | None], Engine]


@pytest.fixture
def engines(settings: Settings) -> Iterator[Make]:
    """Return a function that gives the processes of a codec, or of none; all have the same tasks."""
    made: list[Engine] = []

    def make(codec: Encryption | None) -> Engine:
        engine = Engine(Database(settings, Vault(codec)), settings)
        if made:
            engine.tasks = made[0].tasks
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
        engine.database.close()


def _naps(engine: Engine, entered: list[str]) -> None:
    @engine.task("naps")
    def naps(ctx: TaskContext, card: str) -> str:
        def keep(given: str) -> str:
            entered.append("keep")
            return f"{given}!"

        kept = ctx.step.run("keep", keep, card)
        ctx.step.sleep("nap", timedelta(minutes=1))
        return f"{kept}?"


def _wake(engine: Engine, clock: Clock) -> None:
    clock.advance(seconds=61)
    engine.timers()


def test_no_column_of_any_table_shows_what_a_run_was_given_did_and_failed_with(
    engines: Make, conn: Connection, schema: str, clock: Clock
) -> None:
    engine = engines(BOTH)
    tries: list[int] = []

    @engine.task("t", retry=RetryPolicy(2, initial=timedelta(minutes=1)))
    def body(ctx: TaskContext, card: str) -> dict[str, Any]:
        def fail() -> None:
            raise ValueError(f"declined: {CANARY}")

        found = [
            ctx.step.run("keep", lambda given: given, card),
            ctx.step.map("all", lambda item: f"{item}{CANARY}", ["a", "b"], key=lambda item: item),
            ctx.step.transaction("book", lambda tx: CANARY),
            ctx.step.effect("pay", lambda info: CANARY, policy=Policy.IDEMPOTENT_KEY),
            ctx.step.parallel({"left": lambda: ctx.step.run("in", lambda: CANARY)}),
            ctx.step.wait_for_fact("seen").payload,
        ]
        try:
            ctx.step.options(retry=RetryPolicy.NONE).run("fail", fail)
        except ValueError as error:
            found.append(str(error))
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError(f"once more: {CANARY}")
        return {"all": found}

    run_id, _ = engine.run("t", CANARY)
    assert leaks(conn, schema) == []
    engine.client.signal(run_id, "seen", {"card": CANARY})
    engine.client.emit("other", "key", CANARY)
    OutboxClient(engine.database, engine.settings).emit("paid", {"card": CANARY})
    engine.route()
    engine.process().deliver(run_id, "t")
    assert leaks(conn, schema) == []
    _wake(engine, clock)
    outcome = engine.process().deliver(run_id, "t")

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.SUCCEEDED
    run = engine.client.get(run_id)
    assert engine.client.result(run)["all"][0] == CANARY
    assert CANARY in json.dumps(engine.client.result(run)["all"][-1])
    assert leaks(conn, schema) == []
    assert [attempt.error for attempt in engine.client.history(run_id).attempts] == [
        None,
        f"RuntimeError: once more: {CANARY}",
        None,
    ]
    assert any(step.result == json.dumps(CANARY).encode() for step in engine.client.history(run_id).steps)


def test_without_a_codec_the_same_search_finds_it(engines: Make, conn: Connection, schema: str) -> None:
    engine = engines(None)
    _naps(engine, [])

    engine.run("naps", CANARY)

    assert {line.partition(":")[0] for line in leaks(conn, schema)} == {"run", "step"}


def test_i6_a_run_goes_on_under_a_newer_key_and_repeats_nothing(engines: Make, clock: Clock) -> None:
    old, both = engines(ONLY_OLD), engines(BOTH)
    entered: list[str] = []
    _naps(old, entered)
    run_id, _ = old.run("naps", CANARY)

    _wake(both, clock)
    both.process().deliver(run_id, "naps")

    assert both.client.result(both.client.get(run_id)) == f"{CANARY}!?"
    assert entered == ["keep"]


@pytest.mark.parametrize(("codec", "told"), [(ONLY_OLD, "no key of this id"), (None, "it has no payload_codec")])
def test_a_process_without_the_key_parks_the_run_and_names_the_key(
    engines: Make, clock: Clock, conn: Connection, schema: str, codec: Encryption | None, told: str
) -> None:
    new, other = engines(ONLY_NEW), engines(codec)
    entered: list[str] = []
    _naps(new, entered)
    run_id, _ = new.run("naps", CANARY)

    _wake(other, clock)
    outcome = other.process().deliver(run_id, "naps")

    assert isinstance(outcome, Parked)
    run = other.client.get(run_id)
    assert (run.state, run.reason) == (RunState.QUARANTINED, "payload_key")
    failure = other.client.failure(run)
    assert failure is not None
    assert "'new'" in failure.message
    assert told in failure.message
    done = _finished(new, clock)
    with pytest.raises(PayloadKeyError, match="'new'"):
        other.client.result(other.client.get(done))
    assert leaks(conn, schema) == []

    new.client.retry(run_id, actor="ann", reason="the key was missing on one host")
    new.route()
    new.process().deliver(run_id, "naps")
    assert new.client.result(new.client.get(run_id)) == f"{CANARY}!?"
    assert entered == ["keep", "keep"]


def _finished(engine: Engine, clock: Clock) -> str:
    run_id, _ = engine.run("naps", "another")
    _wake(engine, clock)
    engine.process().deliver(run_id, "naps")
    return run_id


@pytest.mark.parametrize("asks", [False, True])
def test_a_recorded_value_is_opened_only_where_the_body_asks_for_it_and_no_except_gets_past_that(
    engines: Make, clock: Clock, asks: bool
) -> None:
    new, with_old = engines(ONLY_NEW), engines(WITH_OLD)
    code = [True]

    @new.task("t")
    def body(ctx: TaskContext) -> str:
        if code[0]:
            try:
                ctx.step.run("keep", lambda: CANARY)
            except Exception:  # noqa: BLE001 - user code that catches all
                return "garbage"
        ctx.step.sleep("nap", timedelta(minutes=1))
        return "done"

    run_id = new.start("t")
    with_old.process().deliver(run_id, "t")
    code[0] = asks
    _wake(new, clock)
    new.process().deliver(run_id, "t")

    run = new.client.get(run_id)
    assert (run.state, run.reason) == ((RunState.QUARANTINED, "payload_key") if asks else (RunState.SUCCEEDED, None))


def test_a_codec_may_be_turned_on_and_off_under_runs_in_flight(engines: Make, clock: Clock) -> None:
    plain, sealed, off = engines(None), engines(BOTH), engines(IN_CLEAR)
    entered: list[str] = []
    _naps(plain, entered)
    before, _ = plain.run("naps", "a")
    _wake(sealed, clock)
    sealed.process().deliver(before, "naps")

    during, _ = sealed.run("naps", "b")
    _wake(off, clock)
    off.process().deliver(during, "naps")

    assert sealed.client.result(sealed.client.get(before)) == "a!?"
    assert off.client.result(off.client.get(during)) == "b!?"
    assert entered == ["keep", "keep"]


def test_other_inputs_are_still_seen_on_replay(engines: Make, clock: Clock) -> None:
    engine = engines(BOTH)
    given = [1]

    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("charge", lambda value: value, given[0])
        ctx.step.sleep("nap", timedelta(minutes=1))

    run_id, _ = engine.run("t")
    given[0] = 2
    _wake(engine, clock)
    engine.process().deliver(run_id, "t")

    assert engine.client.get(run_id).reason == "nondeterminism"


def test_a_flipped_byte_parks_the_run_as_corrupt(engines: Make, clock: Clock, conn: Connection, schema: str) -> None:
    engine = engines(BOTH)
    _naps(engine, [])
    run_id, _ = engine.run("naps", "a")
    last = "octet_length(result) - 1"
    conn.execute(
        f"UPDATE {schema}.step SET result = set_byte(result, {last}, 255 - get_byte(result, {last}))"
        " WHERE result IS NOT NULL".encode()
    )

    _wake(engine, clock)
    engine.process().deliver(run_id, "naps")

    assert engine.client.get(run_id).reason == "journal_corrupt"


def test_i3_an_idempotency_key_holds_over_a_rotation_and_tells_other_input(engines: Make) -> None:
    plain, old, both = engines(None), engines(ONLY_OLD), engines(BOTH)
    _naps(plain, [])
    first = old.start("naps", CANARY, key="k")
    before = plain.start("naps", CANARY, key="from before")

    assert both.start("naps", CANARY, key="k") == first
    with pytest.raises(IdempotencyConflictError):
        both.start("naps", "other", key="k")
    # What was hashed without a key cannot be compared with what is hashed with one; the key still decides.
    assert both.start("naps", CANARY, key="from before") == before


def test_an_event_of_the_same_key_is_the_same_only_with_the_same_payload(engines: Make) -> None:
    clients = [OutboxClient(one.database, one.settings) for one in (engines(ONLY_OLD), engines(BOTH))]
    first = clients[0].emit("paid", {"order": 1}, idempotency_key="k")

    assert clients[1].emit("paid", {"order": 1}, idempotency_key="k") == first
    with pytest.raises(IdempotencyConflictError):
        clients[1].emit("paid", {"order": 2}, idempotency_key="k")


def test_a_fact_that_says_something_else_is_reported_and_one_that_says_the_same_is_not(engines: Make) -> None:
    engine = engines(BOTH)

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return ctx.step.wait_for_fact("ok").payload

    run_id, _ = engine.run("t")
    engine.client.signal(run_id, "ok", {"yes": True})

    with kit.counted(telemetry.Counter.CONTRADICTING_FACT) as counted:
        engine.client.signal(run_id, "ok", {"yes": True})
        assert counted() == 0
        engine.client.signal(run_id, "ok", {"yes": False})
        assert counted() == 1
    engine.process().deliver(run_id, "t")
    assert engine.client.result(engine.client.get(run_id)) == {"yes": True}


def test_i15_another_request_of_an_effect_is_told_and_its_answer_is_shared(engines: Make) -> None:
    old, both = engines(ONLY_OLD), engines(BOTH)
    called: list[int] = []

    @old.task("t")
    def body(ctx: TaskContext, order: int) -> str:
        def pay(info: OpInfo, order: int) -> str:
            called.append(order)
            return CANARY

        return ctx.step.effect("pay", partial(pay, order=order), policy=Policy.IDEMPOTENT_KEY)

    old.run("t", 1)
    again, _ = both.run("t", 1)
    other, _ = both.run("t", 2)

    assert called == [1]
    assert both.client.result(both.client.get(again)) == CANARY
    failure = both.client.failure(both.client.get(other))
    assert failure is not None
    assert failure.type == OpConflictError.__name__
    op = both.client.ops.get("pay")
    assert both.client.ops.result(op) == CANARY
    assert op.result == json.dumps(CANARY).encode()


def test_a_retried_run_takes_over_what_was_sealed(engines: Make, clock: Clock) -> None:
    old, both = engines(ONLY_OLD), engines(BOTH)
    entered: list[str] = []
    broken = [True]

    @old.task("t")
    def body(ctx: TaskContext, card: str) -> str:
        def keep() -> str:
            entered.append(card)
            return card

        kept = ctx.step.run("keep", keep)
        if broken[0]:
            raise ValueError(CANARY)
        return kept

    run_id, _ = old.run("t", CANARY)
    broken[0] = False
    again = both.client.retry(run_id, actor="ann")
    both.process().deliver(again, "t")

    assert both.client.result(both.client.get(again)) == CANARY
    assert entered == [CANARY]


def test_the_command_line_decodes_with_the_apps_codec_and_says_sealed_without(
    engines: Make, settings: Settings, clock: Clock
) -> None:
    engine = engines(BOTH)

    @engine.task("t")
    def body(ctx: TaskContext, card: str) -> None:
        ctx.step.run("keep", lambda: CANARY)
        raise ValueError(f"declined {CANARY}")

    run_id, _ = engine.run("t", CANARY)

    with cli_for(settings, DURABLE_PAYLOAD_CODEC="tests.support.sealing:BOTH") as cli:
        shown = cli("show", run_id, "--payloads", "--json").stdout
        document = json.loads(shown)
        assert document["steps"][0]["result"] == CANARY
        assert document["run"]["input"] == {"args": [CANARY], "kwargs": {}}
        assert document["error"] == f"ValueError: declined {CANARY}"
    with cli_for(settings) as cli:
        shown = cli("show", run_id, "--payloads", "--json").stdout
        document = json.loads(shown)
        assert document["steps"][0]["result"] == "<sealed with the key 'new', which is not known here>"
        assert document["error"] == "<sealed with the key 'new', which is not known here>"
        assert CANARY not in shown
        assert CANARY not in cli("show", run_id).stdout


def test_the_view_counts_what_each_key_has_sealed(engines: Make, conn: Connection, schema: str) -> None:
    old, both, plain = engines(ONLY_OLD), engines(BOTH), engines(None)
    _naps(old, [])
    for engine in (old, both, plain):
        engine.run("naps", "a")

    rows = conn.execute(f"SELECT place, key, payloads FROM {schema}.payload_keys ORDER BY 1, 2".encode()).fetchall()

    assert rows == [(place, key, 1) for place in ("run.args", "step.result") for key in ("new", "old", None)]


def test_a_sealed_run_takes_the_statements_of_a_plain_one(
    engines: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    execute = sql._execute

    def counting(conn: Any, name: str, arity: str, params: Any) -> Any:
        counted[name] += 1
        return execute(conn, name, arity, params)

    monkeypatch.setattr(sql, "_execute", counting)
    # Of the others, proofs depend on how fast the machine is, and leases on the time.
    of_runs = ("enqueue_run", "claim_run", "read_journal", "read_waits", "commit_step", "start_sleep", "finish_run")
    taken: list[list[int]] = []
    for engine in (engines(None), engines(BOTH)):
        if not taken:
            _naps(engine, [])
        counted.clear()
        run_id, _ = engine.run("naps", "a")
        _wake(engine, clock)
        engine.process().deliver(run_id, "naps")
        taken.append([counted[name] for name in (*of_runs, "read_result", "read_payload")])

    assert taken == [[1, 2, 1, 1, 1, 1, 1, 0, 0]] * 2


def test_what_a_retry_has_of_its_run_contradicts_nothing_that_is_said_again(engines: Make) -> None:
    engine, broken = engines(BOTH), [True]
    tokens: list[str] = []
    seen: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        ordered = ctx.step.wait_for_fact("order").payload
        reviewed = ctx.step.begin("review", on_created=tokens.append)
        if broken[0]:
            raise ValueError("broken")
        return [ordered, reviewed, ctx.step.wait_for_fact("last").payload]

    run_id, process = engine.start("t"), engine.process()
    engine.client.signal(run_id, "order", CANARY)
    process.deliver(run_id, "t")
    engine.client.complete(tokens[0], CANARY)
    process.deliver(run_id, "t")
    broken[0] = False

    again = engine.client.retry(run_id, actor="ann")
    process.deliver(again, "t")
    token = sign(Begun(again, 0, "review", 0), Tokens(engine.database, engine.settings).keys())
    unsubscribe = telemetry.subscribe(lambda name, fields: seen.append(name))
    engine.client.signal(again, "order", CANARY)
    engine.route()
    fact = engine.client.complete(token, CANARY)
    unsubscribe()
    engine.client.signal(again, "last", 1)

    assert fact in {one.fact for one in engine.client.history(again).waits}
    assert telemetry.Counter.CONTRADICTING_FACT not in seen
    outcome = process.deliver(again, "t")
    assert isinstance(outcome, Finished)
    assert outcome.value == [CANARY, CANARY, 1]
