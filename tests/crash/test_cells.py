"""Each run ends once, with the right result and no finished step repeated, whatever happens to a process at a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery.result import AsyncResult

from tests.crash import acts, cells
from tests.crash.app import More, build
from tests.crash.cells import Cell
from tests.crash.scene import HELD_SECONDS, Scene
from tests.support.apps import ELSEWHERE, LEDGER, REDELIVERY, Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.clock import Clock
from tests.support.gates import Gates
from tests.support.provider import ADDRESS, Provider
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable import failpoints
from umt_durable.database import Connection
from umt_durable.ledger import install_ledger
from umt_durable.states import RunState
from umt_durable.store import outbox

pytestmark = pytest.mark.processes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        found = cells.chosen(metafunc.config.getoption("cells"))
        marks = [pytest.mark.rabbitmq]
        metafunc.parametrize(
            "cell",
            [pytest.param(cell, marks=marks if cell.broker == "rabbitmq" else ()) for cell in found],
            ids=[str(cell) for cell in found],
        )


@pytest.fixture
def broker(cell: Cell, request: pytest.FixtureRequest) -> Broker:
    """Return the broker of the cell."""
    found: Broker = request.getfixturevalue("redis_broker" if cell.broker == "redis" else "rabbit_broker")
    return found


@pytest.fixture
def crash_env(worker_env: dict[str, str], cell: Cell) -> dict[str, str]:
    """Return the environment of this test's processes."""
    worker_env["DURABLE_HOLD_SECONDS"] = str(HELD_SECONDS)
    worker_env["DURABLE_DELIVER_SECONDS"] = "3"  # what a process has in hand that stands still is given to others then
    if cell.act == "foreign":
        worker_env[REDELIVERY] = "2"  # seconds after which Redis gives an unacked message to another
    return worker_env


@pytest.fixture
def ledger(conn: Connection, schema: str, worker_env: dict[str, str]) -> Callable[[], list[Any]]:
    """Return a function that reads the application's table, which has no unique constraint."""
    name = f'"{schema}".ledger'
    conn.execute(f"CREATE TABLE {name} (step text, value int)".encode())
    worker_env[LEDGER] = name
    return lambda: conn.execute(f"SELECT value FROM {name}".encode()).fetchall()


@pytest.fixture
def booked(cell: Cell, worker_env: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Callable[[], list[int]]]:
    """Return a function that reads what is booked in another database with a ledger, where the cell is about one."""
    if cell.act != "elsewhere":
        yield list
        return
    worker_env[ELSEWHERE] = url = request.getfixturevalue("other_database_url")
    install_ledger(url)
    with psycopg.connect(url, autocommit=True) as books:
        books.execute("CREATE TABLE booking (value int)")
        yield lambda: [row[0] for row in books.execute("SELECT value FROM booking").fetchall()]


@pytest.fixture
def applied(cell: Cell, tmp_path: Path, worker_env: dict[str, str]) -> Iterator[Callable[[], int]]:
    """Return a function that counts what a provider has applied which honours keys, where the cell is about one."""
    if cell.act != "shipping":
        yield lambda: 0
        return
    with Provider("idempotent", tmp_path) as carrier:
        worker_env[ADDRESS] = carrier.address
        yield lambda: carrier.applied("ship:17")


@pytest.fixture
def both(crash_env: dict[str, str]) -> Iterator[tuple[Tasks, More]]:
    """Return the tasks of the workers, for calling them from this process."""
    tasks, more = build(crash_env)
    yield tasks, more
    tasks.durable.stop()
    tasks.app.close()


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    """Return a function that makes workers, which are gone after the test."""
    made: list[Worker] = []

    def make(**options: Any) -> Worker:
        made.append(Worker(**options))
        return made[-1]

    yield make
    for worker in reversed(made):
        worker.close()


def test_i1_whatever_happens_to_a_process_at_a_point_its_run_ends_once(
    cell: Cell,
    both: tuple[Tasks, More],
    crash_env: dict[str, str],
    ledger: Callable[[], list[Any]],
    booked: Callable[[], list[int]],
    applied: Callable[[], int],
    conn: Connection,
    clock: Clock,
    broker: Broker,
    gates: Gates,
    body_log: BodyLog,
    make_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    tasks, more = both
    once = tmp_path / "once"
    scene = Scene(cell, tasks, more, conn, clock, crash_env, broker, gates, body_log, once, make_worker)

    def check() -> None:
        assert_ended(scene, end)
        assert ledger() == {"booking": [(3,)], "shipping": [(1,)]}.get(cell.act, [])
        assert booked() == ([6] if cell.act == "elsewhere" else [])
        assert applied() == (cell.act == "shipping")
        assert_no_finished_step_was_repeated(scene, end)

    end = acts.ACTS[cell.act](scene)
    if end.is_thawed_first:
        scene.thaw()
    check()
    if not end.is_thawed_first and cell.act != "caller":
        scene.thaw()
        check()


def assert_ended(scene: Scene, end: acts.End) -> None:
    """Check where a run stands, and that nothing of it is left anywhere."""
    durable = scene.tasks.durable
    until(
        lambda: [run.state for run in durable.list() if run.id == end.run] == [end.state],
        timeout=90,
        what=f"the run to be {end.state}",
        diagnose=lambda: "\n".join([*(str(durable.explain(run.id)) for run in durable.list()), scene._logs()]),
    )
    if end.state is RunState.SUCCEEDED:
        assert AsyncResult(end.run, app=scene.tasks.app).get(timeout=60) == end.result
    until(lambda: outbox.status(scene.conn)[:2] == (0, 0), timeout=60, what="the outbox to be empty")
    assert all(attempt.outcome is not None for attempt in durable.history(end.run).attempts)
    assert len(durable.list(task=durable.get(end.run).task)) == 1, "there is another run"
    said = scene.conn.execute(
        f'SELECT count(*) FROM "{scene.conn.schema}".fact WHERE name = %s'.encode(), ["go"]
    ).fetchone()
    assert said is not None
    assert said[0] <= 1, "a fact was said twice"


def assert_no_finished_step_was_repeated(scene: Scene, end: acts.End) -> None:
    """Check that only steps that were in flight when something happened were entered twice."""
    counts = scene.body_log.counts(end.run)
    assert set(end.needed) <= counts.keys()
    assert not counts.keys() & set(end.unwanted)
    for free in ("body", "pass", "announce", "old"):  # entered anew by each attempt, or each pass of code that drifts
        counts.pop(free, None)
    assert sum(counts.values()) <= len(counts) + end.repeats
    assert all(times <= 1 + min(end.repeats, 2) for times in counts.values()), counts


def test_every_point_has_its_cells_or_a_reason() -> None:
    told = [point for points in cells.ACTS.values() for point in points] + list(cells.ELSEWHERE)

    assert sorted(told) == sorted(failpoints.NAMES)
    assert set(cells.ACTS) == set(acts.ACTS)


def test_the_choices_are_as_large_as_they_say_and_meet_every_pair_they_can() -> None:
    full, pairwise, ci = (cells.chosen(choice) for choice in ("full", "pairwise", "ci"))

    assert len(ci) >= 150
    assert len(pairwise) >= 300
    assert set(ci) <= set(pairwise) <= set(full)
    assert len(set(full)) == len(full)
    for factors in combinations(("point", "what", "pool", "broker"), 2):
        of_pair = attrgetter(*factors)
        assert {*map(of_pair, pairwise)} == {*map(of_pair, full)}, factors
