"""How long a parent with many children takes, and what it costs: prints one JSON line.

`python3 dev.py exec python -m benchmarks.fan_out --children 10000` runs on a private Postgres and Valkey of its own;
`--broker URL` takes another broker.
Units: seconds, bytes; `cpu_seconds` is that of the worker's processes. `dead_tuples` are the row versions that updates
and deletes left behind, whether or not autovacuum has been there, `hot` those of them that no index noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
from celery import Celery

from umt_durable import Durable, TaskContext, migrate_engine_schema
from umt_durable.embedded import PostgresServer, ValkeyServer

SCHEMA = "fan_out"
QUEUE = "fan-out"
LOOK_SECONDS = 0.2
LONGEST_SECONDS = 3600.0
_COUNTS = """
SELECT (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()) AS commits,
       pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint AS wal_bytes,
       sum(n_tup_upd + n_tup_del)::bigint AS dead_tuples,
       sum(n_tup_hot_upd)::bigint AS hot,
       sum(pg_total_relation_size(relid))::bigint AS bytes
  FROM pg_stat_user_tables WHERE schemaname = %(schema)s
"""
_SIZES = """
SELECT relname, pg_total_relation_size(relid), n_tup_ins, n_tup_upd, n_tup_del, n_dead_tup
  FROM pg_stat_user_tables WHERE schemaname = %(schema)s AND n_tup_ins > 0 ORDER BY 2 DESC
"""


def build(environ: os._Environ[str] | dict[str, str]) -> tuple[Celery, Durable, Any]:
    """Return the app, its `Durable` and the parent task, on the servers that the environment names."""
    app = Celery("fan-out", broker=environ["CELERY_BROKER_URL"], backend="disabled://")
    app.conf.update(task_default_queue=QUEUE, task_ignore_result=True, broker_connection_retry_on_startup=True)
    durable = Durable(app, database_url=environ["DURABLE_DATABASE_URL"], schema=SCHEMA, embedded=False)

    @durable.task(name="fan_out.child")
    def child(ctx: TaskContext, number: int) -> int:
        return ctx.step.run("square", lambda: number * number)

    @durable.task(name="fan_out.parent")
    def parent(ctx: TaskContext, children: int) -> list[int]:
        return ctx.step.gather("all", [child.s(number) for number in range(children)])

    return app, durable, parent


@contextmanager
def servers(broker: str | None) -> Iterator[dict[str, str]]:
    """Give the environment of a private Postgres, which waits for its disk, and of a broker."""
    with tempfile.TemporaryDirectory(prefix="umt-fan-out-") as folder:
        postgres = PostgresServer(Path(folder) / "postgres", durable=True, tcp=True)
        valkey = None if broker else ValkeyServer(Path(folder) / "valkey", durable=False, tcp=True)
        postgres.start()
        try:
            if valkey is not None:
                valkey.start()
            migrate_engine_schema(postgres.url, SCHEMA)
            url = broker or (valkey.url if valkey is not None else "")
            yield {**os.environ, "DURABLE_DATABASE_URL": postgres.url, "CELERY_BROKER_URL": url}
        finally:
            if valkey is not None:
                valkey.stop()
            postgres.stop()


@contextmanager
def worker(env: dict[str, str], slots: int) -> Iterator[psutil.Process]:
    """Give a worker of so many pool children while its broker connection is made or later."""
    argv = [sys.executable, "-m", "celery", "-A", "benchmarks.fan_out:app", "worker", f"--concurrency={slots}"]
    process = subprocess.Popen(
        [*argv, "--loglevel=WARNING"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def counts(conn: psycopg.Connection[Any]) -> dict[str, int]:
    """Return what the server has counted so far."""
    conn.execute("SELECT pg_stat_force_next_flush()")
    conn.execute("SELECT pg_stat_clear_snapshot()")
    with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        return dict(cursor.execute(_COUNTS.encode(), {"schema": SCHEMA}).fetchone() or {})


def measure(env: dict[str, str], children: int, slots: int) -> dict[str, Any]:
    """Return the figures of one parent, from its start to its end."""
    app, durable, parent = build(env)
    with worker(env, slots) as process, psycopg.connect(env["DURABLE_DATABASE_URL"], autocommit=True) as conn:
        wait(durable, parent.delay(1).id)  # the worker is ready, its children are warm
        before, began = counts(conn), time.monotonic()
        run = parent.delay(children).id
        ended = wait(durable, run)
        seconds = time.monotonic() - began
        family = [process, *process.children(recursive=True)]
        peak = {one.pid: peak_bytes(one.pid) for one in family}
        cpu = sum(sum(one.cpu_times()[:2]) for one in family)
        result = durable.client.result(durable.get(run))
        attempts = durable.history(run).attempts
        time.sleep(LOOK_SECONDS * 10)  # counters are flushed by each backend in its own time
        after = counts(conn)
        tables = conn.execute(_SIZES.encode(), {"schema": SCHEMA}).fetchall()
    durable.stop()
    app.close()
    names = ("bytes", "inserted", "updated", "deleted", "dead_left")
    return {
        "children": children,
        "slots": slots,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": round(os.getloadavg()[0], 1),
        "state": str(ended),
        "in_order": result == [number**2 for number in range(children)],
        "parent_attempts": len(attempts),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_bytes": max(peak.values()),
        **{name: after[name] - before[name] for name in after},
        "tables": {row[0]: dict(zip(names, row[1:], strict=True)) for row in tables},
    }


def wait(durable: Durable, run_id: str) -> Any:
    """Return the state of a run once it is over."""
    began = time.monotonic()
    while not (state := durable.get(run_id).state).is_terminal:
        if time.monotonic() > began + LONGEST_SECONDS:
            raise SystemExit(f"run {run_id} is {state} after {LONGEST_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
    return state


def peak_bytes(pid: int) -> int:
    """Return the most resident memory that a live process had so far; what it has now where no peak is kept."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else int(psutil.Process(pid).memory_info().rss)


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description="A parent with many children, measured.")
    parser.add_argument("--children", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--broker", help="the URL of a broker; a private Valkey by default")
    given = parser.parse_args()
    with servers(given.broker) as env:
        print(json.dumps(measure(env, given.children, given.slots)))


def __getattr__(name: str) -> Any:
    # Built when asked for: the process that measures has no servers before it starts them.
    if name == "app":
        globals()["app"] = build(os.environ)[0]
        return globals()[name]
    raise AttributeError(name)


if __name__ == "__main__":
    main()
