"""pytest-celery's containers for this project: a worker of its own image, and the Postgres beside it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import docker
import psycopg
from pytest_celery import CeleryTestContainer, CeleryWorkerContainer

from tests.support import guard
from tests.support.wait import until

SUITE, SHARED = "/suite", "/shared"
"""Where a worker's container has the modules of the tests, and the folder of gates and body log."""
IMAGE: Final = "umt-durable:tests"
POSTGRES_IMAGE: Final = "postgres:17"
POSTGRES_ENV: Final = {"POSTGRES_USER": "durable", "POSTGRES_PASSWORD": "durable", "POSTGRES_DB": "durable"}
POSTGRES_PORT: Final = "5432/tcp"


def no_engine() -> str | None:
    """Say why no Docker engine can be used; None where one answers."""
    with warnings.catch_warnings():
        # The client leaves the socket open on which nobody answered.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            docker.from_env(timeout=10).close()
            reason = None
        except docker.errors.DockerException as error:
            reason = f"no Docker engine answers: {str(error)[:200]}"
        gc.collect()
    return reason


class PostgresContainer(CeleryTestContainer):
    """The database of the runs of one test."""

    def ready(self) -> bool:
        """Return once it takes connections from this machine; while it initialises it takes none."""

        def answers() -> bool:
            try:
                psycopg.connect(self.host_url, connect_timeout=2).close()
            except psycopg.OperationalError:
                return False
            return True

        return until(answers, timeout=60, what="Postgres in a container")

    @property
    def url(self) -> str:
        """Return its URL for other containers of its network."""
        return f"postgresql://durable:durable@{self.attrs['Config']['Hostname']}:5432/durable"

    @property
    def host_url(self) -> str:
        """Return its URL for this machine."""
        return f"postgresql://durable:durable@127.0.0.1:{self._wait_port(POSTGRES_PORT)}/durable"


class DurableWorkerContainer(CeleryWorkerContainer):
    """A worker in the image that the project's Dockerfile makes.

    Shape: beside what the plug-in asks of a container it has what the nodes on processes have.
    """

    @property
    def pid(self) -> int:
        """Return the id of the main process, as the container numbers it."""
        return 1

    def wait(self) -> int:
        """Return the exit status once the main process has ended."""
        status = self._container.wait(timeout=60)["StatusCode"]
        self.reload()
        return int(status)

    def kill_child(self, pid: int) -> None:
        """Kill one process of the pool with SIGKILL."""
        code, said = self.exec_run(["python", "-c", f"import os; os.kill({pid}, 9)"])
        assert code == 0, said


def named(name: str) -> type[DurableWorkerContainer]:
    """Return the class of a worker with a name of its own; the plug-in asks the class for it."""
    return type("NamedWorkerContainer", (DurableWorkerContainer,), {"worker_name": classmethod(lambda cls: name)})


def worker_options(
    kind: type[DurableWorkerContainer], *, env: Mapping[str, str], network: str, content: str, shared: Path
) -> dict[str, Any]:
    """Return what to run a worker's container with: the arguments of `docker.containers.run` but for the image.

    Shape: `content` is the volume that the plug-in fills with the worker's app, `shared` the folder of gates and body
    log, which the user of the image must be able to write to.
    """
    command: Sequence[str] = kind.command("--concurrency=2", "--without-mingle")
    return {
        "command": list(command),
        "detach": True,
        "environment": dict(env),
        "network": network,
        "volumes": {
            content: {"bind": "/app", "mode": "rw"},
            str(guard.ROOT / "tests"): {"bind": f"{SUITE}/tests", "mode": "ro"},
            str(shared): {"bind": SHARED, "mode": "rw"},
        },
    }
