"""A private Postgres and a private Valkey for a project folder, with nothing to install or configure.

`ensure` makes the pair run, `running` looks whether it does, and `down` ends it; `PostgresServer` and `ValkeyServer`
are the two on their own, for tests.
The programs come from the extra `embedded`; the rules of their life are in `server` and `pair`.
"""

from umt_durable.embedded.pair import Pair, down, ensure, running
from umt_durable.embedded.postgres import PostgresServer
from umt_durable.embedded.valkey import ValkeyServer

__all__ = ["Pair", "PostgresServer", "ValkeyServer", "down", "ensure", "running"]
