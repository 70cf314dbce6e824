"""Each pool executes durable tasks; what a pool does to its processes costs a run nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery, signature

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.gates import Gates
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Pool, Worker
from umt_durable.errors import DefinitionError
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

APP = "tests.celery.pooled:app"
only_redis = pytest.mark.parametrize("broker", ["redis"], indirect=True)
each_pool = pytest.mark.parametrize("kind", ["fork", "spawn", "threads", "solo", "gevent"])
long_pools = pytest.mark.parametrize(
    "kind", ["fork", "gevent", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("spawn", "threads", "solo"))]
)
"""Each pool, of which those that differ least are left to `dev.py matrix`."""


class Project:
    """The project of tests/celery/pooled.py as another process sees it: by the names of its tasks."""

    def __init__(self, app: Celery) -> None:
        self.app = app

    def send(self, name: str, *args: object, **options: object):  # type: ignore[no-untyped-def]  # AsyncResult is generic
        """Send a task by its name and return its result."""
        return signature(f"pooled.{name}", args=args, app=self.app).apply_async(queue=QUEUE, **options)


@pytest.fixture
def project(tasks: Tasks) -> Project:
    """Return the project's client; a foreign producer, since this process has none of its tasks."""
    return Project(tasks.app)


@pytest.fixture
def work(start_worker: Callable[..., Worker]) -> Callable[..., Worker]:
    """Return a function that starts a worker of the project with a pool, or a way to start its children."""

    def start(kind: str, *options: str, concurrency: int = 2, **others: object) -> Worker:
        pools: dict[str, Pool] = {"threads": "threads", "solo": "solo", "gevent": "gevent"}
        added = ["--pool-start-method=spawn"] if kind == "spawn" else []
        pool = pools.get(kind, "prefork")
        return start_worker(
            app=APP, pool=pool, concurrency=1 if pool == "solo" else concurrency, options=[*added, *options], **others
        )

    return start


@only_redis
@each_pool
def test_every_pool_executes_parks_and_reports_with_connections_opened_at_import(
    project: Project, work: Callable[..., Worker], body_log: BodyLog, kind: str
) -> None:
    worker = work(kind)

    stepped = project.send("steps", 3, link=signature("pooled.note", ("stepped",), app=project.app))
    parked = project.send("nap", 2.5)
    existing = project.send("classic", 7)
    fresh = [project.send("early", number) for number in range(4)]

    assert stepped.get(timeout=60) == [1, 2, 3]
    assert existing.get(timeout=60) == 7
    assert [one.get(timeout=60) for one in fresh] == list(range(4))
    assert parked.get(timeout=60) == 1
    until(lambda: body_log.count(step="stepped") == 1, what="the callback")
    assert body_log.counts(stepped.id) == {"step-1": 1, "step-2": 1, "step-3": 1}
    assert body_log.counts(parked.id) == {"before": 1, "after": 1}
    assert worker.alive
    assert "Traceback" not in worker.text()


@only_redis
@pytest.mark.parametrize(
    "kind", ["fork", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("spawn", "threads", "solo", "gevent"))]
)
def test_i16_pools_opened_at_import_share_no_connection_between_processes(
    project: Project, work: Callable[..., Worker], kind: str
) -> None:
    worker = work(kind)

    by_engine = [project.send("by_engine") for _ in range(12)]
    by_pool = [project.send("by_pool") for _ in range(4)]

    used = [one.get(timeout=60) for one in by_engine]
    if kind == "fork":
        for one in by_pool:
            with pytest.raises(DefinitionError, match="opened before this process was forked"):
                one.get(timeout=60)
    else:
        used += [one.get(timeout=60) for one in by_pool]
    owners: dict[int, set[int]] = {}
    for pid, backend in used:
        owners.setdefault(backend, set()).add(pid)
    assert all(len(pids) == 1 for pids in owners.values()), owners
    assert worker.alive


@only_redis
@long_pools
def test_a_body_that_gives_nobody_way_keeps_its_lease(
    project: Project, work: Callable[..., Worker], tasks: Tasks, body_log: BodyLog, kind: str
) -> None:
    work(kind, concurrency=1)
    work("solo", "--queues=elsewhere", name="sweeper")  # who would take the run over

    result = project.send("block", 5.0)  # the lease of these tests is 3 s

    assert result.get(timeout=60) == 1
    assert body_log.counts(result.id) == {"block": 1}
    run = tasks.durable.get(result.id)
    assert (run.state, run.crashes) == (RunState.SUCCEEDED, 0)


@only_redis
def test_a_soft_time_limit_is_the_bodys_and_a_hard_one_costs_the_step_it_stopped(
    project: Project, work: Callable[..., Worker], tasks: Tasks, gates: Gates, body_log: BodyLog
) -> None:
    work("fork", concurrency=1)
    gates.close("soft")
    gates.close("hard")

    gave_up = project.send("soft")
    assert gave_up.get(timeout=60) == "gave up"
    result = project.send("hard")
    until(lambda: body_log.count(result.id, "second") == 2, timeout=30, what="the second step to be entered again")
    gates.open("hard")

    assert result.get(timeout=60) == 2
    assert body_log.counts(result.id) == {"first": 1, "second": 2}
    assert len(tasks.durable.history(result.id).attempts) == 2


