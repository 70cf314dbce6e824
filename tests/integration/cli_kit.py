"""The command line in the test's own process, for an app of the test's own."""

from __future__ import annotations

import sys
import types
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from click.testing import CliRunner, Result
from kombu import pools
from psycopg import sql

from tests.support import apps
from umt_durable.bridge.cli import durable
from umt_durable.settings import Settings

NO_BROKER = "redis://:hunter2@127.0.0.1:1/0"


class Cli:
    """Calls `umt-durable -A APP …` for one app, without a terminal."""

    def __init__(self, tasks: apps.Tasks, module: str) -> None:
        self.tasks = tasks
        self.module = module

    def __call__(self, *arguments: str, status: int | None = 0) -> Result:
        """Run a command, which must end with this exit status."""
        result = CliRunner().invoke(durable, ["-A", self.module, *arguments], prog_name="umt-durable")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if status is not None:
            assert result.exit_code == status, result.output
        return result

    def lines(self, *arguments: str) -> list[list[str]]:
        """Return the cells of each line that a command prints."""
        return [line.split("\t") for line in self(*arguments).stdout.splitlines()]


@contextmanager
def cli_for(settings: Settings, *, broker: str = NO_BROKER, backend: str = "", **more: str) -> Iterator[Cli]:
    """Return the command line for the tests' app on a database; the app is importable under a name of its own."""
    environ = {
        "CELERY_BROKER_URL": broker,
        "CELERY_RESULT_BACKEND": backend or "disabled://",
        "DURABLE_DATABASE_URL": str(settings.database_url),
        "DURABLE_SCHEMA": settings.schema,
        "DURABLE_EMBEDDED": "0",
        **more,
    }
    tasks = apps.build(environ)
    module: Any = types.ModuleType(f"cli_app_{uuid.uuid4().hex}")
    module.app = tasks.app
    sys.modules[module.__name__] = module
    try:
        yield Cli(tasks, module.__name__)
    finally:
        del sys.modules[module.__name__]
        tasks.durable.stop()
        tasks.app.pool.force_close_all()
        pools.reset()  # type: ignore[no-untyped-call]  # kombu is untyped
        tasks.app.close()


def one_line(result: Result) -> str:
    """Return the one line that a command wrote to stderr."""
    [line] = result.stderr.splitlines()
    assert "Traceback" not in line
    return line


def set_revision(url: str, schema: str, revision: str) -> None:
    """Make a schema say that it is at another revision."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(sql.SQL("UPDATE {}.umt_version SET version_num = %s").format(sql.Identifier(schema)), [revision])
