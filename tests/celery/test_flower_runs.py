"""What Flower 2.2 shows of durable runs, and what its buttons do to them, with a real Flower and a real worker.

The pages are read as their HTML and JSON; the buttons are the requests that they send.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from celery.exceptions import TaskRevokedError

from tests.celery.signalling import APP
from tests.support import skips
from tests.support.apps import Tasks
from tests.support.brokers import Broker
from tests.support.gates import Gates
from tests.support.ports import free_port
from tests.support.wait import until
from tests.support.workers import Running, Worker
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

only_redis = pytest.mark.parametrize("broker", ["redis"], indirect=True)


class Flower:
    """A Flower process, through its pages and its JSON API."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._session = requests.Session()

    def info(self, run: str) -> dict[str, Any]:
        """Return what the API says of a task; nothing while it knows none."""
        answer = self._session.get(f"{self._address}/api/task/info/{run}", timeout=20)
        return answer.json() if answer.ok else {}

    def page(self, run: str) -> str:
        """Return the HTML of the page of a task."""
        answer = self._session.get(f"{self._address}/task/{run}", timeout=20)
        return answer.text if answer.ok else ""

    def row(self, run: str) -> dict[str, Any]:
        """Return the row of a task in the data of the list."""
        query: dict[str, str | int] = {
            "draw": 1,
            "start": 0,
            "length": 100,
            "order[0][column]": 0,
            "columns[0][data]": "name",
        }
        rows = self._session.get(f"{self._address}/tasks/datatable", params=query, timeout=20).json()["data"]
        found: dict[str, Any] = next(row for row in rows if row["uuid"] == run)
        return found

    def press(self, button: str, run: str) -> str:
        """Press Revoke or Terminate on the page of a task and return what Flower says."""
        query = {"terminate": "true"} if button == "Terminate" else {}
        answer = self._session.post(f"{self._address}/api/task/revoke/{run}", params=query, timeout=20)
        answer.raise_for_status()
        message: str = answer.json()["message"]
        return message

    def wait_for(self, run: str, state: str) -> None:
        """Return once Flower shows a task in a state."""
        until(lambda: self.info(run).get("state") == state, timeout=30, what=f"Flower to show {state}")

    def seen(self, browser: str, path: str, folder: Path) -> str:
        """Return a page as a headless browser shows it, its scripts run."""
        argv = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        argv += [f"--user-data-dir={folder}", "--virtual-time-budget=10000", "--dump-dom", f"{self._address}{path}"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=True)
        return " ".join(done.stdout.split())

    def close(self) -> None:
        """Close the client's connections."""
        self._session.close()


@pytest.fixture(params=["the app", "the broker alone"])
def flower(request: pytest.FixtureRequest, worker_env: dict[str, str], broker: Broker) -> Iterator[Flower]:
    """Return a Flower that loads the app, and then one that knows the broker only, as in a container of its own."""
    port = free_port()
    source = ["-A", APP] if request.param == "the app" else [f"--broker={broker.url}"]
    config = Path(__file__).with_name("flowerconfig.py")
    argv = [sys.executable, "-m", "celery", *source, "flower", "--address=127.0.0.1", f"--port={port}"]
    environment = {**worker_env, "FLOWER_UNAUTHENTICATED_API": "true"}
    if request.param != "the app":
        environment = {key: value for key, value in environment.items() if not key.startswith("DURABLE_")}
    process = Running(
        [*argv, f"--conf={config}"], env=environment, name="flower", ready="Connected to", ready_timeout=60
    )
    with process.start():
        flower = Flower(f"http://127.0.0.1:{port}")
        yield flower
        flower.close()


@only_redis
def test_flower_shows_where_a_run_stands_and_its_buttons_cancel_it(
    flower: Flower,
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    gates: Gates,
) -> None:
    start_worker(concurrency=2, app=APP, options=["--task-events"])
    sleeping, napping = tasks.sleeper.delay(seconds=300), tasks.sleeper.delay(seconds=4, value=7)
    waiting = tasks.waiter.delay("approved")
    wait_for_state([sleeping.id, napping.id], RunState.SLEEPING)
    wait_for_state(waiting.id, RunState.WAITING)

    for parked in (sleeping, waiting):
        flower.wait_for(parked.id, "RETRY")
    assert flower.info(sleeping.id)["result"].strip("'").startswith("durable: sleeping sleep nap")
    page = " ".join(flower.page(sleeping.id).split())
    assert 'id="task-revoke"' in page
    assert "<dd> sleeping </dd>" in page
    assert "sleep nap for 0:05:00" in page
    assert flower.row(waiting.id)["durable_state"] == "waiting"
    assert flower.row(waiting.id)["state"] == "RETRY"

    assert flower.press("Revoke", sleeping.id) == f"Revoked '{sleeping.id}'"
    wait_for_state(sleeping.id, RunState.CANCELLED)
    flower.wait_for(sleeping.id, "REVOKED")
    with pytest.raises(TaskRevokedError):
        sleeping.get(timeout=30)

    gates.close("inside")
    running = tasks.ten_steps.delay(gate_step=2, gate="inside")
    gates.wait("inside")
    flower.wait_for(running.id, "STARTED")
    assert 'id="task-terminate"' in flower.page(running.id)
    flower.press("Terminate", running.id)
    wait_for_state(running.id, RunState.CANCELLED)
    flower.wait_for(running.id, "REVOKED")

    assert napping.get(timeout=60) == 7
    flower.wait_for(napping.id, "SUCCESS")
    assert "durable_state" not in flower.row(napping.id)
    assert "sleep nap" not in flower.page(napping.id)


@only_redis
@pytest.mark.parametrize("flower", ["the app"], indirect=True)
def test_a_browser_shows_where_a_run_stands(
    flower: Flower,
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    tmp_path: Path,
) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        skips.missing("no Chromium to look at Flower's pages with")
    start_worker(concurrency=1, app=APP, options=["--task-events"])
    sleeping = tasks.sleeper.delay(seconds=300)
    wait_for_state(sleeping.id, RunState.SLEEPING)
    flower.wait_for(sleeping.id, "RETRY")

    page = flower.seen(browser, f"/task/{sleeping.id}", tmp_path / "profile")
    listed = flower.seen(browser, "/tasks", tmp_path / "profile")

    assert "sleep nap for 0:05:00" in page
    assert ">Revoke</button>" in page
    assert sleeping.id in listed
    assert ">RETRY<" in listed
