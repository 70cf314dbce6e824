"""Code of a user, type-checked and never run: what `mypy --strict` must take without a word."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, assert_type
from uuid import UUID

import psycopg
from celery import Celery
from pydantic import BaseModel

from umt_durable import (
    AsyncTaskContext,
    Done,
    Durable,
    Fact,
    FactWait,
    History,
    ItemFailure,
    NotDone,
    Op,
    OpInfo,
    Policy,
    PollPolicy,
    RetryPolicy,
    Run,
    TaskContext,
    Timer,
    current_context,
)
from umt_durable.states import RunState

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

app = Celery("shop")
durable = Durable(app)


class Order(BaseModel):
    number: str
    pieces: int = 1


class Receipt(BaseModel):
    text: str


def charge(order: Order, *, currency: str = "EUR") -> str:
    return f"{order.number} {currency} {current_context().idempotency_key}"


def ship(order: Order, info: OpInfo) -> int:
    return info.turn + order.pieces


def find(info: OpInfo) -> Done[int] | NotDone:
    return NotDone() if info.resumed else Done(3)


def keep(tx: Session, label: int) -> None:
    tx.flush()


@durable.task(name="shop.fulfil", version=2, retry=RetryPolicy.NETWORK, raises=[ValueError], queue="orders")
def fulfil(ctx: TaskContext, order: Order, note: str = "") -> Receipt:
    paid = ctx.step.run("charge", charge, order, currency="USD")
    assert_type(paid, str)
    label = ctx.step.effect(f"ship:{order.number}", partial(ship, order), reconcile=find, commit=keep)
    assert_type(label, int)
    ctx.step.effect("pay", lambda info: info.idempotency_key, policy=Policy.IDEMPOTENT_KEY, not_applied=[OSError])
    ctx.step.sleep("cooling-off", timedelta(days=2))
    fact = ctx.step.wait_for_fact("approved", timeout=timedelta(days=14))
    return Receipt(text=f"{paid} {note} {fact.payload['by']}")


async def charge_async(order: Order, *, currency: str = "EUR") -> str:
    return f"{order.number} {currency}"


@durable.task(name="shop.later", retry=RetryPolicy.NETWORK)
async def later(ctx: AsyncTaskContext, order: Order, note: str = "") -> Receipt:
    assert_type(await ctx.step.run("charge", charge_async, order, currency="USD"), str)
    assert_type(await ctx.step.options(preemptible=True).run("plain", charge, order), str)
    await ctx.step.sleep("cooling-off", timedelta(days=2))
    assert_type(await ctx.uuid(), UUID)
    assert_type(await ctx.step.map("charge", charge_async, [order], key=lambda order: order.number), list[str])
    assert_type(await ctx.step.map("send", fulfil, [order], key=str, workers=True), list[Receipt])
    assert_type(await ctx.step.wait_for_fact("receipt", type=Receipt), Fact[Receipt])
    assert_type(await ctx.step.wait_all(["a", "b"]), list[Fact[Any]])
    assert_type(await ctx.step.begin("review", type=Receipt, on_created=print), Receipt)
    assert_type(await ctx.step.wait_all({"a": "a"}, timeout=timedelta(1)), dict[str, Fact[Any]])
    ctx.heartbeat({"line": 7})
    assert_type(await ctx.last_heartbeat(int), int | None)
    return Receipt(text=note)


async def use_async(session: AsyncSession, order: Order) -> None:
    later.delay(order, note="gift")
    await later.aenqueue(order, "gift")
    await later.aenqueue(order, conn=session, idempotency_key=order.number)
    assert_type(await durable.aget("r"), Run)
    assert_type(await durable.acomplete("token", order, conn=session), UUID)
    assert_type(await durable.afail("token", ValueError("no"), actor="ann"), UUID)
    assert_type(await durable.asignal("r", "approved", conn=session), UUID)


@durable.task(name="shop.changes", on_mismatch="warn")
def changes(ctx: TaskContext, cursor: int, note: str = "") -> int:
    assert_type(ctx.patched("tax"), bool)
    assert_type(ctx.step.options(renamed_from="charge").run("bill", charge, Order(number="1")), str)
    ctx.step.options(renamed_from=["invoice", "charge"], key=cursor).sleep("nap", timedelta(days=1))
    if cursor < 7:
        ctx.continue_as_new(cursor + 1, note="again", version=2)
    return ctx.generation


@durable.task(name="shop.changes.async")
async def changes_async(ctx: AsyncTaskContext, cursor: int) -> int:
    if await ctx.patched("tax"):
        await ctx.continue_as_new(cursor + 1)
    return cursor


def label(order: Order) -> UUID:
    return UUID(int=order.pieces)


@durable.task(name="shop.parallel")
def parallel(ctx: TaskContext, orders: list[Order]) -> int:
    labels = ctx.step.map("label", label, orders, key=lambda order: order.number)
    assert_type(labels, list[UUID])
    found = ctx.step.map("label", label, orders, key=lambda order: order.number, concurrency=4, on_error="collect")
    assert_type(found, list[UUID | ItemFailure])
    sent = ctx.step.map("send", fulfil, orders, key=lambda order: order.number, workers=True)
    assert_type(sent, list[Receipt])
    some = ctx.step.map("some", later, orders, key=str, concurrency=50, on_error="collect", workers=True)
    assert_type(some, list[Receipt | ItemFailure])
    assert_type(ctx.step.map("named", "shop.fulfil", orders, key=str, workers=True), list[Any])
    assert_type(ctx.step.parallel({"a": lambda: 1, "b": lambda: 2}), dict[str, int])
    mixed = ctx.step.parallel(
        {"a": (label, orders[0]), "b": lambda: ctx.step.run("b", label, orders[0])}, concurrency=2
    )
    assert_type(mixed, dict[str, Any])
    return len(labels)


def shipped(conn: psycopg.Connection) -> object:
    return conn.execute("SELECT 1").fetchone()


@durable.task(name="shop.waits")
def waits(ctx: TaskContext) -> str:
    receipt = ctx.step.wait_for_fact("receipt", type=Receipt, on_created=lambda address: print(address.run_id))
    assert_type(receipt, Fact[Receipt])
    assert_type(ctx.step.begin("review", type=Receipt, on_created=print, timeout=timedelta(days=1)), Receipt)
    assert_type(ctx.step.begin("plain", on_created=lambda token: token.upper()), Any)
    won = ctx.step.wait_any({"paid": FactWait("paid", key="A-17"), "gone": "gone", "late": timedelta(days=1)})
    assert_type(won, Fact[Any])
    assert_type(ctx.step.wait_all({"a": "a", "b": Timer(timedelta(hours=1))}), dict[str, Fact[Any]])
    assert_type(ctx.step.wait_all(["a", "b"]), list[Fact[Any]])
    assert_type(ctx.step.wait_quorum(2, ["a", "b", "c"], timeout=timedelta(days=1)), list[Fact[Any]])
    ctx.step.wait_for_fact("read", check=shipped)
    row: Fact = ctx.step.wait_for_fact("row", check=lambda: True, poll=PollPolicy(maximum=timedelta(minutes=1)))
    return receipt.payload.text + str(won.label) + row.source


@durable.task
def bare(ctx: TaskContext) -> int:
    return ctx.attempt


@durable.task()
def called(ctx: TaskContext, number: int) -> list[int]:
    return [number]


def use(session: Session, order: Order) -> None:
    first = fulfil.delay(order)
    fulfil.delay(order, note="gift")
    fulfil.enqueue(order, note="gift")
    fulfil.enqueue(order, conn=session, idempotency_key=order.number, ref=order.number, attributes={"vip": True})
    fulfil.enqueue(order, idempotency_key=order.number, idempotency_ttl=60.0)
    fulfil.enqueue(order, idempotency_key="k", idempotency_ttl=timedelta(days=1), idempotency_policy="reject")
    fulfil.enqueue(order, ref="A-17")
    fulfil.apply_async((order,), countdown=3, priority=9)
    print(first.id, fulfil.name, fulfil.s(order), fulfil.si(order, "gift"), bare.delay(), called.si(3))
    assert_type(fulfil(order), Receipt)
    assert_type(bare(), int)
    assert_type(called(3), list[int])


def look(run_id: str) -> None:
    run = durable.get(run_id)
    assert_type(run, Run)
    assert_type(durable.list(task="shop.fulfil", states=["failed", RunState.READY], limit=10), list[Run])
    assert_type(durable.history(run_id), History)
    assert_type(durable.ops.list(states=["uncertain"]), list[Op])
    assert_type(durable.ops.resolve("ship:A-17", done=3, actor="ann"), Op)
    assert_type(durable.signal(run_id, "approved", {"by": "ann"}, actor="ann"), UUID)
    assert_type(durable.emit("paid", "A-17", dedupe="1"), UUID)
    assert_type(durable.cancel(run_id, reason="asked"), UUID)
    assert_type(durable.fork(run_id, from_step="charge", actor="ann", input={"order": 1}, version=2), str)
    print(run.state.is_terminal, durable.history(run_id).attempts[0].outcome)


def decorate(make: Callable[[TaskContext, str], bool]) -> None:
    assert_type(durable.task(make, name="shop.made")("x"), bool)
