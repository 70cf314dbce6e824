"""The queues and exchanges that are known to exist on one broker connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu.common import Broadcast

from umt_durable.bridge.outgoing import Outgoing, reason
from umt_durable.errors import BrokerUnavailableError

if TYPE_CHECKING:
    from celery import Celery


class Routes:
    """Makes sure, once per connection, that a message has somewhere to go.

    Keeps: a queue or exchange that is wrong is a problem of the rows that name it, and is tried once a batch.
    """

    def __init__(
        self,
        app: Celery,
        channel: object,
        *,
        lost: tuple[type[BaseException], ...],
        is_outage: Callable[[Exception], bool] = lambda _: False,
        look: Callable[[str], object] | None = None,
    ) -> None:
        """Work on `channel`; `lost` errors are passed on; `look` asks the broker for an exchange, where it can.

        `is_outage` tells of another error that the broker is the trouble, not the queue.
        """
        self._app = app
        self._channel = channel
        self._lost = lost
        self._is_outage = is_outage
        self._look = look
        self._known: set[tuple[str, str]] = set()
        self._problems: dict[tuple[str, str], str] = {}

    def begin_batch(self) -> None:
        """Forget the problems of the last batch: they may have been repaired."""
        self._problems.clear()

    def problem(self, row: Outgoing) -> str | None:
        """Declare the row's queue and look for its exchange; give the reason when the row has nowhere to go."""
        queue, exchange, look = row.queue, row.exchange, self._look
        found = None
        if queue is not None:
            found = self._once("queue", queue, lambda: declare(self._app, queue, self._channel))
        if found is None and exchange and look is not None:
            found = self._once("exchange", exchange, lambda: look(exchange))
        return found

    def forget(self, row: Outgoing) -> None:
        """Declare and look again next time: the broker would not take a message for this route."""
        self._known -= {("queue", row.queue or ""), ("exchange", row.exchange)}

    def _once(self, kind: str, name: str, attempt: Callable[[], object]) -> str | None:
        key = (kind, name)
        if key in self._known:
            return None
        if key not in self._problems:
            try:
                attempt()
            except self._lost:
                raise
            except Exception as error:
                if self._is_outage(error):
                    raise BrokerUnavailableError(reason(error)) from error
                self._problems[key] = f"{kind} {name!r} cannot be used: {reason(error)}"
            else:
                self._known.add(key)
        return self._problems.get(key)


def declare(app: Celery, name: str, channel: object) -> None:
    """Declare a queue of the app, with its exchange and binding, as the app's own settings describe it.

    Errors: KeyError when the app knows no such queue and `task_create_missing_queues` is off.
    """
    found = app.amqp.queues[name]
    # Each receiver of a broadcast declares a queue of its own.
    entity: Any = found.exchange if isinstance(found, Broadcast) else found
    entity(channel).declare()
