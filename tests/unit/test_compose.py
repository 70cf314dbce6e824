"""docker-compose.yml, checked by the tool where one is installed and by its structure everywhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import skips

PROJECT = Path(__file__).resolve().parents[2]


def compose_command() -> list[str] | None:
    """Return the command of the compose tool, None where there is none."""
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, timeout=60).returncode == 0:
        return [docker, "compose"]
    alone = shutil.which("docker-compose")
    return [alone] if alone else None


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())
    return loaded


def test_the_compose_tool_accepts_the_file() -> None:
    command = compose_command()
    if command is None:
        skips.missing("neither `docker compose` nor docker-compose is installed")

    done = subprocess.run(
        [*command, "-f", "docker-compose.yml", "config", "-q"], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr


def test_every_dependency_is_awaited_by_a_condition_that_can_come_true(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for needed, rule in service.get("depends_on", {}).items():
            assert needed in services, name
            if rule["condition"] == "service_healthy":
                assert "healthcheck" in services[needed], name
            else:
                assert rule["condition"] == "service_completed_successfully"
                assert "restart" not in services[needed], name


def test_only_loopback_ports_are_published(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]

    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_old_compose_tools_can_read_it(compose: dict[str, Any]) -> None:
    assert "name" not in compose
    assert set(compose["services"]) == {"postgres", "rabbitmq", "redis", "migrate", "worker", "flower"}


def test_the_image_holds_everything_the_wheel_is_built_from() -> None:
    ignored = (PROJECT / ".dockerignore").read_text().splitlines()
    copied = {
        word
        for line in (PROJECT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    }

    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}
    assert all((PROJECT / name).exists() for name in copied)
