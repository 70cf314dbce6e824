"""What the demo reads in the product's tables. It only looks; the shop's code needs none of this."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from examples.orders.proof import Completed

TERMINAL = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class Totals:
    """Sums over the whole demo. Those of `counters` are what each process told last; the killed ones told no more."""

    take_overs: int
    grants: int
    counters: Mapping[str, int]

    def of(self, name: str) -> int:
        """Give one counter, by its name in `umt_durable.telemetry`."""
        return self.counters.get(name, 0)


def run_states(conn: Connection[Any]) -> dict[str, str]:
    """Give the state of every run of the shop, by run id."""
    rows = conn.execute("SELECT id, state FROM umt_durable.run WHERE task = 'shop.fulfil'").fetchall()
    return dict(rows)


def completed(conn: Connection[Any], clock_ahead: float) -> list[Completed]:
    """Read the steps that completed.

    Units: `clock_ahead` is by how many seconds the database's clock is ahead of this machine's.
    """
    rows = conn.execute(
        """
        SELECT run.id, step.key, step.fence, extract(epoch FROM step.finished_at)::float8 - %s
          FROM umt_durable.step JOIN umt_durable.run ON run.no = step.run
         WHERE step.state = 'done'
        """,
        (clock_ahead,),
    ).fetchall()
    return [Completed(run, step_name(key), fence, finished_at) for run, key, fence, finished_at in rows]


def clock_ahead(conn: Connection[Any]) -> float:
    """Measure by how many seconds the database's clock is ahead of this machine's, to within one round trip."""
    before = time.time()
    row = conn.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    after = time.time()
    assert row is not None
    return float(row[0]) - (before + after) / 2


def totals(conn: Connection[Any]) -> Totals:
    """Sum up attempts and counters."""
    row = conn.execute("SELECT count(*) FILTER (WHERE outcome = 'lost'), count(*) FROM umt_durable.attempt").fetchone()
    assert row is not None
    counters = conn.execute(
        """
        SELECT entry.key, sum(entry.value::bigint)::bigint
          FROM umt_durable.worker, jsonb_each_text(worker.counters) AS entry
         GROUP BY entry.key
        """
    ).fetchall()
    return Totals(take_overs=row[0], grants=row[1], counters=dict(counters))


def step_name(key: str) -> str:
    """Give the name of a step from its key in the journal; the shop calls no name twice in one run."""
    return key.partition("#")[0]
