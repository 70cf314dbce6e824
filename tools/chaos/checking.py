"""The checker: what must hold of the rows, the logs and the results that a chaos run leaves, whatever was done to it.

It reads what the product wrote, what the bodies, the provider and the triggers noted down, and what the load was
promised. Nothing of the product's own judgement is believed: a step is done when its row says so, and a body was
entered when the log of the bodies says so.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from celery import Celery, states
from celery.result import AsyncResult

from tests.support import bodylog
from tools.chaos.app import expected
from tools.chaos.load import Start
from tools.chaos.stage import Stage

ZEROS: Final = (
    *("lost", "wrong", "duplicated_committed_steps", "zombie_commits", "lost_wakeups", "missing_results"),
    *("doubled_rows", "deadlocks"),
)
SHOWN: Final = 10
"""How many findings of a kind are shown; all are counted."""


@dataclass
class Findings:
    """What was found to be wrong, by kind, and what was counted besides."""

    wrong: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in ZEROS})
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, text: str) -> None:
        """Note something that is wrong."""
        self.wrong[kind].append(text)

    def numbers(self) -> dict[str, int]:
        """Return how much of each kind was found."""
        return {name: len(found) for name, found in self.wrong.items()}

    def shown(self) -> Iterable[str]:
        """Give some findings of each kind, for people."""
        for kind, found in self.wrong.items():
            yield from (f"{kind}: {text}" for text in found[:SHOWN])
            if len(found) > SHOWN:
                yield f"{kind}: and {len(found) - SHOWN} more"


def unfinished(stage: Stage) -> list[str]:
    """Return the runs that have not ended, or whose result or callbacks are still to be sent."""
    with stage.connect() as conn:
        rows = conn.execute(
            b"SELECT id || ' ' || state FROM run WHERE finished_at IS NULL"
            b" UNION ALL SELECT 'outbox ' || type FROM outbox_event WHERE status = 'pending' AND type <> 'run'"
        ).fetchall()
    return [str(row[0]) for row in rows]


def check(stage: Stage, app: Celery, started: list[Start]) -> Findings:
    """Check everything, once nothing is under way any more."""
    found = Findings()
    with stage.connect() as conn:

        def rows(text: str) -> list[tuple[Any, ...]]:
            return conn.execute(text.encode()).fetchall()

        runs = {
            row[0]: row
            for row in rows("SELECT id, state, convert_from(result, 'UTF8'), no, task, reason FROM run ORDER BY no")
        }
        _check_runs(found, runs, started)
        _check_bodies(found, rows, stage.body_log)
        _check_noted(found, rows)
        _check_parked(found, rows)
        _check_effects(found, rows, stage, runs)
        for outcome, number in rows("SELECT coalesce(outcome, 'open'), count(*) FROM attempt GROUP BY 1"):
            found.counts[f"attempts_{outcome}"] += number
        for name, number in rows(
            "SELECT key, sum(value::bigint)::bigint FROM worker, jsonb_each_text(counters) GROUP BY key"
        ):
            found.counts[name] += number
    _check_results(found, app, runs, started)
    _check_server(found, stage)
    for name in ("rescan_hit", "system_retry"):
        if found.counts[name]:
            found.add(
                "lost_wakeups" if name == "rescan_hit" else "deadlocks",
                f"{name} was counted {found.counts[name]} times",
            )
    return found


def _check_runs(found: Findings, runs: Mapping[str, tuple[Any, ...]], started: list[Start]) -> None:
    for start in started:
        run = runs.get(start.run)
        if run is None:
            if start.acked:
                found.add("lost", f"{start.run} was acknowledged and has no row")
            continue
        found.counts["runs"] += 1
        _, state, result, _, _, reason = run
        if state != "succeeded":
            found.add("lost", f"{start.run} is {state} ({reason})")
        elif json.loads(result) != expected(start.number):
            found.add("wrong", f"{start.run} gave {result}, not {expected(start.number)}")


def _check_bodies(found: Findings, rows: Any, log: bodylog.BodyLog) -> None:
    """No body is entered after its step was done; its clock is compared through the database's, of the same machine."""
    offset = float(rows("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0]) - bodylog.clock()
    done = {
        (run, key): at
        for run, key, at in rows(
            "SELECT r.id, s.key, extract(epoch FROM s.finished_at)::float8 FROM step AS s JOIN run AS r ON r.no = s.run"
            " WHERE s.state = 'done'"
        )
    }
    found.counts["steps"] = len(done)
    for entry in log.entries(mark="begin"):
        found.counts["bodies"] += 1
        key = re.sub(r"^flaky:.*", "flaky", entry.step)
        key = f"ship:{entry.run}" if key == "ship" else key
        at = done.get((entry.run, key))
        if at is None:
            found.add("duplicated_committed_steps", f"{key} of {entry.run} was entered and has no outcome")
        elif entry.at + offset > at:
            late = entry.at + offset - at
            found.add("duplicated_committed_steps", f"{key} of {entry.run} was entered {late:.3f} s after it was done")


def _check_noted(found: Findings, rows: Any) -> None:
    for what, run, key, fence, owner in rows("SELECT what, run, key, fence, found FROM chaos_audit"):
        found.add("zombie_commits", f"{what}: step {key} of run {run} under fence {fence}, met {owner}")


def _check_parked(found: Findings, rows: Any) -> None:
    for run, state, key in rows(
        "SELECT r.id, r.state, w.key FROM run AS r JOIN wait AS w ON w.run = r.no"
        " WHERE r.finished_at IS NULL AND w.state <> 'pending' AND r.state = 'waiting'"
        " AND NOT EXISTS (SELECT FROM wait AS o WHERE o.run = r.no AND o.state = 'pending')"
    ):
        found.add("lost_wakeups", f"{run} is {state}, and its wait {key} is over")


def _check_effects(found: Findings, rows: Any, stage: Stage, runs: Mapping[str, tuple[Any, ...]]) -> None:
    booked = Counter(dict(rows("SELECT run, count(*) FROM chaos_booking GROUP BY run")))
    shipped: defaultdict[str, int] = defaultdict(int)
    if stage.provider.log.exists():
        for line in stage.provider.log.read_text().splitlines():
            shipped[json.loads(line)["op"]] += 1
    for run, (_, state, _, _, task, _) in runs.items():
        if task != "chaos.canary" or state != "succeeded":
            continue
        if booked[run] != 1:
            found.add("doubled_rows", f"{run} has {booked[run]} bookings")
        if shipped[f"ship:{run}"] != 1:
            found.add("doubled_rows", f"{run} was shipped {shipped[f'ship:{run}']} times")
    for run, number in rows("SELECT id, count(*) FROM run GROUP BY id HAVING count(*) > 1"):
        found.add("doubled_rows", f"{run} is there {number} times")
    for run, number in rows(
        "SELECT r.id, count(c.no) FROM run AS r LEFT JOIN run AS c ON c.parent_no = r.no"
        " WHERE r.task = 'chaos.canary' AND r.state = 'succeeded' GROUP BY r.id HAVING count(c.no) <> 1"
    ):
        found.add("doubled_rows", f"{run} has {number} children")


def _check_results(found: Findings, app: Celery, runs: Mapping[str, tuple[Any, ...]], started: list[Start]) -> None:
    for start in started:
        run = runs.get(start.run)
        if run is None or run[1] != "succeeded":
            continue
        result = AsyncResult(start.run, app=app)
        if result.state != states.SUCCESS or result.result != expected(start.number):
            found.add("missing_results", f"{start.run} is {result.state} in the result backend: {result.result!r:.100}")


def _check_server(found: Findings, stage: Stage) -> None:
    log = stage.postgres.log.read_text(errors="replace")
    for line in log.splitlines():
        if "deadlock detected" in line:
            found.add("deadlocks", line)
