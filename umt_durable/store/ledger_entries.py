"""The entries of a ledger in another database: which transaction steps are done there, and who may do one.

The connections are users', the transactions those of the step. Nothing here is in the schema of the runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from umt_durable import sql
from umt_durable.records import Token
from umt_durable.sql import SchemaConnection


@dataclass(frozen=True, slots=True)
class Place:
    """The identity of a step in a ledger: whose run it is of, and which of it."""

    ledger: str
    run_id: str
    step: str

    @property
    def parameters(self) -> dict[str, object]:
        """Return the identity as statement parameters."""
        return {"ledger": self.ledger, "run_id": self.run_id, "step": self.step}


@dataclass(frozen=True, slots=True)
class Done:
    """What is recorded of a step that is done: its result as it is stored, and the digest of that."""

    result: bytes
    digest: bytes


def claim(conn: SchemaConnection, place: Place, token: Token) -> bool:
    """Claim a step for an attempt; False when it is done, or a later attempt has it: `read` tells which."""
    row = sql.there(conn, "claim_entry", fence=token.fence, claim=token.claim, **place.parameters)
    return row is not None and bool(row[0])


def read(conn: SchemaConnection, place: Place) -> Done | None:
    """Return what is recorded of a step, if it is done."""
    row = sql.there(conn, "read_entry", **place.parameters)
    return None if row is None else Done(conn.vault.hold(bytes(row[0])), bytes(row[1]))


def settle(conn: SchemaConnection, place: Place, token: Token, done: Done) -> bool:
    """Record the result of a step that this transaction has claimed; False when the claim is gone."""
    row = sql.there(
        conn,
        "settle_entry",
        fence=token.fence,
        claim=token.claim,
        result=done.result,
        digest=done.digest,
        **place.parameters,
    )
    return row is not None
