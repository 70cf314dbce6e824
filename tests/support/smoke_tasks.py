"""Tasks of pytest-celery's workers: durable ones of every app that has a `Durable`, and one that is not."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task

from tests.support import bodylog
from tests.support.apps import log_and_pass
from umt_durable import DurableTask, current_context


@shared_task(name="smoke.steps", base=DurableTask)
def steps(count: int, gate_step: int = 0, gate: str = "") -> list[int]:
    """Execute some steps, one of which may stop at a gate."""
    ctx = current_context()
    return [
        ctx.step.run(f"step-{n}", log_and_pass, f"step-{n}", n, gate if n == gate_step else "")
        for n in range(1, count + 1)
    ]


@shared_task(name="smoke.nap", base=DurableTask)
def nap(seconds: float) -> int:
    """Be parked once."""
    ctx = current_context()
    ctx.step.run("before", log_and_pass, "before", 0)
    ctx.step.sleep("nap", timedelta(seconds=seconds))
    return ctx.step.run("after", log_and_pass, "after", 1)


@shared_task(name="smoke.ordinary")
def ordinary(value: int) -> int:
    """Be an ordinary task beside them."""
    bodylog.write("ordinary", "begin")
    return value + 1
