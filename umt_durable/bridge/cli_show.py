"""`durable show|explain`: one run, what happened to it, and why it stands where it stands.

No payload is shown unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from umt_durable.bridge.cli_runs import checked
from umt_durable.bridge.console import Section, emit, json_option
from umt_durable.bridge.durable import Durable
from umt_durable.bridge.project import Project, project_of
from umt_durable.bridge.showing import (
    Document,
    failure_in,
    progress_of,
    run_document,
    shown,
    state_of,
    told,
    visible,
)
from umt_durable.engine.client import History
from umt_durable.engine.explaining import Explanation
from umt_durable.engine.failures import Failure
from umt_durable.records import Progress, StepEntry, WaitEntry
from umt_durable.store import diagnosis


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--payloads", is_flag=True, help="Show arguments, results and facts too, secrets masked by their names.")
@json_option
@click.pass_context
def show(ctx: click.Context, run_id: str, payloads: bool, as_json: bool) -> None:
    """Show what happened to a run: its attempts, steps, waits and last error, and what people did to it."""
    durable, project = checked(ctx), project_of(ctx)
    history = durable.client.history(run_id)
    document = _history_document(durable, history, payloads=payloads)
    document["because"] = _reasons(project, durable.client.explain(run_id))
    if document["error"] is not None:
        document["error"] = project.spelled(document["error"])
    emit(document, _history_sections(history, document), as_json=as_json)


@click.command("explain")
@click.argument("run_id", metavar="RUN")
@json_option
@click.pass_context
def explain(ctx: click.Context, run_id: str, as_json: bool) -> None:
    """Say why a run stands where it stands, what it goes on with, and what a person can do about it."""
    durable, project = checked(ctx), project_of(ctx)
    found = durable.client.explain(run_id)
    document: Document = {"run": run_document(found.run), "because": _reasons(project, found)}
    said = progress_of(found.run.progress)
    run = [("state", state_of(found.run)), *([("progress", said)] if said else [])]
    emit(document, [Section("run", ("", ""), run), _because(document)], as_json=as_json)


def _reasons(project: Project, found: Explanation) -> list[Document]:
    """Return the reasons of an explanation, with commands that can be pasted as they stand."""
    return [
        asdict(one) | {"remedy": None if one.remedy is None else project.spelled(one.remedy)} for one in found.because
    ]


def _because(document: Document) -> Section:
    return _section("because", document["because"], ("why", "text", "until", "remedy"))


def _history_document(durable: Durable, history: History, *, payloads: bool) -> Document:
    run = history.run
    failure = failure_in(run.error)
    document: Document = {
        "run": run_document(run),
        "error": told(failure),
        "attempts": [
            {"no": number} | visible(attempt) | {"error": attempt.error}
            for number, attempt in enumerate(history.attempts, start=1)
        ],
        "steps": [_step_document(step, run.codec, payloads=payloads) for step in history.steps],
        "waits": [_wait_document(wait, payloads=payloads) for wait in history.waits],
        "audit": [asdict(entry) for entry in history.audit],
        "progress": [_progress_document(said, payloads=payloads) for said in history.progress],
    }
    if payloads:
        stored = durable.database.do(lambda conn: diagnosis.arguments(conn, run.no))
        document["run"] |= {"input": shown(*stored) if stored else None, "result": shown(run.result, run.codec)}
        document["traceback"] = failure.traceback if isinstance(failure, Failure) else None
    return document


def _step_document(step: StepEntry, kind: int, *, payloads: bool) -> Document:
    error = told(failure_in(step.error))
    payload = {"result": shown(step.result, kind)} if payloads else {}
    return {name: value for name, value in visible(step).items() if name not in ("due", "age_seconds")} | {
        "error": error,
        **payload,
    }


def _wait_document(wait: WaitEntry, *, payloads: bool) -> Document:
    payload = {"payload": shown(wait.payload)} if payloads else {}
    return {name: value for name, value in visible(wait).items() if name != "due"} | payload


def _progress_document(said: Progress, *, payloads: bool) -> Document:
    return visible(said) | ({"payload": shown(said.payload)} if payloads else {})


def _history_sections(history: History, document: Document) -> list[Section]:
    run = {**document["run"], "progress": progress_of(history.run.progress), "error": document["error"]}
    if document.get("traceback"):
        run["traceback"] = document["traceback"]
    return [
        Section("run", ("", ""), [(name, value) for name, value in run.items() if value is not None]),
        _because(document),
        _section(
            "attempt", document["attempts"], ("no", "fence", "outcome", "claimed_at", "ended_at", "worker", "error")
        ),
        _section(
            "step",
            document["steps"],
            ("seq", "key", "kind", "state", "failures", "started_at", "finished_at", "wake_at", "error", "result"),
        ),
        _section("wait", document["waits"], ("seq", "key", "name", "state", "deadline", "settled_at", "payload")),
        _section("progress", document["progress"], ("key", "status", "done", "total", "at", "payload")),
        _section("audit", document["audit"], ("at", "act", "actor", "reason", "detail")),
    ]


def _section(title: str, entries: list[Document], columns: Sequence[str]) -> Section:
    shown = [column for column in columns if not entries or column in entries[0]]
    return Section(title, shown, [[entry[column] for column in shown] for entry in entries])
