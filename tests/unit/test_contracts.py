"""The import contracts: there, over modules that exist, and part of `dev.py lint`, which runs them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def contracts() -> dict[str, dict[str, Any]]:
    """Return the contracts of pyproject.toml by their id."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    assert config["root_packages"] == ["umt_durable"]
    assert config["include_external_packages"]
    return {contract["id"]: contract for contract in config["contracts"]}


def test_b1_every_import_contract_is_there_and_is_checked() -> None:
    found = contracts()

    assert {name: contract["type"] for name, contract in found.items()} == {
        "layers": "layers",
        "celery": "forbidden",
        "sqlalchemy": "forbidden",
        "django": "forbidden",
    }
    assert {"celery", "kombu"} <= set(found["celery"]["forbidden_modules"])
    assert {"sqlalchemy", "alembic"} <= set(found["sqlalchemy"]["forbidden_modules"])
    assert set(found["django"]["forbidden_modules"]) == {"django"}
    assert 'program("lint-imports")' in (ROOT / "dev.py").read_text(encoding="utf-8")


def test_b1_the_layers_hold_every_module_of_the_package_once() -> None:
    package = ROOT / "umt_durable"
    real = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    named = re.findall(r"umt_durable\.(\w+)", " ".join(contracts()["layers"]["layers"]))

    assert len(named) == len(set(named))
    assert real - {"__init__", "__main__"} - set(named) == set()


def test_b1_only_the_bridge_and_what_stands_on_it_may_know_celery() -> None:
    allowed = {rule.split(" -> ")[0].split(".")[1] for rule in contracts()["celery"]["ignore_imports"]}

    assert allowed == {"bridge", "testing", "web", "contrib"}
