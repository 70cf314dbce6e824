"""The transactional step: a user's rows, the recorded result and the check of the fence in one commit (I16)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from umt_durable import codec, telemetry
from umt_durable.database import IDLE_IN_TRANSACTION_MS, RETRY_SECONDS
from umt_durable.engine.attempt import AlreadyRecordedError, exit_for
from umt_durable.engine.exits import Abandoned
from umt_durable.engine.passing import Pass
from umt_durable.failpoints import point
from umt_durable.session import Binding, UserTransaction, is_lost, transaction
from umt_durable.states import StepState
from umt_durable.store import journal
from umt_durable.store.guard import Guard

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


class _RefusedError(Exception):
    """The record of the result was not written; raised to roll the user's rows back."""


def run_in_transaction(
    the_pass: Pass,
    entry: journal.Entry,
    binding: Binding,
    body: Callable[[Any], Any],
    annotation: Any,
    *,
    where: str,
) -> Any:
    """Run a body in one transaction with its record; return the value as it would be read back.

    A commit whose reply was lost is asked for before anything is done again, under a lock that waits for it. What the
    body itself raises, a database error included, is the body's failure.
    Errors: the body's own; EncodingError; Abandoned when the grant had ended, with the user's rows rolled back;
    AlreadyRecordedError when the journal has the result.
    """
    attempt = the_pass.attempt
    deadline, pause = time.monotonic() + RETRY_SECONDS, SHORTEST_PAUSE
    while True:
        this = _Try(the_pass, entry, binding, where)
        try:
            encoded = this.run(body, annotation)
        except _RefusedError:
            # This grant recorded it by a commit whose reply was lost, or the grant has ended.
            if attempt.read(lambda guard: journal.look(guard, entry.key)) is None:
                telemetry.count(telemetry.Counter.FENCED_WRITE)
                raise Abandoned("a transaction was rolled back: the grant of its run has ended", fenced=True) from None
            attempt.progressed()
            raise AlreadyRecordedError(entry.key) from None
        except Exception as error:
            if not (this.lost and is_lost(error)):
                raise
            telemetry.count(telemetry.Counter.LOST_REPLY)
            if time.monotonic() > deadline:
                if not this.committing:
                    raise  # nothing was committed: an outage of the binding is the step's failure, for its policy
                raise Abandoned(f"{where}: the fate of its commit is not known", fenced=False) from error
            if attempt.signal.wait(pause):
                the_pass.leave(exit_for(attempt.signal.reason or "shutdown"))
            pause = min(2 * pause, LONGEST_PAUSE)
            attempt.enter(entry, explicit=True)  # says so where the commit has arrived after all
        else:
            point("txstep.commit.a")
            attempt.progressed()
            return encoded


class _Try:
    """One try of the transaction.

    Shape: `lost` says that an error now means a lost connection of the transaction: before it is open, once it is
    committing, or when it broke under the body. Any other error is the body's own.
    """

    def __init__(self, the_pass: Pass, entry: journal.Entry, binding: Binding, where: str) -> None:
        self._pass, self._entry, self._binding, self._where = the_pass, entry, binding, where
        self.lost, self.committing = True, False

    def run(self, body: Callable[[Any], Any], annotation: Any) -> Any:
        """Run the body and commit its rows with its result; return the result as it would be read back."""
        attempt, entry = self._pass.attempt, self._entry
        with transaction(self._binding, self._pass.database.schema) as tx:
            tx.bound.execute(f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_MS}".encode())
            if not attempt.is_fresh():
                attempt.enter(entry, explicit=True)  # opening the transaction took its time
            value = self._call(body, tx)
            encoded, decoded = codec.round_trip(value, annotation, where=self._where)
            point("txstep.user_sql.a")
            mine = Guard(tx.bound, attempt.token)  # type: ignore[arg-type]  # a user's, in the shape of ours
            if journal.commit(mine, entry, state=StepState.DONE, result=encoded.data, digest=encoded.digest) is None:
                raise _RefusedError
            point("txstep.commit.b")
            self.lost = self.committing = True
        return decoded

    def _call(self, body: Callable[[Any], Any], tx: UserTransaction) -> Any:
        self.lost = False
        try:
            value = body(tx.handle)
            tx.flush()
        except Exception as error:
            broken = getattr(tx.handle, "closed", False) or getattr(error, "connection_invalidated", False)
            self.lost = bool(broken)
            raise
        self.lost = True  # what follows is ours: an error of the connection is one
        return value
