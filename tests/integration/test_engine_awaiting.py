"""Steps that await an ordinary task, in the test's own process: what is written, refused, repeated and decided."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.integration.awaiting_kit import TIMEOUT, Play, make_play  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.engine import Engine
from tests.support.proxy import Proxy
from umt_durable import Done, NotDone, StepFailedError, StepTimeoutError, TaskInfo, Unknown, UnknownStepError
from umt_durable.database import Connection, Database
from umt_durable.engine.answers import Answer
from umt_durable.engine.failures import capture
from umt_durable.engine.outcomes import Dropped, Finished, Parked
from umt_durable.engine.reporting import Message
from umt_durable.errors import DefinitionError, InputError
from umt_durable.settings import Settings
from umt_durable.states import RunState, WaitState
from umt_durable.store import waits


def _messages(conn: Connection) -> int:
    row = conn.execute(f"SELECT count(*) FROM \"{conn.schema}\".outbox_event WHERE type = 'celery'".encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_step_wait_and_message_are_written_once_and_the_answer_is_the_result(play: Play, conn: Connection) -> None:
    assert isinstance(play.deliver(), Parked)
    assert _messages(conn) == 1

    assert play.bring(Answer({"pages": [1, 2]}))
    assert play.engine.state(play.run) is RunState.READY
    outcome = play.deliver()

    assert isinstance(outcome, Finished)
    assert outcome.value == {"pages": [1, 2]}
    assert _messages(conn) == 1
    history = play.engine.client.history(play.run)
    assert [(step.key, step.kind, step.state) for step in history.steps] == [("label", "task", "done")]
    assert [(wait.key, wait.state) for wait in history.waits] == [("umt.task/label", WaitState.SATISFIED)]


def test_a_failure_is_raised_as_itself_where_its_class_is_known_at_each_pass(play: Play) -> None:
    play.deliver()
    play.bring(Answer(failure=capture(LookupError("no such order"))))
    outcome = play.deliver()
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, LookupError)
    assert play.caught == ["LookupError: no such order"]


@pytest.mark.parametrize("token", ["", "0" * 32, "short", "\u00e9" * 32])
def test_answers_without_the_token_are_refused(play: Play, conn: Connection, token: str) -> None:
    play.deliver()
    assert not play.bring(Answer("forged"), token)
    assert play.engine.state(play.run) is RunState.WAITING
    assert waits.unanswered(conn, play.engine.client.get(play.run).no)


@pytest.mark.parametrize("statement", ["send_step", "await_answer", "keep_step_message", "COMMIT"])
def test_i24_a_lost_reply_sends_no_second_message(
    proxied_url: str,
    database_proxy: Proxy,
    schema: str,
    settings: Settings,
    conn: Connection,
    statement: str,
) -> None:
    through = Settings(database_url=proxied_url, schema=schema, embedded=False, lease_seconds=settings.lease_seconds)
    database = Database(through)
    engine = Engine(database, through)
    play = Play(engine)
    commit = statement == "COMMIT"
    cut = database_proxy.cut_after_commit(match=b"send_step") if commit else database_proxy.cut_reply(statement)

    assert isinstance(play.deliver(), Parked)

    assert cut.fired == 1
    assert _messages(conn) == 1
    found = waits.awaited(conn, play.run, 0, "umt.task/label")
    assert found is not None
    assert found.token == play.outside.sent[0][2]
    engine.close()
    database.close()


def test_another_signature_under_the_same_key_is_no_replay(play: Play) -> None:
    play.deliver()
    play.bring(Answer(1))
    play.signature = "print something else"
    assert isinstance(play.deliver(), Parked)
    assert play.engine.client.get(play.run).reason == "nondeterminism"


def test_a_lost_message_of_an_idempotent_task_is_sent_again_under_the_same_token(
    play: Play, conn: Connection, clock: Clock
) -> None:
    play.options = {"timeout": TIMEOUT, "idempotent": True}
    play.deliver()
    play.pass_time(clock, seconds=59)
    assert play.engine.state(play.run) is RunState.WAITING
    play.outside.leave(play.engine.database)
    play.pass_time(clock, seconds=2)
    assert isinstance(play.deliver(), Parked)
    assert _messages(conn) == 1
    assert len({token for _, _, token in play.outside.sent}) == 1

    play.pass_time(clock, seconds=119)
    assert play.engine.state(play.run) is RunState.WAITING, "each next message counts as lost after twice the time"
    play.pass_time(clock, seconds=62)
    outcome = play.deliver()

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, StepTimeoutError)
    assert play.outside.looks == 1


def test_at_the_time_out_the_result_backend_is_asked_once(play: Play, clock: Clock) -> None:
    play.options = {"timeout": TIMEOUT}
    play.deliver()
    play.outside.leave(play.engine.database)
    play.outside.known = Answer("seen")
    play.pass_time(clock, seconds=241)
    outcome = play.deliver()
    assert isinstance(outcome, Finished)
    assert outcome.value == "seen"
    assert play.outside.looks == 1


@pytest.mark.parametrize("how", ["answer", "result", "error"])
def test_without_an_answer_a_person_decides_or_the_late_answer(play: Play, clock: Clock, how: str) -> None:
    play.options = {"timeout": TIMEOUT}
    play.deliver()
    play.outside.leave(play.engine.database)
    play.pass_time(clock, seconds=241)
    assert isinstance(play.deliver(), Parked)
    found = play.engine.client.get(play.run)
    assert (found.state, found.reason) == (RunState.QUARANTINED, "uncertain_op")
    kept = play.engine.client.failure(found)
    assert kept is not None
    assert kept.type == "UncertainStepError"
    assert f"`umt-durable resolve {play.run} label --result JSON`" in kept.message
    assert "with `--error TEXT`" in kept.message

    match how:
        case "answer":
            assert play.bring(Answer("late"))
        case "result":
            play.engine.client.resolve_step(play.run, "label", result="late", actor="ann")
        case _:
            play.engine.client.resolve_step(play.run, "label", error="never executed", actor="ann", reason="asked")
    kept_acts = [(act.act, act.actor, act.reason, act.detail) for act in play.engine.client.history(play.run).audit]
    if how == "answer":
        assert kept_acts == []
    else:
        reason = "asked" if how == "error" else None
        assert kept_acts == [("resolve", "ann", reason, f"step label: {how}")]
    released = play.engine.client.get(play.run)
    assert (released.state, released.reason) == (RunState.READY, None)
    outcome = play.deliver()

    assert isinstance(outcome, Finished)
    if how == "error":
        assert isinstance(outcome.error, StepFailedError)
        assert "never executed" in str(outcome.error)
    else:
        assert outcome.value == "late"
    with pytest.raises(UnknownStepError):
        play.engine.client.resolve_step(play.run, "label", result="twice")


@pytest.mark.parametrize(("verdict", "ends"), [(Done("found"), "found"), (NotDone(), "timeout"), (Unknown(), "parked")])
def test_reconcile_decides_at_the_time_out(play: Play, conn: Connection, clock: Clock, verdict: Any, ends: str) -> None:
    told: list[Any] = []

    def reconcile(info: TaskInfo) -> Any:
        told.append(info)
        return verdict

    play.options = {"timeout": TIMEOUT, "reconcile": reconcile}
    play.deliver()
    play.outside.leave(play.engine.database)
    play.pass_time(clock, seconds=241)
    outcome = play.deliver()

    assert [(info.task, info.sent) for info in told] == [("print", 1)]
    assert told[0].task_id == str(play.outside.sent[0][1].task_id)
    match ends:
        case "found":
            assert isinstance(outcome, Finished)
            assert outcome.value == "found"
        case "timeout":
            assert isinstance(outcome, Finished)
            assert isinstance(outcome.error, StepTimeoutError)
        case _:
            assert isinstance(outcome, Parked)
            assert play.engine.state(play.run) is RunState.QUARANTINED


def test_an_answer_while_the_run_is_left_to_a_person_is_not_missed(play: Play, conn: Connection, clock: Clock) -> None:
    play.options = {"timeout": TIMEOUT, "reconcile": lambda info: play.bring(Answer("just now")) and Unknown()}
    play.deliver()
    play.outside.leave(play.engine.database)
    play.pass_time(clock, seconds=241)
    assert isinstance(play.deliver(), Dropped)
    assert play.engine.state(play.run) is RunState.READY
    outcome = play.deliver()
    assert isinstance(outcome, Finished)
    assert outcome.value == "just now"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": timedelta(0)}, "timeout must be"),
        ({"timeout": 3}, "timeout must be"),
        ({"resend": timedelta(days=40_000)}, "resend must be"),
        ({"reconcile": lambda info: NotDone()}, "needs timeout="),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    play: Play, conn: Connection, options: dict[str, Any], said: str
) -> None:
    play.options = options
    outcome = play.deliver()
    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert "'label'" in str(outcome.error)
    assert said in str(outcome.error)
    assert _messages(conn) == 0


def test_i11_a_cancel_before_the_message_is_written_sends_nothing(play: Play, conn: Connection) -> None:
    pack = play.outside.pack

    def cancel(*asked: Any) -> Message:
        play.engine.client.cancel(play.run)
        return pack(*asked)

    setattr(play.outside, "pack", cancel)  # noqa: B010
    outcome = play.deliver()
    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.CANCELLED
    assert _messages(conn) == 0


def test_arguments_that_the_task_does_not_take_are_refused_before_anything_is_written(
    play: Play, conn: Connection
) -> None:
    play.outside.refused = "print"

    outcome = play.deliver()

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, InputError)
    assert str(outcome.error) == "step 'label': arguments of print refused: order: missing"
    assert _messages(conn) == 0
    history = play.engine.client.history(play.run)
    assert (history.steps, history.waits) == ([], [])


def test_what_was_sent_is_not_refused_by_code_that_has_changed(play: Play) -> None:
    play.deliver()
    play.outside.refused = "print"
    play.bring(Answer(1))

    outcome = play.deliver()

    assert isinstance(outcome, Finished)
    assert outcome.value == 1