@pytest.mark.redis_by_default
def test_recycled_children_lose_no_run_and_double_no_callback(
    project: Project, work: Callable[..., Worker], tasks: Tasks, body_log: BodyLog
) -> None:
    work("fork", "--max-tasks-per-child=2", "--max-memory-per-child=120000")

    results = [
        project.send("steps", 3, link=signature("pooled.note", (f"note-{n}",), app=project.app)) for n in range(12)
    ]
    eaten = [project.send("eat", 150) for _ in range(3)]
    parked = [project.send("nap", 1.0) for _ in range(4)]

    assert [one.get(timeout=60) for one in results] == [[1, 2, 3]] * 12
    assert len({one.get(timeout=60) for one in eaten}) == 3, "each child is over its limit after one"
    assert [one.get(timeout=60) for one in parked] == [1] * 4
    assert all(body_log.counts(one.id) == {"before": 1, "after": 1} for one in parked)
    until(lambda: all(body_log.count(step=f"note-{n}") for n in range(12)), what="the callbacks")
    assert len(body_log.pids()) > 4
    for result in results:
        assert body_log.counts(result.id) == {"step-1": 1, "step-2": 1, "step-3": 1}
        assert tasks.durable.get(result.id).crashes == 0
    assert [body_log.count(step=f"note-{n}") for n in range(12)] == [1] * 12


@only_redis
def test_a_pool_that_grows_and_shrinks_disturbs_no_run(
    project: Project, work: Callable[..., Worker], tasks: Tasks, gates: Gates, body_log: BodyLog
) -> None:
    worker = work("fork", "--autoscale=4,1", concurrency=1)
    gates.close("inside")
    held = [project.send("steps", 3, 2, "inside") for _ in range(4)]
    gates.wait("inside", processes=3)

    gates.open("inside")
    assert [one.get(timeout=60) for one in held] == [[1, 2, 3]] * 4
    control = tasks.app.control
    control.pool_shrink(max(len(worker.children()) - 1, 0) or 1, destination=[worker.node], reply=True, timeout=10)
    after = [project.send("steps", 3) for _ in range(4)]

    assert [one.get(timeout=60) for one in after] == [[1, 2, 3]] * 4
    for result in (*held, *after):
        assert body_log.counts(result.id) == {"step-1": 1, "step-2": 1, "step-3": 1}
        assert tasks.durable.get(result.id).crashes == 0


@only_redis
def test_autoscaling_down_disturbs_neither_what_is_in_flight_nor_what_is_parked(
    project: Project,
    work: Callable[..., Worker],
    worker_env: dict[str, str],
    tasks: Tasks,
    gates: Gates,
    body_log: BodyLog,
) -> None:
    worker_env["AUTOSCALE_KEEPALIVE"] = "4"  # seconds for which the autoscaler leaves a pool as it is; 30 by default
    worker = work("fork", "--autoscale=4,1", concurrency=1)
    gates.close("short")
    gates.close("long")
    parked = [project.send("nap", 8.0) for _ in range(4)]
    long = project.send("steps", 3, 2, "long")
    gates.wait("long")
    short = [project.send("steps", 3, 2, "short") for _ in range(3)]
    gates.wait("short", processes=3)
    assert len(worker.children()) == 4

    gates.open("short")
    assert [one.get(timeout=60) for one in short] == [[1, 2, 3]] * 3
    until(lambda: len(worker.children()) < 3, timeout=60, what="the pool to shrink around the body in flight")
    assert body_log.count(long.id, "step-2") == 1
    gates.open("long")

    assert long.get(timeout=60) == [1, 2, 3]
    assert [one.get(timeout=60) for one in parked] == [1] * 4
    for result in (long, *short):
        assert body_log.counts(result.id) == {"step-1": 1, "step-2": 1, "step-3": 1}
    for result in parked:
        assert body_log.counts(result.id) == {"before": 1, "after": 1}
    assert all(tasks.durable.get(one.id).crashes == 0 for one in (long, *short, *parked))


@only_redis
def test_eventlet_is_refused_when_the_worker_starts(
    tasks: Tasks, start_worker: Callable[..., Worker], worker_env: dict[str, str], eventlet_stand_in: str
) -> None:
    worker_env["PYTHONPATH"] = eventlet_stand_in
    worker = Worker(env=worker_env, app=APP, pool="eventlet")  # type: ignore[arg-type]  # the one that is refused

    with worker.start(wait=False):
        assert worker.wait() == 1
        assert "the eventlet pool is not supported: its hub blocks in the database driver" in worker.text()
        assert "Traceback" not in worker.text()


@pytest.fixture
def eventlet_stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with modules that look like eventlet as far as Celery imports them."""
    folder = tmp_path_factory.mktemp("stand-in")
    package = folder / "eventlet"
    package.mkdir()
    (package / "__init__.py").write_text("def monkey_patch(*args, **options):\n    pass\n")
    (package / "debug.py").write_text("def hub_blocking_detection(*args):\n    pass\n")
    (package / "hubs.py").write_text("def get_hub():\n    return None\n")
    return str(folder)
