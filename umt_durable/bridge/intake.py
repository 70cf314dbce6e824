"""Taking foreign messages into the database, off the consumer loop.

The consumer must go on: a frozen database would cost the broker's heartbeat, and a message that is tried again at once
would spin. So a message in doubt waits here, unacked, and the broker's prefetch is the brake. One thread asks the
database, for a batch where it can, and calls back what became of each message. In a gevent worker the thread is a
greenlet, and batches are of one: a flush of many acks breaks the Redis channel there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import psycopg
from celery.bootsteps import RUN
from celery.utils.log import get_logger
from celery.worker import state as worker_state

from umt_durable import telemetry
from umt_durable.bridge.revoke import REVOKED, is_revoked
from umt_durable.bridge.runtime import DurableRuntime
from umt_durable.clock import boottime
from umt_durable.database import is_refusal
from umt_durable.errors import ConfigurationError, DatabaseBusyError, DatabaseUnavailableError, DurableError

if TYPE_CHECKING:
    from umt_durable.bridge.message import TaskMessage

logger = get_logger(__name__)

INTAKE: Final = "durable_intake"
"""The attribute of a worker that holds its intake."""

BATCH = 50
WAITING = 1_000
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 4.0
STOP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A foreign message to be taken in. `settle(True)`: its run is committed; `settle(False)`: it is refused."""

    message: TaskMessage
    settle: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question whether an id has a run row. `settle` gets the answer."""

    run: str
    settle: Callable[[bool], None]


Item = Arrival | Inquiry


@dataclass(frozen=True, slots=True)
class _Blocked:
    """An arrival that an open transaction of somebody's keeps out. Units: `due`, the next try, is `boottime`."""

    arrival: Arrival
    failures: int
    due: float


class Intake:
    """The one thread of a worker's main process that takes foreign messages in.

    Keeps: `settle(True)` of an arrival is called only after the transaction that holds its run has committed, and
    nothing is settled as refused because the database cannot be reached. `settle` runs in this thread.
    """

    def __init__(self, runtime: DurableRuntime, *, batch: int = BATCH) -> None:
        self._runtime = runtime
        self._batch = batch
        self._items: queue.Queue[Item | None] = queue.Queue(WAITING)
        self._blocked: list[_Blocked] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._outage = False

    @property
    def waiting(self) -> int:
        """Return about how many items nobody has looked at yet."""
        return self._items.qsize()

    def start(self) -> None:
        """Start the thread."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="umt-durable-intake", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what was not settled stays unacked, so the broker sends it again."""
        self._stopping.set()
        self.offer(None)
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def offer(self, item: Item | None) -> bool:
        """Queue an item and say whether there was room."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        left: list[Item] = []
        failures = 0
        while not self._stopping.is_set():
            left = self._settle(self._gather(left, pause(failures)))
            self._retry_blocked()
            failures = failures + 1 if left else 0
            if left and self._outage:
                self._stopping.wait(pause(failures))

    def _gather(self, left: Sequence[Item], seconds: float) -> list[Item]:
        """Return what was left and what came meanwhile; wait for one to come, or until it is time to try again."""
        items: list[Item | None] = list(left)
        try:
            if not self._outage:
                items.append(self._items.get(timeout=self._patience(seconds if left else None)))
            while len(items) < self._batch:
                items.append(self._items.get_nowait())
        except queue.Empty:
            pass
        return [item for item in items if item is not None]

    def _patience(self, seconds: float | None) -> float | None:
        """Return for how long to wait for an item: no longer than to the next try of a blocked one."""
        tries = [max(0.0, blocked.due - boottime()) for blocked in self._blocked]
        return min(tries if seconds is None else [seconds, *tries], default=None)

    def _retry_blocked(self) -> None:
        """Try the blocked arrivals that are due again, each alone: with others it would keep these out too."""
        now = boottime()
        due = [blocked for blocked in self._blocked if blocked.due <= now]
        self._blocked = [blocked for blocked in self._blocked if blocked.due > now]
        for blocked in due:
            if self._stopping.is_set():
                return
            left = self._take_in([blocked.arrival], blocked.failures)
            self._blocked += [_Blocked(one, blocked.failures, now + pause(blocked.failures)) for one in left]

    def _settle(self, items: Sequence[Item]) -> list[Item]:
        """Settle what can be settled and return the rest, to be tried again later."""
        self._outage = False
        arrivals = [item for item in items if isinstance(item, Arrival)]
        left: list[Item] = [*self._take_in(arrivals)] if arrivals else []
        for item in items:
            if isinstance(item, Inquiry) and (self._outage or not self._answer(item)):
                left.append(item)
        return left

    def _take_in(self, arrivals: Sequence[Arrival], failures: int = 0) -> list[Arrival]:
        """Take arrivals in and return those to be tried again; one that is blocked waits apart from all others."""
        try:
            self._runtime.take_in([arrival.message for arrival in arrivals])
            revoked = [arrival.message.id for arrival in arrivals if _was_revoked(arrival.message)]
            if revoked:  # before there was a run to cancel; no child may have it before that is made good
                self._runtime.cancel_runs(revoked, REVOKED)
        except Exception as error:  # noqa: BLE001 - it is logged as a refusal or as the reason to wait
            blame = blamed(error)
            if blame is Blame.MESSAGE and len(arrivals) == 1:
                refuse(arrivals[0].message.task, arrivals[0].message.id, error)
                _tell(arrivals[0], False)
                return []
            if blame is Blame.BUSY and len(arrivals) == 1:
                if not failures:
                    self._report(error)
                self._blocked.append(_Blocked(arrivals[0], failures + 1, boottime() + pause(failures + 1)))
                return []
            if blame is Blame.DATABASE or len(arrivals) == 1:
                self._report(error)
                return list(arrivals)
            # One of them spoils the batch; the others must not wait for it.
            return [left for arrival in arrivals for left in self._take_in([arrival])]
        for arrival in arrivals:
            _tell(arrival, True)
        return []

    def _answer(self, inquiry: Inquiry) -> bool:
        try:
            known = self._runtime.has_run(inquiry.run)
        except Exception as error:  # noqa: BLE001 - it is logged as a refusal or as the reason to wait
            if blamed(error) is not Blame.MESSAGE:
                self._report(error)
                return False
            refuse(None, inquiry.run, error)
            known = False  # an id that cannot even be asked for is of no run
        _tell(inquiry, known)
        return True

    def _report(self, error: Exception) -> None:
        """Log that items wait: one line for an outage, the trace as well for what nobody foresaw."""
        self._outage = blamed(error) is Blame.DATABASE
        text = " ".join(str(error).split())
        logger.warning(
            "Foreign messages wait, unacked: %s: %.300s", type(error).__name__, text, exc_info=not self._outage
        )


class ConsumerSide:
    """The consumer's side of the intake, for one broker connection.

    Keeps: a message is handed on, acked or rejected in the consumer's loop only, and only while the connection on which
    it came is still the consumer's. After that the broker sends it again, and taking it in again changes nothing.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._connection = consumer.connection
        self._intake = intake_of(consumer)

    def take_in(self, message: TaskMessage, finish: Callable[[bool], None]) -> None:
        """Have a message taken in, then call `finish` with whether it was, or refused."""
        self._offer(Arrival(message, self._settle(finish)))

    def ask(self, run: str, finish: Callable[[bool], None]) -> None:
        """Have the database asked for a run row, then call `finish` with the answer."""
        self._offer(Inquiry(run, self._settle(finish)))

    def _offer(self, item: Item, failures: int = 0) -> None:
        if not self._intake.offer(item):
            self._consumer.timer.call_after(pause(failures + 1), self._offer, (item, failures + 1))

    def _settle(self, finish: Callable[[bool], None]) -> Callable[[bool], None]:
        def in_loop(answer: bool) -> None:
            if self._consumer.connection is self._connection and self._consumer.blueprint.state == RUN:
                finish(answer)

        def settle(answer: bool) -> None:
            # A green consumer has no loop to call into; the intake is a greenlet beside it.
            if self._consumer.pool.is_green:
                in_loop(answer)
            else:
                self._consumer.call_soon(in_loop, answer)

        return settle


