"""Steps that could never work: each is a typed error that names the step or the argument, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.support.engine import Engine
from umt_durable import PollPolicy, RetryPolicy, Timer
from umt_durable.database import Database
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Finished
from umt_durable.errors import DefinitionError
from umt_durable.settings import Settings


@pytest.fixture
def engine(database: Database, settings: Settings) -> Iterator[Engine]:
    engine = Engine(database, settings)
    yield engine
    engine.close()


async def coroutine_function(*_: object) -> int:
    """Be what nobody would await."""
    return 1


def call(*_: object) -> int:
    """Be a step's function."""
    return 1


def takes_one(order: int) -> int:
    """Be a step's function of one argument."""
    return order


def takes_none() -> int:
    """Be a step's function of no argument."""
    return 1


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda step: step.run("s", None), "step 's': fn must be a function, not None"),
    (lambda step: step.run("s", call()), "step 's': fn must be a function, not 1"),
    (lambda step: step.transaction("s", "insert"), "step 's': fn must be a function"),
    (lambda step: step.transaction("s", coroutine_function), "step 's': fn is a coroutine function"),
    (lambda step: step.transaction("s", call, on=7), "step 's': on: int is no binding"),
    (lambda step: step.transaction("s", call, on="nope"), "step 's': on: no binding named 'nope' is configured"),
    (lambda step: step.sleep("s", 7), "step 's'"),
    (lambda step: step.sleep("s", timedelta(seconds=-1)), "step 's'"),
    (lambda step: step.sleep_until("s", datetime(2030, 1, 1)), "step 's'"),  # noqa: DTZ001
    (lambda step: step.sleep_until("s", "2030-01-01"), "step 's'"),
    (lambda step: step.wait_for_fact("w", timeout=7), "wait 'w'"),
    (lambda step: step.wait_for_fact("w", timeout=timedelta(seconds=-1)), "wait 'w'"),
    (lambda step: step.wait_for_fact("w", mode="last"), "wait 'w'"),
    (lambda step: step.wait_any(["a"], timeout=7), "wait_any"),
    (lambda step: step.wait_all(["a"], timeout="1h"), "wait_all"),
    (lambda step: step.wait_quorum(1, ["a"], timeout=7), "wait_quorum"),
    (lambda step: step.wait_quorum(3, ["a", "b"]), "wait_quorum"),
    (lambda step: step.wait_any([Timer(datetime(2030, 1, 1))]), "timer"),  # noqa: DTZ001
    (lambda step: step.map("m", call, [1], key=str, workers="yes"), "step.map 'm': workers"),
    (lambda step: step.map("m", call, [1], key=str, concurrency=0), "step.map 'm': concurrency"),
    (lambda step: step.map("m", call, [1], key=str, on_error="ignore"), "step.map 'm': on_error"),
    (lambda step: step.options(undo=7).run("s", call), "undo: a function declared with @undo, not 7"),
    (lambda step: step.options(retry=7).run("s", call), "retry: a RetryPolicy"),
    (lambda step: step.options(preemptible="yes").run("s", call), "preemptible is True or False"),
    (lambda step: step.effect("k", call, on="nope"), "effect 'k': on: no binding named 'nope' is configured"),
    (lambda step: step.run("s", takes_one), "step 's': fn does not take the arguments that it is given: missing"),
    (
        lambda step: step.run("s", takes_one, 1, 2),
        "step 's': fn does not take the arguments that it is given: too many",
    ),
    (lambda step: step.run("s", takes_one, copies=1), "step 's': fn does not take the arguments that it is given"),
    (lambda step: step.transaction("s", takes_one, 1), "step 's': fn does not take the arguments that it is given"),
    (lambda step: step.map("m", takes_none, [1], key=str), "step.map 'm': fn is called as fn(item): too many"),
    (lambda step: step.map("m", call, [1], key=takes_none), "step.map 'm': key is called as key(item): too many"),
    (lambda step: step.parallel({"a": takes_one}), "step.parallel 'parallel': the branch 'a' does not take"),
    (lambda step: step.parallel({"a": (takes_one, 1, 2)}), "step.parallel 'parallel': the branch 'a' does not take"),
    (
        lambda step: step.task("t", None, timeout=timedelta(1), reconcile=takes_none),
        "step 't': reconcile is called as reconcile(info): too many",
    ),
    (
        lambda step: step.wait_for_fact("w", on_created=takes_none),
        "wait 'w': on_created is called as on_created(address): too many",
    ),
    (
        lambda step: step.begin("b", on_created=takes_none),
        "step 'b': on_created is called as on_created(token): too many",
    ),
    (lambda step: step.wait_for_fact("w", poll=timedelta(0)), "wait 'w': poll must be a timedelta of more than 0"),
    (lambda step: step.wait_for_fact("w", poll=PollPolicy(factor=True)), "PollPolicy: factor must be from 1 to 100"),
    (
        lambda step: step.options(retry=RetryPolicy.NETWORK).sleep("s", timedelta(1)),
        "step 's': retry= is for steps with a function of their own",
    ),
    (
        lambda step: step.options(preemptible=True).wait_for_fact("w"),
        "wait 'w': preemptible= is for steps with a function of their own",
    ),
    (lambda step: step.options(retry=RetryPolicy.FILE).wait_any(["a"]), "step.wait_any: retry= is for steps"),
    (lambda step: step.options(retry=RetryPolicy.FILE).begin("b", on_created=call), "step 'b': retry= is for steps"),
    (
        lambda step: step.options(retry=RetryPolicy.FILE).map("m", "t", [1], key=str, workers=True),
        "step.map 'm' on workers: retry= is for steps",
    ),
    (lambda step: step.effect("k", call, on=7), "effect 'k': on: int is no binding"),
    (lambda step: step.effect("k", call, not_applied=ValueError), "effect 'k': not_applied holds exception classes"),
    (lambda step: step.effect("k", coroutine_function), "effect 'k': do is a coroutine function"),
    (lambda step: step.map("m", call, 7, key=str), "step.map 'm': items"),
    (lambda step: step.map("m", call, [1], key=None), "step.map 'm': key must be a function"),
    (lambda step: step.map("m", "t", [1], key="id", workers=True), "step.map 'm': key must be a function"),
    (lambda step: step.gather("g", None), "step 'g': give a list of signatures"),
    (lambda step: step.gather("g", "t"), "step 'g': give a list of signatures"),
    (lambda step: step.options(renamed_from=7).run("s", call), "renamed_from="),
    (lambda step: step.task("t", None, timeout=timedelta(1), reconcile=7), "step 't': reconcile must be a function"),
    (
        lambda step: step.task("t", None, timeout=timedelta(1), reconcile=coroutine_function),
        "reconcile is a coroutine",
    ),
    (lambda step: step.task("t", None, idempotent="yes"), "step 't': idempotent is True or False"),
    (lambda step: step.wait_for_fact("w", on_created=7), "wait 'w': on_created must be a function"),
    (lambda step: step.wait_for_fact("w", on_created=coroutine_function), "wait 'w': on_created is a coroutine"),
    (lambda step: step.wait_for_fact("w", type=7), "wait 'w': type: no payload can be read as 7"),
    (lambda step: step.wait_for_fact("w", type="Answer"), "wait 'w': type: a type is given itself"),
    (lambda step: step.wait_for_fact("a\ud800"), "the name of a fact holds a NUL or half of a surrogate pair"),
    (lambda step: step.wait_any(["a\0"]), "the name of a fact holds a NUL"),
    (lambda step: step.wait_any({"a\0": "n"}), "the label of a wait"),
    (lambda step: step.begin("b", on_created=coroutine_function), "step 'b': on_created is a coroutine function"),
    (lambda step: step.begin("b", on_created=call, type=7), "'b': type: no payload can be read as 7"),
]


@pytest.mark.parametrize(("bad", "said"), REFUSED)
def test_what_can_never_work_is_refused_before_anything_is_written(
    engine: Engine, bad: Callable[[Any], Any], said: str
) -> None:
    @engine.task("t")
    def body(ctx: TaskContext) -> None:
        bad(ctx.step)

    run_id, outcome = engine.run("t")

    assert isinstance(outcome, Finished)
    assert isinstance(outcome.error, DefinitionError)
    assert said in str(outcome.error)
    history = engine.client.history(run_id)
    assert (history.steps, history.waits) == ([], [])
