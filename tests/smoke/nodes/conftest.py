"""pytest-celery's vocabulary for the tests of this folder alone, on local processes.

The plug-in is not loaded: its fixtures are taken by name, so that those which need a Docker engine, and those which
shadow Celery's own, reach no other test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from pytest_celery import CeleryBackendCluster, CeleryBrokerCluster, CeleryTestBackend, CeleryTestBroker
from pytest_celery.fixtures.backend import celery_backend_cluster_config
from pytest_celery.fixtures.broker import celery_broker_cluster_config
from pytest_celery.fixtures.setup import (
    celery_setup,
    celery_setup_app,
    celery_setup_cls,
    celery_setup_config,
    celery_setup_name,
)
from pytest_celery.fixtures.worker import celery_worker, celery_worker_cluster, celery_worker_cluster_config
from pytest_celery.vendors.worker.container import CeleryWorkerContainer
from pytest_celery.vendors.worker.fixtures import (
    celery_setup_worker,
    default_worker_cls,
    default_worker_container_cls,
    default_worker_initial_content,
    default_worker_signals,
    default_worker_utils_module,
)

from tests.support import smoke_app, smoke_tasks
from tests.support.brokers import Broker
from tests.support.closing import close_app
from tests.support.nodes import ServerHandle, WorkerHandle
from umt_durable import Durable

__all__ = [
    "celery_backend_cluster_config",
    "celery_broker_cluster_config",
    "celery_setup",
    "celery_setup_app",
    "celery_setup_cls",
    "celery_setup_config",
    "celery_setup_name",
    "celery_setup_worker",
    "celery_worker",
    "celery_worker_cluster",
    "celery_worker_cluster_config",
    "default_worker_cls",
    "default_worker_container_cls",
    "default_worker_initial_content",
    "default_worker_signals",
    "default_worker_utils_module",
]


@pytest.fixture
def celery_broker_cluster(broker: Broker) -> Iterator[CeleryBrokerCluster]:
    """Return a cluster of the broker of this test."""
    cluster = CeleryBrokerCluster(CeleryTestBroker(ServerHandle(broker.name, broker.url, broker)))
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_backend_cluster(redis_url: str) -> Iterator[CeleryBackendCluster]:
    """Return a cluster of the result backend of this test."""
    cluster = CeleryBackendCluster(CeleryTestBackend(ServerHandle("results", redis_url)))
    yield cluster
    cluster.teardown()


@pytest.fixture
def default_worker_app_module() -> ModuleType:
    """Return the template of the workers' app, which has a `Durable`."""
    return smoke_app


@pytest.fixture
def default_worker_tasks() -> set[ModuleType]:
    """Return the modules whose tasks the workers have, with the plug-in's own."""
    return {*CeleryWorkerContainer.tasks_modules(), smoke_tasks}


@pytest.fixture
def default_worker_app(celery_setup_app: Celery, worker_env: dict[str, str]) -> Iterator[Celery]:
    """Return the app of the test, which has a `Durable` on the same database as the workers'."""
    celery_setup_app.conf.update(
        broker_connection_retry_on_startup=True,
        durable_database_url=worker_env["DURABLE_DATABASE_URL"],
        durable_schema=worker_env["DURABLE_SCHEMA"],
        durable_embedded=False,
        durable_lease_seconds=float(worker_env["DURABLE_LEASE_SECONDS"]),
    )
    durable = Durable(celery_setup_app)
    yield celery_setup_app
    durable.stop()
    close_app(celery_setup_app)


@pytest.fixture
def make_worker_handle(
    default_worker_initial_content: dict[str, Any], worker_env: dict[str, str], tmp_path: Path
) -> Iterator[Callable[[str], WorkerHandle]]:
    """Return a function that starts one more worker like that of the set-up."""
    made: list[WorkerHandle] = []

    def make(name: str) -> WorkerHandle:
        made.append(WorkerHandle(tmp_path / name, default_worker_initial_content, worker_env, name=name))
        return made[-1]

    yield make
    for handle in made:
        handle.teardown()


@pytest.fixture
def default_worker_container(make_worker_handle: Callable[[str], WorkerHandle]) -> WorkerHandle:
    """Return the worker process of the set-up, where the plug-in has a container."""
    handle = make_worker_handle("celery_test_worker")
    handle.ready()
    return handle
