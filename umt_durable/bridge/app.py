"""The library's own Celery app, for `celery -A umt_durable`, which needs nothing to be set up.

It reads `celeryconfig.py` of the current folder, or the module that CELERY_CONFIG_MODULE names. When its configuration
is first needed, and neither a database nor a broker is configured, the embedded pair of the folder is started or
attached to, and its schema brought up to date. Until then nothing happens: `--help` starts no server.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click
from celery import Celery
from celery.loaders.base import BaseLoader
from celery.utils.collections import DictAttribute

from umt_durable import embedded, migrate
from umt_durable.bridge.console import blame
from umt_durable.bridge.durable import Durable
from umt_durable.errors import ConfigurationError, DurableError
from umt_durable.redaction import redact_url
from umt_durable.settings import Settings
from umt_durable.states import OWN

if TYPE_CHECKING:
    app: LibraryApp
    durable: LibraryDurable

CONFIG_VARIABLE: Final = "CELERY_CONFIG_MODULE"
CONFIG_MODULE: Final = "celeryconfig"
BROKER_VARIABLES: Final = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")
BROKER_KEYS: Final = ("broker_url", "broker_read_url", "broker_write_url", "broker_host")

Needs = Literal["all", "database", "nothing"]


class LibraryLoader(BaseLoader):
    """Reads `celeryconfig`, which may be missing; what goes wrong inside it is shown."""

    def read_configuration(self, env: str = CONFIG_VARIABLE) -> Any:
        """Return the settings of the configuration module.

        Errors: ConfigurationError when the module that CELERY_CONFIG_MODULE names is missing, or a module raises.
        """
        named = os.environ.get(env)
        name = named or CONFIG_MODULE
        try:
            return DictAttribute(self.import_from_cwd(name))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise ConfigurationError(f"{name} cannot be loaded: {blame(error)}") from error
        except Exception as error:
            raise ConfigurationError(f"{name} cannot be loaded: {blame(error)}") from error
        if named:
            raise ConfigurationError(f"{env}={named!r} names a module that is neither in {Path.cwd()} nor on the path")
        return {}


class LibraryApp(Celery):
    """A Celery app that runs on the embedded pair of the current folder unless servers are configured.

    Shape: `needs` says what the process at hand will use, so that a command which only reads the database asks for no
    broker, and one that prints DDL starts nothing.
    Errors: ConfigurationError at the first look at the configuration when one of database and broker is configured and
    the other is not; EmbeddedError when the pair cannot be started. The command line shows both without a trace.
    """

    needs: Needs = "all"

    def on_init(self) -> None:
        """Give the app its `Durable`."""
        LibraryDurable(self)
        self.add_defaults({"result_chord_expires": 0})  # Celery's default forgets a chord whose member sleeps for a day

    def _load_config(self) -> Any:
        # A receiver of `on_after_configure` could not refuse: Celery logs what it raises and goes on.
        try:
            conf = super()._load_config()
            if self.needs != "nothing":
                self.umt_durable.settle(conf)
        except DurableError as error:
            self._conf, self.configured = None, False
            raise _shown(error) from error
        return conf


class LibraryDurable(Durable):
    """The `Durable` of the library's own app."""

    pair: embedded.Pair | None = None

    def settle(self, conf: Any) -> None:
        """Leave a configuration that names a database and a broker, those of the embedded pair if none are named."""
        settings = Settings.load(self._given, {key: conf[key] for key in conf if str(key).startswith("durable_")})
        has_database = settings.database_url is not None
        has_broker = any(map(os.environ.get, BROKER_VARIABLES)) or any(conf.get(key) for key in BROKER_KEYS)
        needs_broker = self.app.needs == "all"
        if has_database and (has_broker or not needs_broker):
            return
        if has_database or has_broker or not settings.embedded:
            raise ConfigurationError(_missing(has_database, has_broker))
        self.pair = embedded.ensure()
        if migrate.read_revision(self.pair.database_url, settings.schema) != migrate.head():
            migrate.migrate_engine_schema(self.pair.database_url, settings.schema)
        conf["durable_database_url"] = self.pair.database_url
        conf["broker_url"] = self.pair.broker_url
        if not conf.result_backend:
            conf["result_backend"] = self.pair.result_url

    def banner(self) -> str:
        """Say in one line what runs where, without secrets."""
        services = "here" if self.settings.worker_services else "elsewhere"
        versions = sum(1 for task in self.tasks if not task.name.startswith(OWN))
        tasks = "1 task version" if versions == 1 else f"{versions} task versions"
        if not versions:
            tasks = "no durable task here: start it with -A of the module that declares some"
        return f"umt_durable: {tasks} · {whereabouts(self)} · relay and maintenance {services}"


def whereabouts(durable: Durable) -> str:
    """Say where the journal and the broker of an app are, without secrets."""
    database = durable.database  # the first look at the configuration; it may start the embedded pair
    pair = getattr(durable, "pair", None)
    if pair is not None:
        return f"embedded Postgres (schema {database.schema}) and Valkey in {pair.home}"
    broker = durable.app.conf.broker_write_url or durable.app.connection_for_write().as_uri()
    return f"journal {redact_url(database.url)} schema {database.schema} · broker {redact_url(str(broker))}"


def _missing(has_database: bool, has_broker: bool) -> str:
    """Say which half of a configuration is not there."""
    if has_database:
        return (
            "a database is configured but no broker: set CELERY_BROKER_URL (or broker_url in celeryconfig.py),"
            " take the database setting away to run on the embedded pair, or name your own app with -A"
        )
    if has_broker:
        return (
            "a broker is configured but no database: set DURABLE_DATABASE_URL (or durable_database_url in"
            " celeryconfig.py), take the broker setting away to run on the embedded pair, or name your own app with -A"
        )
    return (
        "the embedded pair is turned off and no servers are configured: set DURABLE_DATABASE_URL and"
        " CELERY_BROKER_URL, or take DURABLE_EMBEDDED=0 (durable_embedded) away"
    )


def _shown(error: DurableError) -> DurableError:
    """Return the same error, also of the kind that Celery's command line shows in one line."""
    kind = type(error)
    both: Any = type(kind.__name__, (kind, click.ClickException), {"__module__": kind.__module__})
    shown: DurableError = both(str(error))
    return shown


@cache
def _made() -> LibraryApp:
    return LibraryApp("umt_durable", loader=LibraryLoader)


def __getattr__(name: str) -> Any:
    if name == "app":
        return _made()
    if name == "durable":
        return _made().umt_durable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
