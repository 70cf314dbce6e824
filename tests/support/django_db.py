"""Django without a project: databases that a test declares, and one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.apps import apps
from django.conf import settings
from django.db import connections, models
from psycopg.conninfo import conninfo_to_dict

if not settings.configured:
    settings.configure(DATABASES={}, INSTALLED_APPS=[], USE_TZ=False, DEFAULT_AUTO_FIELD="django.db.models.AutoField")
    django.setup()
assert apps.ready


class Booking(models.Model):
    """A row of the application; nothing in the table keeps doubles out, so that they show."""

    amount = models.IntegerField()

    class Meta:
        app_label = "shop"
        db_table = "booking"


def declare(alias: str, url: str, schema: str, **options: Any) -> Any:
    """Declare a database under an alias, with its unqualified names in a schema; return this thread's connection."""
    parts = conninfo_to_dict(url)
    entry = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts["dbname"],
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": parts.get("port", ""),
        "OPTIONS": {"options": f"-c search_path={schema}", **options.pop("OPTIONS", {})},
        **options,
    }
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: entry})[alias]
    return connections[alias]


@contextmanager
def declared(alias: str, url: str, schema: str, **options: Any) -> Iterator[Any]:
    """Declare a database, yield this thread's connection to it, and forget it again."""
    try:
        yield declare(alias, url, schema, **options)
    finally:
        connections[alias].close()
        connections[alias].close_pool()
        del connections[alias]
        del connections.settings[alias]
