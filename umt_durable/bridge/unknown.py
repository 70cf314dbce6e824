"""Messages that no strategy of this worker takes: of a task it does not have, or not as a durable one, or unreadable.

Celery ends an unregistered task with FAILURE in the result backend. A run whose task only another worker knows is not
failed but *blocked*, so its message is acked here and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger

from umt_durable.bridge.fields import MAX_ID, Fields, is_name
from umt_durable.bridge.intake import ConsumerSide, refuse
from umt_durable.bridge.message import is_hint
from umt_durable.bridge.raw import RawGuard
from umt_durable.bridge.runtime import runtime_of
from umt_durable.bridge.strategy import is_durable, run_id_of
from umt_durable.errors import MessageRefusedError

logger = get_logger(__name__)

Handler = Callable[..., None]


class UnknownMessages(bootsteps.StartStopStep):
    """Replaces a consumer's handlers of unknown tasks and unreadable messages; a step of the consumer blueprint."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._consumer = consumer
        self._stock_unknown_task: Handler = consumer.on_unknown_task
        self._stock_unknown_message: Handler = consumer.on_unknown_message
        self._stock_decode_error: Handler = consumer.on_decode_error
        self._stock_create: Callable[..., Handler] = consumer.create_task_handler
        consumer.on_unknown_task = self.on_unknown_task
        consumer.on_unknown_message = self.on_unknown_message
        consumer.on_decode_error = self.on_decode_error
        consumer.create_task_handler = self.create_task_handler

    def start(self, consumer: Any) -> None:
        """Guard the channel of a new broker connection, on which the task consumer will read."""
        RawGuard.place(consumer.connection.default_channel)

    def create_task_handler(self, *args: Any, **options: Any) -> Handler:
        """Return Celery's receiver of all messages, behind a look at the headers.

        Keeps: a hint never reaches a task that is not durable here, as in a worker with older code: Celery would call
        its body without arguments and store that failure for the run.
        """
        receive = self._stock_create(*args, **options)
        tasks = self._consumer.app.tasks

        def on_task_received(message: Any) -> None:
            name = (message.headers or {}).get("task", "")
            # The name is a key of a dict there: a list as name raises TypeError, which nobody catches.
            if not isinstance(name, str):
                self._drop(message, "its task name is no text")
            elif name in tasks and is_hint(message.headers) and _is_ordinary(tasks[name]):
                self._leave_blocked(message, name, message.headers.get("id"))
            else:
                receive(message)

        return on_task_received

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Ack a message of an unregistered task that belongs to a run; leave one of no run to Celery."""
        name, run = _name_and_id(message)
        if is_hint(message.headers):
            self._leave_blocked(message, name, run)
        elif not isinstance(run, str) or not is_name(run):
            self._drop(message, f"its id is no text of 1 to {MAX_ID} characters")
        else:

            def finish(known: bool) -> None:
                if known:
                    self._leave_blocked(message, name, run)
                else:
                    self._stock_unknown_task(body, message, exc)

            ConsumerSide(self._consumer).ask(run, finish)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """Drop a hint that names no task; leave other messages of no known form to Celery."""
        if is_hint(message.headers):
            self._drop(message, "it names no task")
        else:
            self._stock_unknown_message(body, message)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Drop an unreadable message of a durable task without logging its body; leave others to Celery."""
        name, _ = _name_and_id(message)
        known = self._consumer.app.tasks.get(name) if isinstance(name, str) else None
        if is_hint(message.headers) or is_durable(known):
            self._drop(message, f"it cannot be read: {type(exc).__name__}")
        else:
            self._stock_decode_error(message, exc)

    def _leave_blocked(self, message: Any, name: object, run: object) -> None:
        """Ack a message of a run that this worker cannot execute; its hint comes back for a worker that can."""
        logger.warning("Durable task %.100r is not registered here; run %.100r stays blocked", name, run)
        headers = message.headers if isinstance(message.headers, Mapping) else {}
        try:
            fields = Fields(name, {**headers, "id": run})
            refused = fields.run_id(), fields.number("replaced_task_nesting") or 0
        except MessageRefusedError as error:
            logger.debug("nobody is asked for its hint again: %s", error)
        else:
            runtime_of(self._consumer.app).incidents.hint_refused(*refused)
        message.ack_log_error(logger, self._consumer.connection_errors)

    def _drop(self, message: Any, reason: str) -> None:
        refuse(_name_and_id(message)[0], run_id_of(message), MessageRefusedError(reason))
        message.reject_log_error(logger, self._consumer.connection_errors)


def _is_ordinary(task: Any) -> bool:
    """Say whether a task is Celery's own: neither of our class nor behind our strategy."""
    return getattr(task, "is_ordinary", True) and not is_durable(task)


def _name_and_id(message: Any) -> tuple[object, object]:
    """Return the task name and the id that a message gives, of protocol 2 or 1, whatever they are."""
    if isinstance(message.headers, Mapping) and "task" in message.headers:
        return message.headers["task"], message.headers.get("id")
    # Protocol 1 was decoded before it came here; an unreadable one was not, and must not be.
    payload = message._decoded_cache
    return (payload.get("task"), payload.get("id")) if isinstance(payload, Mapping) else (None, None)
