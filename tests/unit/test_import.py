"""`import umt_durable` starts nothing and loads nothing heavy; every public name is there when it is asked for."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import umt_durable

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "celery",
    "kombu",
    "billiard",
    "amqp",
    "redis",
    "pydantic",
    "psycopg",
    "psycopg_pool",
    "sqlalchemy",
    "alembic",
    "django",
    "rich",
)


def loaded_by(statement: str) -> set[str]:
    """Return which heavy modules a fresh interpreter has after a statement."""
    program = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import umt_durable; dir(umt_durable); umt_durable.__all__") == set()


def test_the_module_that_celery_loads_for_every_command_loads_nothing_heavy() -> None:
    assert loaded_by("import umt_durable.bridge.cli") == set()


def test_an_error_class_costs_no_driver_and_no_celery() -> None:
    assert loaded_by("from umt_durable import DurableError, RunState, Settings, RetryPolicy") == set()


def test_an_unknown_name_is_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'umt_durable' has no attribute 'nonsense'"):
        _ = umt_durable.nonsense
    with pytest.raises(ImportError):
        importlib.import_module("umt_durable.nonsense")


@pytest.mark.parametrize("name", [name for name in umt_durable.__all__ if name not in ("app", "durable")])
def test_every_public_name_is_found(name: str) -> None:
    value = getattr(umt_durable, name)

    assert value.__name__ == name
    assert name in dir(umt_durable)


def test_b1_the_public_names_are_sorted_and_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((ROOT / "umt_durable" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names}

    assert umt_durable.__all__ == sorted(set(umt_durable.__all__))
    assert set(umt_durable.__all__) == seen


def test_the_version_is_that_of_the_installed_package() -> None:
    assert umt_durable.__version__.count(".") == 2
