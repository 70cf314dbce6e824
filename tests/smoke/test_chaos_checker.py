"""The checker of `dev.py chaos` finds each wrong that is planted, and nothing where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery

from tests.support import bodylog
from tests.support.bodylog import BodyLog
from tools.chaos import audit, checking
from tools.chaos.app import expected
from tools.chaos.checking import ZEROS
from tools.chaos.load import Start
from umt_durable.database import Connection


@dataclass
class Left:
    """What a chaos run has left, as far as the checker looks: one run that went well, to be spoiled."""

    conn: Connection
    url: str
    schema: str
    folder: Path
    results: Celery
    started: list[Start]

    @property
    def url_log(self) -> Path:
        return self.folder / "postgres.log"

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.url, autocommit=True, options=f"-c search_path={self.schema}")

    @property
    def body_log(self) -> BodyLog:
        return BodyLog(self.folder / "bodies.log")

    @property
    def provider(self) -> Any:
        return type("Provider", (), {"log": self.folder / "provider.log"})

    @property
    def postgres(self) -> Any:
        return type("Postgres", (), {"log": self.url_log})

    def do(self, text: str, *values: object) -> None:
        """Execute SQL in the schema of the run."""
        with self.connect() as conn:
            conn.execute(text.encode(), values)

    def check(self) -> dict[str, int]:
        """Return how much of each kind is found."""
        return checking.check(self, self.results, self.started).numbers()  # type: ignore[arg-type]  # as far as it looks


@pytest.fixture
def left(conn: Connection, database_url: str, schema: str, tmp_path: Path, monkeypatch: Any) -> Iterator[Left]:
    audit.install(database_url, schema)
    results = Celery("results", backend="cache+memory://", set_as_current=False)
    found = Left(conn, database_url, schema, tmp_path, results, [Start("chaos-1", 1, acked=True)])
    found.url_log.write_text("LOG:  ready\n")
    found.do("ALTER TABLE run DROP CONSTRAINT run_owned_while_running")  # a checker has to see what cannot be, too
    found.do("INSERT INTO run (id, task, version, state, fence) VALUES ('chaos-1', 'chaos.canary', 1, 'running', 1)")
    monkeypatch.setenv(bodylog.VARIABLE, str(found.body_log.path))
    bodylog.write("first", "begin", run="chaos-1")
    found.do(
        "INSERT INTO step (run, key, seq, kind, state, fence, finished_at)"
        " VALUES (1, 'first', 1, 'run', 'done', 1, now())"
    )
    found.do("UPDATE run SET state = 'succeeded', finished_at = now(), result = %s", json.dumps(expected(1)).encode())
    found.do("INSERT INTO chaos_booking VALUES ('chaos-1', 1)")
    found.do("INSERT INTO run (id, task, version, state, parent_no) VALUES ('child-1', 'chaos.child', 1, 'waiting', 1)")
    (tmp_path / "provider.log").write_text('{"op": "ship:chaos-1"}\n')
    results.backend.store_result("chaos-1", expected(1), "SUCCESS")
    yield found
    results.close()


def test_a_run_that_went_well_is_well(left: Left) -> None:
    assert left.check() == dict.fromkeys(ZEROS, 0)


def enter_late(left: Left) -> None:
    bodylog.write("first", "begin", run="chaos-1")


def enter_without_outcome(left: Left) -> None:
    bodylog.write("last", "begin", run="chaos-1")


SPOILT: dict[str, tuple[str, Callable[[Left], object]]] = {
    "an acknowledged run has no row": ("lost", lambda left: left.started.append(Start("chaos-2", 2, acked=True))),
    "a run did not end": (
        "lost",
        lambda left: left.do("UPDATE run SET state = 'failed' WHERE no = 1; DELETE FROM chaos_audit"),
    ),
    "a run gave something else": (
        "wrong",
        lambda left: left.do("UPDATE run SET result = '[]' WHERE no = 1; DELETE FROM chaos_audit"),
    ),
    "a body was entered after its step was done": ("duplicated_committed_steps", enter_late),
    "a body was entered whose step has no outcome": ("duplicated_committed_steps", enter_without_outcome),
    "a step was written under an old fence": (
        "zombie_commits",
        lambda left: left.do(
            "UPDATE run SET state = 'running', finished_at = NULL, fence = 2 WHERE no = 1;"
            "INSERT INTO step (run, key, seq, kind, state, fence) VALUES (1, 'late', 2, 'run', 'done', 1);"
            "UPDATE run SET state = 'succeeded', finished_at = now() WHERE no = 1;"
            "DELETE FROM chaos_audit WHERE what <> 'zombie'"
        ),
    ),
    "an outcome was written over": (
        "zombie_commits",
        lambda left: left.do("UPDATE step SET result = '2'; DELETE FROM chaos_audit WHERE what <> 'rewritten'"),
    ),
    "an ended run came back": (
        "zombie_commits",
        lambda left: left.do(
            "UPDATE run SET state = 'cancelled' WHERE no = 1; UPDATE run SET state = 'succeeded' WHERE no = 1;"
            "DELETE FROM chaos_audit WHERE ctid <> (SELECT min(ctid) FROM chaos_audit)"
        ),
    ),
    "a wait is over and its run still waits": (
        "lost_wakeups",
        lambda left: left.do(
            "INSERT INTO run (id, task, version, state) VALUES ('other', 'chaos.child', 1, 'waiting');"
            "INSERT INTO wait (run, key, seq, name, mode, state, address, settled_at)"
            " VALUES (3, 'go', 1, 'go', 'first', 'satisfied', '[]', now())"
        ),
    ),
    "an ended run was given another result": (
        "zombie_commits",
        lambda left: left.do("UPDATE run SET error = 'x' WHERE no = 1"),
    ),
    "a wait was settled twice": (
        "zombie_commits",
        lambda left: left.do(
            "INSERT INTO wait (run, key, seq, name, mode, state, address, settled_at)"
            " VALUES (1, 'go', 1, 'go', 'first', 'satisfied', '[]', now());"
            "UPDATE wait SET state = 'timed_out'"
        ),
    ),
    "a child was made twice": (
        "doubled_rows",
        lambda left: left.do(
            "INSERT INTO run (id, task, version, state, parent_no) VALUES ('child-2', 'chaos.child', 1, 'waiting', 1)"
        ),
    ),
    "rows were booked twice": ("doubled_rows", lambda left: left.do("INSERT INTO chaos_booking VALUES ('chaos-1', 1)")),
    "an effect was applied twice": (
        "doubled_rows",
        lambda left: (left.folder / "provider.log").write_text('{"op": "ship:chaos-1"}\n' * 2),
    ),
    "a result is missing": ("missing_results", lambda left: left.results.backend.forget("chaos-1")),
    "the server saw a deadlock": ("deadlocks", lambda left: left.url_log.write_text("ERROR:  deadlock detected\n")),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_planted_is_found(left: Left, spoilt: str) -> None:
    kind, plant = SPOILT[spoilt]
    plant(left)

    assert left.check() == {**dict.fromkeys(ZEROS, 0), kind: 1}


def test_a_start_that_was_not_acknowledged_may_have_no_row(left: Left) -> None:
    left.started.append(Start("chaos-2", 2, acked=False))

    assert left.check() == dict.fromkeys(ZEROS, 0)
