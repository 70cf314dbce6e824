"""What a person does with external effects: look at them, and say what became of one that nobody else can tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar
from uuid import uuid4

from umt_durable import codec, telemetry, texts
from umt_durable.database import Connection, Database
from umt_durable.engine import failures
from umt_durable.engine.failures import Failure
from umt_durable.errors import (
    DatabaseUnavailableError,
    DefinitionError,
    OpFailedError,
    OpStateError,
    UnknownOpError,
)
from umt_durable.payloads import opened
from umt_durable.records import Op
from umt_durable.services import release
from umt_durable.settings import Settings
from umt_durable.states import OpState
from umt_durable.store import ledger
from umt_durable.store.ledger import OpName

T = TypeVar("T")

MISSING: Final = object()
CALL_SECONDS = 10.0
MAX_PAGE = 1000
MAX_COMMENT = 1000
UNSETTLED = (OpState.OPEN, OpState.UNCERTAIN)


def check_page(limit: object) -> None:
    """Refuse what is no size of a page.

    Errors: DefinitionError.
    """
    if not isinstance(limit, int) or not 1 <= limit <= MAX_PAGE:
        raise DefinitionError(f"limit must be from 1 to {MAX_PAGE}, not {limit!r:.100}")


def _opened(op: Op) -> Op:
    """Return an op with its answer as it was before it was sealed, where that can be had here."""
    return replace(op, result=opened(op.result), error=opened(op.error))


class Ops:
    """The op ledger of one schema, in the namespace of the settings unless another one is named."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    def list(
        self,
        *,
        states: Sequence[OpState | str] | None = None,
        after: str = "",
        limit: int = 100,
        namespace: str | None = None,
    ) -> list[Op]:
        """Read a page of ops in the order of their keys, those without an answer unless `states` are named.

        Shape: `after` is the `op_key` of the last one of the page before.
        Errors: DefinitionError for a state that is none, a limit outside 1 to 1000, text that cannot be stored.
        """
        check_page(limit)
        texts.check("after", after, least=0)
        texts.check("namespace", namespace, least=0)
        try:
            wanted = UNSETTLED if states is None else [OpState(state) for state in states]
        except (ValueError, TypeError) as error:
            raise DefinitionError(str(error)) from None
        within = namespace or self._settings.op_namespace
        found = self._do(lambda conn: ledger.page(conn, within, states=wanted, after=after, limit=limit))
        return [_opened(op) for op in found]

    def get(self, op_key: str, *, namespace: str | None = None) -> Op:
        """Read one op.

        Errors: UnknownOpError.
        """
        op = self._name(op_key, namespace)
        found = self._do(lambda conn: ledger.read(conn, op))
        if found is None:
            raise UnknownOpError(op.namespace, op_key)
        return _opened(found)

    def failure(self, op: Op) -> Failure | None:
        """Return why an op failed, or is uncertain."""
        return None if op.error is None else failures.from_bytes(op.error)

    def result(self, op: Op, annotation: Any = codec.EMPTY) -> Any:
        """Return the recorded answer of an op, typed by an annotation if one is given; None without one."""
        return None if op.result is None else codec.decode(op.result, annotation)

    def resolve(
        self,
        op_key: str,
        *,
        done: Any = MISSING,
        not_done: bool = False,
        failed: str | None = None,
        actor: str,
        reason: str | None = None,
        namespace: str | None = None,
    ) -> Op:
        """Say what became of an effect, and let the runs go on that are parked for it; return it as it is then.

        Shape: exactly one of `done` (its result, as plain JSON gives it: it was applied), `not_done` (it was not, and
        may be called again) and `failed` (it was not, and will not be; the text is the failure).
        Errors: OpStateError when it is done, or a running run is executing it; UnknownOpError; DefinitionError;
        EncodingError for a result that cannot be stored.
        """
        if (done is not MISSING) + bool(not_done) + (failed is not None) != 1:
            raise DefinitionError(f"op {op_key!r}: say one of done=, not_done=True and failed=")
        if not actor:
            raise DefinitionError(f"op {op_key!r}: actor= says who decides")
        texts.check("actor", actor)
        for label, text in (("failed", failed), ("reason", reason)):
            if text is not None and not isinstance(text, str):
                raise DefinitionError(f"op {op_key!r}: {label} must be text, not {text!r:.100}")
        state, said = OpState.OPEN, codec.Encoded(b"", 0, b"")
        if done is not MISSING:
            state, said = OpState.DONE, codec.encode(done, codec.EMPTY, where=f"the result of op {op_key!r}")
        failure = None
        if failed is not None:
            state, failure = OpState.FAILED, failures.capture(OpFailedError(op_key, failed), step=op_key).to_bytes()
        op, token = self._name(op_key, namespace), uuid4()

        def decide(conn: Connection) -> None:
            before = ledger.read(conn, op)
            if before is None:
                raise UnknownOpError(op.namespace, op_key)
            if before.token == token:  # the reply was lost
                return
            _check(before)
            if not ledger.resolve(
                conn,
                op,
                held=before.token,
                token=token,
                state=state,
                result=said.data if state is OpState.DONE else None,
                digest=said.digest if state is OpState.DONE else None,
                error=failure,
                actor=actor,
                comment=None if reason is None else texts.storable(reason)[:MAX_COMMENT],
            ):
                raise OpStateError(f"op {op_key!r} has changed meanwhile: look at it again")

        self._do(decide)
        telemetry.count(telemetry.Counter.RESOLVED_OP)
        self._release(op)
        return self.get(op_key, namespace=op.namespace)

    def _release(self, op: OpName) -> None:
        """Make the parked runs ready; where that cannot be done now, maintenance finds them."""
        try:
            if release.release(self._database, self._settings, op):
                self._database.notify()
        except DatabaseUnavailableError:
            return

    def _name(self, op_key: str, namespace: str | None) -> OpName:
        within = namespace or self._settings.op_namespace
        for text in (op_key, within):
            if not isinstance(text, str) or not texts.is_storable(text):
                raise UnknownOpError(str(namespace), json.dumps(str(op_key)))
        return OpName(within, op_key)

    def _do(self, work: Callable[[Connection], T]) -> T:
        return self._database.do(work, seconds=CALL_SECONDS)


def _check(op: Op) -> None:
    if op.state is OpState.DONE:
        raise OpStateError(f"op {op.op_key!r} is done: its result is recorded and stays")
    if op.busy and op.state is OpState.OPEN:
        raise OpStateError(f"op {op.op_key!r} is being executed by run {op.run_id}: cancel that first, or wait")
