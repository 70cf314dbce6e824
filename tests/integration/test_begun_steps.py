"""Begun steps: a signed token goes out, whoever has it completes the step, and whatever else comes changes nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session

from tests.integration import service_kit as kit
from tests.integration.cli_kit import cli_for, one_line
from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, RecordingReporter, dying_at, in_thread, take_over
from tests.support.proxy import Proxy
from tests.support.sealing import BOTH, CANARY, leaks
from umt_durable.database import Connection, Database
from umt_durable.engine.client import Client
from umt_durable.engine.context import TaskContext
from umt_durable.engine.exits import Replaced
from umt_durable.engine.outcomes import Delivery, Finished, Parked
from umt_durable.errors import (
    ConfigurationError,
    DefinitionError,
    ExpiredTokenError,
    FactPayloadError,
    InvalidTokenError,
    StaleTokenError,
    StepFailedError,
    StepTimeoutError,
    TokenError,
    UnknownRunError,
    UsedTokenError,
)
from umt_durable.payloads import Vault
from umt_durable.records import NewRun
from umt_durable.settings import Settings
from umt_durable.states import RunState

OLD, NEW = "the old secret of the app", "the new secret of the app"


@dataclass
class Verdict:
    by: str
    limit: int = 0


class Begun:
    """A task that begins a step, and the tokens it handed out."""

    def __init__(self, database: Database, settings: Settings, **options: Any) -> None:
        self.engine = Engine(database, settings)
        self.tokens: list[str] = []
        self.options = options

        @self.engine.task("t", raises=(LookupError,))
        def body(ctx: TaskContext) -> Any:
            found = ctx.step.begin("review", on_created=self.tokens.append, **self.options)
            ctx.step.sleep("nap", timedelta(minutes=1))
            return str(found)

    @property
    def client(self) -> Client:
        return self.engine.client

    def start(self) -> str:
        """Start a run and have it begin its step."""
        run_id, outcome = self.engine.run("t")
        assert isinstance(outcome, Parked), outcome
        return run_id

    def deliver(self, run_id: str) -> Any:
        return self.engine.process().deliver(run_id, "t")

    def end(self, run_id: str, clock: Clock) -> Finished:
        """Take a woken run past its sleep to its end."""
        outcome = self.deliver(run_id)
        if isinstance(outcome, Parked):
            clock.advance(seconds=61)
            self.engine.timers()
            outcome = self.deliver(run_id)
        assert isinstance(outcome, Finished), outcome
        return outcome


@pytest.fixture
def begun(database: Database, settings: Settings) -> Iterator[Begun]:
    begun = Begun(database, settings)
    yield begun
    begun.engine.close()


def facts_of(conn: Connection) -> int:
    return int(kit.table(conn, "SELECT count(*) FROM {}.fact")[0][0])


def test_the_holder_of_the_token_completes_the_step_once(begun: Begun, clock: Clock) -> None:
    run_id = begun.start()
    (token,) = begun.tokens
    assert begun.engine.state(run_id) is RunState.WAITING

    fact = begun.client.complete(token, {"ok": True}, actor="ann")
    assert begun.engine.state(run_id) is RunState.READY

    assert begun.client.complete(token, {"ok": True}) == fact
    assert begun.end(run_id, clock).value == "{'ok': True}"
    assert begun.client.complete(token, {"ok": True}) == fact
    assert begun.tokens == [token]


def test_another_value_than_the_first_is_refused_and_changes_nothing(
    begun: Begun, clock: Clock, conn: Connection
) -> None:
    run_id = begun.start()
    (token,) = begun.tokens
    begun.client.complete(token, 1)

    with pytest.raises(UsedTokenError, match="the first counts"):
        begun.client.complete(token, 2)
    with pytest.raises(UsedTokenError, match="the first counts"):
        begun.client.fail(token, "no")

    assert facts_of(conn) == 1
    assert begun.end(run_id, clock).value == "1"
    with pytest.raises(UsedTokenError):
        begun.client.complete(token, 2)


def test_the_result_is_of_the_type_asked_for_at_each_replay(
    database: Database, settings: Settings, clock: Clock
) -> None:
    begun = Begun(database, settings, type=Verdict)
    run_id = begun.start()
    begun.client.complete(begun.tokens[0], {"by": "ann", "limit": 3})
    assert begun.end(run_id, clock).value == str(Verdict("ann", 3))
    begun.engine.close()


def test_a_result_of_another_type_is_a_typed_error(database: Database, settings: Settings) -> None:
    begun = Begun(database, settings, type=Verdict)
    run_id = begun.start()
    begun.client.complete(begun.tokens[0], {"who": "ann"})
    outcome = begun.deliver(run_id)
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, FactPayloadError)
    begun.engine.close()


@pytest.mark.parametrize(
    ("given", "raised", "said"),
    [
        ("not today", StepFailedError, "not today"),
        (LookupError("no such order"), LookupError, "no such order"),
        (OSError(5, "x"), OSError, "x"),
    ],
)
def test_a_step_is_failed_with_a_text_or_an_exception(
    begun: Begun, given: Any, raised: type[Exception], said: str
) -> None:
    run_id = begun.start()
    begun.client.fail(begun.tokens[0], given)
    outcome = begun.deliver(run_id)
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, raised)
    assert said in str(outcome.error)


@pytest.mark.parametrize("given", ["", None, 7])
def test_a_failure_that_says_nothing_is_refused(begun: Begun, conn: Connection, given: Any) -> None:
    begun.start()
    with pytest.raises(DefinitionError, match="error must be"):
        begun.client.fail(begun.tokens[0], given)
    assert facts_of(conn) == 0


def _bent(token: str, place: int) -> str:
    data = bytearray(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    data[place] ^= 1
    return base64.urlsafe_b64encode(bytes(data)).decode().rstrip("=")


@pytest.mark.parametrize("place", [0, 1, 5, -33, -32, -1])
def test_a_forged_token_is_refused_and_not_shown(begun: Begun, conn: Connection, place: int) -> None:
    begun.start()
    forged = _bent(begun.tokens[0], place)
    with pytest.raises(InvalidTokenError) as caught:
        begun.client.complete(forged, 1)
    assert forged not in str(caught.value)
    assert facts_of(conn) == 0


@pytest.mark.parametrize("cut", [1, 4, 20, 43, 44, 60])
def test_a_truncated_token_is_refused(begun: Begun, conn: Connection, cut: int) -> None:
    begun.start()
    with pytest.raises(InvalidTokenError):
        begun.client.complete(begun.tokens[0][:-cut], 1)
    assert facts_of(conn) == 0


@pytest.mark.parametrize("token", ["", " ", "AQ", "é", "a" * 9000, "AQ=x", b"AQ", None, 7, "\0"])
def test_what_is_no_token_is_refused(begun: Begun, token: Any) -> None:
    with pytest.raises(InvalidTokenError):
        begun.client.complete(token, 1)


def test_a_token_copied_with_blanks_around_it_holds(begun: Begun) -> None:
    begun.start()
    begun.client.complete(f" {begun.tokens[0]}\n", 1)


def test_i9_a_time_out_is_recorded_and_the_token_has_no_use_any_more(
    database: Database, settings: Settings, clock: Clock, conn: Connection
) -> None:
    begun = Begun(database, settings, timeout=timedelta(hours=1))
    run_id = begun.start()
    clock.advance(seconds=3601)
    with pytest.raises(ExpiredTokenError):  # also before anybody has noticed
        begun.client.complete(begun.tokens[0], 1)
    begun.engine.timers()
    outcome = begun.deliver(run_id)

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, StepTimeoutError)
    assert str(outcome.error) == "step 'review' was not completed within 1:00:00"
    with pytest.raises(ExpiredTokenError):
        begun.client.complete(begun.tokens[0], 1)
    assert facts_of(conn) == 0
    begun.engine.close()


def test_i9_what_was_said_in_time_counts_though_nobody_had_routed_it(
    database: Database, settings: Settings, clock: Clock
) -> None:
    begun = Begun(database, settings, timeout=timedelta(hours=1))
    run_id = begun.start()
    begun.client._may_apply = False  # as an app, which only says it
    begun.client.complete(begun.tokens[0], 1)
    clock.advance(seconds=3601)
    begun.engine.timers()

    assert begun.end(run_id, clock).value == "1"
    begun.engine.route()
    begun.engine.close()


def test_a_step_that_nobody_completed_before_its_run_ended_is_refused(begun: Begun, conn: Connection) -> None:
    run_id = begun.start()
    begun.client.cancel(run_id)
    before = facts_of(conn)
    with pytest.raises(UsedTokenError, match="before its run ended"):
        begun.client.complete(begun.tokens[0], 1)
    assert facts_of(conn) == before


def test_the_token_of_an_earlier_generation_is_stale(database: Database, settings: Settings, conn: Connection) -> None:
    engine = Engine(database, settings)
    tokens: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext, turn: int) -> Any:
        found = ctx.step.begin("review", on_created=tokens.append)
        if turn == 0:
            ctx.continue_as_new(1)
        return found

    run_id, _ = engine.run("t", 0)
    engine.client.complete(tokens[0], "first")
    engine.process().deliver(run_id, "t")
    engine.process().deliver(run_id, "t")

    with pytest.raises(StaleTokenError):
        engine.client.complete(tokens[0], "again")
    assert tokens[0] != tokens[1]
    engine.client.complete(tokens[1], "second")
    outcome = engine.process().deliver(run_id, "t")
    assert isinstance(outcome, Finished)
    assert outcome.value == "second"
    engine.close()


def test_a_token_of_a_run_that_is_not_there_is_refused(begun: Begun, conn: Connection) -> None:
    begun.start()
    kit.table(conn, "DELETE FROM {}.run")
    with pytest.raises(UnknownRunError):
        begun.client.complete(begun.tokens[0], 1)


@pytest.mark.parametrize("point", ["wait.commit.a", "announced"])
def test_i24_a_crash_before_it_is_noted_hands_the_same_token_out_again(begun: Begun, clock: Clock, point: str) -> None:
    run_id, process = begun.engine.start("t"), begun.engine.process()
    if point == "announced":
        dying = begun.tokens

        def die(token: str) -> None:
            dying.append(token)
            if len(dying) == 1:
                raise KeyboardInterrupt

        begun.tokens = Dying(die)
        with pytest.raises(KeyboardInterrupt):
            process.deliver(run_id, "t")
        begun.tokens = dying
    else:
        with dying_at(point), pytest.raises(KeyboardInterrupt):
            process.deliver(run_id, "t")
    process.freeze()
    take_over(begun.engine, clock)
    begun.deliver(run_id)

    assert len(set(begun.tokens)) == 1
    assert len(begun.tokens) == (2 if point == "announced" else 1)
    begun.client.complete(begun.tokens[0], 1)
    assert begun.end(run_id, clock).value == "1"


class Dying(list[str]):
    """A list whose append is something else."""

    def __init__(self, append: Any) -> None:
        self._append = append

    def append(self, token: str) -> None:
        self._append(token)


@pytest.mark.parametrize("statement", ["register_wait", "announce_wait", "complete_step"])
def test_i24_a_lost_reply_changes_nothing(
    proxied_url: str, database_proxy: Proxy, schema: str, settings: Settings, clock: Clock, statement: str
) -> None:
    through = replace(settings, database_url=proxied_url)
    database = Database(through)
    begun = Begun(database, through)
    cut = database_proxy.cut_reply(statement)

    run_id = begun.start()
    begun.client.complete(begun.tokens[0], 1)

    assert cut.fired == 1
    assert len(set(begun.tokens)) == 1
    assert begun.end(run_id, clock).value == "1"
    begun.engine.close()
    database.close()


def test_keys_are_turned_over_without_losing_a_token(database: Database, settings: Settings, clock: Clock) -> None:
    old = Begun(database, replace(settings, signing_keys=(OLD,)))
    new = Client(database, replace(settings, signing_keys=(NEW, OLD)))
    gone = Client(database, replace(settings, signing_keys=(NEW,)))
    run_id = old.start()

    with pytest.raises(InvalidTokenError, match="no key that is known here"):
        gone.complete(old.tokens[0], 1)
    new.complete(old.tokens[0], 1)

    assert old.end(run_id, clock).value == "1"
    old.engine.close()


def test_a_token_of_the_schemas_own_key_is_not_one_of_the_settings(database: Database, settings: Settings) -> None:
    begun = Begun(database, settings)
    begun.start()
    with pytest.raises(InvalidTokenError):
        Client(database, replace(settings, signing_keys=(NEW,))).complete(begun.tokens[0], 1)
    begun.engine.close()


def test_without_a_key_nothing_is_written(begun: Begun, conn: Connection) -> None:
    kit.table(conn, "DELETE FROM {}.setting WHERE name = 'signing_key'")
    run_id = begun.engine.start("t")
    outcome = begun.deliver(run_id)

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, ConfigurationError)
    assert "DURABLE_SIGNING_KEYS" in str(outcome.error)
    assert begun.client.history(run_id).waits == []
    with pytest.raises(ConfigurationError, match="DURABLE_SIGNING_KEYS"):
        begun.client.complete("AQ", 1)


@pytest.mark.parametrize("library", ["psycopg", "sqlalchemy"])
def test_i2_a_completion_exists_if_and_only_if_the_callers_commit_does(
    begun: Begun, settings: Settings, clock: Clock, library: str
) -> None:
    run_id = begun.start()
    url = str(settings.database_url)
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with psycopg.connect(url) if library == "psycopg" else Session(engine) as own:
        begun.client.complete(begun.tokens[0], 1, conn=own)
        own.rollback()
        begun.client.complete(begun.tokens[0], 2, conn=own)
        own.commit()
    engine.dispose()
    begun.engine.route()
    assert begun.end(run_id, clock).value == "2"


def test_the_command_line_completes_and_fails_steps(begun: Begun, settings: Settings, clock: Clock) -> None:
    done, failed = begun.start(), begun.start()
    with cli_for(settings) as cli:
        shown = cli("complete", begun.tokens[0], '{"by": "ann"}', "--json")
        cli("complete", begun.tokens[1], "--error", "not today")
        bad = cli("complete", _bent(begun.tokens[0], -1), "1", status=1)
        used = cli("complete", begun.tokens[0], "2", status=1)
        cli("complete", begun.tokens[0], "2", "--error", "both", status=2)

    assert set(json.loads(shown.stdout)) == {"fact"}
    assert "no key that is known here has signed it" in one_line(bad)
    assert "the first counts" in one_line(used)
    assert begun.tokens[0] not in one_line(used)
    assert begun.end(done, clock).value == "{'by': 'ann'}"
    assert isinstance(begun.end(failed, clock).error, StepFailedError)


def test_a_retry_of_the_run_has_what_was_said_and_a_begun_step_that_was_not_has_a_new_token(
    database: Database, settings: Settings
) -> None:
    engine = Engine(database, settings)
    tokens: list[str] = []
    broken = [True]

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        first = ctx.step.begin("first", on_created=tokens.append)
        if broken:
            raise LookupError("broken")
        return [first, ctx.step.begin("second", on_created=tokens.append)]

    run_id, _ = engine.run("t")
    engine.client.complete(tokens[0], "one")
    engine.process().deliver(run_id, "t")
    assert engine.state(run_id) is RunState.FAILED
    broken.clear()
    again = engine.client.retry(run_id, actor="ann")
    engine.process().deliver(again, "t")

    assert len(tokens) == 2
    engine.client.complete(tokens[1], "two")
    outcome = engine.process().deliver(again, "t")
    assert isinstance(outcome, Finished)
    assert outcome.value == ["one", "two"]
    engine.close()


def test_with_sealed_payloads_the_first_still_counts_and_nothing_is_in_clear(
    settings: Settings, clock: Clock, conn: Connection
) -> None:
    sealed = Database(settings, Vault(BOTH))
    begun = Begun(sealed, settings)
    run_id = begun.start()
    fact = begun.client.complete(begun.tokens[0], CANARY)

    assert begun.client.complete(begun.tokens[0], CANARY) == fact
    with pytest.raises(UsedTokenError):
        begun.client.complete(begun.tokens[0], "another")
    assert begun.end(run_id, clock).value == CANARY
    assert leaks(conn, settings.schema) == []
    begun.engine.close()
    sealed.close()


def test_a_step_that_is_begun_in_a_branch_is_completed_by_its_own_token(database: Database, settings: Settings) -> None:
    engine = Engine(database, settings)
    tokens: dict[str, str] = {}

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        def ask(who: str) -> str:
            found: str = ctx.step.begin("review", type=str, on_created=lambda token: tokens.update({who: token}))
            return found

        return ctx.step.parallel({who: (ask, who) for who in ("ann", "bob")})

    run_id, _ = engine.run("t")
    engine.client.complete(tokens["bob"], "no")
    engine.client.complete(tokens["ann"], "yes")
    outcome = engine.process().deliver(run_id, "t")
    assert isinstance(outcome, Finished)
    assert outcome.value == {"ann": "yes", "bob": "no"}
    engine.close()


def test_tokens_of_two_steps_of_one_name_are_their_own(database: Database, settings: Settings) -> None:
    engine = Engine(database, settings)
    tokens: list[str] = []

    @engine.task("t")
    def body(ctx: TaskContext) -> Any:
        return [ctx.step.begin("review", on_created=tokens.append) for _ in range(2)]

    run_id, _ = engine.run("t")
    engine.client.complete(tokens[0], 1)
    engine.process().deliver(run_id, "t")
    engine.client.complete(tokens[1], 2)
    outcome = engine.process().deliver(run_id, "t")
    assert isinstance(outcome, Finished)
    assert outcome.value == [1, 2]
    engine.close()


@pytest.mark.parametrize("options", [{"timeout": 7}, {"timeout": timedelta(-1)}])
def test_what_can_never_work_is_refused_before_anything_is_written(
    database: Database, settings: Settings, options: dict[str, Any]
) -> None:
    begun = Begun(database, settings, **options)
    run_id = begun.engine.start("t")
    outcome = begun.deliver(run_id)
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert "'review'" in str(outcome.error)
    assert begun.client.history(run_id).waits == []
    begun.engine.close()


def test_all_errors_of_tokens_are_one_kind_and_none_shows_a_secret(settings: Settings) -> None:
    for kind in (InvalidTokenError, StaleTokenError, ExpiredTokenError, UsedTokenError):
        assert issubclass(kind, TokenError)
    assert NEW not in repr(replace(settings, signing_keys=(NEW,)))


@pytest.mark.parametrize("keys", [(), ("short",), (NEW, "short")])
def test_a_key_that_is_too_short_is_refused(settings: Settings, keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="signing_keys must be"):
        replace(settings, signing_keys=keys)


@pytest.mark.parametrize("given", [3, "no such", "Unknown", [int]])
def test_a_type_that_nothing_can_be_read_as_is_refused_before_anybody_has_a_token(
    database: Database, settings: Settings, given: Any
) -> None:
    begun = Begun(database, settings, type=given)
    run_id, outcome = begun.engine.run("t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert "review" in str(outcome.error)
    assert (begun.tokens, begun.client.history(run_id).waits) == ([], [])
    begun.engine.close()


async def sends_later(given: object) -> None:
    """Stand for a function that hands something out, if it is awaited."""


@pytest.mark.parametrize("given", [sends_later, partial(sends_later), 3, "send"])
@pytest.mark.parametrize("verb", ["begin", "wait_for_fact"])
def test_what_would_hand_nothing_out_is_refused_before_anything_is_written(begun: Begun, verb: str, given: Any) -> None:
    @begun.engine.task("asks")
    def asks(ctx: TaskContext) -> Any:
        return getattr(ctx.step, verb)("review", on_created=given)

    run_id, outcome = begun.engine.run("asks")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert "'review': on_created " in str(outcome.error)
    assert begun.client.history(run_id).waits == []


# -- runs that take up another one ------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken_up", ["retry", "fork"])
def test_what_takes_up_a_later_generation_begins_steps_of_its_own_in_those_that_follow(
    begun: Begun, taken_up: str
) -> None:
    engine, client, broken = begun.engine, begun.client, [True]

    @engine.task("loop")
    def loop(ctx: TaskContext, number: int) -> list[Any]:
        found = ctx.step.begin("review", on_created=begun.tokens.append)
        if number == 1 and broken[0]:
            raise ValueError("broken")
        if number < 2:
            ctx.continue_as_new(number + 1)
        return [found, ctx.step.run("turn", lambda: ctx.generation)]

    run_id, process = engine.start("loop", 0), engine.process()
    for number in range(2):
        process.deliver(run_id, "loop")
        client.complete(begun.tokens[-1], number)
        process.deliver(run_id, "loop")
    assert engine.state(run_id) is RunState.FAILED
    broken[0] = False

    if taken_up == "retry":
        again = client.retry(run_id, actor="ann")
        process.deliver(again, "loop")
    else:
        again = client.fork(run_id, from_step="review", actor="ann")
        process.deliver(again, "loop")
        client.complete(begun.tokens[-1], 1)
        process.deliver(again, "loop")
    process.deliver(again, "loop")
    client.complete(begun.tokens[-1], 2)

    assert process.deliver(again, "loop").value == [2, 2]  # type: ignore[union-attr]


def test_a_retry_does_not_take_what_completed_a_step_of_an_earlier_generation(begun: Begun) -> None:
    engine, client, broken, gate = begun.engine, begun.client, [True], Gate()

    @engine.task("loop")
    def loop(ctx: TaskContext, number: int) -> Any:
        def ask() -> Any:
            return ctx.step.begin("review", on_created=begun.tokens.append)

        if number == 0:
            try:
                ctx.step.parallel({"ask": ask, "other": lambda: 1 // 0})
            except Exception:  # noqa: BLE001 - the branch that waits is dropped with it
                gate.pass_through()
                ctx.continue_as_new(1)
        if broken[0]:
            raise ValueError("broken")
        return ctx.step.parallel({"ask": ask})["ask"]

    run_id, process = engine.start("loop", 0), engine.process()
    with in_thread(lambda: process.deliver(run_id, "loop")):
        gate.wait_reached()
        client.complete(begun.tokens[0], "of the first generation")
        gate.open()
    process.deliver(run_id, "loop")
    assert engine.state(run_id) is RunState.FAILED
    broken[0] = False

    again = client.retry(run_id, actor="ann")
    process.deliver(again, "loop")
    client.complete(begun.tokens[-1], "of the second")

    assert process.deliver(again, "loop").value == "of the second"  # type: ignore[union-attr]


def test_a_retry_does_not_take_what_completed_a_step_of_the_run_that_it_replaced(begun: Begun) -> None:
    engine, client, broken = begun.engine, begun.client, [True]

    @engine.task("first")
    def first(ctx: TaskContext) -> None:
        ctx.step.begin("review", on_created=begun.tokens.append)
        given = b'{"args": [], "kwargs": {}}'
        ctx._pass.leave(Replaced(run=NewRun(id=ctx.run_id, task="second", nesting=1, version=1, queue="q", args=given)))

    @engine.task("second")
    def second(ctx: TaskContext) -> Any:
        if broken[0]:
            raise ValueError("broken")
        return ctx.step.begin("review", on_created=begun.tokens.append)

    run_id, process = engine.start("first"), engine.process()
    process.deliver(run_id, "first")
    client.complete(begun.tokens[0], "of the first run")
    process.deliver(run_id, "first")
    process.executor.execute(Delivery(run_id, 1, "second", uuid4()), RecordingReporter())
    assert engine.state(run_id) is RunState.FAILED
    broken[0] = False

    again = client.retry(run_id, actor="ann")
    process.deliver(again, "second")
    client.complete(begun.tokens[-1], "of the second")

    assert process.deliver(again, "second").value == "of the second"  # type: ignore[union-attr]
