"""What Flower shows of durable runs.

A parked run is a RETRY in Flower with no configuration, and its events carry where it stands. With

    from umt_durable.bridge.flower import format_task

in `flowerconfig.py` the task page says so in rows of its own. The state stays RETRY: Flower offers its Revoke button,
which cancels the run, for that state only.
"""

from __future__ import annotations

from typing import Any, Final

from umt_durable.states import PARKED

MARK: Final = "durable: "
"""How the result begins in the event of a parked run."""

PARKED_STATE: Final = "RETRY"
ROWS: Final = ("durable_state", "durable_until")


def format_task(task: Any) -> Any:
    """Return Flower's copy of a task with what is known of its run in rows of its own, and nothing stale.

    Shape: a parked run gets `durable_state` and `durable_until`, on the task page and in the data of the list; in place
    of a result and an exception that are none. Later states lose what was said of an earlier wait. Ordinary tasks stay
    as they are.
    """
    result, exception = str(getattr(task, "result", None) or ""), str(getattr(task, "exception", None) or "")
    said = _unquoted(result).removeprefix(MARK)
    is_parked = task.state == PARKED_STATE and said != _unquoted(result)
    if is_parked:
        task.durable_state, _, task.durable_until = said.partition(" ")
        task._fields = (*task._fields, *ROWS)
    if said != _unquoted(result) and not is_parked:
        task.result = None
    if _unquoted(exception).partition(" ")[0] in PARKED:
        task.exception = task.traceback = None
    return task


def _unquoted(text: str) -> str:
    """Return a text without the quotes that an event may have put around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text
