"""The guard: what a write of an attempt must hold."""

from __future__ import annotations

from dataclasses import dataclass

from umt_durable.database import Connection
from umt_durable.records import Token


@dataclass(frozen=True, slots=True)
class Guard:
    """A connection together with the fencing token that every write through it compares inside the statement."""

    conn: Connection
    token: Token

    @property
    def key(self) -> dict[str, object]:
        """Return the token as statement parameters."""
        return {"run": self.token.run, "fence": self.token.fence, "claim": self.token.claim}
