"""Which Celery app a command is for, found when the command first needs it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from umt_durable.bridge.cli import COMMANDS
from umt_durable.bridge.console import blame, one_line
from umt_durable.bridge.findings import many
from umt_durable.bridge.nearby import apps_near
from umt_durable.errors import FOR_APPS, DurableError

if TYPE_CHECKING:
    from umt_durable.bridge.app import Needs
    from umt_durable.bridge.durable import Durable

VARIABLES: Final = ("DURABLE_APP", "CELERY_APP")
_KEY: Final = "umt_durable.project"
_OURS: Final = re.compile(rf"umt-durable (?=(?:{'|'.join(COMMANDS)})\b)")
_WORKER: Final = "celery worker"


class Project:
    """The app of one command.

    Shape: `named` is what `-A` says; `given` is the app that `celery -A` has found, under the name `given_as`. Without
    either it is the app that DURABLE_APP or CELERY_APP names, and without these the library's own.
    """

    def __init__(self, *, named: str | None, given: Any = None, given_as: str | None = None) -> None:
        self.given = given
        self.given_as = given_as
        self.name = named or ("" if given is not None else next(filter(None, map(os.environ.get, VARIABLES)), ""))

    @cached_property
    def app(self) -> Any:
        """Return the app, with its modules of tasks not yet imported.

        Errors: ClickException in one line.
        """
        if self.name:
            return self._find()
        if self.given is not None:
            return self.given
        import umt_durable

        if self.near:
            click.echo(f"{self.unnamed}; {self.name_it}", err=True)
        return umt_durable.app

    @cached_property
    def near(self) -> list[str]:
        """The modules of this folder that seem to hold an app which the command line has not named."""
        return [] if self.name or self.given is not None else apps_near(Path.cwd())

    @property
    def unnamed(self) -> str:
        """What a command without `-A` works on, where another app is near."""
        return f"without -A this is the package's own app, and not the one in {many(self.near)}"

    @property
    def name_it(self) -> str:
        """How to name the app that is near."""
        return f"to use that, write: umt-durable -A {self.near[0]} …"

    def durable(self, needs: Needs = "database", *, tasks: bool = False) -> Durable:
        """Return the `Durable` of the app; `needs` and `tasks` say what this command will use.

        Errors: ClickException in one line.
        """
        from umt_durable.bridge.app import LibraryApp
        from umt_durable.bridge.durable import Durable

        app = self.app
        if isinstance(app, LibraryApp):
            app.needs = needs
        durable = getattr(app, "umt_durable", None)
        if not isinstance(durable, Durable):
            raise click.ClickException(
                f"the Celery app {self.name or app.main!r} has no Durable: write `durable = Durable(app)` after it,"
                " or name another app with -A"
            )
        with user_code("the configuration"):
            if not app.configured:
                # Reading a key would do it too, but swallow a KeyError that the user's module raises.
                app._finalize_pending_conf()
            if tasks:
                app.loader.import_default_modules()
                app.finalize(auto=True)
        return durable

    def spelled(self, text: str) -> str:
        """Return a text whose commands name the app as this command line does: each can be pasted as it stands."""
        if not self.name and self.given_as:
            ours, named = f"celery -A {shlex.quote(self.given_as)} durable", self.given_as
        else:
            ours, named = f"umt-durable -A {shlex.quote(self.name)}" if self.name else "umt-durable", self.name
        worker = f"celery -A {shlex.quote(named) if named else 'MODULE'} worker"
        if named:
            text = text.replace(f" ({FOR_APPS})", "")
        return _OURS.sub(lambda _: f"{ours} ", text).replace(_WORKER, worker)

    def _find(self) -> Any:
        from celery import Celery
        from celery.app.utils import find_app

        with user_code(f"the app {self.name!r}"):
            try:
                found = find_app(self.name)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{self.name.partition(':')[0]}.".startswith(f"{error.name}."):
                    raise
                raise click.UsageError(
                    f"there is no module {error.name!r} for -A {self.name}: start this in the project's folder"
                ) from None
            except AttributeError as error:
                raise click.UsageError(f"-A {self.name}: {one_line(str(error))}") from None
        if not isinstance(found, Celery):
            raise click.UsageError(f"-A {self.name} is a {type(found).__name__}, not a Celery app")
        return found


def remember(ctx: click.Context, project: Project) -> None:
    """Keep the project of this command line; Celery's own object stays where its code expects it."""
    ctx.meta[_KEY] = project


def project_of(ctx: click.Context) -> Project:
    """Return the project of this command line."""
    project: Project = ctx.meta[_KEY]
    return project


def spelled(ctx: click.Context, text: str) -> str:
    """Return a text whose commands name the app as this command line does, if it has got so far as to name one."""
    project: Project | None = ctx.meta.get(_KEY)
    return text if project is None else project.spelled(text)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn what a user's module raises while it is imported into one line that names the place."""
    try:
        yield
    except (click.ClickException, DurableError):
        raise
    except Exception as error:
        raise click.ClickException(f"{what} cannot be loaded: {blame(error)}") from error
