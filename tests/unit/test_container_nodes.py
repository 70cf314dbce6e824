"""What of pytest-celery's containers can be looked at without a Docker engine: that all of it fits together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docker.models.containers import _create_container_args
from pytest_celery import CeleryTestWorker

from tests.support import container_nodes, guard
from tests.support.container_nodes import DurableWorkerContainer

CONTAINERS = guard.ROOT / "tests" / "smoke" / "containers"


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_each_smoke_test_finds_its_nodes_as_containers_of_the_plug_in(broker: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-k", broker, "--setup-plan", str(CONTAINERS)],
        cwd=guard.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout
    tests = {line.split("::")[1].split("[")[0] for line in done.stdout.splitlines() if "::test_" in line}
    assert len(tests) == 4
    for fixture in ("docker_client", "product_image", "worker_image", "default_redis_backend", "celery_setup"):
        assert fixture in done.stdout, fixture


def test_a_worker_runs_under_its_name_with_the_modules_and_the_folder_of_its_test(tmp_path: Path) -> None:
    kind = container_nodes.named("second")
    options = container_nodes.worker_options(kind, env={"A": "1"}, network="net", content="volume", shared=tmp_path)

    given = _create_container_args({**options, "image": "umt-durable:tests", "version": "1.43"})

    assert given["command"][:4] == ["celery", "-A", "app", "worker"]
    assert "second@%h" in given["command"]
    assert f"{tmp_path}:/shared:rw" in given["host_config"]["Binds"]
    assert f"{guard.ROOT / 'tests'}:/suite/tests:ro" in given["host_config"]["Binds"]
    assert given["host_config"]["NetworkMode"] == "net"
    assert issubclass(kind, DurableWorkerContainer)
    assert CeleryTestWorker(kind.__new__(kind), None).worker_name == "second"


def test_the_worker_s_image_is_the_product_s_and_runs_as_its_user() -> None:
    product = (guard.ROOT / "Dockerfile").read_text().splitlines()
    tests = (CONTAINERS / "Dockerfile").read_text().splitlines()

    assert "FROM ${BASE}" in tests
    user = [line for line in product if line.startswith("USER ")][-1]
    assert [line for line in tests if line.startswith("USER ")][-1] == user
    assert "WORKDIR /app" in product  # where the plug-in mounts the worker's app
