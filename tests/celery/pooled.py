"""A Celery project as users write them: tasks beside the app, and connections that are opened when it is imported.

`celery -A tests.celery.pooled:app worker` runs it, with every pool; spawned children find it through `include`. The
connections are inherited by forked children, which must not use them, and must not break them for the parent.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import psycopg
import redis
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from psycopg_pool import ConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from tests.support import bodylog, gates
from tests.support.apps import log_and_pass
from tests.support.queues import QUEUE
from umt_durable import Durable, DurableTask, TaskContext, current_context

app = Celery(
    "pooled",
    broker=os.environ["CELERY_BROKER_URL"],
    backend=os.environ["CELERY_RESULT_BACKEND"],
    include=["tests.celery.pooled"],
)
app.conf.update(task_default_queue=QUEUE, broker_connection_retry_on_startup=True)
durable = Durable(app)

# Opened before any fork, and used, so that their sockets are live in the parent.
early_pool = ConnectionPool(os.environ["DURABLE_DATABASE_URL"], min_size=2, max_size=4, open=True)
early_pool.wait(timeout=30)
early_engine = create_engine(
    os.environ["DURABLE_DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://", 1), pool_size=2
)
with early_engine.connect() as first:
    first.execute(text("SELECT 1"))
early_redis = redis.Redis.from_url(os.environ["CELERY_RESULT_BACKEND"])
early_redis.ping()
durable.database.do(lambda conn: conn.execute("SELECT 1"))  # the product's own pool


@durable.task(name="pooled.steps")
def steps(ctx: TaskContext, count: int = 3, gate_step: int = 0, gate: str = "") -> list[int]:
    """Execute some steps, one of which may stop at a gate."""
    return [
        ctx.step.run(f"step-{n}", log_and_pass, f"step-{n}", n, gate if n == gate_step else "")
        for n in range(1, count + 1)
    ]


@durable.task(name="pooled.nap")
def nap(ctx: TaskContext, seconds: float) -> int:
    """Be parked once, then go on in whichever process."""
    ctx.step.run("before", log_and_pass, "before", 0)
    ctx.step.sleep("nap", timedelta(seconds=seconds))
    return ctx.step.run("after", log_and_pass, "after", 1)


@durable.task(name="pooled.early", ignore_result=False)
def early(ctx: TaskContext, value: int) -> int:
    """Use the broker's and the database's clients of the importing process as Celery users do: by new connections."""
    return ctx.step.run("fresh", fresh, value)


def fresh(value: int) -> int:
    """Ask both servers by connections of this process."""
    with psycopg.connect(os.environ["DURABLE_DATABASE_URL"]) as conn:
        conn.execute("SELECT 1")
    redis.Redis.from_url(os.environ["CELERY_RESULT_BACKEND"]).ping()
    return value


@durable.task(name="pooled.by_engine")
def by_engine(ctx: TaskContext) -> list[int]:
    """Use the engine of the importing process for a transaction step; say which process that was on which backend."""
    return ctx.step.transaction("look", ask_session, on=early_engine)


def ask_session(session: Session) -> list[int]:
    """Hold a backend for a moment, and return this process and the backend."""
    session.execute(text("SELECT pg_sleep(0.1)"))
    return [os.getpid(), int(session.execute(text("SELECT pg_backend_pid()")).scalar_one())]


@durable.task(name="pooled.by_pool")
def by_pool(ctx: TaskContext) -> list[int]:
    """Do the same with the psycopg pool, whose connections no forked process can use."""
    return ctx.step.transaction("look", ask_connection, on=early_pool.connection)


def ask_connection(conn: psycopg.Connection[Any]) -> list[int]:
    """Hold a backend for a moment, and return this process and the backend."""
    conn.execute("SELECT pg_sleep(0.1)")
    row = conn.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return [os.getpid(), int(row[0])]


@durable.task(name="pooled.block")
def block(ctx: TaskContext, seconds: float) -> int:
    """Block this thread, and in gevent everything else, for longer than a lease lasts."""
    return ctx.step.run("block", busy, "block", seconds)


def busy(step: str, seconds: float) -> int:
    """Compute, without giving way."""
    with bodylog.body(step):
        until = bodylog.clock() + seconds
        while bodylog.clock() < until:
            sum(range(1000))
    return 1


@durable.task(name="pooled.soft", soft_time_limit=1)
def soft(ctx: TaskContext) -> str:
    """Give up softly, in a step that notices."""
    return ctx.step.run("long", softly)


def softly() -> str:
    """Wait at a gate until the soft limit comes."""
    try:
        with bodylog.body("long"):
            gates.pass_through("soft")
    except SoftTimeLimitExceeded:
        return "gave up"
    return "was let through"


@durable.task(name="pooled.hard", time_limit=2)
def hard(ctx: TaskContext) -> int:
    """Stop at a gate in the second step, until the hard limit ends this process."""
    ctx.step.run("first", log_and_pass, "first", 1)
    return ctx.step.run("second", log_and_pass, "second", 2, "hard")


@durable.task(name="pooled.eat")
def eat(ctx: TaskContext, mebibytes: int) -> int:
    """Take memory and keep it, so that the child is over its limit afterwards."""
    return ctx.step.run("eat", devour, mebibytes)


_eaten: list[bytearray] = []


def devour(mebibytes: int) -> int:
    """Touch that much memory."""
    with bodylog.body("eat"):
        for _ in range(mebibytes):  # piece by piece: other threads of a starved machine renew a lease meanwhile
            _eaten.append(bytearray(os.urandom(1) * (1 << 20)))
    return os.getpid()


@app.task(name="pooled.classic", base=DurableTask, bind=True)
def classic(self: Any, value: int) -> int:
    """Be an existing task that reaches its context by `current_context`."""
    return current_context().step.run("only", log_and_pass, "only", value)


@app.task(name="pooled.note")
def note(value: object, mark: str) -> None:
    """Be an ordinary callback that says it was called."""
    bodylog.write(mark, "begin")


@app.task(name="pooled.slow")
def slow(seconds: float) -> int:
    """Be an ordinary task that takes a while."""
    time.sleep(seconds)
    return os.getpid()
