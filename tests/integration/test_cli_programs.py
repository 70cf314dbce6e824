"""The commands as programs: `umt-durable`, `celery -A proj durable`, on a terminal and off it."""

from __future__ import annotations

import json
import os
import pty
import re
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


def on_terminal(environ: dict[str, str], folder: Path, columns: int, *arguments: str) -> str:
    """Return what `umt-durable` shows on a terminal of so many columns."""
    output = bytearray()
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [str(BIN / "umt-durable"), *arguments],
        env={**environ, "TERM": "xterm", "COLUMNS": str(columns)},
        cwd=folder,
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
    return output.decode()


def test_the_app_is_named_by_an_option_by_either_variable_or_by_celery(run: Run, environ: dict[str, str]) -> None:
    enqueue(environ)

    told = [
        run("umt-durable", "-A", APP, "status"),
        run("umt-durable", "status", DURABLE_APP=APP),
        run("umt-durable", "status", CELERY_APP=APP),
        run("celery", "-A", APP, "durable", "status"),
        run("celery", "durable", "-A", APP, "status"),
        run("umt-durable", "-A", APP, "status", DURABLE_APP="nonsense", CELERY_APP="nonsense"),
        run("umt-durable", "status", "-A", APP),
        run("umt-durable", "status", f"--app={APP}"),
        run("celery", "durable", "status", "-A", APP),
    ]

    assert {(each.returncode, each.stderr) for each in told} == {(0, "")}
    assert all("runs\tready\t1\n" in each.stdout for each in told)


def test_without_a_name_the_librarys_own_app_looks_into_the_configured_database(
    run: Run, environ: dict[str, str]
) -> None:
    enqueue(environ)

    told = run("celery", "durable", "status")

    assert "runs\tready\t1\n" in told.stdout


def test_whoever_forgets_to_name_his_app_is_told_beside_the_output(run: Run, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "celery.py").write_text("from celery import Celery\n\napp = Celery('shop')\n")

    told, asked = run("umt-durable", "status", "--json"), run("umt-durable", "doctor", "--json")

    assert "runs" in json.loads(told.stdout)
    assert told.stderr == (
        "without -A this is the package's own app, and not the one in shop; to use that, write: umt-durable -A shop …\n"
    )
    assert {each["check"]: each["level"] for each in json.loads(asked.stdout)["findings"]}["app"] == "warn"
    assert run("umt-durable", "status", "-A", APP).stderr == ""


@pytest.mark.parametrize(
    ("program", "ours", "name"),
    [
        (["umt-durable", "-A", APP], f"umt-durable -A {APP}", APP),
        (["umt-durable", "doctor", "-A", APP], f"umt-durable -A {APP}", APP),
        (["celery", "-A", APP, "durable"], f"celery -A {APP} durable", APP),
        (["umt-durable"], "umt-durable", "MODULE"),
    ],
    ids=["umt-durable", "after", "celery", "unnamed"],
)
def test_each_fix_names_the_app_as_the_command_line_did(run: Run, program: list[str], ours: str, name: str) -> None:
    command = program if "doctor" in program else [*program, "doctor"]

    unstaffed = run(*command, "--json")
    split = run(*command, "--json", DURABLE_WORKER_SERVICES="0")
    unmigrated = run(*command, "--json", DURABLE_SCHEMA="elsewhere")
    refused = run(*[part.replace("doctor", "status") for part in command], DURABLE_SCHEMA="elsewhere")

    assert f"`celery -A {name} worker`" in unstaffed.stdout
    assert f"`{ours} serve --role relay`" in split.stdout
    assert f"`{ours} migrate`" in unmigrated.stdout
    assert f"`{ours} migrate`" in refused.stderr


def test_runs_are_readable_on_a_terminal_of_80_columns(environ: dict[str, str], tmp_path: Path) -> None:
    run_id = enqueue(environ)

    lines = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(environ, tmp_path, 80, "-A", APP, "runs")).splitlines()

    assert all(len(line.rstrip()) <= 80 for line in lines)
    [row] = [place for place, line in enumerate(lines) if "tests.one_step@1" in line]
    assert "ready" in lines[row]
    assert run_id in lines[row + 1]
    assert len(lines) == row + 2


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

    shown = on_terminal(environ, tmp_path, 200, "-A", APP, "runs")

    assert "\x1b[" in shown
    assert "created" in shown
    assert run_id in shown
    plain = run("umt-durable", "-A", APP, "runs").stdout
    assert "\x1b[" not in plain
    assert "created" not in plain
    assert json.loads(run("umt-durable", "-A", APP, "runs", "--json").stdout)["runs"][0]["id"] == run_id
