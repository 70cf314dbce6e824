"""Which Celery app a command is for, found when the command first needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import click

from umt_durable.bridge.console import blame, one_line
from umt_durable.errors import DurableError

if TYPE_CHECKING:
    from umt_durable.bridge.app import Needs
    from umt_durable.bridge.durable import Durable

VARIABLES: Final = ("DURABLE_APP", "CELERY_APP")
_KEY: Final = "umt_durable.project"


class Project:
    """The app of one command.

    Shape: `named` is what `-A` says; `given` is the app that `celery -A` has found. Without either it is the app that
    DURABLE_APP or CELERY_APP names, and without these the library's own.
    """

    def __init__(self, *, named: str | None, given: Any = None) -> None:
        self.given = given
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

        return umt_durable.app

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


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn what a user's module raises while it is imported into one line that names the place."""
    try:
        yield
    except (click.ClickException, DurableError):
        raise
    except Exception as error:
        raise click.ClickException(f"{what} cannot be loaded: {blame(error)}") from error
