"""Fixtures of all tests: private servers, a schema for each test, both brokers, real processes.

    database_url, schema    a migrated schema of this test alone, on the private Postgres; in `integration/`, and where
                            a test is marked `each_postgres`, on an older reachable server with `--postgres=older`
    settings, database      what the product makes of them; `conn` is a connection in autocommit, `clock` moves its time
    database_proxy          a proxy in front of Postgres that loses replies; `proxied_url` leads through it
    broker                  both brokers in turn; `redis_broker` and `rabbit_broker` are one each
    worker_env              the environment that makes a worker process use all of these
    start_worker, serve     start real processes, which are gone when the test is over
    body_log, gates         what the bodies of tests/support/apps.py wrote, and where they stop
    pool                    the supported pools in turn
    tasks                   the tasks of those processes, to be called from the test; `wait_for_state` waits for runs

A missing service skips with a reason that the summary counts, and fails where CI=true.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
import pytest

from tests.support import apps, diagnose, guard, nursery, skips, workers
from tests.support.bodylog import VARIABLE as BODY_LOG
from tests.support.bodylog import BodyLog
from tests.support.brokers import NAMES as BROKERS
from tests.support.brokers import Broker, RabbitBroker, RedisBroker
from tests.support.clock import Clock
from tests.support.gates import VARIABLE as GATES
from tests.support.gates import Gates
from tests.support.postgres import (
    Postgres,
    PrivatePostgres,
    SharedPostgres,
    address,
    drop_schema,
    find_older,
    make_schema,
    through,
)
from tests.support.proxy import Proxy
from tests.support.rabbit import NoRabbitError, Rabbit, find
from tests.support.valkey import Valkey
from tests.support.wait import until
from tests.support.workers import POOLS, Pool, Serve, Worker
from umt_durable.database import Connection, Database
from umt_durable.settings import Settings
from umt_durable.states import RunState

# No example database: the project folder may be read-only, and a shared machine sets no time for one example.
hypothesis.settings.register_profile("suite", deadline=None, database=None, derandomize=skips.in_ci(), print_blob=True)
hypothesis.settings.load_profile("suite")

OLDER_URL, OLDER_TOLD = "UMT_TEST_OLDER_URL", "UMT_TEST_OLDER_TOLD"


# -- the session ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "on which servers the integration part runs: the private one, an older one that is reachable, or both"
    cells = "of the crash matrix: a few cells, CI's share, all pairs of factors, or everything"
    parser.addoption("--cells", choices=("few", "ci", "pairwise", "full"), default="few", help=cells)
    parser.addoption("--postgres", choices=("private", "older", "both"), default="private", help=told)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background jobs ignore it, and what they start does too; some tests interrupt what they start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "each_postgres: runs on the private Postgres and on an older reachable one")
    config.addinivalue_line("markers", "private_postgres_only: restarts or reconfigures its server")
    if not hasattr(config, "workerinput"):
        # Asked once: every process of the session must collect the same tests.
        url, told = find_older()
        os.environ[OLDER_URL], os.environ[OLDER_TOLD] = url or "", told
        if url is None and config.getoption("postgres") == "older":
            raise pytest.UsageError(f"--postgres=older: {told}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Before the selection by marks, which leaves the long ones out.
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("redis_by_default") and parameters.get("broker") == "rabbitmq":
            item.add_marker(pytest.mark.long)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "postgres" not in metafunc.fixturenames or not os.environ.get(OLDER_URL):
        return
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    everywhere = "integration" in metafunc.definition.path.parts or "each_postgres" in marks
    if everywhere and "private_postgres_only" not in marks and "private_postgres" not in metafunc.fixturenames:
        asked = metafunc.config.getoption("postgres")
        metafunc.parametrize(
            "postgres", ["private", "older"] if asked == "both" else [asked], indirect=True, scope="session"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed and isinstance(item, pytest.Function):
        url, schema = item.funcargs.get("database_url"), item.funcargs.get("schema")
        if isinstance(url, str) and isinstance(schema, str):
            report.sections.append(("rows of the database", diagnose.rows(url, schema)))
        report.sections.extend((f"log of {one.name}", one.tail()) for one in workers.RUNNING)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    told: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        told[reason] = told.get(reason, 0) + 1
    for reason, times in sorted(told.items()):
        terminalreporter.write_line(f"skipped {times}: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_session() -> Iterator[None]:
    guard.token()
    yield
    nursery.close()
    left = guard.kill_all(guard.wait_gone(guard.strays(), timeout=5))
    guard.end_watch()
    assert not left, "processes left behind by the tests, now killed:\n" + "\n".join(left)


@pytest.fixture(scope="session")
def private_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the private servers of this test process."""
    return tmp_path_factory.mktemp("servers")


