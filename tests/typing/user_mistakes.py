"""Mistakes of a user, type-checked and never run: each line that says so must be reported with that code."""

from __future__ import annotations

from celery import Celery

from umt_durable import AsyncTaskContext, Durable, TaskContext

app = Celery("shop")
durable = Durable(app)


def charge(amount: int) -> str:
    return str(amount)


@durable.task(name="shop.fulfil")
def fulfil(ctx: TaskContext, order: str, pieces: int = 1) -> str:
    ctx.step.run("charge", charge, order)  # expect: call-overload
    ctx.step.runs("charge", charge, pieces)  # expect: attr-defined
    count: int = ctx.step.run("charge", charge, pieces)  # expect: assignment
    ctx.step.options(renamed_from=7)  # expect: arg-type
    ctx.patched(7)  # expect: arg-type
    ctx.step.effect("ship", charge)  # expect: arg-type
    ctx.step.effect("ship", lambda info: 1, policy="park")  # expect: arg-type
    return ctx.step.run("charge", charge, count)


@durable.task(name="shop.parallel")
def parallel(ctx: TaskContext, amounts: list[int]) -> list[str]:
    ctx.step.map("charge", charge, ["1"], key=str)  # expect: arg-type
    ctx.step.map("charge", charge, amounts)  # expect: call-overload
    ctx.step.map("charge", charge, amounts, key=str, on_error="ignore")  # expect: call-overload
    ctx.step.map("charge", charge, amounts, key=str, workers=True)  # expect: call-overload
    ctx.step.map("fulfil", fulfil, amounts, key=str, workers=True)  # expect: call-overload
    ctx.step.wait_any({"paid": 7})  # expect: dict-item
    number: int = ctx.step.wait_for_fact("paid", type=str).payload  # expect: assignment
    ctx.step.begin("review", type=str)  # expect: call-overload
    number = ctx.step.begin("review", type=str, on_created=print)  # expect: assignment
    return ctx.step.map("charge", charge, [number], key=str, on_error="collect")  # expect: return-value


@durable.task(name="shop.later")
async def later(ctx: AsyncTaskContext) -> None:
    await ctx.step.wait_for_fact("paid", timeout=5)  # expect: call-overload
    await ctx.step.wait_for_fact("paid", time_out=None)  # expect: call-overload
    await ctx.step.wait_all(["paid"], poll="1m")  # expect: call-overload
    await ctx.step.begin("review", type=str)  # expect: call-overload
    ctx.set_status(7)  # expect: arg-type
    ctx.progress("3")  # expect: arg-type
    place: int = await ctx.last_heartbeat(str)  # expect: assignment, arg-type
    ctx.heartbeat(place)


@durable.task(name="shop.nothing")  # expect: arg-type
def without_context(order: str) -> str:
    return order


@durable.task(name="shop.versions", version="2")  # expect: call-overload, untyped-decorator
def versions(ctx: TaskContext) -> None: ...


@durable.task(name="shop.mismatch", on_mismatch="ignore")  # expect: call-overload, untyped-decorator
def mismatch(ctx: TaskContext) -> None: ...


def use(run_id: str) -> None:
    fulfil.delay(17)  # expect: arg-type
    fulfil.delay("A-17", piece=2)  # expect: call-arg
    fulfil.delay()  # expect: call-arg
    fulfil.enqueue("A-17", pieces="2")  # expect: call-overload
    fulfil.si("A-17", "2")  # expect: arg-type
    fulfil.dealy("A-17")  # expect: attr-defined
    number: int = fulfil("A-17")  # expect: assignment
    print(durable.get(run_id).stat)  # expect: attr-defined
    durable.list(tasks="shop.fulfil")  # expect: call-arg
    print(durable.list()[0].states)  # expect: attr-defined
    print(durable.history(run_id).step)  # expect: attr-defined
    durable.signal(run_id, "approved", run=number)  # expect: call-arg
    durable.fork(run_id, actor="ann")  # expect: call-arg
    durable.cancel(17)  # expect: arg-type
    durable.fail("token", error=17)  # expect: arg-type


async def use_async(run_id: str) -> None:
    await fulfil.aenqueue("A-17", pieces="2")  # expect: call-overload
    await fulfil.aenqueue(17)  # expect: call-overload
    await durable.acancel(17)  # expect: arg-type
