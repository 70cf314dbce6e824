"""`celery worker --versions`: workers of one app that take different versions of its tasks, from one queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import deployed_apps
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, RedisBroker
from tests.support.deployed_apps import DEPLOYED
from tests.support.workers import Pool, Worker
from umt_durable import Durable
from umt_durable.database import Connection
from umt_durable.sql import quote
from umt_durable.states import RunState
from umt_durable.store import workers

pytestmark = pytest.mark.processes

APP = "tests.support.deployed_apps:app"
TASK = "tests.deployed"


@pytest.fixture
def broker(redis_broker: RedisBroker) -> Broker:
    """Return one broker: whose version a hint is for is decided in the database."""
    return redis_broker


@pytest.fixture
def callers(worker_env: dict[str, str]) -> Iterator[dict[str, Durable]]:
    """Return the app as each of two deploys has it: new runs have its highest version."""
    built = {code: deployed_apps.build({**worker_env, DEPLOYED: code}) for code in ("1", "1 2")}
    yield {code: durable for code, (_, durable) in built.items()}
    for app, durable in built.values():
        durable.stop()
        app.close()


@pytest.fixture
def take(start_worker: Callable[..., Worker], worker_env: dict[str, str]) -> Callable[..., Worker]:
    """Return a function that starts a worker with both versions in its code, and takes some."""

    def start(text: str, pool: Pool = "threads") -> Worker:
        env = {**worker_env, DEPLOYED: "1 2"}
        name = text.rpartition("@")[2]
        return start_worker(app=APP, pool=pool, concurrency=1, env=env, name=name, options=[f"--versions={text}"])

    return start


def start_of(durable: Durable) -> Any:
    return durable.app.tasks[TASK].delay(0)


@pytest.mark.parametrize("pool", [pytest.param("threads", marks=pytest.mark.long), "prefork"])
def test_f2_f4_two_workers_of_one_version_each_take_their_own_runs_and_all_ordinary_tasks(
    take: Callable[..., Worker], callers: dict[str, Durable], body_log: BodyLog, conn: Connection, pool: Pool
) -> None:
    old, new = take(f"{TASK}@1", pool), take(f"{TASK}@2", pool)

    runs = [start_of(callers[code]) for code in ("1", "1 2") * 4]
    plain = [callers["1"].app.tasks["tests.plain"].delay() for _ in range(8)]

    took = [(run.get(timeout=60)[-1], {one.pid for one in body_log.entries(run.id)}) for run in runs]
    pids = {one: {one.pid, *(child.pid for child in one.children())} for one in (old, new)}
    assert [version for version, _ in took] == ["version 1", "version 2"] * 4
    assert all(found <= pids[old if version == "version 1" else new] for version, found in took)
    assert {one.get(timeout=60) for one in plain} <= pids[old] | pids[new]
    assert "takes tests.deployed@1\n" in old.text()
    assert {TASK, f"{TASK}@1", f"{TASK}@2"} <= workers.live_versions(conn)


def test_f2_f5_i19_runs_wait_for_the_worker_that_takes_their_version(
    take: Callable[..., Worker],
    callers: dict[str, Durable],
    wait_for_state: Callable[..., None],
    conn: Connection,
    schema: str,
) -> None:
    """The worker of version 1 takes no run without a version either: those get the highest there is."""
    old = take(f"{TASK}@1")
    pinned, newest = start_of(callers["1"]), start_of(callers["1 2"])
    found = conn.execute(f"SELECT {quote(schema)}.enqueue(%s, %s)", [TASK, '{"seconds": 0}']).fetchone()
    assert found is not None
    unpinned = str(found[0])

    assert pinned.get(timeout=60)[-1] == "version 1"
    assert start_of(callers["1"]).get(timeout=60)[-1] == "version 1"  # it has been round again
    for waiting in (newest.id, unpinned):
        assert callers["1"].get(waiting).state is RunState.READY
        assert callers["1"].history(waiting).attempts == []
    assert old.alive
    take(f"{TASK}@2")

    wait_for_state([newest.id, unpinned], RunState.SUCCEEDED, timeout=60)
    assert callers["1"].get(unpinned).version == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f"{TASK}@9",
            f"Error: --versions: no durable task named '{TASK}@9' is registered here (registered: {TASK}@1, {TASK}@2)",
        ),
        (f"{TASK}@1,import_*", "Error: --versions: no durable task named 'import_*' is registered here"),
        (",", "Error: --versions: versions: name at least one of"),
    ],
)
def test_f2_a_worker_told_of_a_version_that_is_not_there_does_not_start(
    worker_env: dict[str, str], text: str, told: str
) -> None:
    env = {**worker_env, DEPLOYED: "1 2"}
    worker = Worker(app=APP, env=env, name="refused", options=[f"--versions={text}"])

    try:
        worker.start(wait=False)

        assert worker.wait() == 1
        assert told in worker.text()
        assert "Traceback" not in worker.text()
    finally:
        worker.close()