# -- Postgres ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def private_postgres(private_folder: Path) -> Iterator[PrivatePostgres]:
    """Return a Postgres that a test may restart."""
    server = PrivatePostgres(private_folder / "postgres")
    yield server
    server.close()


@pytest.fixture(scope="session")
def older_postgres() -> Iterator[SharedPostgres]:
    """Return a database of our own in a server that runs already."""
    url = os.environ.get(OLDER_URL)
    if not url:
        skips.missing(os.environ[OLDER_TOLD])
    server = SharedPostgres(url)
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Postgres:
    """Return the server of this test: the private one, or in turn each that there is."""
    name = "older_postgres" if getattr(request, "param", "private") == "older" else "private_postgres"
    server: Postgres = request.getfixturevalue(name)
    return server


@pytest.fixture
def database_url(postgres: Postgres) -> str:
    """Return the URL of a database with a migrated schema of this test's own: see `schema`."""
    return postgres.url


@pytest.fixture
def schema(database_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the name of a migrated, empty schema that is dropped after the test."""
    module = re.sub(r"\W", "_", request.path.stem.removeprefix("test_"))[:30]
    name = f"test_{module}_{uuid.uuid4().hex[:12]}"
    make_schema(database_url, name)
    yield name
    drop_schema(database_url, name)


@pytest.fixture
def other_database_url(database_url: str) -> Iterator[str]:
    """Return the URL of another, empty database on the same server, which is dropped after the test."""
    name = f"umt_other_{os.getpid()}_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}".encode())
        yield f"{database_url.rpartition('/')[0]}/{name}"
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def settings(database_url: str, schema: str) -> Settings:
    """Return settings for the schema of this test, with the shortest lease."""
    return Settings(database_url=database_url, schema=schema, embedded=False, lease_seconds=3.0, poll_seconds=0.1)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """Return the product's own connections to the schema of this test."""
    database = Database(settings)
    yield database
    database.close()


@pytest.fixture
def conn(database: Database) -> Iterator[Connection]:
    """Return a connection of the product's own kind, in autocommit."""
    with database.connect(application="test") as conn:
        yield conn


@pytest.fixture
def clock(conn: Connection, schema: str) -> Clock:
    """Return the clock of this test's schema, which from now on can be moved."""
    return Clock(conn, schema)


@pytest.fixture
def database_proxy(database_url: str) -> Iterator[Proxy]:
    """Return a proxy in front of this test's Postgres that can lose a chosen reply."""
    with Proxy(*address(database_url), postgres=True) as proxy:
        yield proxy


@pytest.fixture
def proxied_url(database_url: str, database_proxy: Proxy) -> str:
    """Return the database URL through `database_proxy`."""
    return through(database_url, database_proxy)


# -- brokers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def valkey(private_folder: Path) -> Iterator[Valkey]:
    """Return a Valkey that a test may stop and wipe."""
    server = Valkey(private_folder / "valkey")
    yield server
    server.stop()


@pytest.fixture
def redis_url(valkey: Valkey) -> str:
    """Return the URL of an empty database for results."""
    valkey.start()
    valkey.flush()
    return valkey.result_url


@pytest.fixture(scope="session")
def rabbit(private_folder: Path) -> Iterator[Rabbit]:
    """Return a RabbitMQ server: a reachable one, a private one, or one in a container."""
    try:
        server = find(private_folder)
    except NoRabbitError as reason:
        skips.missing(str(reason))
    yield server
    server.close()


@pytest.fixture
def redis_broker(valkey: Valkey, redis_url: str) -> Iterator[RedisBroker]:
    """Return an empty Valkey as a broker."""
    broker = RedisBroker(valkey)
    yield broker
    broker.close()


@pytest.fixture
def rabbit_broker(rabbit: Rabbit) -> Iterator[RabbitBroker]:
    """Return a virtual host of this test's own as a broker."""
    broker = RabbitBroker(rabbit)
    yield broker
    broker.close()


@pytest.fixture
def rabbit_url(rabbit_broker: RabbitBroker) -> str:
    """Return the URL of a virtual host of this test's own."""
    return rabbit_broker.url


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.rabbitmq] * (name == "rabbitmq")) for name in BROKERS])
def broker(request: pytest.FixtureRequest) -> Broker:
    """Return each broker in turn, empty."""
    broker: Broker = request.getfixturevalue("redis_broker" if request.param == "redis" else "rabbit_broker")
    return broker


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=POOLS)
def pool(request: pytest.FixtureRequest) -> Pool:
    """Return each supported pool in turn."""
    name: Pool = request.param
    return name


