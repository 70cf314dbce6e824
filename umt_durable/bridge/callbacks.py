"""What follows a run: links, the next chain member, errbacks.

Each leaves once per row of the outbox, under an id that is derived from the run, so that a durable callback makes one
run however often it is published (I13).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from celery.app.task import Context
from celery.canvas import Signature, maybe_signature

from umt_durable.bridge.envelope import Envelope
from umt_durable.engine.context import NAMESPACE
from umt_durable.states import RunState

if TYPE_CHECKING:
    from celery import Celery


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
        app.backend._call_task_errbacks(one, error, None)
        return
    family = {"parent_id": request.id, "root_id": request.root_id or request.id}
    if ordinal < len(envelope.callbacks):
        link = _derived(envelope.callbacks[ordinal], request, "link", ordinal)
        maybe_signature(link, app=app).apply_async((value,), **family)
        return
    following = _derived(envelope.chain[-1], request, "chain", ordinal)
    maybe_signature(following, app=app).apply_async((value,), chain=list(envelope.chain[:-1]), **family)


def _derived(signature: Mapping[str, Any], request: Context, kind: str, ordinal: int) -> Signature:
    """Return a signature whose parts without an id have one that is derived from the run and their place."""
    copy: dict[str, Any] = json.loads(json.dumps(signature)) if _is_plain(signature) else dict(signature)
    _name(copy, [kind, request.id, request.replaced_task_nesting or 0, ordinal])
    return Signature(copy)


def _name(signature: dict[str, Any], place: Sequence[object]) -> None:
    options = signature["options"] = dict(signature.get("options") or {})
    options.setdefault("task_id", str(derive(place)))
    kwargs = signature.get("kwargs") or {}
    for part in ("tasks", "header"):
        members = kwargs.get(part)
        if isinstance(members, list):
            for index, member in enumerate(members):
                if isinstance(member, dict):
                    _name(member, [*place, part, index])
        elif isinstance(members, dict):
            _name(members, [*place, part])
    if isinstance(kwargs.get("body"), dict):
        _name(kwargs["body"], [*place, "body"])


def derive(place: Sequence[object]) -> UUID:
    """Return the id that belongs to a place in the family of a run."""
    return uuid5(NAMESPACE, json.dumps(list(place)))


def _is_plain(signature: Mapping[str, Any]) -> bool:
    try:
        json.dumps(signature)
    except TypeError:
        return False
    return True
