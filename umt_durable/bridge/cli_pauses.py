"""`durable task|queue pause|resume`: whole tasks and queues that stand still until somebody resumes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from umt_durable.bridge.cli_runs import actor_option, checked
from umt_durable.bridge.console import emit, json_option, say
from umt_durable.bridge.durable import Durable
from umt_durable.states import Scope


@click.group()
def task() -> None:
    """Pause and resume all runs of a task."""


@click.group()
def queue() -> None:
    """Pause and resume all runs in a queue."""


def _command(group: click.Group, scope: Scope, verb: str, done: str, not_done: str, text: str) -> None:
    @group.command(verb, help=text)
    @click.argument("name")
    @click.option("--reason", metavar="TEXT", help="Kept in the audit.")
    @actor_option
    @json_option
    @click.pass_context
    def command(ctx: click.Context, name: str, reason: str | None, who: str, as_json: bool) -> None:
        durable: Durable = checked(ctx, tasks=True)
        act: Callable[..., Any] = getattr(durable, f"{verb}_{scope}")
        changed = act(name, actor=who, reason=reason)
        if as_json:
            emit({str(scope): name, "act": verb, "changed": changed}, [], as_json=True)
        else:
            say(f"{scope} {name} {done if changed else not_done}")


_PAUSE = (
    "Have the ready runs of {} wait until it is resumed, and those that become ready.\n\n"
    "Starts are taken as before; sleeps, time-outs and facts go on, and so does what is being executed."
)
_RESUME = "Let the runs of a paused {} go on, some hundreds at a time."

for _group, _scope in ((task, Scope.TASK), (queue, Scope.QUEUE)):
    _what = "a task" if _scope is Scope.TASK else "a queue"
    _command(_group, _scope, "pause", "is paused", "was paused before", _PAUSE.format(_what))
    _command(_group, _scope, "resume", "goes on", "is not paused", _RESUME.format(_scope))
