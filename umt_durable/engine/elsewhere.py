"""Transaction steps in another database: the user's rows and an entry of a ledger there, then the step in the journal.

Two commits, of two databases, so a process may die between them. The entry has the result then, and the next attempt
finds it before it does anything. It asks by claiming the entry for its own fence, in a transaction of its own: that
waits for a commit which is still on its way, and shuts out every earlier attempt, whose transaction claims the entry
too, before the user's function is called. An attempt that is the first to begin the step has nothing to ask about.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import psycopg

from umt_durable import codec, telemetry
from umt_durable.bound import UserTransaction
from umt_durable.clock import boottime
from umt_durable.database import IDLE_IN_TRANSACTION_MS, RETRY_SECONDS
from umt_durable.engine import failures
from umt_durable.engine.attempt import exit_for
from umt_durable.engine.exits import Canceled
from umt_durable.engine.passing import Pass
from umt_durable.engine.txstep import LONGEST_PAUSE, SHORTEST_PAUSE
from umt_durable.errors import JournalCorruptError, PrivilegeError, SchemaError
from umt_durable.failpoints import point
from umt_durable.ledger import INSTALL, Ledger
from umt_durable.session import driver_error, is_elsewhere, is_lost, transaction
from umt_durable.states import RunState, StepState
from umt_durable.store import journal, ledger_entries
from umt_durable.store.ledger_entries import Done, Place

logger = logging.getLogger(__name__)

_UNKNOWN: Final = object()
"""Stands for the value of a result that is read from the ledger: it is decoded once the journal has it."""
SHORTEST_PARK_SECONDS, LONGEST_PARK_SECONDS = 5.0, 60.0


class _LaterAttemptError(Exception):
    """The entry is claimed by a later attempt; never leaves this module."""


class _UndecidedError(Exception):
    """The other database does not say whether an earlier try is committed; kept as the reason of a parked run."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A transaction step as its body asks for it.

    Shape: `begun_seconds` is how long ago an earlier try of it began, of whatever attempt; None: there is none.
    """

    entry: journal.Entry
    ledger: Ledger
    body: Callable[[Any], Any]
    annotation: Any
    where: str
    begun_seconds: float | None


class LedgerStep:
    """One transaction step with a ledger in one pass, over all its tries in this process."""

    def __init__(self, the_pass: Pass, step: Elsewhere) -> None:
        self._pass, self._attempt, self._step, self._ledger = the_pass, the_pass.attempt, step, step.ledger
        self._place = Place(step.ledger.name, the_pass.run_id, the_pass.among_runs(step.entry.key))
        self._in_doubt = step.begun_seconds is not None
        self._tx: UserTransaction | None = None
        self._may_be_lost, self._committing = True, False
        self._since = boottime()

    def once(self) -> Any:
        """Be one try: commit the rows there, or find that they are, and record the step; return its value.

        Errors: the body's own; EncodingError; SchemaError without a ledger there; the exits of the pass. Keeps: nothing
        is recorded as failed while an earlier try may yet turn out to be committed.
        """
        done, value = self._committed()
        point("ledger.commit.a")
        entry = self._step.entry
        self._attempt.commit(
            lambda guard: journal.commit(guard, entry, state=StepState.DONE, result=done.result, digest=done.digest),
            entry.key,
        )
        point("ledger.record.a")
        return codec.decode(self._pass.opened(done.result), self._step.annotation) if value is _UNKNOWN else value

    def _committed(self) -> tuple[Done, Any]:
        """Return what is committed there: by this try, or by an earlier one."""
        deadline, pause = time.monotonic() + RETRY_SECONDS, SHORTEST_PAUSE
        failure: Exception | None = None
        while True:
            try:
                found = self._look(failure) if self._in_doubt else self._commit()
            except _LaterAttemptError:
                self._shut_out()
            except Exception as error:
                if self._may_be_lost and is_lost(error):
                    self._wait(error, pause, is_last=time.monotonic() > deadline)
                    pause = min(2 * pause, LONGEST_PAUSE)
                elif self._committing:  # the commit was refused, or a hook of the user's library failed after it
                    self._in_doubt, failure = True, error
                else:
                    raise
            else:
                if found is not None:
                    return found
                if failure is not None:
                    raise failure

    # -- the transactions there ----------------------------------------------------------------------------------------

    def _look(self, failure: Exception | None) -> tuple[Done, Any] | None:
        """Shut out the earlier tries and attempts, and return what one of them has committed."""
        self._may_be_lost, self._committing = True, False
        with self._open() as tx:
            found = self._claim(tx)
        point("ledger.claim.a")
        before, self._tx, self._in_doubt = self._tx, None, False
        if found is None:
            return None
        if failure is not None:
            logger.error("a hook after the commit of %s failed", self._step.where, exc_info=failure)
        if before is not None:
            before.arrived()
        return found, _UNKNOWN

    def _commit(self) -> tuple[Done, Any]:
        """Commit the user's rows with the entry, or return what is committed."""
        self._tx, self._may_be_lost, self._committing = None, True, False
        with self._open() as tx:
            found = self._claim(tx)
            if found is not None:
                return found, _UNKNOWN
            if not self._attempt.is_fresh():
                self._attempt.enter(self._step.entry, explicit=True)  # the claim took its time
            encoded, decoded = codec.round_trip(self._call(tx), self._step.annotation, where=self._step.where)
            done = self._sealed(encoded)
            point("ledger.user_sql.a")
            # The last look at grant, cancel and lease, made now: nothing here keeps a take-over from happening.
            self._attempt.prove(anew=True)
            if not ledger_entries.settle(tx.bound, self._place, self._attempt.token, done):
                raise _LaterAttemptError
            point("ledger.commit.b")
            self._tx, self._committing = tx, True
        point("ledger.commit.r")
        return done, decoded

    @contextmanager
    def _open(self) -> Iterator[UserTransaction]:
        with transaction(self._ledger.binding, self._ledger.schema, self._pass.database.vault) as tx:
            # Frozen, this process must not hold the entry, and its successor with it, for ever.
            tx.bound.execute(f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_MS}".encode())
            yield tx

    def _claim(self, tx: UserTransaction) -> Done | None:
        """Hold the entry for this attempt, or return the result that it has."""
        try:
            if ledger_entries.claim(tx.bound, self._place, self._attempt.token):
                return None
            found = ledger_entries.read(tx.bound, self._place)
        except Exception as error:
            self._explain(error)
            raise
        if found is None:
            raise _LaterAttemptError
        if hashlib.sha256(found.result).digest() != found.digest:
            text = f"{self._step.where}: its result in the ledger does not match its digest"
            self._pass.condemn(JournalCorruptError(text))
        return found

    def _call(self, tx: UserTransaction) -> Any:
        self._may_be_lost = False
        try:
            value = self._step.body(tx.handle)
            tx.flush()
        except Exception as error:
            self._may_be_lost = tx.is_broken() or bool(getattr(error, "connection_invalidated", False))
            raise
        self._may_be_lost = True  # what follows is ours
        return value

    def _sealed(self, encoded: codec.Encoded) -> Done:
        """Return a value as both databases store it."""
        result = self._pass.database.vault.seal(encoded.data)
        return Done(result, encoded.digest if result is encoded.data else hashlib.sha256(result).digest())

    # -- when it does not go well --------------------------------------------------------------------------------------

    def _explain(self, error: Exception) -> None:
        """Say what is missing there, if that is what an error means.

        Errors: SchemaError, PrivilegeError.
        """
        schema, where = self._ledger.schema, self._step.where
        if is_elsewhere(error):
            raise SchemaError(
                f"{where}: the database of its binding has no ledger in schema {schema!r}: run `{INSTALL}` for it"
            ) from error
        if isinstance(driver_error(error), psycopg.errors.InsufficientPrivilege):
            raise PrivilegeError(
                f"{where}: this database user may not write to the ledger in schema {schema!r}: run"
                f" `{INSTALL} --role ROLE` for it, as its owner"
            ) from error

    def _shut_out(self) -> NoReturn:
        """Leave the run, whose grant has ended.

        Errors: Abandoned; JournalCorruptError where the journal knows of no later attempt.
        """
        where = self._step.where
        self._attempt.confirm(f"{where}: a later attempt has begun it, the grant of this one has ended")
        text = f"{where}: the ledger has it from an attempt that the journal does not know; was the journal restored?"
        self._pass.condemn(JournalCorruptError(text))

    def _wait(self, error: Exception, pause: float, *, is_last: bool) -> None:
        """Prepare for another try after a lost reply; when the time is over, park the run, or let the step fail.

        Errors: the given one, for the step's policy, where nothing can have been committed; the exits of the pass.
        """
        self._in_doubt = self._in_doubt or self._committing
        telemetry.count(telemetry.Counter.LOST_REPLY)
        if is_last:
            if not self._in_doubt:
                raise error
            self._park(error)
        if self._attempt.signal.wait(pause):
            self._pass.leave(exit_for(self._attempt.signal.reason or "shutdown"))
        self._attempt.enter(self._step.entry, explicit=True)

    def _park(self, error: Exception) -> None:
        """Free the worker until the other database can be asked again. No attempt is used."""
        entry, age = self._step.entry, (self._step.begun_seconds or 0.0) + boottime() - self._since
        seconds = min(max(age / 4, SHORTEST_PARK_SECONDS), LONGEST_PARK_SECONDS)
        text = f"{self._step.where}: whether it is committed in the other database is not known: {error}"
        kept = failures.capture(_UndecidedError(text)).to_bytes()
        due = self._attempt.write(
            lambda guard: journal.record_try(guard, entry, delay_seconds=seconds, error=kept, age_seconds=age),
            cancel=lambda reply: reply is not None and reply.cancel,
        )
        if due is not None and due.cancel:
            raise Canceled("cancelled")
        self._pass.suspend(RunState.RETRYING, steps=[entry.key], until=f"{self._step.where}: its ledger")
