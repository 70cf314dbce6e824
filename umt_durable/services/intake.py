"""Intake: messages of producers without this package become runs, before they are acknowledged (I3)."""

from __future__ import annotations

from collections.abc import Sequence

from umt_durable import failpoints, telemetry
from umt_durable.database import Connection, Database
from umt_durable.records import NewRun
from umt_durable.services.transactions import commit
from umt_durable.settings import Settings
from umt_durable.store import runs


def take_in(database: Database, settings: Settings, batch: Sequence[NewRun]) -> None:
    """Commit the runs of a batch of foreign messages in one transaction, once per (id, nesting).

    Errors: DatabaseUnavailableError; of these DatabaseBusyError, soon, when an open transaction of somebody's has
    inserted one of these ids; psycopg.Error when a row cannot be stored. None of them is then. Repeating it is safe.
    """
    ordered = sorted(batch, key=lambda new: (new.id, new.nesting))  # two batches with the same ids never wait in a ring

    def insert(conn: Connection) -> int:
        failpoints.point("intake.insert.b")
        created = [runs.intake(conn, new, deliver_seconds=settings.deliver_seconds) for new in ordered]
        failpoints.point("intake.insert.a")
        return sum(created)

    telemetry.count(telemetry.Counter.FOREIGN_INTAKE, commit(database, "intake", insert, limited=True))
