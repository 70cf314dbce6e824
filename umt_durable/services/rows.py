"""One row after the other: what goes wrong with one leaves it for the next look, and never stops a scan (RG-6)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from umt_durable import telemetry
from umt_durable.errors import DatabaseBusyError, DatabaseUnavailableError

logger = logging.getLogger(__name__)

Row = TypeVar("Row")
Done = TypeVar("Done")

MOST_TOLD = 1000

_told: set[tuple[str, str]] = set()


def each(duty: str, rows: Iterable[Row], work: Callable[[Row], Done]) -> tuple[list[Done], int]:
    """Do work for each row; give what it returned, and how many rows were left for the next look.

    A row that somebody else holds is left in silence. Any other failure is counted, and logged the first time.
    Errors: DatabaseUnavailableError when the database does not answer: the next row would fare no better.
    """
    done: list[Done] = []
    failed = 0
    for row in rows:
        try:
            done.append(work(row))
        except DatabaseBusyError:
            failed += 1
        except DatabaseUnavailableError:
            raise
        except Exception:
            failed += 1
            telemetry.count(telemetry.Counter.DUTY_FAILED, duty=duty, row=str(row))
            if (duty, str(row)) not in _told and len(_told) < MOST_TOLD:
                _told.add((duty, str(row)))
                logger.exception("%s left %s for its next look", duty, row)
    return done, failed
