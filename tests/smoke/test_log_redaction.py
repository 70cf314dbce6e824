"""The log of a real worker holds no secret that an exception carries, whoever logs the exception."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import leaking
from tests.support.brokers import Broker, RedisBroker
from tests.support.workers import Pool, Worker

pytestmark = pytest.mark.processes


@pytest.fixture
def broker(redis_broker: RedisBroker) -> Broker:
    """Return one broker: the log is the same with each."""
    return redis_broker


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_password_in_an_exception_reaches_no_line_of_a_workers_log(
    start_worker: Callable[..., Worker], worker_env: dict[str, str], pool: Pool
) -> None:
    worker = start_worker(app="tests.support.leaking:app", pool=pool)

    for name, marker in (
        ("leaking.body", "body-marker"),
        ("leaking.step", "step-marker"),
        ("leaking.exit", "cause-marker"),
        ("leaking.plain", "plain-marker"),
    ):
        leaking.send(worker_env, name)
        worker.wait_for(marker)
    worker.term()
    worker.wait()

    text = worker.text()
    assert "print-marker postgresql://***@db/shop" in text
    assert "cannot connect to postgresql://***@db.internal/shop" in text
    assert "Traceback" in text
    assert leaking.CANARY not in text
