"""`durable retry|pause|resume`: what people do to runs, each act with who did it and why in the audit."""

from __future__ import annotations

import click

from umt_durable.bridge.cli_runs import actor, checked, run_document, state_of
from umt_durable.bridge.console import emit, json_option, say
from umt_durable.bridge.durable import Durable


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--reason", metavar="TEXT", help="Kept in the audit.")
@json_option
@click.pass_context
def retry(ctx: click.Context, run_id: str, reason: str | None, as_json: bool) -> None:
    """Have a run go on that is quarantined, failed or cancelled.

    A quarantined run is made ready with a new crash budget. A failed or cancelled one stays as it is: a new run takes
    up what it had done, once however often this is asked.
    """
    client = checked(ctx).client
    again = client.retry(run_id, actor=actor(), reason=reason)
    if as_json:
        emit({"run": run_id, "goes_on_as": again}, [], as_json=True)
    elif again == run_id:
        say(f"{run_id} {client.get(run_id).state}")
    else:
        say(f"{run_id} goes on as {again}")


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--reason", metavar="TEXT", help="Kept in the audit.")
@json_option
@click.pass_context
def pause(ctx: click.Context, run_id: str, reason: str | None, as_json: bool) -> None:
    """Have a run stand still until it is resumed.

    A process that executes it ends the step in flight first. Sleeps and time-outs go on, and facts reach it.
    """
    durable = checked(ctx)
    durable.client.pause(run_id, actor=actor(), reason=reason)
    _tell(durable, run_id, as_json=as_json)


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--reason", metavar="TEXT", help="Kept in the audit.")
@json_option
@click.pass_context
def resume(ctx: click.Context, run_id: str, reason: str | None, as_json: bool) -> None:
    """Let a paused run go on."""
    durable = checked(ctx)
    durable.client.resume(run_id, actor=actor(), reason=reason)
    _tell(durable, run_id, as_json=as_json)


def _tell(durable: Durable, run_id: str, *, as_json: bool) -> None:
    run = durable.client.get(run_id)
    if as_json:
        emit(run_document(run), [], as_json=True)
    else:
        say(f"{run_id} {state_of(run)}")
