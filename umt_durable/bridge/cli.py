"""The commands of `celery -A proj durable …` and of `umt-durable`.

Celery imports this module for every `celery` command, so it loads nothing but click; each command is loaded when it is
called. Celery shows a group under the group's own name, which is therefore `durable`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import click

from umt_durable.errors import DatabaseUnavailableError, DurableError

COMMANDS: Final = {
    "migrate": "cli_schema",
    "grants": "cli_schema",
    "ledger": "cli_ledger",
    "status": "cli_runs",
    "runs": "cli_runs",
    "show": "cli_show",
    "explain": "cli_show",
    "signal": "cli_runs",
    "cancel": "cli_acts",
    "outbox": "cli_outbox",
    "ops": "cli_ops",
    "retry": "cli_acts",
    "fork": "cli_acts",
    "pause": "cli_acts",
    "resume": "cli_acts",
    "task": "cli_pauses",
    "queue": "cli_pauses",
    "versions": "cli_versions",
    "resolve": "cli_runs",
    "complete": "cli_runs",
    "serve": "serve",
    "dev": "cli_dev",
    "down": "cli_dev",
    "doctor": "doctor",
}


class DurableGroup(click.Group):
    """Loads its commands late, and shows each error of this package as one line with exit status 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"umt_durable.bridge.{COMMANDS[cmd_name]}"), cmd_name)
        if _AFTER not in command.params:
            command.params.append(_AFTER)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command that was asked for."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if type(error) is not click.ClickException:  # a usage error says its own things around its text
                raise
            raise click.ClickException(_spelled(ctx, error.message)) from error
        except DatabaseUnavailableError as error:
            text = f"{_told(str(error))} (where it is says DURABLE_DATABASE_URL)"
            raise click.ClickException(_spelled(ctx, text)) from error
        except DurableError as error:
            raise click.ClickException(_spelled(ctx, _told(str(error)))) from error


def _name_app(ctx: click.Context, _: click.Parameter, named: str | None) -> None:
    """Take the app that is named after the command, as it may be before it."""
    if named is not None:
        from umt_durable.bridge.project import Project, remember

        remember(ctx, Project(named=named))


_AFTER: Final = click.Option(["-A", "--app"], metavar="APP", hidden=True, expose_value=False, callback=_name_app)
"""The option `-A` of each command: people write it after the command too."""


@click.group("durable", cls=DurableGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-A",
    "--app",
    "named",
    metavar="APP",
    help="The Celery app, as for celery -A. Else DURABLE_APP or CELERY_APP, else the library's own app.",
)
@click.version_option(package_name="umt-durable", message="umt-durable %(version)s")
@click.pass_context
def durable(ctx: click.Context, named: str | None) -> None:
    """Runs, schema and services of durable tasks."""
    from umt_durable.bridge.project import Project, remember

    root = ctx.find_root()
    name = root.params.get("app") if root is not ctx else None
    given = getattr(root.obj, "app", None) if name else None
    remember(ctx, Project(named=named, given=given, given_as=name if isinstance(name, str) else None))


def main() -> None:
    """Be the program `umt-durable`."""
    durable(prog_name="umt-durable")


def _spelled(ctx: click.Context, text: str) -> str:
    from umt_durable.bridge.project import spelled

    return spelled(ctx, text)


def _told(text: str) -> str:
    from umt_durable.bridge.console import one_line
    from umt_durable.redaction import redact_text

    return one_line(redact_text(text))
