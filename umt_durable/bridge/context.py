"""Celery's request objects, filled from the row of a run instead of from a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from celery.app.task import Context

from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.runtime import CLAIM_KEY
from umt_durable.tracing import NESTED

# What the worker and its pool put into a request; all else in it came from the message.
_OF_THE_WORKER: Final = ("hostname", "delivery_info", "called_directly", "loglevel", "logfile", "_children", CLAIM_KEY)


def restore_request(request: Context, envelope: Envelope, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Make a delivered request what the row of its run says, once the run is claimed.

    Of the message only the id, the nesting and the task are left, by which the run was claimed; what the worker itself
    added stays. Our own header is gone, so that a retry or a replacement does not carry it along.
    """
    given = dict(request.__dict__)
    request.clear()
    request.update(
        _fields(
            str(given["id"]),
            nesting=given.get("replaced_task_nesting") or 0,
            task=given.get("task"),
            envelope=envelope,
            args=args,
            kwargs=kwargs,
        )
    )
    request.update({name: given[name] for name in _OF_THE_WORKER if name in given})


def request_context(
    *,
    run_id: str,
    nesting: int,
    task: str,
    queue: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    envelope: Envelope,
    hostname: str | None = None,
) -> Context:
    """Give a request with which a result backend can end a run where no task is being executed.

    It has all that `mark_as_done`, `mark_as_failure` and `mark_as_revoked` look at: ids, group, chord, chain, errbacks
    and the reply queue. Where the message said nothing of `ignore_result` the task's own setting holds: ask that first.
    """
    fields = _fields(run_id, nesting=nesting, task=task, envelope=envelope, args=args, kwargs=kwargs)
    delivery_info = {
        "exchange": envelope.exchange or "",
        "routing_key": queue if envelope.routing_key is None else envelope.routing_key,
        "priority": None,
        "redelivered": False,
    }
    return Context(fields, hostname=hostname, delivery_info=delivery_info, called_directly=False)


def _fields(
    run_id: str,
    *,
    nesting: int,
    task: str | None,
    envelope: Envelope,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> dict[str, object]:
    """Give what a worker would have read from the message that began the run, by the names a request has for it."""
    nested = envelope.headers.get(NESTED)
    custom = nested if isinstance(nested, Mapping) else envelope.headers
    correlation_id, reply_to = envelope.correlation_id or run_id, envelope.reply_to or ""
    return {
        **envelope.headers,
        NESTED: dict(custom) or None,
        "lang": "py",
        "id": run_id,
        "task": task,
        "replaced_task_nesting": nesting,
        "args": list(args),
        "kwargs": dict(kwargs),
        "root_id": envelope.root_id or run_id,
        "parent_id": envelope.parent_id,
        "group": envelope.group,
        "group_index": envelope.group_index,
        "shadow": envelope.shadow,
        "origin": envelope.origin,
        "argsrepr": envelope.argsrepr,
        "kwargsrepr": envelope.kwargsrepr,
        "retries": envelope.retries,
        "ignore_result": envelope.ignore_result,
        "timelimit": list(envelope.timelimit or (None, None)),
        "eta": envelope.eta,
        "expires": envelope.expires,
        "stamped_headers": list(envelope.stamped_headers) or None,
        "stamps": dict(envelope.stamps),
        "reply_to": reply_to,
        "correlation_id": correlation_id,
        "properties": {**envelope.properties, "reply_to": reply_to, "correlation_id": correlation_id},
        "callbacks": list(envelope.callbacks) or None,
        "errbacks": list(envelope.errbacks) or None,
        "chain": list(envelope.chain) or None,
        "chord": None if envelope.chord is None else dict(envelope.chord),
    }
