"""Everything the demo needs around it: a folder, a database, a broker, the bank and two workers; and their end."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from examples.orders import steplog, tables
from examples.orders.order import read_stock
from examples.orders.processes import BankProcess, ProcessError, Worker, uninterrupted
from umt_durable.embedded import PostgresServer, ValkeyServer
from umt_durable.migrate import migrate_engine_schema
from umt_durable.settings import libpq_url

# The shortest there is, so that the runs of a worker that is killed as a whole go on within seconds.
LEASE_SECONDS: Final = 3.0
OUTAGE_SECONDS: Final = 1.0
WORKERS: Final = 2
RESTARTS: Final = 3
GIVEN: Final = "DURABLE_DATABASE_URL"
SETTINGS: Final = ("DURABLE_", "CELERY_")


class Stage:
    """A context manager: inside its block everything runs, after it nothing does.

    With DURABLE_DATABASE_URL the demo makes a database of its own on that server and drops it at the end; without, it
    uses an embedded Postgres. The broker is always a Valkey of its own, since it is going to be wiped.
    """

    def __init__(self, *, seed: int, keep: bool, say: Callable[[str], None]) -> None:
        self._seed = seed
        self._keep = keep
        self._say = say
        self._exit = ExitStack()
        self._started = 0
        self._restarts = 0
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._set_up(undo)
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self._exit.close()

    def start_workers(self) -> None:
        """Start the workers; they need a second or two before they take work."""
        for _ in range(WORKERS):
            self.workers.append(self._start_worker())

    def replace_worker(self, dead: Worker) -> Worker:
        """Start a new worker in the place of a dead one."""
        worker = self._start_worker()
        self.workers[self.workers.index(dead)] = worker
        return worker

    def supervise(self, *, at_work: bool) -> None:
        """Do what a service manager does: start a worker anew that ended by itself, a few times.

        Errors: ProcessError with the reason when it ended before it was `at_work`, or once too often.
        """
        for worker in list(self.workers):
            if not worker.ended_by_itself:
                continue
            reason = f"worker {worker.name} ended by itself: {worker.last_words()}"
            if not at_work or self._restarts >= RESTARTS:
                raise ProcessError(reason)
            self._restarts += 1
            worker.kill()
            self._say(f"{reason}; worker {self.replace_worker(worker).name} is started in its place")

    def stop_workers(self) -> None:
        """End all workers, politely, so that each tells its last counts."""
        for worker in self.workers:
            worker.ask_to_end()
        for worker in self.workers:
            worker.stop()

    def wipe_broker(self) -> None:
        """Stop the broker, delete all its data and start it again."""
        self._broker.stop("immediate")
        self._broker.wipe()
        time.sleep(OUTAGE_SECONDS)
        self._broker.start()

    def _set_up(self, undo: ExitStack) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="umt-demo-"))
        undo.callback(self._leave_home)
        self.diary = self.home / "steps.log"
        self.bank_log = self.home / "bank.log"
        self.database_url = self._start_database(undo)
        self._broker = ValkeyServer(self.home)
        self._run_server(self._broker, undo)
        migrate_engine_schema(self.database_url)
        # In autocommit; whoever wants a transaction begins one.
        self.conn: psycopg.Connection[Any] = psycopg.connect(self.database_url, autocommit=True)
        undo.callback(self.conn.close)
        with self.conn.transaction():
            tables.create(self.conn, read_stock())
        bank = BankProcess(self.bank_log, self._seed)
        undo.callback(bank.stop)
        self.environ = {
            **without_settings(os.environ),
            GIVEN: self.database_url,
            "DURABLE_LEASE_SECONDS": str(LEASE_SECONDS),
            "CELERY_BROKER_URL": self._broker.url,
            "CELERY_RESULT_BACKEND": self._broker.result_url,
            "SHOP_BANK_URL": bank.url,
            steplog.VARIABLE: str(self.diary),
        }
        undo.callback(self._kill_workers)
        self._say(f"database {self._where}, broker embedded, bank at {bank.url}, folder {self.home}")

    def _start_database(self, undo: ExitStack) -> str:
        given = os.environ.get(GIVEN)
        if not given:
            self._where = "embedded"
            server = PostgresServer(self.home)
            self._run_server(server, undo)
            return server.url
        server_url = libpq_url(given)
        name = f"umt_demo_{secrets.token_hex(4)}"
        with psycopg.connect(server_url, autocommit=True) as conn:
            conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        self._where = f"{name} on the server of {GIVEN}"
        if not self._keep:
            undo.callback(_drop_database, server_url, name)
        return make_conninfo(server_url, dbname=name)

    def _run_server(self, server: PostgresServer | ValkeyServer, undo: ExitStack) -> None:
        if not self._keep:
            # Before the start, so that one that fails halfway is ended too.
            undo.callback(server.stop, "immediate")
        server.start()

    def _start_worker(self) -> Worker:
        name = f"shop-{self._started + 1}"
        self._started += 1
        return Worker(name, self.home / f"{name}.log", self.environ)

    def _kill_workers(self) -> None:
        for worker in self.workers:
            worker.kill()

    def _leave_home(self) -> None:
        if self._keep:
            self._say(f"kept: logs and servers in {self.home}, database {self.database_url}")
            self._say(f"to stop the servers: DURABLE_EMBEDDED_HOME={self.home} umt-durable down")
        else:
            shutil.rmtree(self.home, ignore_errors=True)


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without any setting of the library or of Celery: the demo's own ones hold."""
    return {name: value for name, value in environ.items() if not name.startswith(SETTINGS)}


def take_environment(environ: Mapping[str, str]) -> None:
    """Make this process's environment the given one: what is not in it is gone."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


def _drop_database(server_url: str, name: str) -> None:
    with psycopg.connect(server_url, autocommit=True) as conn:
        conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
