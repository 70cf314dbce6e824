"""Telling about an outage once when it begins and once when it is over."""

from __future__ import annotations

import logging

from umt_durable.clock import boottime
from umt_durable.redaction import redact_text


class Outage:
    """One thing that can be away, as one thread sees it."""

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._what = what
        self._logger = logger
        self._since: float | None = None

    @property
    def going_on(self) -> bool:
        """Say whether the last thing told was a failure."""
        return self._since is not None

    def failed(self, error: BaseException) -> None:
        """Note a failure; the first of a series is logged."""
        if self._since is None:
            self._since = boottime()
            self._logger.warning("%s is away, trying on: %s", self._what, redact_text(str(error)).strip())

    def worked(self) -> bool:
        """Note that it answers; the first time after failures is logged, and gives True."""
        since, self._since = self._since, None
        if since is None:
            return False
        self._logger.info("%s is back after %.1f s", self._what, boottime() - since)
        return True
