"""What `durable doctor` asks of the broker: that it is there, of a kind that is tested, and read by our workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kombu.exceptions import OperationalError

from umt_durable.bridge.console import one_line
from umt_durable.bridge.findings import Findings, counted, fail, many, ok, warn
from umt_durable.redaction import redact_text, redact_url

TESTED: Final = ("amqp", "redis")
LOCAL: Final = ("memory", "filesystem")
TRY_SECONDS: Final = 5
PING_SECONDS: Final = 1.5


def broker(app: Any) -> Findings:
    """Connect, and look at what kind of broker it is and whether it keeps what it is given."""
    where = redact_url(str(app.conf.broker_write_url or app.connection_for_write().as_uri()))
    with app.connection_for_write(connect_timeout=TRY_SECONDS) as connection:
        kind = connection.transport.driver_type
        if kind in LOCAL:
            yield fail("broker", f"{where} reaches no other process", "use RabbitMQ, Redis or Valkey")
            return
        if kind not in TESTED:
            yield warn("broker", f"{where}: durable tasks are not tested with {kind}", "use RabbitMQ, Redis or Valkey")
        try:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=TRY_SECONDS)
            yield ok("broker", f"{where} answers")
            if kind == "redis":
                yield from _memory(connection)
        except (OperationalError, *connection.connection_errors, *connection.channel_errors) as error:
            yield fail(
                "broker",
                f"{where} cannot be reached: {one_line(redact_text(str(error)))}",
                "start it, or set CELERY_BROKER_URL to where it is; runs wait in Postgres until then",
            )


def workers(app: Any, live: Sequence[str]) -> Findings:
    """Ask the workers that hold a lease whether they also listen to this broker, which answers; `live` names them."""
    if not live:
        return
    with app.connection_for_write(connect_timeout=TRY_SECONDS) as connection:
        replies = app.control.ping(timeout=PING_SECONDS, connection=connection) or []
    if replies:
        yield ok("remote control", f"{counted(len(replies), 'worker answers', 'workers answer')} through the broker")
    else:
        yield warn(
            "remote control",
            f"no worker answers through this broker, but in the database there are leases of {many(list(live))}",
            "check that they use this broker, and that worker_enable_remote_control is on",
        )


def priorities(app: Any, used: Mapping[str, str]) -> Findings:
    """Look whether RabbitMQ heeds priorities in the queues where somebody uses them.

    Shape: `used` gives for each queue who uses them there. The queue of the broker itself is asked, in the one way in
    which RabbitMQ tells: it is declared as any worker of the app declares it, and only if it exists already.
    """
    with app.connection_for_write(connect_timeout=TRY_SECONDS) as connection:
        if connection.transport.driver_type != "amqp":  # Redis has a list for each priority
            return
        for name, who in used.items():
            if name not in app.amqp.queues and not app.conf.task_create_missing_queues:
                continue  # its messages cannot be sent at all, which the relay tells
            queue = app.amqp.queues[name]
            is_declared = "x-max-priority" in _declared(queue)
            is_real = _has_priorities(connection, queue, is_declared=is_declared)
            if not (is_declared if is_real is None else is_real):
                yield warn(
                    "priority",
                    f"{who}, and queue {name!r} {'of the broker' if is_declared else 'is declared without'}"
                    f"{' has no' if is_declared else ''} x-max-priority: RabbitMQ delivers first come, first served",
                    _priority_fix(name, is_declared=is_declared, is_there=is_real is not None),
                )
            elif not is_declared:
                yield warn(
                    "priority",
                    f"queue {name!r} of the broker has x-max-priority and the app declares it without: a worker is"
                    " refused when it declares the queue",
                    "set task_queue_max_priority, or queue_arguments of the queue, to what the broker has",
                )


def _priority_fix(name: str, *, is_declared: bool, is_there: bool) -> str:
    steps = [] if is_declared else ["set task_queue_max_priority = 9"]
    if is_there:
        steps.append(
            f"let workers empty {name!r}, stop them and delete it (rabbitmqctl delete_queue): RabbitMQ changes no queue"
            " that exists, and the next worker makes it anew"
        )
    return ", then ".join(steps) or "start a worker: it makes the queue"


def _declared(queue: Any) -> Mapping[str, Any]:
    """Return the arguments with which a queue of an app is declared."""
    own = {} if queue.max_priority is None else {"x-max-priority": queue.max_priority}
    return {**own, **(queue.queue_arguments or {})}


def _has_priorities(connection: Any, queue: Any, *, is_declared: bool) -> bool | None:
    """Say whether the broker's queue heeds priorities; None where it does not exist or does not tell."""
    try:
        queue.bind(connection.channel()).queue_declare(passive=True)
        queue.bind(connection.channel()).queue_declare()
    except connection.channel_errors as error:
        text = str(error)
        if "x-max-priority" not in text:
            return None
        return not is_declared or "current is none" not in text.replace("'", "")
    return is_declared


def _memory(connection: Any) -> Findings:
    """Look whether Redis throws messages away when its memory is full."""
    try:
        found = connection.default_channel.client.info("memory")
    except connection.channel_errors:  # this user may not ask
        return
    policy = str(found.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction" and int(found.get("maxmemory", 0)):
        yield warn(
            "broker memory",
            f"maxmemory-policy is {policy}: a full Redis throws queues away",
            "set maxmemory-policy to noeviction: it then refuses new messages, and runs wait in Postgres",
        )
