"""Celery's signals around a publishing, sent around the commit of a run.

What counts calls, adds headers or opens a span at `before_task_publish` does so for durable tasks too, and what it put
into the headers of the message is in the run's row, and in each of its hints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery import signals

from umt_durable import tracing
from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.reading import custom_headers
from umt_durable.records import NewRun

if TYPE_CHECKING:
    from celery import Celery


def is_watched() -> bool:
    """Say whether anyone wants to know of a publishing."""
    watched = signals.before_task_publish.receivers or signals.after_task_publish.receivers
    return bool(watched or tracing.tracers())


class Publishing:
    """One call of a durable task, from the finished message to the committed run."""

    def __init__(self, app: Celery, name: str, message: Any, new: NewRun) -> None:
        self._app, self._name, self._new = app, name, new
        self._headers: dict[str, Any] = message.headers
        self._properties: dict[str, Any] = message.properties
        self._body = message.body
        known = Envelope.from_bytes(new.envelope)
        self._route = {"exchange": known.exchange or "", "routing_key": known.routing_key or new.queue}

    def begin(self) -> NewRun:
        """Tell those who want to know before, and return the run with the headers that they and the tracers added."""
        before = custom_headers(self._headers)
        if signals.before_task_publish.receivers:
            queue = self._app.amqp.queues.get(self._new.queue)
            signals.before_task_publish.send(
                sender=self._name,
                body=self._body,
                declare=None if queue is None else [queue],
                headers=self._headers,
                properties=self._properties,
                retry_policy=self._app.conf.task_publish_retry_policy,
                **self._route,
            )
        tracing.inject(self._headers)
        headers = custom_headers(self._headers)
        if headers == before:
            return self._new
        envelope = replace(Envelope.from_bytes(self._new.envelope), headers=headers)
        return replace(self._new, envelope=envelope.to_bytes())

    def end(self) -> None:
        """Tell those who want to know after. A caller's own transaction is still open then, and may roll back."""
        if signals.after_task_publish.receivers:
            signals.after_task_publish.send(sender=self._name, body=self._body, headers=self._headers, **self._route)
