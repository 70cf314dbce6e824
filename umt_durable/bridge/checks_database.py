"""What `durable doctor` asks of Postgres: that commits are kept, this code fits, and nothing is in the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg.conninfo import conninfo_to_dict

from umt_durable import migrate
from umt_durable.bridge.findings import Finding, Findings, fail, many, ok, warn
from umt_durable.database import IDLE_IN_TRANSACTION_MS, LOCK_TIMEOUT_MS, STATEMENT_TIMEOUT_MS, Database
from umt_durable.errors import MIGRATE, PayloadKeyError, SchemaError
from umt_durable.settings import Settings, libpq_url
from umt_durable.store.diagnosis import OpenTransaction, Server, Timeouts

OLDEST: Final = 15
POOLER_PORT: Final = 6432
SKEW_SECONDS: Final = 5.0
OPEN_SECONDS: Final = 600.0
FULL: Final = 0.8

RIGHTS_FIX: Final = (
    "as the owner of the schema run `umt-durable grants --worker-role NAME`, and make this user a member of it"
)
POOLER_FIX: Final = "set durable_pooler = True (DURABLE_POOLER=1), or connect to Postgres itself"


def unreachable(reason: str) -> Finding:
    """Say why the database cannot be used; nothing else of it can be looked at then."""
    if "startup parameter" in reason:
        return fail("pooler", f"a pooler refuses our start-up options: {reason}", POOLER_FIX)
    return fail("database", reason, "start Postgres, or set DURABLE_DATABASE_URL to where it is")


def revision(database: Database, settings: Settings) -> Findings:
    """Compare the schema's revision with the one that this code needs."""
    try:
        current, needed = migrate.read_revision(database.url, settings.schema), migrate.head()
    except SchemaError as error:
        yield fail("rights", str(error), RIGHTS_FIX)
        return
    if current == needed:
        yield ok("schema", f"schema {settings.schema!r} is at revision {current}")
    elif current is None or current < needed:
        state = "does not exist yet" if current is None else f"is at revision {current}, this code needs {needed}"
        yield fail("schema", f"schema {settings.schema!r} {state}", f"run `{MIGRATE}`")
    else:
        yield fail(
            "schema",
            f"schema {settings.schema!r} is at revision {current}, newer than this code's {needed}",
            "install the version of umt-durable that made it, or a newer one",
        )


def server(found: Server, where: str) -> Findings:
    """Look at the version, at who the server is, and at what it does to keep commits."""
    major = found.version // 10000
    if major < OLDEST:
        yield fail("database", f"Postgres {major} at {where}", f"use Postgres {OLDEST} or newer")
    else:
        yield ok("database", f"Postgres {major} at {where}")
    if found.is_standby:
        yield fail("database", "this server is a standby: nothing can be written", "connect to the primary")
    if found.encoding != "UTF8":
        yield warn("database", f"its encoding is {found.encoding}", "use a database in UTF8: names are any text")
    yield from _durability(found)
    if found.connections > found.max_connections * FULL:
        yield warn(
            "connections",
            f"{found.connections} of {found.max_connections} connections are in use",
            "raise max_connections, lower durable_pool_size, or put a pooler in front",
        )


def _durability(found: Server) -> Findings:
    """Look at what a commit is worth when the machine loses its power."""
    weak = [
        (name, cost)
        for name, value, cost in (
            ("fsync", found.fsync, "a crash of the machine can destroy everything"),
            ("synchronous_commit", found.synchronous_commit, "steps that were done can be lost, and then run again"),
            ("full_page_writes", found.full_page_writes, "a crash of the machine can destroy tables"),
        )
        if value == "off"
    ]
    for name, cost in weak:
        yield fail("durability", f"{name} is off: {cost}", f"set {name} = on in postgresql.conf, or for our role")
    if not weak:
        yield ok("durability", "commits are flushed to disk")


