"""The audit: what people did to runs, in the transaction of what they did."""

from __future__ import annotations

from uuid import UUID

from umt_durable import sql, texts
from umt_durable.database import Connection
from umt_durable.records import AuditRecord


def add(
    conn: Connection, id: UUID, act: str, *, run: int, actor: str, reason: str | None, detail: str | None = None
) -> None:
    """Record an act, once per id. `detail` is what it met or made."""
    kept = {"actor": texts.storable(actor), "reason": texts.storable(reason), "detail": texts.storable(detail)}
    sql.count(conn, "add_audit", id=id, act=act, run=run, **kept)


def of_run(conn: Connection, run: int) -> list[AuditRecord]:
    """Read what people did to a run, the first act first."""
    return [AuditRecord(*row) for row in sql.many(conn, "audit_of_run", run=run)]
