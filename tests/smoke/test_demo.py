"""The demo as a user starts it: its last line, its exit status, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
OF_ANOTHER_APP = {
    "DURABLE_SCHEMA": "foo",
    "DURABLE_LEASE_SECONDS": "600",
    "DURABLE_WORKER_SERVICES": "0",
    "CELERY_BROKER_URL": "redis://127.0.0.1:1/0",
    "CELERY_BROKER_WRITE_URL": "redis://127.0.0.1:1/0",
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a new user with an empty HOME, and of one whose shell is set up for an app of their own."""
    kept = {name: value for name, value in os.environ.items() if not re.match("DURABLE_|CELERY_|SHOP_|COVERAGE_", name)}
    home = tmp_path / "home"
    home.mkdir()
    return {**kept, **OF_ANOTHER_APP, "HOME": str(home), "TMPDIR": str(tmp_path)}


def start(environ: dict[str, str], *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.orders.demo", *options]
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )


def runs(process: psutil.Process) -> bool:
    """Say whether a process still does anything; where process 1 reaps no orphans, dead ones stay as zombies."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def processes_in(folder: Path) -> list[psutil.Process]:
    """Find what still works in a folder or was started with a path of it."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.cwd() or any(str(folder) in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_demo_ends_with_every_zero_at_zero_and_leaves_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    demo = start(environ, "--orders", "40", "--seed", "7")
    output, errors = demo.communicate(timeout=180)

    lines = output.splitlines()
    assert demo.returncode == 0, f"{output}\n{errors}"
    found = json.loads(lines[-1])
    assert (found["command"], found["runs"], found["succeeded"] + found["refused"]) == ("demo", 40, 40)
    assert found["refused"] > 0
    assert found["kills"] >= 8
    zeros = ("completed_steps_reexecuted", "charged_twice", "booked_twice", "lost")
    assert [found[name] for name in zeros] == [0, 0, 0, 0]
    assert sum("the broker is back, empty" in line for line in lines) == 1
    assert list(tmp_path.glob("umt-demo-*")) == []
    assert processes_in(tmp_path) == []


def test_an_interrupted_demo_stops_all_it_started(environ: dict[str, str], tmp_path: Path) -> None:
    demo = start(environ, "--orders", "40")
    assert demo.stdout is not None

    def until_first_kill() -> Iterator[str]:
        assert demo.stdout is not None
        for line in demo.stdout:
            yield line
            if line.startswith("kill -9"):
                return

    seen = list(until_first_kill())
    family = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=60)

    assert demo.returncode == 130, f"{''.join(seen)}\n{errors}"
    assert len(family) >= 5
    assert [process for process in family if runs(process)] == []
    assert list(tmp_path.glob("umt-demo-*")) == []
    assert processes_in(tmp_path) == []
