"""`durable outbox list|show|replay`: rows of the outbox that were given up, and putting them back.

No payload is shown unless it is asked for.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

import click

from umt_durable.bridge.cli_runs import checked
from umt_durable.bridge.console import Section, emit, json_option, say
from umt_durable.bridge.project import project_of
from umt_durable.bridge.showing import shown
from umt_durable.engine.ops import MAX_PAGE
from umt_durable.errors import DefinitionError
from umt_durable.records import OutboxEvent
from umt_durable.redaction import redact_text
from umt_durable.states import OutboxStatus

COLUMNS: Final = ("id", "type", "run", "attempts", "created", "reason")


@click.group()
def outbox() -> None:
    """Look at the rows of the outbox that were given up, and put them back."""


@outbox.command("list")
@click.option("--type", "type", metavar="TYPE", help="Only rows of this type.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, MAX_PAGE))
@click.option("--before", metavar="ID", help="The page after the row with this id.")
@json_option
@click.pass_context
def list_(ctx: click.Context, type: str | None, limit: int, before: str | None, as_json: bool) -> None:
    """List the dead rows, the newest first.

    Cells: id, type, run, attempts, created at, reason. The id of the last row is what --before takes to go on.
    """
    found = checked(ctx).outbox.dead(type=type, limit=limit, before=before)
    found = [_spelled(ctx, row) for row in found]
    document = {
        "events": [_document(row) for row in found],
        "before": str(found[-1].id) if len(found) == limit else None,
    }
    rows = [(row.id, row.type, row.run, row.attempts, row.created_at, _told(row)) for row in found]
    emit(document, [Section("outbox", COLUMNS, rows)], as_json=as_json)


@outbox.command("show")
@click.argument("event", metavar="ID")
@click.option("--payload", is_flag=True, help="Show the payload too, secrets masked by their names.")
@json_option
@click.pass_context
def show(ctx: click.Context, event: str, payload: bool, as_json: bool) -> None:
    """Show one row: where it stands, what it belongs to or has started, and why it was last refused."""
    row = _spelled(ctx, checked(ctx).outbox.get(event))
    document = _document(row)
    if payload:
        document["payload"] = shown(row.payload)
    cells = [(name, value) for name, value in document.items() if value is not None]
    emit(document, [Section("event", ("", ""), cells)], as_json=as_json)


@outbox.command("replay")
@click.argument("event", metavar="[ID]", required=False)
@click.option("--type", "type", metavar="TYPE", help="Put all dead rows of this type back.")
@json_option
@click.pass_context
def replay(ctx: click.Context, event: str | None, type: str | None, as_json: bool) -> None:
    """Put a dead row, or all dead rows of a type, back as if it had never been tried."""
    if (event is None) is (type is None):
        raise click.UsageError("name either the ID of a row or a --type")
    box = checked(ctx).outbox
    if event is not None and (row := box.get(event)).status is not OutboxStatus.DEAD:
        raise DefinitionError(f"outbox row {row.id} is {row.status}: only dead rows can be replayed")
    count = box.replay(event, type=type)
    if as_json:
        emit({"replayed": count}, [], as_json=True)
    else:
        say(f"{count} put back")


def _spelled(ctx: click.Context, row: OutboxEvent) -> OutboxEvent:
    """Return a row whose reason names the app, where it has commands to paste, as this command line does."""
    return row if row.reason is None else replace(row, reason=project_of(ctx).spelled(row.reason))


def _told(row: OutboxEvent) -> str:
    return redact_text(row.reason or "")


def _document(row: OutboxEvent) -> dict[str, Any]:
    """Return the fields of a row that are no payload."""
    named = {field.name: getattr(row, field.name) for field in fields(row) if field.name != "payload"}
    return named | {"id": str(row.id), "reason": _told(row) or None}
