"""Hints: our own messages, which say that a run may be ready and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from uuid import UUID

from celery.utils.nodenames import anon_nodename

from umt_durable.bridge.destination import plain_way
from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.outgoing import PERSISTENT, Outgoing
from umt_durable.tracing import NESTED

if TYPE_CHECKING:
    from celery import Celery

HEADER: Final = "umt_durable"
"""The header that makes a message a hint; its value is {"v": 1, "gen": the run's fence when it became ready}."""

VERSION: Final = 1
ENQUEUED_AT: Final = "sentry-task-enqueued-time"
"""From this Sentry computes how long a message was under way: of the first hint, and not of one after days of sleep."""

EMPTY_BODY: Final = b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'


def is_hint(headers: object) -> bool:
    """Say whether a message with these headers is one of ours."""
    return isinstance(headers, Mapping) and isinstance(headers.get(HEADER), Mapping)


def hint(
    app: Celery,
    *,
    key: UUID,
    run_id: str,
    nesting: int,
    task: str,
    queue: str,
    priority: int | None,
    gen: int,
    envelope: bytes | None,
) -> Outgoing:
    """Build the message that says: this run may be ready.

    Its headers are those of the message that began the run, so that Celery, Flower, canvas and a revoke by stamps see
    what they know; but it never waits or expires by itself, and its body is empty: the row has the arguments.
    Units: `priority` is ours; None leaves it to the broker's default.
    """
    known = Envelope.from_bytes(envelope)
    exchange, routing_key = plain_way(app, queue)
    if known.exchange is not None:
        exchange, routing_key = known.exchange, known.routing_key or ""
    properties: dict[str, object] = {
        "correlation_id": known.correlation_id or run_id,
        "reply_to": known.reply_to or "",
        "delivery_mode": known.delivery_mode or PERSISTENT,
    }
    if priority is not None:
        properties["priority"] = priority
    return Outgoing(
        key=key,
        exchange=exchange,
        routing_key=routing_key,
        queue=queue,
        body=EMPTY_BODY,
        content_type="application/json",
        content_encoding="utf-8",
        headers=hint_headers(run_id, nesting, task, gen, known),
        properties=properties,
    )


def hint_headers(run_id: str, nesting: int, task: str, gen: int, known: Envelope) -> dict[str, object]:
    """Give the protocol 2 headers of a hint: those of the message that began the run, but for what is in its row."""
    return {
        **(known.headers if gen == 0 else _of_later_hints(known.headers)),
        "lang": "py",
        "task": task,
        "id": run_id,
        "shadow": known.shadow,
        "eta": None,
        "expires": None,
        "group": known.group,
        "group_index": known.group_index,
        "retries": 0,
        "timelimit": list(known.timelimit or (None, None)),
        "root_id": known.root_id or run_id,
        "parent_id": known.parent_id,
        "argsrepr": known.argsrepr or "(...)",
        "kwargsrepr": known.kwargsrepr or "{...}",
        "origin": known.origin or anon_nodename(),
        "ignore_result": known.ignore_result,
        "replaced_task_nesting": nesting,
        "stamped_headers": list(known.stamped_headers) or None,
        "stamps": dict(known.stamps),
        HEADER: {"v": VERSION, "gen": gen},
    }


def _of_later_hints(headers: Mapping[str, object]) -> dict[str, object]:
    kept = {name: value for name, value in headers.items() if name != ENQUEUED_AT}
    nested = kept.get(NESTED)
    return {**kept, NESTED: _of_later_hints(nested)} if isinstance(nested, Mapping) else kept
