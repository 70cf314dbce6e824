"""The verbs on runs for asyncio programs: done in a thread, on the caller's own connection where one is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from umt_durable.session import async_caller

T = TypeVar("T")


async def in_thread(call: Callable[[object], T], conn: object = None) -> T:
    """Make a call in a thread and return what it returns.

    Shape: `call` is given the transaction to join, or None; `conn` is an AsyncSession or AsyncConnection of SQLAlchemy,
    a psycopg AsyncConnection, or what the plain verbs take.
    Keeps: I2. Cancelled, it still ends before the caller goes on: its statement would meet the caller's rollback.
    """
    joined = None if conn is None else async_caller(conn)
    task = asyncio.ensure_future(asyncio.to_thread(call, joined))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
