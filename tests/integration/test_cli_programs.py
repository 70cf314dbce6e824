"""The commands as programs: `umt-durable`, `celery -A proj durable`, on a terminal and off it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import apps, guard
from umt_durable.settings import Settings

pytestmark = pytest.mark.private_postgres_only

BIN = Path(sys.executable).parent
APP = "tests.support.apps:app"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environ(settings: Settings) -> dict[str, str]:
    return guard.clean_environment(
        {
            "DURABLE_DATABASE_URL": str(settings.database_url),
            "DURABLE_SCHEMA": settings.schema,
            "DURABLE_EMBEDDED": "0",
            "CELERY_BROKER_URL": "redis://127.0.0.1:1/0",
        }
    )


@pytest.fixture
def run(environ: dict[str, str], tmp_path: Path) -> Run:
    def call(program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / program), *arguments],
            env={**environ, **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call


def enqueue(environ: dict[str, str]) -> str:
    tasks = apps.build(environ)
    try:
        return str(tasks.one_step.enqueue(1).id)
    finally:
        tasks.durable.stop()
        tasks.app.close()


def test_the_app_is_named_by_an_option_by_either_variable_or_by_celery(run: Run, environ: dict[str, str]) -> None:
    enqueue(environ)

    told = [
        run("umt-durable", "-A", APP, "status"),
        run("umt-durable", "status", DURABLE_APP=APP),
        run("umt-durable", "status", CELERY_APP=APP),
        run("celery", "-A", APP, "durable", "status"),
        run("celery", "durable", "-A", APP, "status"),
        run("umt-durable", "-A", APP, "status", DURABLE_APP="nonsense", CELERY_APP="nonsense"),
    ]

    assert {(each.returncode, each.stderr) for each in told} == {(0, "")}
    assert all("runs\tready\t1\n" in each.stdout for each in told)


def test_without_a_name_the_librarys_own_app_looks_into_the_configured_database(
    run: Run, environ: dict[str, str]
) -> None:
    enqueue(environ)

    told = run("celery", "durable", "status")

    assert "runs\tready\t1\n" in told.stdout


def test_commands_that_only_read_need_no_broker(run: Run, environ: dict[str, str]) -> None:
    del environ["CELERY_BROKER_URL"]

    assert run("umt-durable", "status").returncode == 0
    refused = run("umt-durable", "serve", "--role", "relay")
    assert refused.returncode == 1
    assert "a database is configured but no broker: set CELERY_BROKER_URL" in refused.stderr


def test_an_app_that_is_none_is_told_in_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("from celery import Celery\napp = Celery('plain')\n")
    (tmp_path / "broken.py").write_text("import os\n\nos.environ['NO SUCH VARIABLE']\n")

    plain, broken = run("umt-durable", "-A", "plain", "status"), run("umt-durable", "-A", "broken", "status")
    missing = run("umt-durable", "-A", "nonsense", "status")

    assert (plain.returncode, broken.returncode, missing.returncode) == (1, 1, 2)
    assert "has no Durable: write `durable = Durable(app)`" in plain.stderr
    assert "'broken' cannot be loaded: KeyError: 'NO SUCH VARIABLE'" in broken.stderr
    assert "broken.py:3)" in broken.stderr
    assert "there is no module 'nonsense'" in missing.stderr
    assert "Traceback" not in plain.stderr + broken.stderr + missing.stderr


def test_celery_shows_the_group_under_its_name_and_the_program_its_commands(run: Run) -> None:
    through_celery, alone = run("celery", "--help").stdout, run("umt-durable", "--help").stdout

    assert "durable  Runs, schema and services of durable tasks." in through_celery
    for command in ("migrate", "status", "runs", "show", "signal", "cancel", "serve", "dev", "down", "doctor"):
        assert f"\n  {command} " in alone
    assert run("umt-durable", "--version").stdout.startswith("umt-durable ")


def test_output_is_a_table_on_a_terminal_and_plain_off_it(run: Run, environ: dict[str, str], tmp_path: Path) -> None:
    run_id = enqueue(environ)
    output = bytearray()
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [str(BIN / "umt-durable"), "-A", APP, "runs"],
        env={**environ, "TERM": "xterm", "COLUMNS": "200"},
        cwd=tmp_path,
        stdout=theirs,
        stderr=theirs,
    ):
        os.close(theirs)
        # Linux ends a terminal whose other side is closed with an error, not with an empty read.
        try:
            while data := os.read(ours, 4096):
                output += data
        except OSError:
            pass
        os.close(ours)

    shown = output.decode()
    assert "\x1b[" in shown
    assert "created" in shown
    assert run_id in shown
    plain = run("umt-durable", "-A", APP, "runs").stdout
    assert "\x1b[" not in plain
    assert "created" not in plain
    assert json.loads(run("umt-durable", "-A", APP, "runs", "--json").stdout)["runs"][0]["id"] == run_id
