"""The database's clock, movable in one schema: what decides in the product is the schema's `now()`, nothing else."""

from __future__ import annotations

from datetime import datetime, timedelta

import psycopg
from psycopg import sql

_MOVABLE = """
CREATE OR REPLACE FUNCTION {schema}.now() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
    SELECT clock_timestamp() + coalesce(
        (SELECT (value #>> '{{}}')::interval FROM {schema}.setting WHERE name = 'clock_offset'), interval '0')
$$
"""
_SHIFT = """
INSERT INTO {schema}.setting AS s (name, value) VALUES ('clock_offset', to_jsonb(%(by)s::interval::text))
ON CONFLICT (name) DO UPDATE SET value = to_jsonb(((s.value #>> '{{}}')::interval + %(by)s::interval)::text)
"""


class Clock:
    """Moves the clock of one schema forward, or back as a fail-over can do; it goes on running in between."""

    def __init__(self, conn: psycopg.Connection[tuple[object, ...]], schema: str) -> None:
        self._conn = conn
        self._schema = sql.Identifier(schema)
        conn.execute(sql.SQL(_MOVABLE).format(schema=self._schema))

    def advance(self, by: timedelta | None = None, *, seconds: float = 0) -> None:
        """Move the clock by a duration; every process sees it with its next statement."""
        shift = (by or timedelta()) + timedelta(seconds=seconds)
        self._conn.execute(sql.SQL(_SHIFT).format(schema=self._schema), {"by": shift})

    def now(self) -> datetime:
        """Return what time it is in the schema."""
        row = self._conn.execute(sql.SQL("SELECT {}.now()").format(self._schema)).fetchone()
        assert row is not None
        assert isinstance(row[0], datetime)
        return row[0]
