"""Sealed messages of runs, as relays, revokes and checks read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from tests.support import sealed_app
from tests.support.clock import Clock
from tests.support.sealed_app import CODEC, Sealed
from tests.support.sealing import CANARY, leaks
from umt_durable.bridge import revoke
from umt_durable.bridge.chords import is_awaited_in
from umt_durable.bridge.dispatch import CeleryDispatcher
from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.publisher import Publisher
from umt_durable.database import Connection
from umt_durable.services.relay import Relay
from umt_durable.settings import Settings
from umt_durable.states import OutboxStatus
from umt_durable.store import diagnosis, runs

Make = Callable[[str], Sealed]


@pytest.fixture
def make(settings: Settings) -> Iterator[Make]:
    """Return a function that gives the app of a process with a codec of `tests.support.sealing`."""
    made: list[Sealed] = []

    def build(codec: str) -> Sealed:
        environ = {
            "DURABLE_DATABASE_URL": str(settings.database_url),
            "DURABLE_SCHEMA": settings.schema,
            "DURABLE_EMBEDDED": "0",
            "CELERY_BROKER_URL": f"memory://{uuid4().hex}",
            "CELERY_RESULT_BACKEND": "cache+memory://",
        }
        sealed = sealed_app.build(environ | ({CODEC: f"tests.support.sealing:{codec}"} if codec else {}))
        made.append(sealed)
        return sealed

    yield build
    for sealed in made:
        sealed.durable.stop()
        sealed.app.close()


def _relay(sealed: Sealed) -> Relay:
    durable = sealed.durable
    return Relay(
        durable.database, durable.settings, CeleryDispatcher(durable, Publisher(sealed.app)), durable.outbox.routes
    )


def test_a_revoke_by_stamps_finds_sealed_runs(make: Make) -> None:
    sealed, lacking = make("BOTH"), make("ONLY_OLD")
    run = sealed.child.apply_async(("a",), stamped_headers=["batch"], batch=CANARY)
    sealed.child.apply_async(("b",), stamped_headers=["batch"], batch="another")

    assert revoke.stamped(sealed.durable, {"batch": CANARY}) == [run.id]
    assert revoke.stamped(lacking.durable, {"batch": CANARY}) == []


def test_the_check_of_chords_reads_sealed_messages(make: Make, conn: Connection, schema: str) -> None:
    sealed, lacking = make("BOTH"), make("")
    in_chord = Envelope(chord={"task": "sealed.note", "args": [CANARY]}).to_bytes()
    alone = Envelope(headers={"note": CANARY}).to_bytes()
    ids = []
    for envelope in (in_chord, alone):
        run = sealed.child.delay("a")
        ids.append(run.id)
        stored = sealed.durable.database.vault.seal(envelope or b"")
        conn.execute(
            f"UPDATE {schema}.run SET envelope = %s, state = 'sleeping', wake_at = created_at + interval '2 days'"
            " WHERE id = %s".encode(),
            [stored, run.id],
        )

    found = sealed.durable.database.do(lambda own: diagnosis.parked_in_chords(own, 3600.0, is_awaited_in))

    assert found is not None
    assert (found.runs, found.example) == (1, ids[0])
    assert lacking.durable.database.do(lambda own: diagnosis.parked_in_chords(own, 3600.0, is_awaited_in)) is None


def test_i1_a_relay_without_the_key_puts_rows_back_and_one_with_it_sends_them(
    make: Make, clock: Clock, conn: Connection, schema: str
) -> None:
    sealed, lacking = make("BOTH"), make("ONLY_OLD")
    event = sealed.durable.outbox.emit("sealed.event", {"card": CANARY})
    sealed.durable.outbox.send(sealed.note.s(CANARY))
    hinted = sealed.child.apply_async(("a",), headers={"note": CANARY})
    assert leaks(conn, schema) == []

    _relay(lacking).run_once()

    row = sealed.durable.outbox.get(event)
    assert (row.status, row.attempts) == (OutboxStatus.PENDING, 1)
    assert row.payload == json.dumps({"card": CANARY}, separators=(",", ":")).encode()
    assert row.reason is not None
    assert row.reason.startswith("PayloadKeyError")
    assert leaks(conn, schema) == []
    clock.advance(seconds=3600)
    _relay(sealed).run_once()

    row = sealed.durable.outbox.get(event)
    assert row.status is OutboxStatus.DISPATCHED
    started = sealed.durable.get(str(row.run))
    found = sealed.durable.database.do(lambda own: runs.arguments(own, started.id, 0))
    assert found is not None
    assert sealed.durable.get(hinted.id).id == hinted.id
    left = conn.execute(f"SELECT count(*) FROM {schema}.outbox_event WHERE type = 'celery'".encode()).fetchone()
    assert left == (0,)
