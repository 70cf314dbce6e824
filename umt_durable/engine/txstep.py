"""Transactions with a user's rows, a record of ours and the check of the fence in one commit (I16)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from umt_durable import codec, telemetry
from umt_durable.bound import UserTransaction
from umt_durable.database import IDLE_IN_TRANSACTION_MS, RETRY_SECONDS
from umt_durable.engine.attempt import AlreadyRecordedError, exit_for
from umt_durable.engine.exits import Abandoned
from umt_durable.engine.passing import Pass
from umt_durable.errors import FencingError, SchemaError
from umt_durable.failpoints import point
from umt_durable.session import Binding, is_elsewhere, is_lost, transaction
from umt_durable.states import StepState
from umt_durable.store import journal
from umt_durable.store.guard import Guard

logger = logging.getLogger(__name__)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


class NotMineError(Exception):
    """The record was refused although the grant holds: the row that it is about is somebody else's by now."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a transaction does: a user's function, what is kept of its value, and the fenced statement that keeps it.

    Shape: `encode` gives what `write` is handed, and the value as it would be read back; `write` is the last statement,
    and gives None when it was refused.
    """

    body: Callable[[Any], Any]
    encode: Callable[[Any], tuple[Any, Any]]
    write: Callable[[Guard, Any], bool | None]


def step_record(entry: journal.Entry, body: Callable[[Any], Any], annotation: Any, *, where: str) -> Record:
    """Return the record of a transaction step."""

    def write(guard: Guard, encoded: codec.Encoded) -> bool | None:
        return journal.commit(guard, entry, state=StepState.DONE, result=encoded.data, digest=encoded.digest)

    return Record(body, lambda value: codec.round_trip(value, annotation, where=where), write)


def run_in_transaction(the_pass: Pass, entry: journal.Entry, binding: Binding, record: Record, *, where: str) -> Any:
    """Run a body in one transaction with its record; return the value as it would be read back.

    A commit whose reply was lost is asked for before anything is done again, under a lock that waits for it. What the
    body itself raises, a database error included, is the body's failure.
    Errors: the body's own; EncodingError; Abandoned when the grant had ended, with the user's rows rolled back;
    AlreadyRecordedError when the journal has the result; NotMineError.
    """
    attempt = the_pass.attempt
    deadline, pause = time.monotonic() + RETRY_SECONDS, SHORTEST_PAUSE
    while True:
        this = _Try(the_pass, entry, binding, record)
        try:
            value = this.run()
        except Exception as error:
            if this.refused:
                # This grant recorded it by a commit whose reply was lost, or the grant has ended.
                if attempt.read(lambda guard: journal.look(guard, entry.key)) is None:
                    the_pass.attempt.confirm(f"{where}: a transaction was rolled back, the grant of its run has ended")
                    raise NotMineError(entry.key) from None
                attempt.progressed()
                raise AlreadyRecordedError(entry.key) from None
            if not (this.lost and is_lost(error)):
                if not this.has_arrived():
                    raise
                logger.error("a hook after the commit of %s failed", where, exc_info=error)
                attempt.progressed()
                raise AlreadyRecordedError(entry.key) from None
            telemetry.count(telemetry.Counter.LOST_REPLY)
            if time.monotonic() > deadline:
                if not this.committing:
                    raise  # nothing was committed: an outage of the binding is the step's failure, for its policy
                raise Abandoned(f"{where}: the fate of its commit is not known", fenced=False) from error
            if attempt.signal.wait(pause):
                the_pass.leave(exit_for(attempt.signal.reason or "shutdown"))
            pause = min(2 * pause, LONGEST_PAUSE)
            this.enter_again()
        else:
            point("txstep.commit.a")
            attempt.progressed()
            return value


class _Try:
    """One try of the transaction.

    Shape: `lost` says that an error now means a lost connection of the transaction: before it is open, once it is
    committing, or when it broke under the body. Any other error is the body's own. `refused`: our record was.
    """

    def __init__(self, the_pass: Pass, entry: journal.Entry, binding: Binding, record: Record) -> None:
        self._pass, self._entry, self._binding, self._record = the_pass, entry, binding, record
        self.lost, self.committing, self.refused = True, False, False
        self._tx: UserTransaction | None = None

    def run(self) -> Any:
        """Run the body and commit its rows with its record; return the value as it would be read back.

        Errors: FencingError, seen by whatever is open around the transaction, when the record is refused.
        """
        attempt, entry, database = self._pass.attempt, self._entry, self._pass.database
        with transaction(self._binding, database.schema, database.vault) as tx:
            tx.bound.execute(f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_MS}".encode())
            if not attempt.is_fresh():
                attempt.enter(entry, explicit=True)  # opening the transaction took its time
            self._tx = tx
            kept, decoded = self._record.encode(self._call(tx))
            point("txstep.user_sql.a")
            mine = Guard(tx.bound, attempt.token)  # type: ignore[arg-type]  # a user's, in the shape of ours
            if self._write(mine, kept) is None:
                self.refused = True
                raise FencingError(attempt.token.run, attempt.token.fence)
            point("txstep.commit.b")
            self.lost = self.committing = True
        point("txstep.commit.r")
        return decoded

    def _write(self, guard: Guard, kept: Any) -> bool | None:
        try:
            return self._record.write(guard, kept)
        except Exception as error:
            if not is_elsewhere(error):
                raise
            raise SchemaError(
                f"the binding leads to a database where schema {self._pass.database.schema!r} is missing or not at this"
                " code's revision: it has to be the database that holds the runs"
            ) from error

    def has_arrived(self) -> bool:
        """Say whether the commit took place though an error came: that is one of a hook of the user's library."""
        key = self._entry.key
        if not self.committing or self._pass.attempt.read(lambda guard: journal.look(guard, key)) is None:
            return False
        self._arrived()
        return True

    def enter_again(self) -> None:
        """Ask to enter the body once more.

        Errors: AlreadyRecordedError where the commit whose reply was lost has arrived.
        """
        try:
            self._pass.attempt.enter(self._entry, explicit=True)
        except AlreadyRecordedError:
            if self.committing:
                self._arrived()
            raise

    def _arrived(self) -> None:
        assert self._tx is not None
        self._tx.arrived()

    def _call(self, tx: UserTransaction) -> Any:
        self.lost = False
        try:
            value = self._record.body(tx.handle)
            tx.flush()
        except Exception as error:
            self.lost = tx.is_broken() or bool(getattr(error, "connection_invalidated", False))
            raise
        self.lost = True  # what follows is ours: an error of the connection is one
        return value
