"""Mistakes in declaring a durable task are refused where they are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from umt_durable import DefinitionError, Durable, DurableTask, RetryPolicy, TaskContext
from umt_durable.bridge import checks_tasks
from umt_durable.bridge.findings import Level


@pytest.fixture
def durable() -> Iterator[Durable]:
    app = Celery("declaring", broker="memory://", set_as_current=False)
    durable = Durable(app, database_url="postgresql://nobody@127.0.0.1:1/none", embedded=False)
    yield durable
    durable.stop()
    app.close()


def test_a_body_without_a_context_is_refused_at_its_declaration(durable: Durable) -> None:
    def charge(order: str) -> str:
        return order

    with pytest.raises(DefinitionError, match="first parameter of a durable task is its TaskContext"):
        durable.task(charge)  # type: ignore[arg-type]


def test_a_number_is_no_retry_policy(durable: Durable) -> None:
    def charge(ctx: TaskContext, order: str) -> str:
        return order

    with pytest.raises(DefinitionError, match=r"retry is a RetryPolicy, such as RetryPolicy\.NETWORK, not 3"):
        durable.task(name="shop.charge", retry=3)(charge)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": 7}, "7 is no task name"),
        ({"name": "a\ud800"}, "is no task name"),
        ({"version": "2"}, "versions count from 1, not '2'"),
        ({"version": 0}, "versions count from 1, not 0"),
        ({"raises": ValueError}, "raises is a list of exception classes, not <class 'ValueError'>"),
        ({"raises": ["ValueError"]}, "raises is a list of exception classes"),
        ({"on_mismatch": "stop"}, "on_mismatch is park, fail or warn, not 'stop'"),
    ],
)
def test_what_no_task_can_have_is_refused(durable: Durable, options: dict[str, Any], said: str) -> None:
    def charge(ctx: TaskContext, order: str) -> str:
        return order

    with pytest.raises(DefinitionError) as error:
        durable.task(**{"name": "shop.charge", **options})(charge)

    assert said in str(error.value)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[Durable]:
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # `shared_task` of other tests adds to every app
    app = Celery("strict", broker="memory://", set_as_current=False)
    durable = Durable(app, database_url="postgresql://nobody@127.0.0.1:1/none", embedded=False, strict_retry=True)
    yield durable
    durable.stop()
    app.close()


def test_e2_strict_mode_names_each_task_without_a_retry_policy(strict: Durable) -> None:
    def body(ctx: TaskContext, order: str) -> str:
        return order

    def plain(order: str) -> str:
        return order

    unnamed = strict.task(name="shop.unnamed")(body)
    strict.task(name="shop.none", retry=RetryPolicy.NONE)(body)
    strict.task(name="shop.network", retry=RetryPolicy.NETWORK)(body)
    strict.app.task(name="shop.plain", base=DurableTask, shared=False)(plain)
    strict.app.task(name="shop.by-celery", base=DurableTask, shared=False, max_retries=3)(plain)
    strict.app.task(name="shop.auto", base=DurableTask, shared=False, autoretry_for=(OSError,))(plain)

    with pytest.raises(DefinitionError, match=r"named by shop\.plain@1, shop\.unnamed@1; give each one retry="):
        strict.check_tasks()
    with pytest.raises(DefinitionError, match=r"named by shop\.plain@1, shop\.unnamed@1"):
        unnamed.delay("o-1")
    [found] = checks_tasks.retries(strict)
    assert found.level is Level.FAIL


def test_e2_strict_mode_is_content_with_named_policies(strict: Durable) -> None:
    @strict.task(name="shop.charge", retry=RetryPolicy.FILE)
    def charge(ctx: TaskContext, order: str) -> str:
        return order

    strict.check_tasks()
    [found] = checks_tasks.retries(strict)
    assert found.level is Level.OK


def test_e2_without_strict_mode_a_task_need_not_name_its_policy(durable: Durable) -> None:
    @durable.task(name="shop.charge")
    def charge(ctx: TaskContext, order: str) -> str:
        return order

    durable.check_tasks()
    assert list(checks_tasks.retries(durable)) == []
