"""The servers and processes of one chaos run: all private, all ended with it, all traffic through proxies of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg

from tests.support import bodylog, provider
from tests.support.brokers import RabbitBroker, RedisBroker
from tests.support.postgres import PrivatePostgres, address, make_schema, through
from tests.support.proxy import Proxy
from tests.support.rabbit import find
from tests.support.valkey import Valkey
from tests.support.workers import Pool, Running, Serve, Worker
from tools.chaos import audit

APP: Final = "tools.chaos.app:app"
LEASE_SECONDS: Final = 3.0
POOLS: Final[tuple[tuple[Pool, int], ...]] = (("prefork", 3), ("threads", 3), ("gevent", 3))
ROLES: Final = ("relay", "maintenance")
SCHEMA: Final = "chaos"


@dataclass
class Stage:
    """What faults can be done to, and what the checker reads.

    Shape: `url` leads to Postgres past the proxy, for load and checker; workers and `serve` go through it.
    """

    folder: Path
    postgres: PrivatePostgres
    database_proxy: Proxy
    valkey: Valkey
    broker: RedisBroker | RabbitBroker
    provider: provider.Provider
    environment: dict[str, str]
    workers: list[Worker] = field(default_factory=list)
    serving: list[Serve] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Return the URL of Postgres, not through the proxy."""
        return self.postgres.url

    @property
    def body_log(self) -> bodylog.BodyLog:
        """Return the log that all bodies write."""
        return bodylog.BodyLog(Path(self.environment[bodylog.VARIABLE]))

    @property
    def processes(self) -> list[Running]:
        """Return the workers and the services."""
        return [*self.workers, *self.serving]

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        """Open a connection in autocommit, with the schema first in its path."""
        return psycopg.connect(self.url, autocommit=True, options=f"-c search_path={SCHEMA}", connect_timeout=5)

    def caller(self) -> dict[str, str]:
        """Return the environment of the process that makes the load: its database is not through the proxy."""
        return {**self.environment, "DURABLE_DATABASE_URL": self.url}


@contextmanager
def stage(broker: str, folder: Path) -> Iterator[Stage]:
    """Start servers and processes, and end them all.

    Errors: NoRabbitError.
    """
    with ExitStack() as stack:
        postgres = PrivatePostgres(folder / "postgres")
        stack.callback(postgres.close)
        proxy = stack.enter_context(Proxy(*address(postgres.url), postgres=True))
        valkey = Valkey(folder / "valkey")
        stack.callback(valkey.stop)
        make_schema(postgres.url, SCHEMA)
        audit.install(postgres.url, SCHEMA)
        made = _broker(stack, broker, valkey, folder)
        stack.callback(made.close)
        shop = stack.enter_context(provider.Provider("idempotent", folder))
        environment = {
            "DURABLE_DATABASE_URL": through(postgres.url, proxy),
            "DURABLE_SCHEMA": SCHEMA,
            "DURABLE_EMBEDDED": "0",
            "DURABLE_LEASE_SECONDS": str(LEASE_SECONDS),
            "DURABLE_HOLD_SECONDS": "3",
            "DURABLE_DELIVER_SECONDS": "5",
            "DURABLE_POLL_SECONDS": "0.2",
            "DURABLE_MAX_CRASHES": "1000",
            "CELERY_BROKER_URL": made.url,
            "CELERY_RESULT_BACKEND": valkey.result_url,
            "HOME": str(folder),
            bodylog.VARIABLE: str(folder / "bodies.log"),
            provider.ADDRESS: shop.address,
        }
        found = Stage(folder, postgres, proxy, valkey, made, shop, environment)
        for pool, slots in POOLS:
            found.workers.append(Worker(env=environment, app=APP, pool=pool, concurrency=slots, name=f"worker-{pool}"))
        found.serving.extend(Serve(role, env=environment, app=APP) for role in ROLES)
        for process in found.processes:
            stack.enter_context(process)
        yield found


def _broker(stack: ExitStack, name: str, valkey: Valkey, folder: Path) -> RedisBroker | RabbitBroker:
    if name == "redis":
        return RedisBroker(valkey)
    server = find(folder / "rabbitmq")
    stack.callback(server.close)
    return RabbitBroker(server)
