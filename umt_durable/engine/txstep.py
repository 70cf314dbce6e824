"""The transactional step: a user's rows, the recorded result and the check of the fence in one commit (I16)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from umt_durable import codec, telemetry
from umt_durable.database import IDLE_IN_TRANSACTION_MS, RETRY_SECONDS, Connection
from umt_durable.engine.exits import Abandoned
from umt_durable.engine.passing import Pass
from umt_durable.failpoints import point
from umt_durable.session import Binding, is_lost, transaction
from umt_durable.states import StepState
from umt_durable.store import journal
from umt_durable.store.guard import Guard


class _Refused(Exception):
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

    A commit whose reply was lost is looked up before anything is done again. If it lands only after that look, the
    repeat finds the step recorded and rolls its own rows back.
    Errors: the body's own; EncodingError; Abandoned when the grant had ended, with the user's rows rolled back.
    """
    token, schema = the_pass.attempt.token, the_pass.database.schema
    deadline = time.monotonic() + RETRY_SECONDS

    def guard(conn: Connection) -> Guard:
        return Guard(conn, token)

    while True:
        try:
            with transaction(binding, schema) as tx:
                tx.bound.execute(f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_MS}".encode())
                value = body(tx.handle)
                encoded, decoded = codec.round_trip(value, annotation, where=where)
                tx.flush()
                point("txstep.user_sql.a")
                mine = Guard(tx.bound, token)  # type: ignore[arg-type]  # a user's connection in the shape of ours
                if (
                    journal.commit(mine, entry, state=StepState.DONE, result=encoded.data, digest=encoded.digest)
                    is None
                ):
                    raise _Refused
                point("txstep.commit.b")
        except _Refused:
            pass
        except Exception as error:
            if not is_lost(error):
                raise
            telemetry.count(telemetry.Counter.LOST_REPLY)
            if time.monotonic() > deadline:
                raise Abandoned(f"{where}: the database of its binding did not answer", fenced=False) from error
            if the_pass.database.do(lambda conn: journal.look(guard(conn), entry.key)) is None:
                the_pass.attempt.enter(entry, explicit=True)
                continue
        else:
            point("txstep.commit.a")
            the_pass.attempt.progressed()
            return decoded
        return _recorded(the_pass, entry, annotation, guard)


def _recorded(the_pass: Pass, entry: journal.Entry, annotation: Any, guard: Callable[[Connection], Guard]) -> Any:
    """Return what this grant recorded earlier by a commit whose reply was lost."""
    if the_pass.database.do(lambda conn: journal.look(guard(conn), entry.key)) is not StepState.DONE:
        telemetry.count(telemetry.Counter.FENCED_WRITE)
        raise Abandoned("a transaction was refused and rolled back: the grant of this run has ended", fenced=True)
    run = the_pass.attempt.token.run
    found = next(item for item in the_pass.database.do(lambda conn: journal.read(conn, run)) if item.key == entry.key)
    assert found.result is not None
    the_pass.attempt.progressed()
    return codec.decode(found.result, annotation)
