"""A program that uses nothing but the port: enqueue, work, signal, cancel, look, stop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import guard
from tests.support.brokers import RedisBroker
from umt_durable.settings import Settings

PROGRAM = """
import threading
import time
from dataclasses import dataclass

from umt_durable import TaskContext, TaskEngine, create_default_registry, define_task


@dataclass(frozen=True)
class Order:
    number: int


def fulfil(ctx: TaskContext, order: Order) -> str:
    approval = ctx.step.wait_for_fact("approved")
    return f"order {order.number} approved by {approval.payload}"


registry = create_default_registry()
registry.add(define_task("port.order", 1, Order, handler=fulfil))
engine = TaskEngine.connect(registry=registry)
engine.migrate()
run, unwanted = engine.enqueue("port.order", Order(7)), engine.enqueue("port.order", Order(8))


def await_state(run: str, *states: str) -> None:
    deadline = time.monotonic() + 60
    while str(engine.get(run).state) not in states and time.monotonic() < deadline:
        threading.Event().wait(0.02)


def drive() -> None:
    await_state(run, "waiting")
    engine.signal(run, "approved", "ann")
    engine.cancel(unwanted, reason="customer")
    await_state(run, "succeeded")
    await_state(unwanted, "cancelled")
    engine.stop()


driver = threading.Thread(target=drive)
driver.start()
engine.start_worker(["port.order@1"], options=["-P", "threads", "-c", "2"])
driver.join()
print("RESULT", engine.durable.client.result(engine.get(run)))
print("RUNS", sorted((one.id == run, str(one.state)) for one in engine.list(task="port.order")))
engine.stop()
"""


@pytest.mark.processes
def test_c1_a_program_works_through_the_port_alone(
    settings: Settings, redis_broker: RedisBroker, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=guard.clean_environment(
            {
                "DURABLE_DATABASE_URL": str(settings.database_url),
                "DURABLE_SCHEMA": settings.schema,
                "CELERY_BROKER_URL": redis_broker.url,
                "CELERY_RESULT_BACKEND": redis_url,
                "C_FORCE_ROOT": "1",
            }
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "RESULT order 7 approved by ann\n" in done.stdout
    assert "RUNS [(False, 'cancelled'), (True, 'succeeded')]\n" in done.stdout
