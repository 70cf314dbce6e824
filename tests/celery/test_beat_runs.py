"""Celery's own beat, as a process: each tick of an entry starts one run, before and after beat is killed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.celery.beating import SHIFT
from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.wait import until
from tests.support.workers import Running, Worker
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

MODULE = "tests.celery.beating"
ENTRIES = ("by interval", "by name", "by crontab", "with an expiry")


@pytest.mark.long
@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)], indirect=True)
def test_i2_each_tick_of_a_real_beat_starts_one_run_and_a_killed_one_goes_on(
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    tasks: Tasks,
    body_log: BodyLog,
    tmp_path: Path,
) -> None:
    start_worker(app=f"{MODULE}:worker_app", concurrency=2)
    died = tmp_path / "died"
    env = {**worker_env, SHIFT: str(tmp_path / "shift"), ENVIRONMENT: f"enqueue.commit.b=kill;nth=4;file:{died}"}
    argv = [sys.executable, "-m", "celery", "-A", f"{MODULE}:beat_app", "beat", "--loglevel=INFO"]
    argv += ["--schedule", str(tmp_path / "schedule"), "--pidfile="]

    def missing() -> Counter[str] | None:
        """Return the ticks that have started no run, once all others have and each entry has had some."""
        ticks = _ticks(beat)
        begun = Counter(entry.step for entry in body_log.entries(mark="begin"))
        enough = all(ticks[entry] >= (1 if entry == "by crontab" else 2) for entry in ENTRIES)
        return ticks - begun if enough and ticks.total() == begun.total() + 1 else None

    with Running(argv, env=env, name="beat", ready="beat: Starting...", ready_timeout=60) as beat:
        until(lambda: not beat.alive, timeout=60, what="beat to die before it commits its fourth run")
        assert died.exists()
        beat.start()
        left = until(missing, timeout=60, what="all ticks but that one to have started a run")
        beat.term()
        assert beat.wait() == 0
        ticks, text = _ticks(beat), beat.text()

    assert left is not None
    assert left.total() == 1
    assert "by name" not in left, "only the enqueuing of this process was killed"
    until(
        lambda: all(run.state is RunState.SUCCEEDED for run in tasks.durable.list(limit=1000)),
        timeout=60,
        what="all runs to succeed",
    )
    begun = Counter(entry.step for entry in body_log.entries(mark="begin"))
    assert not begun - ticks, "a tick started two runs"
    assert len(tasks.durable.list(limit=1000)) == begun.total()
    assert "Message Error" not in text


def _ticks(beat: Running) -> Counter[str]:
    """Count how often beat says that it sends what is due, by entry."""
    return Counter(entry for line in beat.text().splitlines() for entry in ENTRIES if f"due task {entry} (" in line)
