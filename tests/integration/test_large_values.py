"""Large values: in their rows, and not read before a body asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine
from umt_durable.database import Connection, Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import journal, waits
from umt_durable.store.journal import INLINE_BYTES

LARGE = "x" * (8 * 1024 * 1024)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


def _resume(engine: Engine, clock: Clock, run_id: str) -> object:
    clock.advance(seconds=61)
    engine.timers()
    return engine.process().deliver(run_id, "t")


def test_8_mib_of_text_come_back_from_arguments_steps_and_facts(engine: Engine, clock: Clock) -> None:
    @engine.task("t")
    def body(ctx: TaskContext, given: str) -> list[bool]:
        kept = ctx.step.run("keep", lambda: LARGE)
        ctx.step.sleep("nap", MINUTE)
        said = ctx.step.wait_for_fact("said").payload
        return [given == LARGE, kept == LARGE, said == LARGE]

    run_id, _ = engine.run("t", LARGE)
    engine.client.signal(run_id, "said", LARGE)
    outcome = _resume(engine, clock, run_id)

    assert isinstance(outcome, Finished)
    assert engine.client.result(engine.client.get(run_id)) == [True, True, True]


def test_a_resumed_run_reads_only_the_large_results_its_body_asks_for(
    engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = journal.result

    def counted(conn: Connection, run: int, key: str) -> bytes:
        read.append(key)
        return original(conn, run, key)

    monkeypatch.setattr(journal, "result", counted)
    size = INLINE_BYTES + 1

    @engine.task("t")
    def body(ctx: TaskContext) -> list[int]:
        def branch() -> int:
            return sum(len(ctx.step.run("blob", lambda: "x" * size)) for _ in range(20))

        lengths = ctx.step.parallel({"left": branch, "right": branch})
        ctx.step.run("one", lambda: "y" * size)
        ctx.step.sleep("nap", MINUTE)
        return list(lengths.values())

    run_id, _ = engine.run("t")
    outcome = _resume(engine, clock, run_id)

    assert isinstance(outcome, Finished)
    assert outcome.state is RunState.SUCCEEDED
    assert read == ["one"], "the forty results in the branches lie behind with these"


def test_the_journal_leaves_large_values_in_the_table(
    engine: Engine, conn: Connection, schema: str, clock: Clock
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("just small enough", lambda: "x" * (INLINE_BYTES - 2))
        ctx.step.run("large", lambda: "x" * (INLINE_BYTES - 1))
        ctx.step.wait_for_fact("said")
        ctx.step.wait_for_fact("more")

    run_id, _ = engine.run("t")
    engine.client.signal(run_id, "said", "x" * INLINE_BYTES)
    run = engine.client.get(run_id).no

    small, large = journal.read(conn, run)
    [wait] = waits.of_run(conn, run)
    assert (len(small.result or b""), small.size) == (INLINE_BYTES, INLINE_BYTES)
    assert (large.result, large.size) == (None, INLINE_BYTES + 1)
    assert (wait.payload, wait.size) == (None, INLINE_BYTES + 2)
    assert len(journal.result(conn, run, "large")) == large.size
    assert len(waits.payload(conn, run, "said")) == wait.size
    history = engine.client.history(run_id)
    assert len(history.steps[1].result or b"") == large.size
    assert len(history.waits[0].payload or b"") == wait.size


def test_i6_a_large_result_that_was_changed_parks_the_run(
    engine: Engine, conn: Connection, schema: str, clock: Clock
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.run("large", lambda: "x" * INLINE_BYTES)
        ctx.step.sleep("nap", MINUTE)

    run_id, _ = engine.run("t")
    conn.execute(f"UPDATE {schema}.step SET result = set_byte(result, 9, 65) WHERE key = 'large'".encode())
    _resume(engine, clock, run_id)

    assert engine.client.get(run_id).reason == "journal_corrupt"


def test_a_resume_reads_no_block_of_what_lies_outside_the_rows(
    engine: Engine, conn: Connection, schema: str, clock: Clock
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        ctx.step.map("blobs", lambda item: "".join(map(str, range(70_000))), range(5), key=str)
        ctx.step.sleep("nap", MINUTE)

    run_id, _ = engine.run("t")

    run = engine.client.get(run_id).no
    with engine.database.connect() as own:
        before = _outside(own, schema)
        assert sum(step.size or 0 for step in journal.read(own, run)) > 5 * INLINE_BYTES
        assert _outside(own, schema) == before
        journal.read(own, run, inline=None)
        assert _outside(own, schema) > before


def _outside(conn: Connection, schema: str) -> int:
    """Return how many blocks of large values of steps were ever read, on disk or in memory."""
    conn.execute("SELECT pg_stat_force_next_flush()")
    row = conn.execute(
        "SELECT toast_blks_read + toast_blks_hit FROM pg_statio_user_tables WHERE schemaname = %s AND relname = 'step'",
        [schema],
    ).fetchone()
    assert row is not None
    return int(row[0])
