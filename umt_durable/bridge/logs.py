"""Keep secrets out of a worker's log, whoever writes to it: this package, Celery's tracer, or a library.

An exception carries the text that its raiser gave it, and a driver may put its whole DSN there. Only handlers see all
records, and Celery makes them anew when it sets up logging, in each process of its own.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from celery import signals
from celery.utils.log import get_multiprocessing_logger

from umt_durable.redaction import RedactingFilter

_NAMES: Final = ("", "celery", "celery.task", "celery.redirected")


def redact_worker_logs() -> None:
    """Have every handler that Celery gives its log from now on mask secrets. Doing it twice changes nothing.

    An application that sets up logging by itself, by Celery's signal `setup_logging`, puts the filter on its own
    handlers.
    """
    signals.after_setup_logger.connect(_mask, dispatch_uid=f"{__name__}.logger")
    signals.after_setup_task_logger.connect(_mask, dispatch_uid=f"{__name__}.task")


def _mask(logger: logging.Logger, **_: Any) -> None:
    for each in (logger, get_multiprocessing_logger(), *map(logging.getLogger, _NAMES)):
        for handler in each.handlers:
            if not any(isinstance(one, RedactingFilter) for one in handler.filters):
                handler.addFilter(RedactingFilter())
