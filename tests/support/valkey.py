"""A private Valkey of this test process."""

from __future__ import annotations

from pathlib import Path

import redis

from tests.support import guard
from umt_durable.embedded import ValkeyServer


class Valkey:
    """A Valkey server on a loopback port that stays the same over stops and starts; messages survive a stop."""

    def __init__(self, home: Path) -> None:
        self._server = ValkeyServer(home, durable=True, tcp=True)
        guard.watch(home)
        self._server.start()

    @property
    def url(self) -> str:
        """Return the URL for `broker_url`."""
        return self._server.url

    @property
    def result_url(self) -> str:
        """Return the URL for `result_backend`, in another database."""
        return self._server.result_url

    def client(self) -> redis.Redis:
        """Return a client of the broker's database, to be closed by the caller."""
        return redis.Redis.from_url(self.url)

    def start(self) -> None:
        """Start it unless it runs; return once it answers."""
        self._server.start()

    def stop(self) -> None:
        """Stop it: its connections break and new ones are refused."""
        self._server.stop()

    def kill9(self) -> None:
        """Kill it: up to a second of what it took is lost."""
        self._server.stop("immediate")

    def flush(self) -> None:
        """Remove everything from all its databases."""
        with self.client() as client:
            client.flushall()
