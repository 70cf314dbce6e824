"""S16: a run sleeps under version 1 while version 2, with a step inserted before the sleep, is deployed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from tests.support import deployed_apps
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.clock import Clock
from tests.support.deployed_apps import DEPLOYED
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable import Durable
from umt_durable.engine.explaining import Why
from umt_durable.states import RunState

pytestmark = pytest.mark.processes

APP = "tests.support.deployed_apps:app"


@pytest.fixture
def caller(worker_env: dict[str, str]) -> Iterator[tuple[Celery, Durable]]:
    """Return the app as it was when the run was started: with version 1."""
    app, durable = deployed_apps.build(worker_env)
    yield app, durable
    durable.stop()
    app.close()


class Site:
    """Workers with one deployed code after the other."""

    def __init__(self, start_worker: Callable[..., Worker], env: dict[str, str], durable: Durable) -> None:
        self._start, self._env, self._durable = start_worker, env, durable
        self._worker: Worker | None = None

    def deploy(self, code: str) -> None:
        """Replace the worker by one with other code."""
        if self._worker is not None:
            self._worker.close()
        env = {**self._env, DEPLOYED: code}
        name = f"code-{code.replace(' ', '-')}"
        self._worker = self._start(app=APP, pool="threads", concurrency=1, env=env, name=name)

    def wait_for(self, run_id: str, state: RunState) -> None:
        """Return once a run is in a state."""
        until(lambda: self._durable.get(run_id).state is state, timeout=60, what=f"the run to be {state}")


@pytest.fixture
def site(start_worker: Callable[..., Worker], worker_env: dict[str, str], caller: tuple[Celery, Durable]) -> Site:
    return Site(start_worker, worker_env, caller[1])


def test_s16_i19_a_run_goes_on_with_the_version_it_began_with(
    site: Site, caller: tuple[Celery, Durable], body_log: BodyLog, clock: Clock, broker: Broker
) -> None:
    app, durable = caller
    site.deploy("1")
    run: Any = app.tasks["tests.deployed"].delay(3600)
    site.wait_for(run.id, RunState.SLEEPING)

    site.deploy("2")
    clock.advance(seconds=3601)
    site.wait_for(run.id, RunState.READY)
    wait_until_empty(broker, QUEUE)
    assert [one.text for one in durable.explain(run.id).because if one.why is Why.MISSING_CODE] == [
        "no live worker declares tests.deployed@1"
    ]
    assert body_log.count(run.id, "check") == 0

    site.deploy("1 2")
    assert run.get(timeout=60) == ["1", "version 1"]
    assert body_log.counts(run.id) == {"book": 1}
    newer: Any = app.tasks["tests.deployed"].delay(0)
    assert newer.get(timeout=60) == ["1", "version 1"]  # its caller still has the older code


def test_s16_f1_a_run_goes_on_by_the_patch_call(
    site: Site, caller: tuple[Celery, Durable], body_log: BodyLog, clock: Clock, broker: Broker
) -> None:
    app, _ = caller
    site.deploy("1")
    old: Any = app.tasks["tests.deployed"].delay(3600)
    site.wait_for(old.id, RunState.SLEEPING)

    site.deploy("patched")
    new: Any = app.tasks["tests.deployed"].delay(3600)
    site.wait_for(new.id, RunState.SLEEPING)
    clock.advance(seconds=3601)

    assert old.get(timeout=60) == ["1", "version 1"]
    assert new.get(timeout=60) == ["1", "2", "version 1"]
    assert body_log.counts(old.id) == {"book": 1}
    assert body_log.counts(new.id) == {"book": 1, "check": 1}
