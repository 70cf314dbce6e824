"""`durable ops list|show|resolve`: the external effects of runs, and what a person says of one that is uncertain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from umt_durable.bridge.cli_runs import actor, checked
from umt_durable.bridge.console import Section, emit, json_option
from umt_durable.bridge.showing import failure_in, shown, told
from umt_durable.engine.ops import MAX_PAGE
from umt_durable.records import Op
from umt_durable.states import OpState

namespace_option = click.option("--namespace", metavar="NAME", help="Whose keys; by default those of this app.")


@click.group()
def ops() -> None:
    """External effects: the op ledger, and what a person decides about an op that is uncertain."""


@ops.command("list")
@click.option(
    "--state", "states", multiple=True, type=click.Choice([str(state) for state in OpState]), help="May be repeated."
)
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, MAX_PAGE))
@click.option("--after", metavar="KEY", default="", help="The page after the op with this key.")
@namespace_option
@json_option
@click.pass_context
def list_ops(
    ctx: click.Context, states: Sequence[str], limit: int, after: str, namespace: str | None, as_json: bool
) -> None:
    """List ops without an answer, or those in the states named, in the order of their keys.

    Cells: key, state, run, the run's state, turn, how many runs wait for a person, begun at, why. An open op whose run
    has ended is marked as abandoned: only another run, or a person, settles it.
    """
    durable = checked(ctx)
    found = durable.ops.list(states=states or None, limit=limit, after=after, namespace=namespace)
    columns = ("op", "state", "run", "run state", "turn", "waiting", "began", "why")
    document = {
        "ops": [_document(op, payloads=False) for op in found],
        "after": found[-1].op_key if len(found) == limit else None,
    }
    emit(document, [Section("op", columns, [_row(op) for op in found])], as_json=as_json)


@ops.command("show")
@click.argument("op_key", metavar="KEY")
@click.option("--payloads", is_flag=True, help="Show the recorded answer too, secrets masked by their names.")
@namespace_option
@json_option
@click.pass_context
def show_op(ctx: click.Context, op_key: str, payloads: bool, namespace: str | None, as_json: bool) -> None:
    """Show one op: who began it, its turn and its key for the provider, and who decided about it."""
    durable = checked(ctx)
    _emit(durable.ops.get(op_key, namespace=namespace), payloads=payloads, as_json=as_json)


@ops.command("resolve")
@click.argument("op_key", metavar="KEY")
@click.option("--done", metavar="JSON", help="It was applied; this is its result.")
@click.option("--not-done", is_flag=True, help="It was not applied, and may be called again.")
@click.option("--failed", metavar="TEXT", help="It was not applied, and will not be; this is the failure.")
@click.option("--reason", metavar="TEXT", help="Kept with the decision.")
@namespace_option
@json_option
@click.pass_context
def resolve_op(
    ctx: click.Context,
    op_key: str,
    done: str | None,
    not_done: bool,
    failed: str | None,
    reason: str | None,
    namespace: str | None,
    as_json: bool,
) -> None:
    """Say what became of an op that no running run holds; the runs that wait for it go on."""
    said: dict[str, Any] = {}
    if done is not None:
        try:
            said["done"] = json.loads(done)
        except ValueError as error:
            raise click.BadParameter(f"{error}. Text needs quotes of its own: '\"yes\"'", param_hint="--done") from None
    durable = checked(ctx)
    op = durable.ops.resolve(
        op_key, not_done=not_done, failed=failed, actor=actor(), reason=reason, namespace=namespace, **said
    )
    _emit(op, payloads=False, as_json=as_json)


def _emit(op: Op, *, payloads: bool, as_json: bool) -> None:
    document = _document(op, payloads=payloads)
    rows = [(name, value) for name, value in document.items() if value is not None]
    emit(document, [Section("op", ("", ""), rows)], as_json=as_json)


def _document(op: Op, *, payloads: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "namespace": op.namespace,
        "op": op.op_key,
        "state": op.state,
        "abandoned": op.is_abandoned,
        "run": op.run_id,
        "run_state": op.run_state,
        "turn": op.turn,
        "idempotency_key": op.idempotency_key,
        "waiting": op.waiting,
        "began_at": op.began_at,
        "taken_at": op.taken_at,
        "settled_at": op.settled_at,
        "actor": op.actor,
        "reason": op.comment,
        "why": told(failure_in(op.error)),
    }
    return document | {"result": shown(op.result)} if payloads else document


def _row(op: Op) -> tuple[object, ...]:
    state = f"{op.state} (abandoned)" if op.is_abandoned else str(op.state)
    why = told(failure_in(op.error))
    return op.op_key, state, op.run_id, op.run_state, op.turn, op.waiting, op.began_at, why
