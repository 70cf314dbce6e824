"""What follows a run: links, the next chain member, errbacks, a replacement; and what a cancel ends beside it.

Each leaves once per row of the outbox, under an id that is derived from the run, so that a durable callback makes one
run however often it is published (I13).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from celery import states as celery_states
from celery.app.task import Context
from celery.canvas import group
from celery.exceptions import TaskRevokedError
from kombu.utils import json as kombu_json

from umt_durable.bridge import signatures
from umt_durable.bridge.envelope import Envelope
from umt_durable.states import RunState

if TYPE_CHECKING:
    from celery import Celery

_dumps: Final[Callable[[Any], str]] = kombu_json.dumps
_loads: Final[Callable[[bytes], Any]] = kombu_json.loads


def count(envelope: Envelope, state: RunState) -> int:
    """Return how many callbacks leave when a run ends in a state."""
    if state is RunState.SUCCEEDED:
        return len(envelope.callbacks) + bool(envelope.chain)
    return len(envelope.errbacks) if state is RunState.FAILED else 0


def dispatch(
    app: Celery,
    request: Context,
    envelope: Envelope,
    ordinal: int,
    *,
    value: Any = None,
    error: Exception | None = None,
) -> None:
    """Publish one callback of a run that has ended: the `ordinal`-th of those that `count` counts.

    Source: `celery.app.trace.build_tracer` for what a callback is called with; errbacks are the backend's own business.
    Errors: whatever publishing raises; the outbox row then stays.
    """
    if error is not None:
        errback = _derived(envelope.errbacks[ordinal], request, "errback", ordinal)
        one = Context({**request.__dict__, "errbacks": [errback]})
        app.backend._call_task_errbacks(one, error, "".join(traceback.format_exception(error)))
        return
    if ordinal < len(envelope.callbacks):
        link = signatures.of(app, _derived(envelope.callbacks[ordinal], request, "link", ordinal))
        together = {} if isinstance(link, group) else _group_of_links(request, envelope)
        link.apply_async((value,), **_family(app, request), **together)
        return
    following = _derived(envelope.chain[-1], request, "chain", ordinal)
    signatures.of(app, following).apply_async((value,), chain=list(envelope.chain[:-1]), **_family(app, request))


def dispatch_stored(app: Celery, request: Context, payload: bytes) -> None:
    """Publish the signature that takes a run's place. All its parts have ids, so that a repeat makes no second run.

    Errors: whatever publishing raises; the outbox row then stays.
    """
    signatures.read(app, payload).apply_async(**_family(app, request))


def revoke(backend: Any, request: Context, reason: str, *, store_result: bool) -> None:
    """Store that a run was cancelled; its part of a chord fails, and so do the later members of its chain.

    Celery itself leaves these pending for ever.
    """
    backend.mark_as_revoked(request.id, reason, request=request, store_result=store_result)
    if request.chain:
        error = TaskRevokedError(f"{request.id} before it in the chain: {reason}")
        backend._fail_chain(request.chain, error, None, store_result=store_result, state=celery_states.REVOKED)


def _family(app: Celery, request: Context) -> dict[str, Any]:
    family: dict[str, Any] = {"parent_id": request.id, "root_id": request.root_id or request.id}
    if app.conf.task_inherit_parent_priority:
        family["priority"] = (request.delivery_info or {}).get("priority")
    return family


def _group_of_links(request: Context, envelope: Envelope) -> dict[str, Any]:
    """Return the group that Celery puts several links into: they say so in their requests, and nobody waits for it."""
    if len(envelope.callbacks) < 2:
        return {}
    return {"group_id": str(signatures.derive(["links", request.id, request.replaced_task_nesting or 0]))}


def _derived(signature: Mapping[str, Any], request: Context, kind: str, ordinal: int) -> dict[str, Any]:
    """Return a signature whose parts without an id have one that is derived from the run and their place."""
    copy: dict[str, Any] = _loads(_dumps(dict(signature)).encode()) if _is_plain(signature) else dict(signature)
    signatures.name_parts(copy, [kind, request.id, request.replaced_task_nesting or 0, ordinal])
    return copy


def _is_plain(signature: Mapping[str, Any]) -> bool:
    try:
        _dumps(dict(signature))
    except Exception:  # noqa: BLE001 - whatever its values make of that: it is then used as it is
        return False
    return True
