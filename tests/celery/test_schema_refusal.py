"""A real worker, and `serve`, refuse a schema that is missing, behind or ahead, and make none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from psycopg import sql

from tests.integration.cli_kit import set_revision
from tests.support.brokers import Broker, RedisBroker
from tests.support.workers import Running, Serve, Worker
from umt_durable.database import Connection
from umt_durable.migrate import read_revision
from umt_durable.settings import Settings

pytestmark = pytest.mark.processes

BEHIND, AHEAD = "0000", "9999"
TOLD = {
    None: "run `umt-durable migrate`",
    BEHIND: "run `umt-durable migrate`",
    AHEAD: "revision 9999, which is newer than this code's",
}


@pytest.fixture
def broker(redis_broker: RedisBroker) -> Broker:
    """Return one broker: the schema is looked at before any."""
    return redis_broker


@pytest.fixture
def spoil(conn: Connection, schema: str, settings: Settings) -> Callable[[str | None], None]:
    """Return a function that makes the schema say it is at a revision, or removes it."""

    def at(revision: str | None) -> None:
        if revision is None:
            conn.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
        else:
            set_revision(str(settings.database_url), schema, revision)

    return at


@pytest.fixture
def worker(worker_env: dict[str, str]) -> Iterator[Worker]:
    """Return a worker that is not started yet."""
    worker = Worker(env=worker_env, name="refused")
    yield worker
    worker.close()


def assert_refused(process: Running, settings: Settings, revision: str | None, told: str) -> None:
    """Check that a process ended with one clear line, and left the schema as it was."""
    assert process.wait() == 1
    assert told in process.text()
    assert "Traceback" not in process.text()
    assert read_revision(str(settings.database_url), settings.schema) == revision


@pytest.mark.parametrize("revision", [None, BEHIND, AHEAD], ids=["missing", "behind", "ahead"])
def test_a4_a_worker_refuses_a_schema_that_does_not_fit_and_makes_none(
    spoil: Callable[[str | None], None],
    worker: Worker,
    settings: Settings,
    conn: Connection,
    schema: str,
    revision: str | None,
) -> None:
    spoil(revision)

    worker.start(wait=False)

    assert_refused(worker, settings, revision, TOLD[revision])
    found = conn.execute("SELECT count(*) FROM pg_namespace WHERE nspname = %s", [schema]).fetchone()
    assert found == (0 if revision is None else 1,)


@pytest.mark.parametrize(("role", "revision"), [("relay", BEHIND), ("maintenance", AHEAD)], ids=["behind", "ahead"])
def test_a4_serve_refuses_a_schema_that_does_not_fit(
    spoil: Callable[[str | None], None],
    serve: Callable[..., Serve],
    settings: Settings,
    role: str,
    revision: str,
) -> None:
    spoil(revision)

    told = TOLD[revision].replace("umt-durable", "umt-durable -A tests.support.apps:app")
    process = serve(role, ready=told)

    assert_refused(process, settings, revision, told)
    assert "your.app" not in process.text()


def test_e2_a_worker_whose_tasks_have_to_name_their_retry_policies_refuses_those_that_do_not(worker: Worker) -> None:
    worker.env["DURABLE_STRICT_RETRY"] = "1"

    worker.start(wait=False)

    assert worker.wait() == 1
    assert "no retry policy is named by" in worker.text()
    assert "Traceback" not in worker.text()
