"""Interim states in Celery's result backend, and what leaves at the end of a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from celery import states as celery_states
from celery.app.task import Context
from celery.app.trace import get_actual_ignore_result
from celery.backends.base import DisabledBackend
from celery.utils.log import get_logger

from umt_durable import codec, tracing
from umt_durable.bridge import callbacks, chords
from umt_durable.bridge.context import restore_request
from umt_durable.bridge.envelope import EMPTY, Envelope
from umt_durable.bridge.offspring import ChildTasks
from umt_durable.bridge.ordinary import CeleryTasks
from umt_durable.engine.reporting import DurableTasks, OrdinaryTasks
from umt_durable.errors import DecodingError, DurableError
from umt_durable.records import Grant
from umt_durable.states import RunState

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable
    from umt_durable.bridge.task import DurableTask

logger = get_logger(__name__)


class SuspendedError(DurableError):
    """What the result backend shows of a run between two deliveries, as the reason of its state RETRY."""


class CeleryReporter:
    """Reports one delivery of a run to Celery.

    Keeps: an interim state that cannot be stored costs only its display, never the run.
    """

    def __init__(self, durable: Durable, task: DurableTask, request: Context) -> None:
        self.ordinary: OrdinaryTasks = CeleryTasks(durable)
        self._children = ChildTasks(durable, task.name)
        self._task = task
        self._request = request
        self.envelope: Envelope = EMPTY
        self.age_seconds = 0.0
        self.wrote = False

    def claimed(self, grant: Grant) -> None:
        """Make the request what the run's row says; nothing else in the delivered message is believed."""
        self.envelope = Envelope.from_bytes(grant.envelope)
        self._children.claimed(grant.version)
        try:
            args, kwargs = codec.decode_arguments(grant.args, None, grant.codec)
        except DecodingError:  # the engine quarantines the run for it
            args, kwargs = (), {}
        restore_request(self._request, self.envelope, args, kwargs)
        self._request.retries = grant.failures  # by which Celery's own retry counts
        if not any(self._request.timelimit):
            self._request.update(timelimit=[self._task.time_limit, self._task.soft_time_limit])
        self.age_seconds = grant.age_seconds

    @property
    def durable_tasks(self) -> DurableTasks:
        """The durable tasks that can be children of the run."""
        return self._children

    @property
    def stores(self) -> bool:
        """Whether anyone can ask the result backend for this run."""
        return self._has_backend and not get_actual_ignore_result(self._task, self._request)

    @property
    def reports(self) -> bool:
        """Whether the result backend has to hear of this run's end: from it, a chord or the rest of a chain may."""
        return self._has_backend and (self.stores or chords.is_awaited(self.envelope))

    @property
    def _has_backend(self) -> bool:
        return not isinstance(self._task.backend, DisabledBackend)

    @property
    def trace_id(self) -> str | None:
        """The trace that the message of the run named."""
        return tracing.trace_id(self.envelope.headers)

    def callbacks(self, state: RunState) -> int:
        """Return how many callbacks leave when the run ends in a state."""
        return callbacks.count(self.envelope, state)

    def started(self) -> None:
        """Store STARTED, where the task or the app tracks it."""
        if self._task.tracks_started and self.stores:
            self._store({"pid": os.getpid(), "hostname": self._request.hostname}, celery_states.STARTED)

    def suspending(self, state: RunState, until: str, cause: Exception | None = None) -> None:
        """Store RETRY with the reason, an exception as Celery's: of a retry the failure that it is for."""
        if self.stores:
            self._store(cause or SuspendedError(f"durable: {state} {until}"), celery_states.RETRY)

    def check_sleep(self, seconds: float) -> None:
        """Refuse a sleep that a chord around the run would not outlive.

        Errors: DefinitionError.
        """
        if self._has_backend:
            chords.check_sleep(self._task.backend, self.envelope, seconds)

    def _store(self, value: Any, state: str) -> None:
        self.wrote = True
        try:
            self._task.backend.store_result(self._request.id, value, state, request=self._request)
        except Exception as error:  # noqa: BLE001 - each backend raises its own; the run goes on without this display
            logger.warning("the interim state %s could not be stored: %s", state, type(error).__name__)
