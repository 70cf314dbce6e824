"""`durable status|runs|show|signal|resolve`: look at runs, and tell them something.

No payload is shown unless it is asked for.
"""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any, Final, TypeVar

import click

from umt_durable import codec
from umt_durable.bridge.console import Section, emit, json_option
from umt_durable.bridge.durable import Durable
from umt_durable.bridge.project import project_of
from umt_durable.engine import failures
from umt_durable.engine.client import History, hidden
from umt_durable.engine.failures import Failure
from umt_durable.engine.ops import MAX_PAGE
from umt_durable.errors import DecodingError, PayloadKeyError, UnknownTaskError
from umt_durable.records import Run, StepEntry, WaitEntry
from umt_durable.redaction import redact
from umt_durable.states import OWN, PAUSED, RunState, Scope
from umt_durable.store import diagnosis, outbox, workers
from umt_durable.store.pauses import Pause

Document = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

HIDDEN: Final = ("args", "result", "error", "digest", "fingerprint", "payload", "codec")


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
        "runs": [run_document(run) | {"waits_for": _keeping(run, paused)} for run in found],
        "before": found[-1].no if len(found) == limit else None,
    }
    rows = [_run_row(run, paused) for run in found]
    emit(document, [Section("run", columns, rows, stacked=("id", "task"))], as_json=as_json)


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--payloads", is_flag=True, help="Show arguments, results and facts too, secrets masked by their names.")
@json_option
@click.pass_context
def show(ctx: click.Context, run_id: str, payloads: bool, as_json: bool) -> None:
    """Show what happened to a run: its attempts, steps, waits and last error, and what people did to it."""
    durable = checked(ctx)
    history = durable.client.history(run_id)
    document = _history_document(durable, history, payloads=payloads)
    if document["error"] is not None:
        document["error"] = project_of(ctx).spelled(document["error"])
    emit(document, _history_sections(document), as_json=as_json)


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


def _task_of(run: Run) -> str:
    return run.task if run.version is None else f"{run.task}@{run.version}"


def state_of(run: Run) -> str:
    """Return where a run stands, as people read it."""
    marks = [f"({run.reason})" if run.reason else "", "paused" if run.paused_at and not run.state.is_terminal else ""]
    asked = "cancel asked" if run.cancel_at and not run.state.is_terminal else ""
    if run.compensate_at:
        asked = "undone" if run.state.is_terminal else asked or "undoing"
    return " ".join(filter(None, [str(run.state), *marks, asked]))


def _keeping(run: Run, paused: Sequence[Pause]) -> list[str]:
    """Say which pauses of a task or queue keep a ready run."""
    if run.state is not RunState.READY:
        return []
    names = {Scope.TASK: run.task, Scope.QUEUE: None if run.task.startswith(OWN) else run.queue}
    return [f"{one.scope} {one.name}" for one in paused if names[one.scope] == one.name]


def _run_row(run: Run, paused: Sequence[Pause]) -> tuple[object, ...]:
    kept = "".join(f" ({one.split()[0]} paused)" for one in _keeping(run, paused))
    return (
        *(run.no, run.id, _task_of(run), state_of(run) + kept, run.ref, run.failures, run.crashes, run.queue),
        *(run.created_at, run.wake_at),
    )


def run_document(run: Run) -> Document:
    """Return a run as programs read it."""
    return _visible(run)


def _visible(record: Any) -> Document:
    """Return the fields of a record that are no payload and no token."""
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name not in HIDDEN}


def _history_document(durable: Durable, history: History, *, payloads: bool) -> Document:
    run = history.run
    failure = failure_in(run.error)
    document: Document = {
        "run": run_document(run),
        "blocked": _blocked(durable, run),
        "error": told(failure),
        "attempts": [
            {"no": number} | _visible(attempt) | {"error": attempt.error}
            for number, attempt in enumerate(history.attempts, start=1)
        ],
        "steps": [_step_document(step, run.codec, payloads=payloads) for step in history.steps],
        "waits": [_wait_document(wait, payloads=payloads) for wait in history.waits],
        "audit": [asdict(entry) for entry in history.audit],
    }
    if payloads:
        stored = durable.database.do(lambda conn: diagnosis.arguments(conn, run.no))
        document["run"] |= {"input": shown(*stored) if stored else None, "result": shown(run.result, run.codec)}
        document["traceback"] = failure.traceback if isinstance(failure, Failure) else None
    return document


def _blocked(durable: Durable, run: Run) -> str | None:
    """Say why nobody takes a ready run, if that is so."""
    if run.state is not RunState.READY or run.paused_at is not None:
        return None
    for pause in durable.pauses.list():
        if f"{pause.scope} {pause.name}" in _keeping(run, [pause]):
            return f"{pause}. Let it go on: `umt-durable {pause.scope} resume {pause.name}`"
    needed = _task_of(run)
    if needed in durable.database.do(workers.live_versions):
        return None
    return f"no live worker declares {needed}: start one with that code"


def _step_document(step: StepEntry, kind: int, *, payloads: bool) -> Document:
    error = told(failure_in(step.error))
    payload = {"result": shown(step.result, kind)} if payloads else {}
    return {name: value for name, value in _visible(step).items() if name not in ("due", "age_seconds")} | {
        "error": error,
        **payload,
    }


def _wait_document(wait: WaitEntry, *, payloads: bool) -> Document:
    payload = {"payload": shown(wait.payload)} if payloads else {}
    return {name: value for name, value in _visible(wait).items() if name != "due"} | payload


def shown(data: bytes | None, kind: int = codec.Codec.JSON) -> object:
    """Return a stored value for a person's eyes: as plain JSON, with what its names say is secret masked."""
    if data is None:
        return None
    try:
        return redact(codec.decode(data, codec.EMPTY, kind))
    except DecodingError:
        return f"<{len(data)} bytes that cannot be read>"
    except PayloadKeyError as error:
        return _sealed(error)


def failure_in(data: bytes | None) -> Failure | str | None:
    """Return a stored failure, or what to say instead where it cannot be opened here."""
    if data is None:
        return None
    try:
        return failures.from_bytes(data)
    except PayloadKeyError as error:
        return _sealed(error)


def told(failure: Failure | str | None) -> str | None:
    """Return what stands in a list for a failure."""
    return failure.summary if isinstance(failure, Failure) else failure


def _sealed(error: PayloadKeyError) -> str:
    return f"<sealed with the key {error.key!r}, which is not known here>"


def _history_sections(document: Document) -> list[Section]:
    run = {**document["run"], "blocked": document["blocked"], "error": document["error"]}
    if document.get("traceback"):
        run["traceback"] = document["traceback"]
    return [
        Section("run", ("", ""), [(name, value) for name, value in run.items() if value is not None]),
        _section(
            "attempt", document["attempts"], ("no", "fence", "outcome", "claimed_at", "ended_at", "worker", "error")
        ),
        _section(
            "step",
            document["steps"],
            ("seq", "key", "kind", "state", "failures", "started_at", "finished_at", "wake_at", "error", "result"),
        ),
        _section("wait", document["waits"], ("seq", "key", "name", "state", "deadline", "settled_at", "payload")),
        _section("audit", document["audit"], ("at", "act", "actor", "reason", "detail")),
    ]


def _section(title: str, entries: list[Document], columns: Sequence[str]) -> Section:
    shown = [column for column in columns if not entries or column in entries[0]]
    return Section(title, shown, [[entry[column] for column in shown] for entry in entries])
