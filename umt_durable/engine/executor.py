"""One delivery of a run: claim, replay, go on, settle."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from uuid import UUID

from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.engine.attempt import Attempt
from umt_durable.engine.execution import Execution, Parts
from umt_durable.engine.exits import Abandoned
from umt_durable.engine.outcomes import Delivery, Dropped, Outcome
from umt_durable.engine.registry import TaskRegistry
from umt_durable.engine.reporting import Reporter
from umt_durable.errors import (
    DatabaseUnavailableError,
)
from umt_durable.failpoints import point
from umt_durable.records import Grant, Token
from umt_durable.services import takeover
from umt_durable.services.lease import Lease
from umt_durable.services.refusals import Refusals
from umt_durable.session import Binding
from umt_durable.settings import Settings
from umt_durable.store import outbox, runs, workers

logger = logging.getLogger(__name__)


class Executor:
    """Executes deliveries in one process."""

    def __init__(
        self,
        database: Database,
        lease: Lease,
        settings: Settings,
        tasks: TaskRegistry,
        bindings: Mapping[str, Binding] | None = None,
        *,
        refusals: Refusals | None = None,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make an executor; `refusals` are those of its process.

        Shape: `is_leaving` says whether the process shuts down: runs are then handed over.
        """
        self._refusals = refusals or Refusals(database, settings)
        self._is_leaving = is_leaving
        self._database = database
        self._lease = lease
        self._settings = settings
        self._tasks = tasks
        self._parts = Parts(database, settings, tasks, dict(bindings or {}), lease)

    def execute(self, delivery: Delivery, reporter: Reporter) -> Outcome:
        """Execute one delivery of a run up to its end, its next wait, or the loss of its grant.

        Errors: DatabaseUnavailableError when the claim could not be asked for; a grant it may have got is given up.
        Keeps: I4 (nothing runs that was not claimed), I24 (claim, step, suspend and finish may be repeated).
        """
        worker = self._lease.ensure()
        sent, grant = self._claim(delivery, worker)
        if grant is None and not self._database.do(lambda conn: workers.is_live(conn, worker)):
            # The database's clock has jumped past our lease; the run may be had under another.
            self._lease.lose()
            worker = self._lease.ensure()
            sent, grant = self._claim(delivery, worker)
        if grant is None:
            return self._not_had(delivery)
        point("claim.a")
        telemetry.count(telemetry.Counter.CLAIMED_RUN)
        attempt = Attempt(self._database, self._lease, grant, sent=sent, is_leaving=self._is_leaving)
        self._lease.hold(attempt, worker)
        try:
            return Execution(self._parts, delivery, grant, attempt, reporter).run()
        except Abandoned as how:
            return self._abandoned(how, attempt, reporter)
        except DatabaseUnavailableError as error:
            return self._abandoned(Abandoned(str(error), fenced=False), attempt, reporter)
        except BaseException as error:
            # sys.exit() in a body, a cancelled greenlet, a defect of ours: neither outcome nor suspension.
            crashed = not (isinstance(error, SystemExit) and self._is_leaving())  # a cold shutdown ends bodies so
            self._give_up(grant.token, f"{type(error).__name__} left the body", crashed=crashed)
            raise
        finally:
            self._lease.release(attempt)

    def _claim(self, delivery: Delivery, worker: UUID) -> tuple[float, Grant | None]:
        """Ask for the grant; return it with the `boottime` at which its statement was sent."""
        task = self._tasks.get(delivery.task)
        versions, takes_new = self._tasks.taken(delivery.task), self._tasks.takes_new(delivery.task)

        def ask(conn: Connection) -> tuple[float, Grant | None]:
            sent = boottime()
            grant = runs.claim(
                conn,
                id=delivery.run_id,
                nesting=delivery.nesting,
                task=delivery.task,
                claim=delivery.claim,
                worker=worker,
                versions=versions,
                takes_new=takes_new,
                limit_seconds=task.limit_seconds,
            )
            point("claim.r")
            return sent, grant

        point("claim.b")
        try:
            return self._database.do(ask)
        except DatabaseUnavailableError:
            # The claim may have been granted, or be so yet: under a lost lease it cannot, and nobody would execute it.
            self._lease.lose()
            raise

    def _not_had(self, delivery: Delivery) -> Dropped:
        """Drop a delivery whose run could not be claimed; if that is for its version, another worker gets its hint, and
        if its task or queue is paused, it gets one when that ends."""
        versions, takes_new = self._tasks.taken(delivery.task), self._tasks.takes_new(delivery.task)
        refused = self._refusals.refuse(
            delivery.run_id, delivery.nesting, task=delivery.task, versions=versions, takes_new=takes_new
        )
        if refused is not None:
            return Dropped(refused)
        telemetry.count(telemetry.Counter.DUPLICATE_DELIVERY)
        return Dropped("nothing to claim: the run is being executed, parked or finished")

    def _abandoned(self, how: Abandoned, attempt: Attempt, reporter: Reporter) -> Dropped:
        """Leave the run to whoever has it, or give it up, and repair an interim state that may hide its outcome."""
        logger.warning("run no. %s is left: %s", attempt.token.run, how.reason, extra={"run": attempt.token.run})
        if not how.fenced:
            self._give_up(attempt.token, how.reason)
        if reporter.wrote:
            with contextlib.suppress(DatabaseUnavailableError):  # then the second result row of the finish repairs it
                self._database.do(lambda conn: outbox.report_again(conn, attempt.token.run), seconds=5.0)
        return Dropped(how.reason)

    def _give_up(self, token: Token, reason: str, *, crashed: bool = True) -> None:
        """End a grant that nobody will use; where that fails, end this process's lease, which has the same effect."""
        try:
            takeover.end_delivery(
                self._database,
                claim=token.claim,
                known_dead=False,
                reason=reason,
                settings=self._settings,
                crashed=crashed,
            )
        except DatabaseUnavailableError:
            self._lease.lose()
