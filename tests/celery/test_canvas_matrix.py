"""Every shape of canvas on every broker and pool gives what plain Celery gives: value, family, each body once.

The whole matrix is a suite of its own: `python3 dev.py matrix`. The default run has some shapes whose members suspend
once, on pools that tests/celery/test_canvas_shapes.py has not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.celery import shapes
from tests.support import matrix_apps
from tests.support.bodylog import VARIABLE, BodyLog
from tests.support.brokers import Broker
from tests.support.closing import close_app
from tests.support.matrix_apps import BEGIN, PLAIN_QUEUE, Tasks
from tests.support.queues import QUEUE
from tests.support.wait import until
from tests.support.workers import Pool, Worker
from umt_durable.database import Connection
from umt_durable.states import RunState
from umt_durable.store import outbox

pytestmark = pytest.mark.processes

MODULE = "tests.support.matrix_apps"
UNENDED = [state for state in RunState if not state.is_terminal]
KINDS: tuple[Pool, ...] = ("prefork", "threads", "gevent", "solo")
CONCURRENCY = {"prefork": 3, "threads": 6, "gevent": 12, "solo": 1}


def cells() -> Iterator[object]:
    """Yield broker, pool and whether it is the whole table of shapes; by default there are two small cells."""
    default = [("redis", "prefork"), ("rabbitmq", "gevent")]
    for broker in ("redis", "rabbitmq"):
        marks = [pytest.mark.rabbitmq] * (broker == "rabbitmq")
        for pool in KINDS:
            if (broker, pool) in default:
                yield pytest.param(broker, pool, False, marks=marks, id=f"{broker}-{pool}-small")
            yield pytest.param(broker, pool, True, marks=[*marks, pytest.mark.long], id=f"{broker}-{pool}-whole")


@pytest.fixture
def plain(worker_env: dict[str, str], tmp_path: Path) -> Iterator[tuple[Tasks, BodyLog]]:
    """Return the plain app's tasks, with a worker of their own that knows nothing of this package."""
    log = BodyLog(tmp_path / "plain.log")
    env = {**worker_env, VARIABLE: str(log.path)}
    tasks = matrix_apps.build(env, durable=False)
    with Worker(env=env, app=f"{MODULE}:plain_app", pool="threads", concurrency=6, name="plain"):
        yield tasks, log
        close_app(tasks.app)


@pytest.fixture
def ours(worker_env: dict[str, str]) -> Iterator[Tasks]:
    """Return the durable app's tasks."""
    tasks = matrix_apps.build(worker_env, durable=True)
    yield tasks
    assert tasks.durable is not None
    tasks.durable.stop()
    close_app(tasks.app)


@pytest.mark.parametrize(("broker", "kind", "whole"), list(cells()), indirect=["broker"])
def test_i13_every_shape_is_as_plain_celery_has_it(
    plain: tuple[Tasks, BodyLog],
    ours: Tasks,
    start_worker: Callable[..., Worker],
    broker: Broker,
    body_log: BodyLog,
    conn: Connection,
    kind: Pool,
    whole: bool,
) -> None:
    start_worker(app=f"{MODULE}:durable_app", pool=kind, concurrency=CONCURRENCY[kind])
    table = list(shapes.whole() if whole else shapes.small())

    plain_results, results = shapes.start(plain[0], table), shapes.start(ours, table)
    mapped = _start_maps(ours)
    wanted, found = _outcomes(plain_results), _outcomes(results)
    maps = _outcomes(mapped)
    until(lambda: broker.held(PLAIN_QUEUE) == 0, timeout=60, what="the plain worker to be done")
    until(lambda: _is_quiet(ours, broker, conn), timeout=120, what="all runs to end, with all that follows them")

    assert {one.name: found[one.name] for one in table if one.value is not None} == {
        one.name: ("value", one.value) for one in table if one.value is not None
    }
    expected, seen = shapes.look(wanted, plain[1]), shapes.look(found, body_log)
    different = [line for name in seen for line in shapes.compare(name, expected[name], seen[name])]
    assert not different, "plain Celery against durable:\n" + "\n".join(different)
    assert {name: one.bodies for name, one in seen.items() if set(one.bodies.values()) != {1}} == {}
    _check_maps(maps, mapped, body_log)


def _start_maps(tasks: Tasks) -> dict[str, Any]:
    """Start what has no plain counterpart, for there an item is no message: here each is a run of its own."""
    item = tasks.item
    return {
        "map": item.map([0, 1, 2]).delay(),
        "starmap": item.starmap([(10, 0), (11, 1), (12, 3)]).delay(),
        "chunks": item.chunks([(n, 1) for n in range(20, 25)], 2)(),
        "chunks in a group": item.chunks([(n, 1) for n in range(30, 33)], 2).group()(),
    }


def _check_maps(outcomes: dict[str, Any], results: dict[str, Any], log: BodyLog) -> None:
    assert outcomes == {
        "map": ("value", [1, 2, 3]),
        "starmap": ("value", [11, 12, 13]),
        "chunks": ("value", [[21, 22], [23, 24], [25]]),
        "chunks in a group": ("value", [[31, 32], [33]]),
    }
    entries = [entry for entry in log.entries() if entry.step.startswith("item-")]
    assert Counter(entry.step for entry in entries if entry.mark == BEGIN) == Counter(
        f"item-{n}" for first, last in ((0, 3), (10, 13), (20, 25), (30, 33)) for n in range(first, last)
    )
    roots = {entry.step: json.loads(entry.mark)[0] for entry in entries if entry.mark != BEGIN}
    assert {roots[f"item-{n}"] for n in range(3)} == {results["map"].id}
    assert {roots[f"item-{n}"] for n in range(10, 13)} == {results["starmap"].id}


def _outcomes(results: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    return {name: shapes.outcome(result) for name, result in results.items()}


def _is_quiet(tasks: Tasks, broker: Broker, conn: Connection) -> bool:
    assert tasks.durable is not None
    if broker.held(QUEUE) or outbox.status(conn)[0]:
        return False
    return not tasks.durable.list(states=UNENDED, limit=1) and not broker.held(QUEUE) and outbox.status(conn)[0] == 0
