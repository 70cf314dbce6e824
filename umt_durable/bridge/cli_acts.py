"""`durable cancel|retry|fork|pause|resume`: what people do to runs, each act with who did it and why in the audit."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import click

from umt_durable.bridge.bulk import Act, chosen, do_to_many, filters
from umt_durable.bridge.cli_runs import actor_option, checked, json_of
from umt_durable.bridge.console import emit, json_option, say
from umt_durable.bridge.durable import Durable
from umt_durable.bridge.showing import run_document, state_of
from umt_durable.states import TERMINAL, RunState

LIVE: Final = [state for state in RunState if state not in TERMINAL]
ENDED: Final = [*sorted(TERMINAL), RunState.QUARANTINED]
STANDING: Final = [RunState.QUARANTINED, RunState.FAILED, RunState.CANCELLED]


@click.command()
@filters
@click.option("--reason", metavar="TEXT", help="Kept with the run.")
@click.option("--compensate", is_flag=True, help="Execute the undos of what it has done first.")
@actor_option
@json_option
@click.pass_context
def cancel(
    ctx: click.Context,
    /,
    run_id: str | None,
    reason: str | None,
    compensate: bool,
    who: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Ask that a run end as cancelled.

    A parked or waiting run ends at once, a running one at its next step; a run that has ended stays as it is.
    """
    durable, which = checked(ctx), chosen(run_id, given)
    cancel_one = partial(durable.client.cancel, reason=reason, actor=who, compensate=compensate)
    if which is not None:
        do_to_many(durable, Act("cancel", cancel_one, LIVE), which, as_json=as_json)
        return
    assert run_id is not None
    before = durable.client.get(run_id)
    if before.state.is_terminal:
        emit(run_document(before), [], as_json=True) if as_json else say(f"{run_id} has ended before: {before.state}")
        return
    cancel_one(run_id)
    run = durable.client.get(run_id)
    if as_json:
        emit(run_document(run), [], as_json=True)
    else:
        later = "will be undone and end" if run.compensate_at else "will end at its next step"
        say(f"{run_id} {run.state}" if run.state.is_terminal else f"{run_id} {run.state}, {later}")


@click.command()
@filters
@click.option("--version", type=click.IntRange(1), metavar="N", help="Go on with this version of the task.")
@click.option("--reason", metavar="TEXT", help="Kept in the audit.")
@actor_option
@json_option
@click.pass_context
def retry(
    ctx: click.Context,
    /,
    run_id: str | None,
    version: int | None,
    reason: str | None,
    who: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Have a run go on that is quarantined, failed or cancelled.

    A quarantined run is made ready with a new crash budget. It keeps its version, unless its input did not fit before
    it had done anything: then it takes the highest there is. A failed or cancelled one stays as it is: a new run takes
    up what it had done, once however often this is asked.
    """
    durable, which = checked(ctx), chosen(run_id, given)
    client = durable.client
    if which is not None:
        retry_one = partial(client.retry, actor=who, reason=reason, version=version)
        do_to_many(durable, Act("retry", retry_one, STANDING, takes_paused=False), which, as_json=as_json)
        return
    assert run_id is not None
    again = client.retry(run_id, actor=who, reason=reason, version=version)
    if as_json:
        emit({"run": run_id, "goes_on_as": again}, [], as_json=True)
    elif again == run_id:
        say(f"{run_id} {client.get(run_id).state}")
    else:
        say(f"{run_id} goes on as {again}")


@click.command()
@filters
@click.option("--from-step", required=True, metavar="KEY", help="Its key as `show` gives it; it is executed anew.")
@click.option("--input", metavar="JSON", help="Other arguments: an object of all of them by name.")
@click.option("--version", type=int, metavar="N", help="Another version of the task.")
@click.option("--reason", metavar="TEXT", help="Kept in the audit.")
@actor_option
@json_option
@click.pass_context
def fork(
    ctx: click.Context,
    /,
    run_id: str | None,
    from_step: str,
    input: str | None,
    version: int | None,
    reason: str | None,
    who: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Start a new run that begins where RUN was at a step.

    It has what was done before that step. RUN, which has ended or is quarantined, stays as it is. Of many runs those
    that were never at the step, or do not take the input, are passed over; asked again, it forks them again.
    """
    which = chosen(run_id, given)
    durable = checked(ctx, tasks=input is not None)
    arguments = None if input is None else json_of(input)
    if which is not None:
        fork_one = partial(
            durable.fork, from_step=from_step, actor=who, reason=reason, input=arguments, version=version
        )
        do_to_many(durable, Act("fork", fork_one, ENDED, takes_paused=False), which, as_json=as_json)
        return
    assert run_id is not None
    made = durable.fork(run_id, from_step=from_step, actor=who, reason=reason, input=arguments, version=version)
    if as_json:
        emit({"run": run_id, "fork": made}, [], as_json=True)
    else:
        say(f"{run_id} is forked as {made}")


@click.command()
@filters
@click.option("--reason", metavar="TEXT", help="Kept in the audit.")
@actor_option
@json_option
@click.pass_context
def pause(ctx: click.Context, /, run_id: str | None, reason: str | None, who: str, as_json: bool, **given: Any) -> None:
    """Have a run stand still until it is resumed.

    A process that executes it ends the step in flight first. Sleeps and time-outs go on, and facts reach it.
    """
    durable, which = checked(ctx), chosen(run_id, given)
    pause_one = partial(durable.client.pause, actor=who, reason=reason)
    if which is not None:
        do_to_many(durable, Act("pause", pause_one, LIVE, paused=False, takes_paused=False), which, as_json=as_json)
        return
    assert run_id is not None
    pause_one(run_id)
    _tell(durable, run_id, as_json=as_json)


@click.command()
@filters
@click.option("--reason", metavar="TEXT", help="Kept in the audit.")
@actor_option
@json_option
@click.pass_context
def resume(
    ctx: click.Context, /, run_id: str | None, reason: str | None, who: str, as_json: bool, **given: Any
) -> None:
    """Let a paused run go on."""
    durable, which = checked(ctx), chosen(run_id, given)
    resume_one = partial(durable.client.resume, actor=who, reason=reason)
    if which is not None:
        do_to_many(durable, Act("resume", resume_one, LIVE, paused=True), which, as_json=as_json)
        return
    assert run_id is not None
    resume_one(run_id)
    _tell(durable, run_id, as_json=as_json)


def _tell(durable: Durable, run_id: str, *, as_json: bool) -> None:
    run = durable.client.get(run_id)
    if as_json:
        emit(run_document(run), [], as_json=True)
    else:
        say(f"{run_id} {state_of(run)}")
