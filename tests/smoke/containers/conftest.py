"""pytest-celery's vocabulary for the tests of this folder alone, on containers, where a Docker engine answers.

    worker      pytest-celery's worker container on the image of the project's Dockerfile
    database    Postgres in a container; brokers and result backend are the plug-in's own containers

Without an engine each test is skipped with the reason. With UMT_TEST_CONTAINERS=1 a missing engine is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from pytest_celery import CeleryBackendCluster, CeleryBrokerCluster, CeleryTestBroker, defaults
from pytest_celery.vendors.rabbitmq import fixtures as rabbitmq
from pytest_celery.vendors.redis.backend import fixtures as redis_backend
from pytest_celery.vendors.redis.broker import fixtures as redis_broker
from pytest_celery.vendors.worker.fixtures import default_worker_env, default_worker_volume
from pytest_docker_tools import build, container

from tests.smoke.nodes.conftest import (
    celery_backend_cluster_config,
    celery_broker_cluster_config,
    celery_setup,
    celery_setup_app,
    celery_setup_cls,
    celery_setup_config,
    celery_setup_name,
    celery_setup_worker,
    celery_worker,
    celery_worker_cluster,
    celery_worker_cluster_config,
    default_worker_app,
    default_worker_app_module,
    default_worker_cls,
    default_worker_initial_content,
    default_worker_signals,
    default_worker_tasks,
    default_worker_utils_module,
)
from tests.support import container_nodes as nodes
from tests.support import guard
from tests.support.bodylog import VARIABLE as BODY_LOG
from tests.support.bodylog import BodyLog
from tests.support.container_nodes import DurableWorkerContainer, PostgresContainer
from tests.support.gates import VARIABLE as GATES
from tests.support.gates import Gates

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
    "default_worker_app",
    "default_worker_app_module",
    "default_worker_cls",
    "default_worker_env",
    "default_worker_initial_content",
    "default_worker_signals",
    "default_worker_tasks",
    "default_worker_utils_module",
    "default_worker_volume",
]

WANTED = "UMT_TEST_CONTAINERS"
HERE = Path(__file__).parent

# The plug-in's fixtures of the servers, some twenty, under their own names.
for _module in (redis_broker, redis_backend, rabbitmq):
    globals().update({name: one for name, one in vars(_module).items() if name.startswith(("default_", "celery_"))})
default_pytest_celery_network = defaults.default_pytest_celery_network

product_image = build(path=str(guard.ROOT), tag="umt-durable:product", scope="session")
worker_image = build(path=str(HERE), tag=nodes.IMAGE, buildargs={"BASE": "{product_image.tags[0]}"}, scope="session")
postgres_container = container(
    image=nodes.POSTGRES_IMAGE,
    environment=nodes.POSTGRES_ENV,
    ports={nodes.POSTGRES_PORT: None},
    network="{default_pytest_celery_network.name}",
    wrapper_class=PostgresContainer,
    timeout=90,
)


@pytest.fixture(scope="session")
def docker_client(request: pytest.FixtureRequest) -> Iterator[docker.DockerClient]:
    """Return a client of the Docker engine; skip where there is none."""
    reason = nodes.no_engine()
    if reason is not None and os.environ.get(WANTED) == "1":
        pytest.fail(f"{WANTED}=1, but {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason)
    request.config.option.reuse_containers = False  # an option of a plug-in that is not loaded
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture(autouse=True)
def _engine(docker_client: docker.DockerClient) -> None:
    """Look for the engine before anything else is set up."""


@pytest.fixture
def database_url(postgres_container: PostgresContainer) -> str:
    """Return the URL of the database for this machine; see `schema`."""
    return postgres_container.host_url


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return the folder that this machine and the containers share; the image's user may write to it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.fixture
def body_log(shared: Path) -> BodyLog:
    """Return the log that the bodies in this test's containers write."""
    return BodyLog(shared / "bodies.log")


@pytest.fixture
def gates(shared: Path) -> Iterator[Gates]:
    """Return the gates at which the bodies in this test's containers stop."""
    gates = Gates(shared / "gates")
    yield gates
    gates.open_all()


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> CeleryTestBroker:
    """Return the node of the broker that the test names."""
    return request.getfixturevalue(f"celery_{request.param}_broker")


@pytest.fixture
def celery_broker_cluster(broker: CeleryTestBroker) -> Iterator[CeleryBrokerCluster]:
    """Return a cluster of the broker of this test."""
    cluster = CeleryBrokerCluster(broker)
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_backend_cluster(celery_redis_backend: Any) -> Iterator[CeleryBackendCluster]:
    """Return a cluster of the result backend of this test."""
    cluster = CeleryBackendCluster(celery_redis_backend)
    yield cluster
    cluster.teardown()


@pytest.fixture
def worker_env(database_url: str, schema: str) -> dict[str, str]:
    """Return what app and workers of the test have in common, as this machine sees it."""
    return {"DURABLE_DATABASE_URL": database_url, "DURABLE_SCHEMA": schema, "DURABLE_LEASE_SECONDS": "3"}


@pytest.fixture
def default_worker_container_cls() -> type[DurableWorkerContainer]:
    """Return the class of a worker's container."""
    return DurableWorkerContainer


@pytest.fixture
def container_env(
    worker_env: dict[str, str], default_worker_env: dict[str, str], postgres_container: PostgresContainer
) -> dict[str, str]:
    """Return the environment of a worker's container: the servers as their network knows them."""
    return {
        **default_worker_env,
        **worker_env,
        "DURABLE_DATABASE_URL": postgres_container.url,
        "DURABLE_EMBEDDED": "0",
        "DURABLE_POLL_SECONDS": "0.2",
        "PYTHONPATH": f"/app:{nodes.SUITE}",
        BODY_LOG: f"{nodes.SHARED}/bodies.log",
        GATES: f"{nodes.SHARED}/gates",
    }


@pytest.fixture
def make_worker_handle(
    docker_client: docker.DockerClient,
    worker_image: Any,
    default_worker_volume: Any,
    default_pytest_celery_network: Any,
    container_env: dict[str, str],
    shared: Path,
    gates: Gates,
) -> Iterator[Callable[[str], DurableWorkerContainer]]:
    """Return a function that starts one more worker like that of the set-up."""
    made: list[Any] = []

    def make(name: str) -> DurableWorkerContainer:
        kind = nodes.named(name)
        options = nodes.worker_options(
            kind,
            env=container_env,
            network=default_pytest_celery_network.name,
            content=default_worker_volume.name,
            shared=shared,
        )
        made.append(docker_client.containers.run(worker_image.id, **options))
        return kind(made[-1])

    yield make
    for one in made:
        one.remove(force=True)


@pytest.fixture
def default_worker_container(make_worker_handle: Callable[[str], DurableWorkerContainer]) -> DurableWorkerContainer:
    """Return the worker's container of the set-up."""
    handle = make_worker_handle("celery_test_worker")
    handle.ready()
    return handle
