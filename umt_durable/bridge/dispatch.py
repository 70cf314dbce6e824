"""What a relay publishes: hints through the broker, results through the result backend, callbacks through canvas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery.app.task import Context
from celery.exceptions import BackendError
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from umt_durable import tracing
from umt_durable.bridge import callbacks, chords, message, ordinary, sending
from umt_durable.bridge.deliver import outcome_of, plain_arguments
from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.outgoing import Outgoing, Report, reason
from umt_durable.bridge.publisher import Publisher
from umt_durable.bridge.revoke import announce_revoked
from umt_durable.errors import BrokerUnavailableError, DatabaseUnavailableError, DecodingError
from umt_durable.records import FinishedRun, OutboxEntry
from umt_durable.services.events import HOPELESS
from umt_durable.states import OutboxType, RunState

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable

logger = get_logger(__name__)


def _redis_errors() -> tuple[type[Exception], ...]:
    from redis import exceptions

    return exceptions.ConnectionError, exceptions.TimeoutError


# What result backends raise when they cannot be reached: no row's fault, so none of its attempts is used up.
_AWAY = (OSError, OperationalError, BackendError, *_redis_errors())


@dataclass(slots=True)
class _Tally:
    """What became of the rows of a batch; `parts` are the messages of a row that is several, `once` those rows that may
    not leave twice.
    """

    confirmed: set[UUID] = field(default_factory=set)
    refused: dict[UUID, str] = field(default_factory=dict)
    hopeless: dict[UUID, str] = field(default_factory=dict)
    parts: dict[UUID, list[UUID]] = field(default_factory=dict)
    once: set[UUID] = field(default_factory=set)
    doubtful: set[UUID] = field(default_factory=set)

    def settle(self, confirmed: Collection[UUID], refused: Mapping[UUID, str], doubtful: Collection[UUID] = ()) -> None:
        """Take what became of the messages: a row has left when all of its messages have.

        One that may not leave twice is in doubt when a part of it is, or when parts of it have left and others have
        not: none of them can be sent again.
        """
        inner = {part for parts in self.parts.values() for part in parts}
        self.confirmed |= set(confirmed) - inner
        self.refused |= {key: why for key, why in refused.items() if key not in inner}
        for row, parts in self.parts.items():
            problem = next((refused[part] for part in parts if part in refused), None)
            left = [part for part in parts if part in confirmed]
            doubt = any(part in doubtful for part in parts)
            if row in self.once and (doubt or 0 < len(left) < len(parts)):
                self.doubtful.add(row)
            elif problem is not None:
                self.refused[row] = problem
            elif len(left) == len(parts):
                self.confirmed.add(row)
            elif doubt:
                self.doubtful.add(row)


def _is_errback(entry: OutboxEntry, run: FinishedRun) -> bool:
    """Say whether a row is what follows a failure: it may look at that failure, which is stored before it leaves."""
    return entry.type == OutboxType.CALLBACK and run.state is RunState.FAILED


class CeleryDispatcher:
    """Publishes what a relay has claimed. One per relay thread."""

    def __init__(self, durable: Durable, publisher: Publisher) -> None:
        self._durable = durable
        self._publisher = publisher

    def dispatch(
        self,
        hints: Sequence[OutboxEntry],
        reports: Sequence[tuple[OutboxEntry, FinishedRun]],
        others: Sequence[OutboxEntry],
    ) -> Report:
        """Publish a batch and say what became of each row; a result that meets a backend that is away stays in neither.

        Errors: BrokerUnavailableError when the broker takes nothing, with what it had confirmed or is in doubt.
        """
        tally = _Tally()
        unstored: set[int] = set()
        for entry, run in sorted(reports, key=lambda report: _is_errback(*report)):
            if not (_is_errback(entry, run) and run.no in unstored) and not self._deliver(tally, entry, run):
                unstored.add(run.no)
        batch: list[Outgoing] = []
        for entry in hints:
            try:
                batch.append(self._hint(entry))
            except Exception as error:  # noqa: BLE001 - one row that cannot be built must not stop the batch
                tally.refused[entry.id] = reason(error)
        for entry in others:
            batch += self._messages(tally, entry)
        try:
            sent = self._publisher.publish(batch) if batch else Report(frozenset(), {})
        except BrokerUnavailableError as error:
            tally.settle(error.confirmed, {}, error.doubtful)
            raise BrokerUnavailableError(str(error), tally.confirmed, tally.doubtful) from error
        tally.settle(sent.confirmed, sent.refused, sent.doubtful)
        return Report(frozenset(tally.confirmed), tally.refused, tally.hopeless, frozenset(tally.doubtful))

    def _deliver(self, tally: _Tally, entry: OutboxEntry, run: FinishedRun) -> bool:
        try:
            self._report(entry, run)
        except _AWAY as error:
            logger.warning("a %s of run %s waits: %s", entry.type, run.id, reason(error))
        except chords.ClaimedChordError as error:
            logger.info("the %s of run %s is told again: %s", entry.type, run.id, error)
        except Exception as error:  # noqa: BLE001 - backends raise their own; the row stays and is tried again
            logger.warning("a %s of run %s could not be delivered: %s", entry.type, run.id, type(error).__name__)
            tally.refused[entry.id] = reason(error)
        else:
            tally.confirmed.add(entry.id)
        return entry.id in tally.confirmed

    def _messages(self, tally: _Tally, entry: OutboxEntry) -> Sequence[Outgoing]:
        """Make the messages of a row that is no hint; the row is settled when all of them are."""
        try:
            if entry.type == OutboxType.CELERY:
                with tracing.in_trace_of(entry.trace):
                    found = sending.messages(
                        self._durable.app,
                        entry.id,
                        entry.payload or b"",
                        age_seconds=entry.age_seconds,
                        once=entry.once,
                    )
            else:
                found = self._durable.outbox.routes.messages(entry)
        except (*_AWAY, DatabaseUnavailableError) as error:
            logger.warning("outbox row %s waits: %s", entry.id, reason(error))
            return []
        except HOPELESS as error:
            tally.hopeless[entry.id] = reason(error)
            return []
        except Exception as error:  # noqa: BLE001 - one row that cannot be built must not stop the batch
            tally.refused[entry.id] = reason(error)
            return []
        tally.parts[entry.id] = [message.key for message in found]
        if entry.once:
            tally.once.add(entry.id)
        return found

    def _hint(self, entry: OutboxEntry) -> Outgoing:
        assert entry.run_id is not None
        assert entry.task is not None
        return message.hint(
            self._durable.app,
            key=entry.id,
            run_id=entry.run_id,
            nesting=entry.nesting or 0,
            task=entry.task,
            queue=entry.queue or self._durable.queue_of(entry.task),
            priority=entry.priority,
            gen=entry.fence or 0,
            envelope=entry.envelope,
        )

    def _report(self, entry: OutboxEntry, run: FinishedRun) -> None:
        """Store a result again, or publish a callback, of a run whose finisher died before it had."""
        envelope = Envelope.from_bytes(run.envelope)
        with tracing.on_behalf_of(envelope.headers):
            self._report_one(entry, run, envelope)

    def _report_one(self, entry: OutboxEntry, run: FinishedRun, envelope: Envelope) -> None:
        app = self._durable.app
        request = self._request(run, envelope)
        backend = self._backend(run.task)
        value, error = outcome_of(self._durable, run)
        if entry.type == OutboxType.CALLBACK and entry.payload is not None:
            callbacks.dispatch_stored(app, request, entry.payload)
            return
        if entry.type == OutboxType.CALLBACK:
            callbacks.dispatch(app, request, envelope, entry.ordinal, value=value, error=error)
            return
        stores = not request.ignore_result
        if run.state is RunState.SUCCEEDED:
            backend.mark_as_done(run.id, value, request, store_result=stores)
            chords.check_unclaimed(backend, request)
        elif run.state is RunState.FAILED:
            backend.mark_as_failure(run.id, error, request=request, store_result=stores, call_errbacks=False)
            chords.check_unclaimed(backend, request)
        else:
            ordinary.revoke_unanswered(self._durable, run.no)
            callbacks.revoke(backend, request, run.reason or "cancelled", store_result=stores)
            if entry.ordinal == 0:
                announce_revoked(app, run.task, request, run.reason)

    def _request(self, run: FinishedRun, envelope: Envelope) -> Context:
        try:
            args, kwargs = plain_arguments(run.args, run.codec)
        except DecodingError:
            args, kwargs = [], {}
        request = message.request_context(
            run_id=run.id,
            nesting=run.nesting,
            task=run.task,
            queue=run.queue or self._durable.queue_of(run.task),
            args=args,
            kwargs=kwargs,
            envelope=envelope,
        )
        if request.ignore_result is None:
            task = self._durable.app.tasks.get(run.task)
            request.ignore_result = bool(getattr(task, "ignore_result", False))
        return request

    def _backend(self, task: str) -> Any:
        known = self._durable.app.tasks.get(task)
        return self._durable.app.backend if known is None else known.backend
