"""`durable versions`: which versions runs still need, and which live workers have."""

from __future__ import annotations

from typing import Any

import click

from umt_durable.bridge.cli_runs import all_option, checked
from umt_durable.bridge.console import Section, emit, json_option, say
from umt_durable.bridge.durable import Durable
from umt_durable.engine.client import hidden
from umt_durable.errors import UnknownTaskError
from umt_durable.store import diagnosis, workers

Rows = list[dict[str, Any]]


@click.command()
@click.option("--task", metavar="NAME", help="Only this task.")
@click.option(
    "--require-drained",
    "drained",
    metavar="VERSION",
    type=click.IntRange(1),
    help="End with status 1 while a run of this version of the task has not ended.",
)
@all_option
@json_option
@click.pass_context
def versions(ctx: click.Context, task: str | None, drained: int | None, internal: bool, as_json: bool) -> None:
    """Count the runs that have not ended by task and version, and the live workers that have each version.

    The code of a version can go when none of its runs is left; --require-drained says so to a deployment.
    """
    if drained is not None and task is None:
        raise click.UsageError("--require-drained needs --task: versions are counted for each task")
    durable = checked(ctx, tasks=True)
    found = _versions(durable, task, internal=internal)
    if task is not None and not found and not durable.client.list(task=task, limit=1):
        raise UnknownTaskError(task, durable.tasks.declared())
    columns = ("task", "version", "runs", "states", "workers")
    rows = [[_states(one["states"]) if name == "states" else one[name] for name in columns] for one in found]
    emit({"versions": found}, [Section("version", columns, rows)], as_json=as_json)
    left = sum(one["runs"] for one in found if one["version"] == drained)
    if drained is None:
        return
    if left:
        raise click.ClickException(f"{task}@{drained} is not drained: {left} of its runs have not ended")
    if not as_json:
        say(f"{task}@{drained} is drained")


def _versions(durable: Durable, task: str | None, *, internal: bool) -> Rows:
    """Return each version that a run needs, a live worker has, or this app declares."""
    left_out = hidden(task, internal=internal)
    live = [set(worker.versions) for worker in durable.database.do(workers.recent) if worker.live]
    names = {name for had in (*live, durable.tasks.declared()) for name in had if not name.startswith("@")}
    states: dict[tuple[str, int | None], dict[str, int]] = {}
    for name in names:
        own, _, number = name.rpartition("@")
        if own and (task is None or own == task) and not (left_out and own.startswith(left_out)):
            states[own, int(number)] = {}
    for group in durable.database.do(lambda conn: diagnosis.by_version(conn, task, own=left_out)):
        states.setdefault((group.task, group.version), {})[group.state] = group.runs
    return [
        {
            "task": own,
            "version": number,
            "runs": sum(counts.values()),
            "states": counts,
            "workers": sum((own if number is None else f"{own}@{number}") in had for had in live),
        }
        for (own, number), counts in sorted(states.items(), key=lambda one: (one[0][0], one[0][1] or 0))
    ]


def _states(counts: dict[str, int]) -> str:
    return " ".join(f"{state}:{runs}" for state, runs in counts.items())
