"""A Celery app whose durable tasks await ordinary ones, of this app and of `tests.support.plain_app`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from celery import Celery, chain, chord

from tests.support import bodylog, gates
from tests.support.apps import _given, log_and_pass
from tests.support.plain_app import QUEUE as PLAIN
from tests.support.queues import QUEUE
from umt_durable import Done, Durable, NotDone, TaskContext, Unknown


@dataclass(frozen=True)
class Awaited:
    """The app and its tasks, built for one environment."""

    app: Celery
    durable: Durable
    label: Any
    careful: Any
    canvas: Any
    double: Any
    fan: Any
    spread: Any
    swapped: Any
    tree: Any
    review: Any


def build(environ: Mapping[str, str] | None = None) -> Awaited:
    """Return an app with all tasks for an environment, that of this process when none is given."""
    environ = os.environ if environ is None else environ
    app = Celery("umt-awaited", broker=environ.get("CELERY_BROKER_URL"), backend=environ.get("CELERY_RESULT_BACKEND"))
    app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
    durable = Durable(app, **_given(environ))

    @app.task(name="own.label", shared=False)
    def own_label(order: str, gate: str = "") -> dict[str, object]:
        bodylog.write(f"label-{order}", "begin")
        gates.pass_through(gate)
        return {"order": order, "pages": [1, 2]}

    @app.task(name="own.boom", shared=False)
    def own_boom(order: str, kind: str = "key") -> None:
        raise KeyError(order)

    return Awaited(app=app, durable=durable, **_durable_tasks(durable))


def _durable_tasks(durable: Durable) -> dict[str, Any]:
    app = durable.app

    @durable.task(name="awaited.label")
    def label(
        ctx: TaskContext,
        task: str,
        order: str,
        more: str = "",
        timeout: float | None = None,
        idempotent: bool | None = None,
        resend: float | None = None,
    ) -> Any:
        """Await one ordinary task; what it raises comes back as text."""
        ctx.step.run("before", log_and_pass, "before", 0)
        queue = PLAIN if task.startswith("plain.") else QUEUE
        try:
            found = ctx.step.task(
                "label",
                app.signature(task, (order, more) if more else (order,), queue=queue),
                timeout=None if timeout is None else timedelta(seconds=timeout),
                idempotent=idempotent,
                resend=None if resend is None else timedelta(seconds=resend),
            )
        except Exception as error:  # noqa: BLE001 - the point: the type comes back as it was raised
            found = f"{type(error).__name__}: {error}"
        ctx.step.run("after", log_and_pass, "after", 0)
        return found

    @durable.task(name="awaited.careful")
    def careful(ctx: TaskContext, order: str, verdict: str) -> Any:
        """Await a task that nobody executes, and know by other means what became of it."""
        verdicts: dict[str, Done[Any] | NotDone | Unknown] = {
            "done": Done({"found": order}),
            "not": NotDone(),
            "unknown": Unknown(),
        }
        return ctx.step.task(
            "label",
            app.signature("plain.label", (order,), queue="umt-nobody"),
            timeout=timedelta(seconds=5),
            reconcile=lambda info: verdicts[verdict],
        )

    @durable.task(name="awaited.canvas")
    def canvas(ctx: TaskContext, kind: str) -> Any:
        made = app.signature("plain.label", ("A",), queue=PLAIN)
        if kind == "chain":
            return ctx.step.task("all", chain(made, app.signature("plain.pages", queue=PLAIN)))
        if kind == "wrong":
            return ctx.step.task("all", chain(made, app.tasks["own.label"].s("B", "C").set(queue=PLAIN)))
        header = [made.clone(), app.signature("plain.label", ("B",), queue=PLAIN)]
        return ctx.step.task("all", chord(header, app.signature("plain.join", queue=PLAIN), app=app))

    return {"label": label, "careful": careful, "canvas": canvas, **_families(durable)}


def _families(durable: Durable) -> dict[str, Any]:
    @durable.task(name="awaited.double")
    def double(ctx: TaskContext, value: int, gate: str = "") -> int:
        return ctx.step.run("only", log_and_pass, "double", value * 2, gate)

    @durable.task(name="awaited.fan")
    def fan(ctx: TaskContext, count: int, gate: str = "") -> int:
        """Double that many numbers in children, and return the sum."""
        found = ctx.step.gather("all", [double.s(value, gate) for value in range(count)])
        return ctx.step.run("sum", log_and_pass, "sum", sum(found))

    @durable.task(name="awaited.spread")
    def spread(ctx: TaskContext, count: int, gate: str = "", concurrency: int | None = None) -> int:
        """Double that many numbers by a map on the workers, and return the sum."""
        pairs = [(value, gate) for value in range(count)]
        found = ctx.step.map("all", of_pair, pairs, key=lambda one: one[0], concurrency=concurrency, workers=True)
        assert found == [2 * value for value in range(count)]
        return ctx.step.run("sum", log_and_pass, "sum", sum(found))

    @durable.task(name="awaited.of-pair")
    def of_pair(ctx: TaskContext, pair: tuple[int, str]) -> int:
        return ctx.step.run("only", log_and_pass, "double", pair[0] * 2, pair[1])

    @durable.task(name="awaited.leaver")
    def leaver(ctx: TaskContext, value: int) -> Any:
        return leaver.replace(double.s(value))

    @durable.task(name="awaited.swapped")
    def swapped(ctx: TaskContext, value: int) -> Any:
        """Await a child that another task takes the place of."""
        return ctx.step.call("one", leaver, value)

    @durable.task(name="awaited.held")
    def held(ctx: TaskContext, name: str) -> Any:
        return ctx.step.wait_for_fact("go").payload

    @durable.task(name="awaited.tree")
    def tree(ctx: TaskContext, gate: str = "") -> int:
        """Have children of each kind: one that is abandoned, one that ends with this run, awaited ones and theirs."""
        ctx.step.spawn("abandoned", held, "abandoned")
        ctx.step.spawn("bound", held, "bound", on_parent_end="cancel")
        return sum(ctx.step.gather("all", [fan.s(2, gate), fan.s(2, gate)]))

    @durable.task(name="awaited.review")
    def review(ctx: TaskContext, path: str) -> Any:
        """Begin a step, and write its token to a file each time it is handed out."""

        def hand_out(token: str) -> None:
            with Path(path).open("a") as file:
                file.write(f"{token}\n")

        found = ctx.step.begin("review", type=dict[str, int], on_created=hand_out, timeout=timedelta(hours=1))
        return ctx.step.run("after", log_and_pass, "after", found["limit"])

    return {"review": review, "double": double, "fan": fan, "spread": spread, "swapped": swapped, "tree": tree}


def __getattr__(name: str) -> Any:
    # Built when asked for: the tests import this module in processes that have no broker and no database.
    if name in ("app", "durable"):
        tasks = build()
        globals().update(app=tasks.app, durable=tasks.durable)
        return globals()[name]
    raise AttributeError(name)
