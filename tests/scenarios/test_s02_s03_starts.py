"""S02: a start inside a transaction. S03: starts while the broker is down."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.support.apps import Tasks
from tests.support.bodylog import BodyLog
from tests.support.brokers import Broker, wait_until_empty
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.errors import UnknownRunError
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import outbox

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("kind", ["psycopg", "sqlalchemy"])
def test_s02_b7_a_run_exists_if_and_only_if_the_callers_commit_does(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    settings: Settings,
    body_log: BodyLog,
    kind: str,
) -> None:
    start_worker(pool="threads", concurrency=2)
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(str(settings.database_url)))
    begin = Session(engine) if kind == "sqlalchemy" else psycopg.connect(str(settings.database_url))
    with begin as transaction:
        kept = tasks.one_step.enqueue(1, conn=transaction)
        other = tasks.one_step.delay(2)
        wait_for_state(other.id, RunState.SUCCEEDED)  # a whole run passes while the transaction is open
        assert body_log.count(kept.id) == 0
        transaction.commit()
        wait_for_state(kept.id, RunState.SUCCEEDED)
        lost = tasks.one_step.enqueue(3, conn=transaction)
        transaction.rollback()
    engine.dispose()

    with pytest.raises(UnknownRunError):
        tasks.durable.get(lost.id)
    assert body_log.count(lost.id) == 0


def test_s03_i1_starts_while_the_broker_is_down_all_run_once(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    wait_for_state: Callable[..., None],
    broker: Broker,
    body_log: BodyLog,
    conn: Connection,
) -> None:
    start_worker(pool="threads", concurrency=4)
    broker.stop()
    results = [tasks.one_step.delay(number) for number in range(50)]
    ids = [result.id for result in results]
    until(lambda: outbox.status(conn)[0] >= 50, what="50 hints to wait in the outbox")

    broker.start()
    wait_for_state(ids, RunState.SUCCEEDED)

    assert [body_log.count(run_id) for run_id in ids] == [1] * 50
    until(lambda: outbox.status(conn)[0] == 0, timeout=30, what="the outbox to be empty")
    wait_until_empty(broker, QUEUE)