@pytest.fixture
def body_log(tmp_path: Path) -> BodyLog:
    """Return the log that the bodies of this test's processes write."""
    return BodyLog(tmp_path / "bodies.log")


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    """Return the gates at which the bodies of this test's processes stop."""
    gates = Gates(tmp_path / "gates")
    yield gates
    gates.open_all()


@pytest.fixture
def worker_env_for(
    settings: Settings, redis_url: str, body_log: BodyLog, gates: Gates, tmp_path: Path
) -> Callable[[Broker], dict[str, str]]:
    """Return a function that gives the environment of processes working for this test on a broker."""

    def environment(broker: Broker) -> dict[str, str]:
        return {
            "DURABLE_DATABASE_URL": str(settings.database_url),
            "DURABLE_SCHEMA": settings.schema,
            "DURABLE_EMBEDDED": "0",
            "DURABLE_LEASE_SECONDS": str(settings.lease_seconds),
            "DURABLE_POLL_SECONDS": "0.2",
            "CELERY_BROKER_URL": broker.url,
            "CELERY_RESULT_BACKEND": redis_url,
            "HOME": str(tmp_path),
            BODY_LOG: str(body_log.path),
            GATES: str(gates.folder),
        }

    return environment


@pytest.fixture
def worker_env(worker_env_for: Callable[[Broker], dict[str, str]], broker: Broker) -> dict[str, str]:
    """Return the environment of processes that work for this test, on each broker; change it before starting one."""
    return worker_env_for(broker)


@pytest.fixture
def start_worker(worker_env: dict[str, str]) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a Celery worker of `tests.support.apps`; it takes the arguments of `Worker`."""
    started: list[Worker] = []

    def start(**options: Any) -> Worker:
        worker = Worker(**{"env": worker_env, **options})
        started.append(worker)
        return worker.start()

    yield start
    for worker in reversed(started):
        worker.close()


@pytest.fixture
def serve(worker_env: dict[str, str]) -> Iterator[Callable[..., Serve]]:
    """Return a function that starts `umt-durable serve`; it takes the arguments of `Serve`."""
    started: list[Serve] = []

    def start(role: str, **options: Any) -> Serve:
        process = Serve(role, **{"env": worker_env, **options})
        started.append(process)
        return process.start()

    yield start
    for process in reversed(started):
        process.close()


@pytest.fixture
def tasks(worker_env: dict[str, str]) -> Iterator[apps.Tasks]:
    """Return the tasks of the workers, for enqueuing from this process."""
    tasks = apps.build(worker_env)
    yield tasks
    tasks.durable.stop()
    tasks.app.close()


@pytest.fixture
def wait_for_state(tasks: apps.Tasks) -> Callable[..., None]:
    """Return a function that waits until runs are in a state."""

    def wait(ids: Sequence[str] | str, state: RunState, timeout: float = 60.0) -> None:
        wanted = [ids] if isinstance(ids, str) else list(ids)

        def look() -> bool:
            return all(tasks.durable.get(run_id).state is state for run_id in wanted)

        until(look, timeout=timeout, what=f"{len(wanted)} run(s) to be {state}")

    return wait
