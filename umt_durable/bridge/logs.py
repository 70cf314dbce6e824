"""Keep secrets out of a worker's log, whoever writes to it: this package, Celery's tracer, or a library.

An exception carries the text that its raiser gave it, and a driver may put its whole DSN there. Only handlers see all
records, and Celery makes them anew when it sets up logging, in each process of its own.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from celery import signals
from celery._state import get_current_task
from celery.app.trace import log_policy_ignore
from celery.utils.log import get_multiprocessing_logger

from umt_durable.bridge.deliver import SAID
from umt_durable.redaction import RedactingFilter

TRACER: Final = "celery.app.trace"
_NAMES: Final = ("", "celery", "celery.task", "celery.redirected")


def redact_worker_logs() -> None:
    """Have every handler that Celery gives its log from now on mask secrets, and its lines say what happened to runs.

    Doing it twice changes nothing.

    An application that sets up logging by itself, by Celery's signal `setup_logging`, puts the filter on its own
    handlers.
    """
    tracer = logging.getLogger(TRACER)
    if not any(isinstance(one, Said) for one in tracer.filters):
        tracer.addFilter(Said())
    signals.after_setup_logger.connect(_mask, dispatch_uid=f"{__name__}.logger")
    signals.after_setup_task_logger.connect(_mask, dispatch_uid=f"{__name__}.task")


class Said(logging.Filter):
    """Has Celery's line about an ignored delivery say what became of it: parked, cancelled, dropped."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        context = record.args
        if isinstance(context, dict) and context.get("description") == log_policy_ignore.description:
            task = get_current_task()
            said = None if task is None else getattr(task.request, SAID, None)
            if said is not None:
                record.args = {**context, "description": said}
        return True


def _mask(logger: logging.Logger, **_: Any) -> None:
    for each in (logger, get_multiprocessing_logger(), *map(logging.getLogger, _NAMES)):
        for handler in each.handlers:
            if not any(isinstance(one, RedactingFilter) for one in handler.filters):
                handler.addFilter(RedactingFilter())
