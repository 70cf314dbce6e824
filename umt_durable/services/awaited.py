"""Messages of awaited tasks on their way out: only while their step waits, and those that may leave once never twice.

Before such a message is handed to the broker, that is committed. So a relay that finds the note of another one knows
that nobody knows: the message is put aside as dead, with the commands for the person who finds out. A step with a
time-out goes on waiting for the answer, which may still come; one without would do so for ever, and is woken to ask the
result backend and, if that does not know either, a person.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.errors import FOR_APPS
from umt_durable.records import OutboxEntry
from umt_durable.services.transactions import RETRY_SECONDS, commit
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import outbox, runs, waits

logger = logging.getLogger(__name__)

AT_ONCE: Final = 10
"""How many messages are noted as leaving together: as many are in doubt when their relay dies."""
RELAY_DIED: Final = "the relay that was publishing it has ended"
BROKER_LEFT: Final = "the broker had it and did not answer"
TIDY_EVERY_SECONDS: Final = 60.0
TIDY_BATCH: Final = 500


class AwaitedMessages:
    """What a relay has to do about messages of awaited tasks, beside publishing them."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._tidy_at = 0.0

    def leave(self, entries: Sequence[OutboxEntry], relay: UUID, *, hold_seconds: float) -> set[UUID]:
        """Commit that messages are about to be published, and return which may be.

        The others have no step that waits for them any more, or are another relay's by now.
        Errors: DatabaseUnavailableError.
        """
        ids = [entry.id for entry in entries]
        return self._database.do(
            lambda conn: outbox.leave(conn, ids, relay=relay, hold_seconds=hold_seconds), seconds=RETRY_SECONDS
        )

    def doubt(self, entry: OutboxEntry, relay: UUID, why: str) -> bool:
        """Put aside a message of which nobody knows whether it left; False when another relay has it.

        Errors: DatabaseUnavailableError; of these DatabaseBusyError when somebody holds its run: it is found again.
        """
        assert entry.run is not None
        run, step, reason = entry.run, str(entry.step), _told(entry, why)

        def work(conn: Connection) -> bool:
            locked = runs.lock(conn, run)
            given_up = waits.give_up_answer(conn, run, step)
            if not outbox.doubt(conn, entry.id, relay=relay, reason=reason):
                raise _OvertakenError
            if given_up and locked is not None and locked.state is RunState.WAITING:
                return runs.wake(conn, run, deliver_seconds=self._settings.deliver_seconds)
            return False

        try:
            woken = commit(self._database, "doubt", work, limited=True)
        except _OvertakenError:
            return False
        told = {"event": str(entry.id), "run": entry.run_id, "step": step}
        telemetry.count(telemetry.Counter.DOUBTFUL_MESSAGE, **told)
        telemetry.count(telemetry.Counter.WOKEN_RUN, int(woken))
        logger.error("the message of an awaited task is put aside: %s", reason, extra=told)
        return True

    def tidy(self) -> int:
        """Forget messages that were put aside, of steps that wait no more; a look now and then, return how many rows.

        Errors: DatabaseUnavailableError.
        """
        if boottime() < self._tidy_at:
            return 0
        dropped = self._database.do(lambda conn: outbox.drop_answered(conn, limit=TIDY_BATCH), seconds=RETRY_SECONDS)
        if dropped < TIDY_BATCH:
            self._tidy_at = boottime() + TIDY_EVERY_SECONDS
        return dropped


class _OvertakenError(Exception):
    """Another relay has claimed the message since: what this one began is rolled back."""


def _told(entry: OutboxEntry, why: str) -> str:
    run, step = shlex.quote(str(entry.run_id)), shlex.quote(str(entry.step))
    return (
        f"whether it left is not known: {why}. Its task is not declared idempotent, so it is not sent again by itself."
        f" The run goes on with the answer, should it come, or with what a person says: `umt-durable resolve {run}"
        f" {step} --result JSON`, or with `--error TEXT` instead. `umt-durable outbox replay {entry.id}` sends it again"
        f" ({FOR_APPS})"
    )
