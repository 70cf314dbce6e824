"""Begun steps on real workers: killed while the token goes out, completed from other processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import awaited_apps
from tests.support.awaited_apps import Awaited
from tests.support.bodylog import BodyLog
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable import DurableError, InvalidTokenError, RunState, UsedTokenError
from umt_durable.failpoints import ENVIRONMENT

pytestmark = [pytest.mark.processes, pytest.mark.redis_by_default]

APP = "tests.support.awaited_apps:app"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def awaited(worker_env: dict[str, str]) -> Iterator[Awaited]:
    """Return the tasks, for calling."""
    awaited = awaited_apps.build(worker_env)
    yield awaited
    awaited.durable.stop()
    awaited.app.close()


def test_a_token_that_went_out_before_a_kill_goes_out_again_and_completes_the_step(
    awaited: Awaited,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    body_log: BodyLog,
    tmp_path: Path,
) -> None:
    worker_env[ENVIRONMENT] = f"wait.announce.b=kill;file:{tmp_path / 'killed'}"
    tokens = tmp_path / "tokens"
    start_worker(app=APP, pool="prefork", concurrency=1)
    run = awaited.review.delay(str(tokens))
    until(lambda: awaited.durable.get(run.id).state is RunState.WAITING, timeout=60, what="the run to wait")
    first, again = tokens.read_text().split()

    command = [str(Path(sys.executable).with_name("umt-durable")), "-A", "tests.support.awaited_apps", "complete", "-"]
    done = subprocess.run(
        [*command, '{"limit": 7}'], env=worker_env, cwd=ROOT, input=first, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert first == again
    assert run.get(timeout=60) == 7
    assert body_log.count(run.id, "after") == 1
    with pytest.raises(UsedTokenError):
        awaited.durable.complete(again, {"limit": 8})


def test_an_asyncio_program_fails_a_step_by_its_token(
    awaited: Awaited, start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    start_worker(app=APP, pool="threads", concurrency=1)
    run = awaited.review.delay(str(tokens))
    until(lambda: awaited.durable.get(run.id).state is RunState.WAITING, timeout=60, what="the run to wait")
    (token,) = tokens.read_text().split()

    async def use() -> None:
        with pytest.raises(InvalidTokenError):
            await awaited.durable.acomplete(token[:-4], {"limit": 1})
        await awaited.durable.afail(token, "not today", actor="ann")

    asyncio.run(use())

    with pytest.raises(DurableError, match="not today"):
        run.get(timeout=60)
