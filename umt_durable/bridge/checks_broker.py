"""What `durable doctor` asks of the broker: that it is there, of a kind that is tested, and read by our workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kombu.exceptions import OperationalError

from umt_durable.bridge.console import one_line
from umt_durable.bridge.findings import Findings, fail, many, ok, warn
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
        yield ok("remote control", f"{len(replies)} workers answer through the broker")
    else:
        yield warn(
            "remote control",
            f"no worker answers through this broker, but {many(list(live))} hold leases in the database",
            "check that they use this broker, and that worker_enable_remote_control is on",
        )


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
