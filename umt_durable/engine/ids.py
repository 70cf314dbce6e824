"""Ids that are derived from a run: the same whoever computes them, and however often."""

from __future__ import annotations

import json
import uuid
from typing import Final

NAMESPACE: Final = uuid.UUID("0e0c4c0e-54a4-5a6e-9a0e-3d3b5f3f6a51")
"""The namespace of every id derived from a run; it never changes."""


def among_runs(key: str, *, generation: int, nesting: int = 0) -> str:
    """Return a text that stands for a step in one generation of a run, and of the runs of one id in that nesting.

    No key of a step is written like what it adds; the first generation and the first run add nothing.
    """
    again = f"\\^{generation}" if generation else ""
    nested = f"\\@{nesting}" if nesting else ""
    return f"{key}{again}{nested}"


def op_idempotency_key(namespace: str, op_key: str) -> str:
    """Return the key that a provider gets for an effect: the same for all attempts and all runs."""
    return str(uuid.uuid5(NAMESPACE, json.dumps(["op", namespace, op_key])))
