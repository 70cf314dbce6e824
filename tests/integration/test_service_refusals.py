"""What cannot be stored is refused, at once and alone; what an open transaction keeps out waits alone (I23, I26)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import RecordingDispatcher, empty_schema  # noqa: F401  a fixture
from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.bridge.envelope import EMPTY
from umt_durable.bridge.intake import Arrival, Inquiry, Intake
from umt_durable.bridge.runtime import DurableRuntime
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database, is_refusal
from umt_durable.engine.client import Client
from umt_durable.errors import DatabaseBusyError, DefinitionError, UnknownRunError
from umt_durable.records import NewRun
from umt_durable.services.intake import take_in
from umt_durable.services.relay import Relay
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import runs

HUGE = "".join(str(uuid4()) for _ in range(300))  # too random to be compressed into an entry of an index


@pytest.fixture
def client(database: Database, settings: Settings, schema: str) -> Client:
    return Client(database, settings)


@pytest.fixture
def other(database: Database) -> Iterator[Connection]:
    """Return a second session."""
    with database.connect() as conn:
        yield conn


# -- the database layer -----------------------------------------------------------------------------------------------


def test_i26_a_limit_of_the_server_is_a_refusal_and_not_tried_again(database: Database, schema: str) -> None:
    tries = []

    def work(conn: Connection) -> None:
        tries.append(conn)
        kit.enqueue(conn, queue=HUGE)

    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        database.do(work)

    assert len(tries) == 1


@pytest.mark.parametrize(
    ("state", "refusal"),
    [
        ("54000", True),
        ("54001", True),
        ("53400", True),
        ("53100", False),
        ("53200", False),
        ("53300", False),
        ("57P01", False),
        ("57014", False),
        ("55P03", False),
        ("40001", False),
        ("08006", False),
        ("58030", False),
        ("28P01", False),
    ],
)
def test_i26_only_what_fares_the_same_again_is_a_refusal(state: str, refusal: bool) -> None:
    error = psycopg.errors.lookup(state)("x")

    assert isinstance(error, psycopg.OperationalError)
    assert is_refusal(error) is refusal


def test_i26_a_lost_connection_is_no_refusal() -> None:
    assert not is_refusal(psycopg.OperationalError("server closed the connection unexpectedly"))


# -- the intake -------------------------------------------------------------------------------------------------------


def test_i23_the_intake_of_an_id_that_an_open_transaction_inserted_gives_up_soon(
    conn: Connection, other: Connection, database: Database, settings: Settings
) -> None:
    with other.transaction():
        kit.enqueue(other, id="same")
        begun = boottime()
        with pytest.raises(DatabaseBusyError):
            take_in(database, settings, [NewRun(id="same", task=kit.TASK)])

        assert boottime() - begun < 2.5


@dataclass
class Runtime:
    """The part of a runtime that the intake asks, on a real database."""

    database: Database
    settings: Settings
    batches: list[list[str]] = field(default_factory=list)
    raises: Callable[[str], None] = lambda run: None

    def take_in(self, batch: Sequence[Any]) -> None:
        self.batches.append([message.id for message in batch])
        for message in batch:
            self.raises(message.id)
        take_in(self.database, self.settings, [NewRun(id=one.id, task=kit.TASK, queue=one.queue) for one in batch])

    def has_run(self, run_id: str) -> bool:
        return bool(self.database.do(lambda conn: runs.of_id(conn, run_id)))

    def cancel_runs(self, ids: Sequence[str], reason: str) -> Mapping[str, RunState]:
        raise AssertionError("nothing is revoked here")


class Settled:
    """What became of messages."""

    def __init__(self) -> None:
        self.answers: dict[str, bool] = {}
        self._changed = threading.Event()

    def arrival(self, run: str, queue: str = "q") -> Arrival:
        message = SimpleNamespace(id=run, task=kit.TASK, queue=queue, envelope=EMPTY)
        return Arrival(cast(Any, message), lambda answer: self._note(run, answer))

    def inquiry(self, run: str) -> Inquiry:
        return Inquiry(run, lambda answer: self._note(run, answer))

    def wait(self, *names: str) -> None:
        until(lambda: self.answers.keys() >= set(names), what=f"{names} to be settled")

    def _note(self, run: str, answer: bool) -> None:
        self.answers[run] = answer


@pytest.fixture
def runtime(database: Database, settings: Settings, schema: str) -> Runtime:
    return Runtime(database, settings)


@pytest.fixture
def intake(runtime: Runtime) -> Iterator[Intake]:
    intake = Intake(cast(DurableRuntime, runtime))
    yield intake
    intake.stop()


def test_i23_a_message_that_an_open_transaction_keeps_out_waits_alone_and_its_neighbours_get_in(
    conn: Connection, other: Connection, intake: Intake, runtime: Runtime
) -> None:
    settled = Settled()
    with other.transaction():
        kit.enqueue(other, id="same")
        for run in ("a", "same", "b"):
            intake.offer(settled.arrival(run))
        intake.start()
        settled.wait("a", "b")
        intake.offer(settled.arrival("c"))
        settled.wait("c")

        assert "same" not in settled.answers
    settled.wait("same")

    assert settled.answers == dict.fromkeys(("a", "b", "c", "same"), True)
    assert not any({"c", "same"} <= set(batch) for batch in runtime.batches)
    assert kit.table(conn, "SELECT id FROM {}.run ORDER BY id") == [("a",), ("b",), ("c",), ("same",)]


def test_i26_messages_that_cannot_be_stored_are_refused_alone(intake: Intake, runtime: Runtime) -> None:
    def refuse(run: str) -> None:
        if run == "surrogate":
            "\ud800".encode()

    runtime.raises = refuse
    settled = Settled()
    intake.offer(settled.arrival("good"))
    intake.offer(settled.arrival("huge", queue=HUGE))
    intake.offer(settled.arrival("surrogate"))
    intake.offer(settled.inquiry("nul\0"))
    intake.offer(settled.inquiry("half\ud800"))

    intake.start()
    settled.wait("good", "huge", "surrogate", "nul\0", "half\ud800")

    assert [run for run, answer in settled.answers.items() if answer] == ["good"]


# -- the relay --------------------------------------------------------------------------------------------------------


def test_i26_a_reason_that_cannot_be_stored_as_it_is_stops_no_other_row(
    conn: Connection, database: Database, settings: Settings
) -> None:
    kit.worker(conn)
    numbers = [kit.number(conn, kit.enqueue(conn).id) for _ in range(4)]
    reasons = {numbers[0]: "bad \0 reason", numbers[1]: "half \ud800", numbers[2]: "fine"}

    counts = Relay(database, settings, RecordingDispatcher(refuses=reasons)).run_once()

    assert (counts.refused, counts.published) == (3, 1)
    assert kit.table(conn, "SELECT reason, claim FROM {}.outbox_event ORDER BY run") == [
        ("bad ? reason", None),
        ("half ?", None),
        ("fine", None),
    ]


def test_i26_a_refusal_that_cannot_be_recorded_leaves_its_row_and_stops_no_other(
    conn: Connection, database: Database, settings: Settings
) -> None:
    kit.worker(conn)
    numbers = [kit.number(conn, kit.enqueue(conn).id) for _ in range(3)]
    query = """CREATE FUNCTION {}.break_it() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN RAISE EXCEPTION 'planted'; END $$"""
    kit.table(conn, query)
    kit.table(
        conn,
        f"CREATE TRIGGER broken BEFORE UPDATE ON {{}}.outbox_event FOR EACH ROW"
        f" WHEN (new.reason IS NOT NULL AND new.run = {numbers[0]}) EXECUTE FUNCTION {{}}.break_it()",
    )

    try:
        with kit.counted(telemetry.Counter.DUTY_FAILED) as failed:
            refuses = {numbers[0]: "first", numbers[1]: "second"}
            Relay(database, settings, RecordingDispatcher(refuses=refuses)).run_once()

            assert failed() == 1
    finally:
        kit.table(conn, "DROP FUNCTION {}.break_it() CASCADE")
    assert kit.table(conn, "SELECT run, reason FROM {}.outbox_event ORDER BY run") == [
        (numbers[0], None),
        (numbers[1], "second"),
    ]


# -- calls ------------------------------------------------------------------------------------------------------------

UNSTORABLE = ["x" * 256, "\0", "\udc80", "\U0001f600" * 200]


@pytest.mark.parametrize("value", UNSTORABLE, ids=["long", "nul", "surrogate", "bytes"])
@pytest.mark.parametrize("where", ["key", "ref", "queue", "task", "id"])
def test_i26_what_a_run_cannot_keep_is_refused_at_the_call_by_name(
    where: str, value: str, client: Client, conn: Connection
) -> None:
    label = {"key": "idempotency_key", "id": "task_id"}.get(where, where)
    given: dict[str, Any] = {"id": "r", "task": kit.TASK, "args": b"[[],{}]", where: value}

    with pytest.raises(DefinitionError, match=f"^{label} "):
        client.enqueue(NewRun(**given))

    assert kit.table(conn, "SELECT count(*) FROM {}.run") == [(0,)]
    assert kit.table(conn, "SELECT count(*) FROM {}.idempotency_key") == [(0,)]


@pytest.mark.parametrize("value", UNSTORABLE, ids=["long", "nul", "surrogate", "bytes"])
@pytest.mark.parametrize("where", ["key", "actor", "dedupe"])
def test_i26_what_a_fact_cannot_keep_is_refused_at_the_call_by_name(
    where: str, value: str, client: Client, conn: Connection
) -> None:
    new = kit.enqueue(conn)

    with pytest.raises(DefinitionError, match=f"^{where} "):
        client.emit("paid", **{"key": "o1", where: value})
    if where != "key":
        with pytest.raises(DefinitionError, match=f"^{where} "):
            client.signal(new.id, "paid", **{where: value})
    if where == "actor":
        with pytest.raises(DefinitionError, match=r"^actor "):
            client.cancel(new.id, actor=value)

    assert kit.table(conn, "SELECT count(*) FROM {}.fact") == [(0,)]


def test_i26_the_longest_names_and_keys_fit_side_by_side(client: Client, conn: Connection) -> None:
    longest = "".join(chr(0x4E00 + (n * 7919) % 20000) for n in range(255))
    new = NewRun(id=longest, task=longest, queue=longest, args=b"[[],{}]", key=longest, ref=longest)

    client.enqueue(new)
    client.signal(longest, longest, dedupe=longest, actor=longest)
    client.emit(longest, longest, dedupe=longest, actor=longest)

    assert kit.table(conn, "SELECT count(*) FROM {}.fact") == [(2,)]


@pytest.mark.parametrize("attributes", ['{"a": ["\\u0000"]}', '{"\\ud800": 1}'])
def test_i26_attributes_that_cannot_be_stored_are_refused_at_the_call(attributes: str, client: Client) -> None:
    with pytest.raises(DefinitionError, match=r"^attributes "):
        client.enqueue(NewRun(id="r", task=kit.TASK, args=b"[[],{}]", attributes=attributes))


def test_i26_attributes_that_only_look_like_it_are_stored(client: Client) -> None:
    client.enqueue(NewRun(id="r", task=kit.TASK, args=b"[[],{}]", attributes='{"a": "\\\\u0000 \\u00e9"}'))

    assert client.get("r").attributes == {"a": "\\u0000 é"}


@pytest.mark.parametrize("run", ["", "x" * 256, "\0", "\ud800"])
def test_i26_an_id_that_no_run_can_have_is_of_no_run(run: str, client: Client) -> None:
    with pytest.raises(UnknownRunError):
        client.get(run)
    with pytest.raises(UnknownRunError):
        client.signal(run, "paid")