def intake_of(consumer: Any) -> Intake:
    """Return the intake of the worker that a consumer belongs to.

    Errors: ConfigurationError when there is none.
    """
    intake = getattr(consumer.controller, INTAKE, None)
    if not isinstance(intake, Intake):
        raise ConfigurationError("this worker has durable tasks but runs without the bootsteps of Durable(app)")
    return intake


class Blame(StrEnum):
    """What an error of the database layer says: that the database cannot be asked, or a message not be stored."""

    DATABASE = "database"
    BUSY = "busy"  # it answers, but somebody's open transaction keeps one of the batch out
    MESSAGE = "message"
    UNKNOWN = "unknown"  # the message waits: one that waits can be looked at, one that was dropped can not


def blamed(error: Exception) -> Blame:
    """Say what an error is to be put down to."""
    match error:
        case psycopg.DataError() | psycopg.IntegrityError() | UnicodeEncodeError():
            return Blame.MESSAGE
        case psycopg.Error() if is_refusal(error):
            return Blame.MESSAGE
        case DatabaseBusyError():
            return Blame.BUSY
        case psycopg.OperationalError() | psycopg.InterfaceError() | DatabaseUnavailableError():
            return Blame.DATABASE
        case ConfigurationError():
            return Blame.UNKNOWN
        case DurableError():
            return Blame.MESSAGE
        case _:
            return Blame.UNKNOWN


def pause(failures: int) -> float:
    """Return how many seconds to wait after so many failures in a row, 0 included."""
    return float(min(FIRST_PAUSE * 2 ** min(max(failures - 1, 0), 10), LONGEST_PAUSE))


def refuse(task: object, run: object, error: Exception) -> None:
    """Count and log, in one line, a message that is dropped. Its arguments are not logged."""
    telemetry.count(telemetry.Counter.MESSAGE_REFUSED)
    logger.warning("Refused a message for %.100r with id %.100r: %.300s", task, run, " ".join(str(error).split()))


def _was_revoked(message: TaskMessage) -> bool:
    return is_revoked(message.id, message.envelope.stamps if worker_state.revoked_stamps else None)


def _tell(item: Item, answer: bool) -> None:
    """Call back. What goes wrong there is the consumer's affair and must not end this thread."""
    try:
        item.settle(answer)
    except Exception:
        logger.exception("A settled message could not be handed on; the broker sends it again")
