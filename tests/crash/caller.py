"""A process of an application that asks something of a run and ends: `python -m tests.crash.caller VERB [RUN]`."""

from __future__ import annotations

import sys

from tests.crash.app import build

KEY = "the one"
"""The idempotency key of the start, and what the signal is deduplicated by."""


def ask(verb: str, run_id: str = "") -> str:
    """Start a run, or say the fact `go` to one, or cancel one; return the id of the run. Asked again it is the same."""
    tasks, _ = build()
    try:
        match verb:
            case "enqueue":
                return str(tasks.one_step.enqueue(4, idempotency_key=KEY).id)
            case "signal":
                tasks.durable.signal(run_id, "go", 5, dedupe=KEY)
            case "cancel":
                tasks.durable.cancel(run_id)
        return run_id
    finally:
        tasks.durable.stop()
        tasks.app.close()


if __name__ == "__main__":
    print(ask(*sys.argv[1:]))
