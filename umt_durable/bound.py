"""What the kinds of users' connections have in common: how the store's statements reach their transactions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import psycopg
from psycopg.pq import TransactionStatus

from umt_durable.payloads import Vault

ENDED: Final = (
    "the function of a transaction step must not commit or roll back: its result is recorded in that transaction"
)
INHERITED: Final = (
    "the binding gave a connection that was opened before this process was forked, and that its parent may use: open"
    " the psycopg pool in a handler of `worker_process_init`, or bind a SQLAlchemy Engine or a URL"
)
BUSY: Final = "the connection has a transaction open: the record of the result has to be in one of its own"


class Caller(Protocol):
    """A caller's open transaction, as far as one statement of ours needs it."""

    def one(self, query: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Run a statement with `%(name)s` parameters and return its row."""

    def after_commit(self, hook: Callable[[], None]) -> None:
        """Call a hook once the caller has committed, if the library tells us when that is."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A user's connection, as the store's statements take it."""

    schema: str
    vault: Vault
    run: Callable[[bytes, Any], Any]

    def execute(self, query: bytes, params: Any = None, *, prepare: bool | None = None, binary: bool = False) -> Any:
        """Run a statement inside the user's transaction. `prepare` and `binary` are for connections of ours."""
        return self.run(query, params)


def _nothing() -> None:
    """Be the hook of a library that has none."""


@dataclass(frozen=True, slots=True)
class UserTransaction:
    """An open transaction of a binding: what the user's function gets, and the same for the store.

    Shape: `flush` is called after the user's function: what it left unwritten is written then. `arrived` calls those of
    its library's hooks after the commit that have not been called, once it is known that the commit took place though
    an error came instead of its reply. `is_broken` says whether the connection is gone.
    Errors: DefinitionError of `flush` when the function ended the transaction, which is ours to end (I16).
    """

    handle: Any
    bound: Bound
    flush: Callable[[], None]
    is_broken: Callable[[], bool]
    arrived: Callable[[], None] = _nothing


def is_over(conn: psycopg.Connection[Any]) -> bool:
    """Say whether no transaction is open, as after a `COMMIT` that was sent as a statement."""
    return conn.info.transaction_status is TransactionStatus.IDLE
