"""Celery's `replace` for durable tasks: the run ends and its successor begins in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from celery.canvas import Signature, _chain

from umt_durable.bridge import enqueuing, signatures
from umt_durable.engine.context import current_context
from umt_durable.engine.exits import Replaced

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable


def leave_for(durable: Durable, signature: Signature) -> NoReturn:
    """Leave the body of the current run for a signature that Celery has given the run's id, chord and followers.

    Shape: a durable task, alone or first in a chain, becomes a run in the same transaction; anything else is kept in
    the outbox by it, and published afterwards.
    Errors: DurableError inside a step, whose outcome could not be recorded; EncodingError.
    """
    the_pass = current_context()._pass
    the_pass.check()
    run = None
    if _begins_with_one_run(durable, signature):
        run = enqueuing.run_of(signature.apply_async)
    if run is not None:
        the_pass.leave(Replaced(run=run))
    the_pass.leave(Replaced(message=signatures.stored(signature, "the signature of a replacement")))


def _begins_with_one_run(durable: Durable, signature: Signature) -> bool:
    first: Any = signature.tasks[0] if isinstance(signature, _chain) and signature.tasks else signature
    return type(first) is Signature and durable.has_task(first.task)
