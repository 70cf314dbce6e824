"""A pytest plug-in that keeps one part of the selected tests: every n-th, so that slow neighbours are spread."""

from __future__ import annotations

import os
from typing import Final

import pytest

VARIABLE: Final = "CELERY_SUITE_PART"
"""Shape: `0/4` is the first of four parts."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other parts."""
    number, parts = map(int, os.environ.get(VARIABLE, "0/1").split("/"))
    others = [item for place, item in enumerate(items) if place % parts != number]
    if others:
        items[:] = items[number::parts]
        config.hook.pytest_deselected(items=others)