def clock(found: Server, local_seconds: float) -> Findings:
    """Compare clocks. Nothing of ours decides by the local one, but Celery's `eta` and logs are read by it.

    Units: epoch seconds.
    """
    skew = local_seconds - found.clock
    if abs(skew) > SKEW_SECONDS:
        yield warn(
            "clock",
            f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the database's",
            "set both by NTP: an absolute eta means another moment here than there",
        )
    else:
        yield ok("clock", f"this machine's clock is within {SKEW_SECONDS:.0f} s of the database's")


def schema_clock(moved_seconds: float) -> Findings:
    """Look whether the schema's clock is the server's, as it is everywhere but in tests."""
    if abs(moved_seconds) > 1.0:
        yield fail("clock", f"the schema's clock is moved by {moved_seconds:.0f} s", "only tests move it: set it back")


def pooler(found: Server, settings: Settings, told_backend: int) -> Findings:
    """Tell whether something sits between us and the server, and whether the settings know.

    Shape: `told_backend` is the process id that the connection was told at its start; a pooler makes one up.
    """
    url = libpq_url(settings.database_url or "")
    is_seen = found.backend != told_backend
    at_port = str(conninfo_to_dict(url).get("port") or "") == str(POOLER_PORT)
    if settings.pooler:
        yield ok("pooler", "durable_pooler is on: no LISTEN, so hints leave at the next poll")
    elif is_seen:
        yield fail("pooler", "a pooler sits between this process and Postgres, and durable_pooler is off", POOLER_FIX)
    elif at_port:
        yield warn("pooler", f"port {POOLER_PORT} is PgBouncer's, and durable_pooler is off", POOLER_FIX)


def timeouts(found: Timeouts, settings: Settings) -> Findings:
    """Look whether this connection has the time limits without which one lock can stop everything."""
    wanted = {
        "statement_timeout": (found.statement, STATEMENT_TIMEOUT_MS),
        "lock_timeout": (found.lock, LOCK_TIMEOUT_MS),
        "idle_in_transaction_session_timeout": (found.idle_in_transaction, IDLE_IN_TRANSACTION_MS),
    }
    off = {name: limit for name, (value, limit) in wanted.items() if not 0 < value <= limit}
    if not off:
        yield ok("timeouts", "statements, locks and idle transactions of ours are limited")
        return
    told = ", ".join(f"{name} = '{limit // 1000}s'" for name, limit in off.items())
    why = "a pooler carries no start-up options" if settings.pooler else "something took our start-up options away"
    yield warn(
        "timeouts", f"{', '.join(off)} not limited as they should be: {why}", f"set for our role (ALTER ROLE): {told}"
    )


def rights(missing: list[str]) -> Findings:
    """Look whether this user may do what a worker does."""
    if missing:
        yield fail("rights", f"this user lacks rights that a worker needs: {many(missing)}", RIGHTS_FIX)
    else:
        yield ok("rights", "this user may do what a worker does")


def payloads(known: Sequence[str], unknown: Sequence[PayloadKeyError]) -> Findings:
    """Look whether this app can open what is sealed in the schema."""
    for error in unknown:
        yield fail(
            "payloads",
            f"arguments of runs cannot be opened by this app: {error}",
            "give it the payload_codec of the apps that share the schema, with this key; the view payload_keys counts"
            " what each key has sealed",
        )
    if known:
        yield ok("payloads", f"sealed, and opened with the keys {', '.join(map(repr, known))}")


def transactions(oldest: OpenTransaction | None) -> Findings:
    """Look for a transaction that has been open so long that dead rows pile up behind it."""
    if oldest is not None and oldest.seconds > OPEN_SECONDS:
        who = f"process {oldest.pid} ({oldest.application or 'unnamed'}, {oldest.state or 'unknown'})"
        yield warn(
            "transactions",
            f"{who} has had a transaction open for {oldest.seconds / 60:.0f} minutes: dead rows pile up behind it",
            f"end it: SELECT pg_terminate_backend({oldest.pid})",
        )
    else:
        yield ok("transactions", "none has been open for long")
