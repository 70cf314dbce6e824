"""`python -m tests.support.program` is `celery` without its shell and the commands that other packages add to it.

Celery imports all of these at each start, Flower with a web server among them: a fifth of what the start of a worker
costs. That the commands are there is tested where `celery` itself is started.
"""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any


def leave_commands_out() -> None:
    """Have Celery find no commands of other packages when it is imported."""
    own = importlib.metadata.entry_points

    def without_commands(**chosen: Any) -> Any:
        return () if chosen.get("group") == "celery.commands" else own(**chosen)

    importlib.metadata.entry_points = without_commands
    shell = sys.modules["click_repl"] = ModuleType("click_repl")
    shell.register_repl = lambda group: None  # type: ignore[attr-defined]


def main() -> None:
    """Be `celery`, which asks for the commands when it is imported."""
    leave_commands_out()
    from celery.__main__ import main as celery

    celery()


if __name__ == "__main__":
    main()
