"""The tasks of `tests.support.apps`, and those that come to the points which they do not pass.

`celery -A tests.crash.app:app worker` runs them; a test process builds the same for its own environment with `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tests.support import apps, bodylog
from tests.support.apps import log_and_pass
from umt_durable import FactAddress, TaskContext, current_context

ROUTED = "tests.happened"
"""The type of the event that a run of `tests.one_step` comes of."""


@dataclass(frozen=True)
class More:
    """The tasks of this module."""

    parent: Any
    awaiter: Any
    announcer: Any
    drifter: Any
    undoer: Any


def build(environ: Mapping[str, str] | None = None) -> tuple[apps.Tasks, More]:
    """Return both sets of tasks on one app, for an environment, that of this process when none is given."""
    tasks = apps.build(environ)
    durable = tasks.durable

    @durable.task(name="tests.parent", version=1)
    def parent(ctx: TaskContext, value: int) -> list[int]:
        ctx.step.run("before", log_and_pass, "before", 0)
        return [ctx.step.call("first", tasks.one_step, value), ctx.step.call("second", tasks.one_step, value + 1)]

    @durable.task(name="tests.awaiter", version=1)
    def awaiter(ctx: TaskContext, value: int) -> int:
        ctx.step.run("before", log_and_pass, "before", 0)
        total: int = ctx.step.task("add", tasks.add.s(value, 1), timeout=timedelta(hours=1), idempotent=True)
        return total

    @durable.task(name="tests.announcer", version=1)
    def announcer(ctx: TaskContext) -> int:
        def announce(address: FactAddress) -> None:
            bodylog.write("announce", "begin", run=address.run_id)

        return int(ctx.step.wait_for_fact("go", on_created=announce).payload)

    @durable.task(name="tests.drifter", version=1)
    def drifter(ctx: TaskContext) -> None:
        """Ask for another step at its second pass, as code does that was changed under it."""
        passes = bodylog.BodyLog.from_environment().count(current_context().run_id, "pass")
        bodylog.write("pass", "begin", run=ctx.run_id)
        ctx.step.run("old" if passes == 0 else "new", log_and_pass, "old", passes)
        ctx.step.sleep("nap", timedelta(seconds=2.5))
        ctx.step.run("old", log_and_pass, "old", passes)

    @durable.task(name="tests.undoer", version=1)
    def undoer(ctx: TaskContext, gate: str) -> None:
        ctx.step.options(undo=apps.unpick).run("pick", log_and_pass, "pick", 1)
        ctx.step.run("hold", log_and_pass, "hold", 2, gate)
        ctx.step.run("never", log_and_pass, "never", 3)

    durable.outbox.route(ROUTED, tasks.one_step, unpack=True)
    return tasks, More(parent, awaiter, announcer, drifter, undoer)


def __getattr__(name: str) -> Any:
    # Built when asked for: the tests import this module in processes that have no broker and no database.
    if name in ("app", "durable"):
        tasks, _ = build()
        globals().update(app=tasks.app, durable=tasks.durable)
        return globals()[name]
    raise AttributeError(name)
