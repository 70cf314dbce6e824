"""`durable status|runs|signal|complete|resolve`: look at many runs, and tell one something."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import click

from umt_durable.bridge.console import Section, emit, json_option
from umt_durable.bridge.durable import Durable
from umt_durable.bridge.project import project_of
from umt_durable.bridge.showing import Document, run_document, state_of
from umt_durable.engine.client import hidden
from umt_durable.engine.explaining import keeping, version_of
from umt_durable.engine.ops import MAX_PAGE
from umt_durable.errors import UnknownTaskError
from umt_durable.records import Run
from umt_durable.states import OWN, PAUSED, RunState
from umt_durable.store import diagnosis, outbox, workers
from umt_durable.store.pauses import Pause

F = TypeVar("F", bound=Callable[..., Any])


def all_option(command: F) -> F:
    """Give a command the option `--all`, as the parameter `internal`."""
    said = f"Also the runs of the package's own tasks, {OWN}*, which bring answers to steps."
    return click.option("--all", "internal", is_flag=True, help=said)(command)


def actor_option(command: F) -> F:
    """Give a command the option `--actor`, as the parameter `who`."""
    said = "Who does it, for the audit; else the user who calls the command."
    return click.option("--actor", "who", metavar="NAME", help=said, callback=lambda *given: given[2] or actor())(
        command
    )


@click.command()
@all_option
@json_option
@click.pass_context
def status(ctx: click.Context, internal: bool, as_json: bool) -> None:
    """Count runs by state, what is paused as a whole, the outbox, live workers, and what all processes counted.

    Blocked are the ready runs that no live worker can take.
    """
    durable = checked(ctx)
    database = durable.database
    counts = durable.client.counts(internal=internal)
    own = hidden(None, internal=internal)
    pending, dead, oldest = database.do(outbox.status)
    live = [worker for worker in database.do(workers.recent) if worker.live]
    paused = durable.pauses.list()
    document: Document = {
        "schema": durable.settings.schema,
        "runs": {state: counts.get(state, 0) for state in (*RunState, PAUSED)},
        "blocked": sum(group.runs for group in database.do(partial(diagnosis.blocked, own=own))),
        "paused": [asdict(one) for one in paused],
        "outbox": {"pending": pending, "dead": dead, "oldest_seconds": round(oldest, 3)},
        "workers": [asdict(worker) for worker in live],
        "counters": database.do(workers.sum_counters),
    }
    sections = [
        Section("runs", ("state", "runs"), _counted({**document["runs"], "blocked": document["blocked"]})),
        Section(
            "paused",
            ("", "name", "runs", "since", "by", "reason"),
            [(one.scope, one.name, one.runs, one.at, one.actor, one.reason) for one in paused],
        ),
        Section("outbox", ("", "rows"), [("pending", pending), ("dead", dead), ("oldest_seconds", oldest)]),
        Section("worker", ("process", "since", "declares"), [_worker_row(worker) for worker in live]),
        Section("counter", ("", "all processes"), _counted(document["counters"])),
    ]
    emit(document, sections, as_json=as_json)


@click.command()
@click.option("--task", metavar="NAME", help="Only runs of this task.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([*map(str, RunState), PAUSED]),
    help="Only runs in this state, or paused; may be repeated.",
)
@click.option("--ref", metavar="REF", help="Only runs with this business key.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, MAX_PAGE))
@click.option("--before", metavar="NO", type=int, help="The page after the run with this number.")
@all_option
@json_option
@click.pass_context
def runs(
    ctx: click.Context,
    task: str | None,
    states: Sequence[str],
    ref: str | None,
    limit: int,
    before: int | None,
    internal: bool,
    as_json: bool,
) -> None:
    """List runs, the newest first.

    Cells: number, id, task@version, state, reference, failures, crashes, queue, created at, due at. The number of the
    last run is what --before takes to go on.
    """
    durable = checked(ctx, tasks=True)
    found = durable.client.list(
        task=task, states=states or None, ref=ref, before=before, limit=limit, internal=internal
    )
    if not found and task is not None and not durable.has_task(task) and not durable.client.list(task=task, limit=1):
        raise UnknownTaskError(task, durable.tasks.declared())
    columns = ("no", "id", "task", "state", "ref", "failures", "crashes", "queue", "created", "due")
    paused = durable.pauses.list()
    document = {
        "runs": [run_document(run) | {"waits_for": _names(run, paused)} for run in found],
        "before": found[-1].no if len(found) == limit else None,
    }
    rows = [_run_row(run, paused) for run in found]
    emit(document, [Section("run", columns, rows, stacked=("id", "task"))], as_json=as_json)


@click.command()
@click.argument("run_id", metavar="RUN")
@click.argument("name")
@click.argument("payload", required=False, metavar="[JSON]")
@click.option("--dedupe", metavar="KEY", help="Saying it again with the same key changes nothing.")
@json_option
@click.pass_context
def signal(ctx: click.Context, run_id: str, name: str, payload: str | None, dedupe: str | None, as_json: bool) -> None:
    """Say the fact NAME to a run, with a payload if one is given, and print the id of the fact."""
    value = None if payload is None else json_of(payload)
    client = checked(ctx).client
    fact = client.signal(run_id, name, value, actor=actor(), dedupe=dedupe)
    ended = client.get(run_id)
    if ended.state.is_terminal:
        click.echo(f"run {run_id} has ended ({ended.state}): nobody will take this fact", err=True)
    emit({"run": run_id, "name": name, "fact": fact}, [Section("fact", ("fact",), [(fact,)])], as_json=as_json)


@click.command()
@click.argument("token")
@click.argument("result", required=False, metavar="[JSON]")
@click.option("--error", metavar="TEXT", help="It failed: the step fails with this text.")
@json_option
@click.pass_context
def complete(ctx: click.Context, token: str, result: str | None, error: str | None, as_json: bool) -> None:
    """Complete the step that a TOKEN of step.begin is of, with a result if one is given, and print the id of the fact.

    With - as TOKEN it is read from standard input, where no list of processes shows it.
    """
    if result is not None and error is not None:
        raise click.UsageError("Give a result or --error, and not both.")
    given = sys.stdin.read() if token == "-" else token  # noqa: S105 - no password
    value = None if result is None else json_of(result)
    client = checked(ctx).client
    if error is not None:
        fact = client.fail(given, error, actor=actor())
    else:
        fact = client.complete(given, value, actor=actor())
    emit({"fact": fact}, [Section("fact", ("fact",), [(fact,)])], as_json=as_json)


@click.command()
@click.argument("run_id", metavar="RUN")
@click.argument("step")
@click.option("--result", metavar="JSON", help="The task was executed, and gave this.")
@click.option("--error", metavar="TEXT", help="It failed, or was not executed: the step fails with this text.")
@click.option("--reason", metavar="TEXT", help="Kept in the audit.")
@actor_option
@json_option
@click.pass_context
def resolve(
    ctx: click.Context,
    run_id: str,
    step: str,
    result: str | None,
    error: str | None,
    reason: str | None,
    who: str,
    as_json: bool,
) -> None:
    """Say how the task that a STEP awaits has ended, and let the run go on.

    For a run that is quarantined as uncertain_op; STEP is the step's key as `show` gives it.
    """
    if (result is None) == (error is None):
        raise click.UsageError("Give --result or --error, and not both.")
    client = checked(ctx).client
    if error is not None:
        fact = client.resolve_step(run_id, step, error=error, actor=who, reason=reason)
    else:
        fact = client.resolve_step(run_id, step, result=json_of(result or ""), actor=who, reason=reason)
    emit({"run": run_id, "step": step, "fact": fact}, [Section("fact", ("fact",), [(fact,)])], as_json=as_json)


def json_of(text: str) -> Any:
    """Read a value that is given on the command line.

    Errors: click.BadParameter.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}. Text needs quotes of its own: '\"yes\"'", param_hint="JSON") from None


