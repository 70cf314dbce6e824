"""Skipping what this machine cannot run: counted with its reason, and a failure where CI=true."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def in_ci() -> bool:
    """Return whether a missing service is a failure."""
    return os.environ.get("CI", "").lower() == "true"


def missing(reason: str) -> NoReturn:
    """Skip the test with a reason that the summary counts; in CI fail it instead."""
    if in_ci():
        pytest.fail(f"CI=true, so nothing is skipped: {reason}", pytrace=False)
    pytest.skip(reason)
