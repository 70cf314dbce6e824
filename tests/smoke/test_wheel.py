from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, timeout=120)
    [built] = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_carries_statements_migrations_and_types(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    statements = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / "umt_durable" / "sql").glob("*.sql")}
    migrations = {
        (Path("umt_durable/_migrations") / path.relative_to(PROJECT / "migrations")).as_posix()
        for path in (PROJECT / "migrations").rglob("*.py")
    }

    assert statements
    assert migrations
    assert statements | migrations | {"umt_durable/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_carries_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist()} == {"umt_durable", "umt_durable-0.1.0.dist-info"}


def test_the_command_line_is_reached_as_its_own_command_and_through_celery(wheel: zipfile.ZipFile) -> None:
    entry_points = wheel.read("umt_durable-0.1.0.dist-info/entry_points.txt").decode()

    assert "[console_scripts]\numt-durable = umt_durable.bridge.cli:main" in entry_points
    assert "[celery.commands]\ndurable = umt_durable.bridge.cli:durable" in entry_points
