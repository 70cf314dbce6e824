"""A TCP proxy that fails on purpose, in a thread of its own.

Every connection of a test to Postgres or to a broker can go through one: it delays, stalls, resets and refuses, and on
the Postgres protocol it loses exactly the reply, or the statement, that a test names. It runs in this process, so a
client here must not wait inside a C call that keeps the interpreter lock (raw `pgconn.get_result` does).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.support.pgwire import Cut, Link, Loss

T = TypeVar("T")

_CHUNK = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _Pair:
    """One client connection and its connection to the target."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter, link: Link | None) -> None:
        self.client = client
        self.server = server
        self.link = link

    def cut(self) -> None:
        """Reset both sides: each sees ECONNRESET, and nothing buffered is delivered."""
        for writer in (self.client, self.server):
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()


class Proxy:
    """A loopback port that stands for a target until told to misbehave.

    Shape: `port` stays the same for the life of the proxy, refusing included.
    Units: seconds.
    With `postgres=True` the protocol is followed, so that `cut_reply`, `cut_before` and `cut_after_commit` work;
    requests for encryption are then answered with a refusal and never forwarded.
    """

    def __init__(self, target_host: str, target_port: int, *, postgres: bool = False) -> None:
        self.target = (target_host, target_port)
        self.host = "127.0.0.1"
        # Bound, never listening: keeps the port ours while connections are refused.
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind((self.host, 0))
        self.port: int = self._place.getsockname()[1]
        self._postgres = postgres
        self._cuts: list[Cut] = []
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._delay = 0.0
        self._jitter = 0.0
        self._slice = _CHUNK
        self._forbidden = b""
        self.connections = 0
        """How many connections to the target were made."""
        self.accepted = 0
        """How many clients were let in, those included that were then left to wait."""
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Proxy:
        """Listen on a free loopback port and pass everything."""
        self._thread.start()
        self._await(self._listen())
        return self

    def close(self) -> None:
        """Reset all connections and end the thread; repeating it changes nothing."""
        if self._thread.is_alive():
            self._await(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
        self._loop.close()
        self._place.close()

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Pass everything again: accept, no delay, any text, deliver what was stalled. Other rules for cuts stay."""
        self._call(self._set_shape, 0.0, 0.0, _CHUNK)
        self._call(self._set_forbidden, b"")
        self._call(self._flowing.set)
        self._await(self._listen())

    def latency(self, seconds: float, *, jitter: float = 0.0) -> None:
        """Delay each piece of data in both directions by `seconds` and up to `jitter` more."""
        self._call(self._set_shape, seconds, jitter, self._slice)

    def slice(self, size: int) -> None:
        """Deliver at most `size` bytes at a time, so that messages arrive in pieces."""
        self._call(self._set_shape, self._delay, self._jitter, size)

    def blackhole(self) -> None:
        """Stall: connections stay open and are accepted, nothing is delivered until `heal`."""
        self._call(self._flowing.clear)

    def reset(self) -> int:
        """Reset every open connection; return how many there were. New ones are taken as before."""
        return self._call(self._reset)

    def refuse(self) -> None:
        """Refuse new connections until `heal`; open ones go on."""
        self._await(self._unlisten())

    def down(self) -> None:
        """Look like a server that is gone: refuse new connections and reset the open ones."""
        self.refuse()
        self.reset()

    def cut_reply(self, statement: str = "", *, times: int = 1, text: bytes = b"") -> Cut:
        """Lose the reply of a statement that ran, and the connection with it.

        In autocommit the statement is committed; inside a transaction the server rolls back at the connection's end.
        Shape: `statement` is the name in the comment before the SQL; `text` any part of the SQL instead.
        """
        return self._rule(Loss.REPLY, _marker(statement, text), times)

    def cut_before(self, statement: str = "", *, times: int = 1, text: bytes = b"") -> Cut:
        """Cut the connection before a statement reaches the server: it never runs."""
        return self._rule(Loss.STATEMENT, _marker(statement, text), times)

    def cut_after_commit(self, times: int = 1, match: bytes | None = None) -> Cut:
        """Lose the reply of a COMMIT that took place; `match` must occur in a statement of that transaction."""
        return self._rule(Loss.COMMIT, match or b"", times)

    def _rule(self, loss: Loss, marker: bytes, times: int) -> Cut:
        assert self._postgres, "a proxy that follows the Postgres protocol is made with postgres=True"
        cut = Cut(loss, marker, times)
        self._cuts.append(cut)
        return cut

    def cut_text(self, text: bytes) -> None:
        """Reset each connection on which a client sends this text, which goes no further, until `heal`.

        Of any protocol; a text that comes in pieces is not seen.
        """
        self._call(self._set_forbidden, text)

    # -- in the loop's thread -------------------------------------------------------------------------------------

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _call(self, act: Callable[..., T], *args: object) -> T:
        async def run() -> T:
            return act(*args)

        return self._await(run())

    def _set_shape(self, delay: float, jitter: float, size: int) -> None:
        self._delay, self._jitter, self._slice = delay, jitter, size

    def _set_forbidden(self, text: bytes) -> None:
        self._forbidden = text

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._accepted, self.host, self.port, backlog=512)

    async def _unlisten(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _shut(self) -> None:
        await self._unlisten()
        self._reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)  # the turns in which closed transports give their sockets back

    def _reset(self) -> int:
        pairs = list(self._pairs)
        for pair in pairs:
            pair.cut()
        return len(pairs)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before it begins closes nothing by itself.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._flowing.wait()
            target_reader, target = await asyncio.open_connection(*self.target)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        self.connections += 1
        pair = _Pair(writer, target, Link(self._cuts) if self._postgres else None)
        self._pairs.add(pair)
        try:
            await self._both(pair, reader, target_reader)
        finally:
            self._pairs.discard(pair)
            if pair.link is not None:
                pair.link.close()
            for side in (writer, target):
                side.close()

    async def _both(self, pair: _Pair, client: asyncio.StreamReader, server: asyncio.StreamReader) -> None:
        """Pump both directions until either ends."""
        pumps = [
            self._loop.create_task(self._pump(pair, client, pair.server, self._from_client)),
            self._loop.create_task(self._pump(pair, server, pair.client, self._from_server)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        pair: _Pair,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        follow: Callable[[_Pair, bytes], tuple[bytes, bool]],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(self._slice):
                if self._delay or self._jitter:
                    await asyncio.sleep(self._delay + random.uniform(0, self._jitter))
                await self._flowing.wait()
                data, cut = follow(pair, data)
                sink.write(data)
                if cut:
                    pair.cut()
                    return
                await sink.drain()

    def _from_client(self, pair: _Pair, data: bytes) -> tuple[bytes, bool]:
        if self._forbidden and self._forbidden in data:
            return b"", True
        if pair.link is None:
            return data, False
        out, cut = pair.link.from_client(data)
        pair.client.write(b"N" * pair.link.refusals)
        pair.link.refusals = 0
        return out, cut

    def _from_server(self, pair: _Pair, data: bytes) -> tuple[bytes, bool]:
        return (data, False) if pair.link is None else pair.link.from_server(data)


def _marker(statement: str, text: bytes) -> bytes:
    assert bool(statement) != bool(text), "name a statement or give a part of its text, not both"
    return text or f"/* {statement} */".encode()
