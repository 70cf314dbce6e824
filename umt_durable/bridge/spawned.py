"""Pool children that are spawned: Celery gives such a child a copy of the worker's app, without what was set on it.

The copy is made first; then the modules with the tasks are imported, and make an app and a `Durable` of their own.
Their tasks end up on the copy, so their `Durable` has to be there too.
"""

from __future__ import annotations

import os
from typing import Any, Final

from celery import _state

SPAWNED: Final = "FORKED_BY_MULTIPROCESSING"
"""What Celery sets in the environment of children that are fresh interpreters."""


def worker_app(app: Any) -> Any:
    """Return the copy of the worker's app that stands for an app in a spawned pool child; None where there is none."""
    if not os.environ.get(SPAWNED):
        return None
    copies = [one for one in _state._get_active_apps() if one is not app and one.main == app.main]
    return copies[0] if len(copies) == 1 else None
