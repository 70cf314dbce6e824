"""The names of the port: thin names over `Durable`, its registry and its client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery

from umt_durable import (
    DefinitionError,
    DuplicateTaskError,
    InputError,
    RetryPolicy,
    TaskContext,
    TaskEngine,
    TaskRegistry,
    UnknownTaskError,
    create_default_registry,
    define_task,
)
from umt_durable.states import OWN


@dataclass(frozen=True)
class Order:
    number: int


def fulfil(ctx: TaskContext, order: Order) -> str:
    return f"order {order.number}"


def first(ctx: TaskContext, value: int) -> int:
    return value


def second(ctx: TaskContext, value: int) -> int:
    return value + 1


@pytest.fixture
def engine() -> Iterator[TaskEngine]:
    registry = create_default_registry()
    for version, handler in ((2, second), (1, first)):
        registry.add(define_task("port.number", version, handler=handler))
    registry.add(define_task("port.order", 1, Order, RetryPolicy.NETWORK, fulfil))
    engine = TaskEngine.connect("postgresql://127.0.0.1:1/x", registry=registry, broker_url="redis://127.0.0.1:1")
    yield engine
    engine.stop()
    engine.durable.app.close()


def test_c2_a_definition_has_one_input_of_the_type_that_its_schema_says() -> None:
    definition = define_task("port.order", 1, Order, RetryPolicy.NETWORK, fulfil)

    args, _ = definition.schema.bind_and_validate(({"number": "7"},), {})

    assert args == (Order(7),)
    assert definition.body(None, Order(7)) == "order 7"
    assert definition.result is str
    assert definition.owner.endswith(".fulfil")
    with pytest.raises(InputError, match=r"input\.number"):
        definition.schema.bind_and_validate(({"number": "seven"},), {})


def test_c2_a_handler_that_takes_only_the_context_finds_its_input_there() -> None:
    def handler(ctx: Any) -> Any:
        return ctx

    definition = define_task("port.only", 1, Order, handler=handler)

    assert definition.body("the context", Order(1)) == "the context"
    assert list(definition.schema.annotations) == ["input"]


def test_c2_without_a_schema_the_signature_says_what_the_arguments_are() -> None:
    @define_task("port.plain")
    def plain(ctx: TaskContext, count: int, name: str = "x") -> int:
        return count

    assert list(plain.schema.annotations) == ["count", "name"]
    assert (plain.name, plain.version) == ("port.plain", 1)


def test_c3_the_default_registry_is_empty_and_knows_versions() -> None:
    registry = create_default_registry()
    registry.add(define_task("port.number", 2, handler=first))

    assert isinstance(registry, TaskRegistry)
    assert list(create_default_registry()) == []
    assert registry.has("port.number")
    assert registry.has("port.number", 2)
    assert not registry.has("port.number", 1)


def test_a3_two_owners_of_one_version_are_refused_by_name() -> None:
    registry = create_default_registry()
    registry.add(define_task("port.number", 1, handler=first))

    with pytest.raises(DuplicateTaskError, match=r"\.first and by .*\.second"):
        registry.add(define_task("port.number", 1, handler=second))


def test_c1_an_engine_makes_a_celery_task_of_each_definition(engine: TaskEngine) -> None:
    assert engine.durable.tasks.versions("port.number") == [1, 2]
    assert engine.durable.app.tasks["port.number"].durable_version == 2
    assert engine.durable.tasks.get("port.order").retry is RetryPolicy.NETWORK


def test_c1_an_engine_may_stand_on_an_app_that_is_there_already() -> None:
    app = Celery("mine", set_as_current=False)
    engine = TaskEngine.connect("postgresql://127.0.0.1:1/x", app=app)

    assert engine.durable.app is app
    engine.stop()
    app.close()


def test_an_unknown_task_is_refused_and_the_known_ones_are_named(engine: TaskEngine) -> None:
    with pytest.raises(UnknownTaskError, match=r"port\.number@2"):
        engine.enqueue("port.nonsense")


def test_f2_a_worker_of_some_versions_takes_no_others(engine: TaskEngine) -> None:
    assert engine._chosen(["port.number@1"]) == "port.number@1"

    assert [one for one in engine.durable.tasks.offered() if not one.startswith(OWN)] == ["port.number@1"]
    assert engine.durable.tasks.get("port.number").version == 2  # what it starts is not bound by that


@pytest.mark.parametrize("version", ["port.numbers", "port.number@9", "port.number@x", "nonsense@1"])
def test_f2_a_version_that_is_not_registered_is_refused(engine: TaskEngine, version: str) -> None:
    with pytest.raises(UnknownTaskError, match=f"named '{version}' .*registered: .*port.number@1"):
        engine._chosen([version])


def test_a_worker_is_started_in_the_main_thread_only(engine: TaskEngine) -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            engine.start_worker()
        except DefinitionError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    assert "needs the main thread" in str(caught[0])


def test_c1_stop_may_be_repeated(engine: TaskEngine) -> None:
    before = threading.active_count()
    lease = engine.durable.process_lease
    lease.start()
    assert threading.active_count() > before

    engine.stop()
    engine.stop()

    assert lease.stopping
    assert threading.active_count() == before


def test_what_is_no_definition_is_refused_by_name() -> None:
    with pytest.raises(DefinitionError, match="task 'a': handler must be a function, not 7"):
        define_task("a", handler=7)  # type: ignore[arg-type]  # the point
    with pytest.raises(DefinitionError, match="task 'a': input_schema"):
        define_task("a", input_schema=7, handler=lambda ctx, input: None)
    with pytest.raises(DefinitionError, match="a registry holds what define_task gives, not 7"):
        TaskRegistry().add(7)  # type: ignore[arg-type]  # the point


def test_e2_a_definition_without_a_policy_does_not_name_one() -> None:
    assert not define_task("a", handler=first).names_retry
    assert define_task("a", retry_policy=RetryPolicy.NONE, handler=first).names_retry
