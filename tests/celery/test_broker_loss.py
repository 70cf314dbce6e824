"""The broker loses everything it held, while workers run: every run is found again, and nothing is said too often."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker
from tests.support.gates import Gates
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.states import RunState
from umt_durable.store import outbox, workers

pytestmark = pytest.mark.processes

QUEUED = 40
MORE_EACH = 2
"""How many more messages one loss may cost for each run."""


def test_i1_i21_i22_forty_queued_runs_survive_the_loss_of_the_broker_with_few_more_messages(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
    gates: Gates,
    conn: Connection,
) -> None:
    pair = [start_worker(pool="threads", concurrency=1, name=name) for name in ("left", "right")]
    gates.close("busy")
    held = [tasks.one_step.delay(number, gate="busy").id for number in range(2)]
    gates.wait("busy", processes=2)
    queued = [tasks.one_step.delay(number).id for number in range(QUEUED)]
    until(lambda: outbox.status(conn)[0] == 0, timeout=30, what="all hints to be published")
    assert broker.held(QUEUE) == QUEUED

    broker.wipe()
    gates.open("busy")
    wait_for_state([*held, *queued], RunState.SUCCEEDED, timeout=120)
    for worker in pair:
        worker.term()
    for worker in pair:
        worker.wait()

    assert [body_log.count(run_id) for run_id in [*held, *queued]] == [1] * (QUEUED + 2)
    # Exact: a process writes its counters once more as it ends. The outbox was empty before the loss, so that each
    # run had been published at least once by then; what was published later is at most what is above that.
    counted = workers.sum_counters(conn)
    assert counted["broker_loss"] >= 1
    assert 0 < counted["published"] - (QUEUED + 2) <= MORE_EACH * (QUEUED + 2)
