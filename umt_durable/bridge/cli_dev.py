"""`durable dev` and `durable down`: the embedded pair of a folder, with a worker, and their end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import click

from umt_durable import embedded
from umt_durable.bridge.cli_schema import bring
from umt_durable.bridge.console import emit, json_option, say
from umt_durable.bridge.project import Project, project_of

FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--env", "as_env", is_flag=True, help="Print shell lines that point another terminal at the running pair, and end."
)
@click.argument("worker_options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def dev(ctx: click.Context, as_env: bool, worker_options: tuple[str, ...]) -> None:
    """Run the embedded pair of this folder and a worker of the app, until Ctrl-C.

    Whatever servers are configured elsewhere, the worker uses the pair. WORKER_OPTIONS go to `celery worker`:
    `durable dev -P threads -c 4`.
    """
    if as_env:
        _print_environment()
        return
    pair = embedded.ensure()
    project = project_of(ctx)
    os.environ.update(_environment(pair))
    durable = project.durable("database")
    if durable.database.url != pair.database_url:
        raise click.ClickException("the app's own code names its database: `dev` would not use the embedded pair")
    bring(durable)
    shell = project.spelled('`eval "$(umt-durable dev --env)"`')
    say(f"dev: embedded Postgres and Valkey in {pair.home}; {shell} points a shell at them")
    ctx.exit(_run(worker_command(project, worker_options)))


@click.command()
@click.option("--force", is_flag=True, help="Even while other processes use it.")
@json_option
def down(force: bool, as_json: bool) -> None:
    """Stop the embedded Postgres and Valkey of this folder. Their data stays."""
    stopped = embedded.down(force=force)
    if as_json:
        emit({"stopped": stopped}, [], as_json=True)
    else:
        say("the embedded pair is stopped" if stopped else "no embedded pair runs in this folder")


def worker_command(project: Project, options: Sequence[str]) -> list[str]:
    """Return the command line of a worker of the project's app.

    Errors: UsageError when the app was found in a way that another process cannot repeat.
    """
    name = project.name or ("umt_durable" if project.given is None else _name_of_given())
    level = [] if any(option.startswith(("-l", "--loglevel")) for option in options) else ["--loglevel", "INFO"]
    return [sys.executable, "-m", "celery", "-A", name, "worker", *level, *options]


def _name_of_given() -> str:
    name = click.get_current_context().find_root().params.get("app")
    if not isinstance(name, str):
        raise click.UsageError("name the app with -A, so that the worker's process finds it too")
    return name


def _print_environment() -> None:
    """Print the lines for a pair that somebody else keeps running: one that is started here would end with us."""
    pair = embedded.running()
    if pair is None:
        raise click.ClickException("no pair is running: start it with `umt-durable dev`")
    for name, value in _environment(pair).items():
        say(f"export {name}={shlex.quote(value)}")


def _environment(pair: embedded.Pair) -> dict[str, str]:
    return {
        "DURABLE_DATABASE_URL": pair.database_url,
        "CELERY_BROKER_URL": pair.broker_url,
        "CELERY_RESULT_BACKEND": pair.result_url,
        "DURABLE_EMBEDDED_HOME": str(Path(pair.home)),
    }


def _run(command: Sequence[str]) -> int:
    """Run a worker in the foreground and return its exit status; the pair is ours until it has ended.

    Ctrl-C reaches the worker by itself: it is in the terminal's process group. Other requests to end are passed on.
    """
    with subprocess.Popen(command) as worker:

        def forward(number: int, _: FrameType | None) -> None:
            worker.send_signal(number)

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for one in FORWARDED:
            signal.signal(one, forward)
        status = worker.wait()
    return status if status >= 0 else 128 - status