def checked(ctx: click.Context, *, tasks: bool = False) -> Durable:
    """Return the project's `Durable`, once its database answers with the schema of this code."""
    durable = project_of(ctx).durable(tasks=tasks)
    durable.check_schema()
    return durable


def actor() -> str:
    """Return who calls the command, as facts and the audit keep it."""
    try:
        return f"cli:{getpass.getuser()}"
    except (OSError, KeyError):  # a user id without a name
        return "cli"


def _counted(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(str(name), number) for name, number in counts.items() if number]


def _worker_row(worker: Any) -> tuple[object, ...]:
    declared = [version for version in worker.versions if "@" in version]
    return f"{worker.host}:{worker.pid}", worker.started_at, " ".join(declared) or "-"


def _names(run: Run, paused: Sequence[Pause]) -> list[str]:
    """Say which pauses of a task or queue keep a ready run."""
    return [f"{one.scope} {one.name}" for one in keeping(run, paused)]


def _run_row(run: Run, paused: Sequence[Pause]) -> tuple[object, ...]:
    kept = "".join(f" ({one.scope} paused)" for one in keeping(run, paused))
    return (
        *(run.no, run.id, version_of(run), state_of(run) + kept, run.ref, run.failures, run.crashes, run.queue),
        *(run.created_at, run.wake_at),
    )
