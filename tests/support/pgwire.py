"""Enough of the Postgres protocol to lose a chosen reply, or a chosen statement, on demand. No I/O here.

A client's connection cut by a plain proxy hits a commit's reply about once in a thousand tries. `Link` follows both
directions of one connection message by message, so that a rule can name a statement by its text and lose exactly its
reply (the server did the work) or the statement itself (the server never saw it).

What decides that the work is done is ReadyForQuery, not CommandComplete: in the extended protocol an autocommit
statement commits when the server handles Sync, after it has written CommandComplete. So the whole reply is withheld,
and the connection is cut once ReadyForQuery has come; an error instead releases what was withheld.
Source: PostgreSQL manual, "Frontend/Backend Protocol", Message Flow and Message Formats.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import Condition

from tests.support.wait import patience

_SSL_REQUEST = 80877103
_GSS_REQUEST = 80877104
_CANCEL_REQUEST = 80877102
_COMMENT = rb"(?:\s|/\*.*?\*/|--[^\n]*\n)*"
_BEGIN = re.compile(_COMMENT + rb"(?:BEGIN|START)\b", re.IGNORECASE | re.DOTALL)
_COMMIT = re.compile(_COMMENT + rb"(?:COMMIT|END)\b", re.IGNORECASE | re.DOTALL)


class Loss(Enum):
    """What a rule loses."""

    REPLY = auto()  # the statement ran; autocommit has committed it
    STATEMENT = auto()  # the statement never reached the server
    COMMIT = auto()  # the COMMIT ran; its reply is lost


@dataclass
class Cut:
    """A rule that cuts connections, and the count of what it did.

    Shape: `marker` is looked for in the SQL text; for `Loss.COMMIT` in any statement of the transaction (empty: all).
    Each of the first `times` matches cuts its connection once; later ones pass.
    """

    loss: Loss
    marker: bytes
    times: int
    fired: int = 0
    _reserved: int = 0
    _changed: Condition = field(default_factory=Condition, repr=False)

    def reserve(self, sql: bytes, transaction: Sequence[bytes]) -> bool:
        """Take one of the remaining cuts if the statement matches; the caller fires it or gives it back."""
        if self.loss is Loss.COMMIT:
            fits = _COMMIT.match(sql) is not None and (
                not self.marker or any(self.marker in one for one in transaction)
            )
        else:
            fits = self.marker in sql
        with self._changed:
            if not fits or self.fired + self._reserved >= self.times:
                return False
            self._reserved += 1
            return True

    def give_back(self) -> None:
        """Undo a reservation: the statement failed or the client left, so nothing was lost."""
        with self._changed:
            self._reserved -= 1

    def fire(self) -> None:
        """Count a cut that took place."""
        with self._changed:
            self._reserved -= 1
            self.fired += 1
            self._changed.notify_all()

    def wait(self, *, fired: int = 1, timeout: float = 10.0) -> None:
        """Return once the rule has cut `fired` times; AssertionError after `timeout` seconds."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.fired >= fired, patience(timeout))
        assert done, f"{self.loss.name.lower()} cut for {self.marker!r} fired {self.fired} of {fired} times"

    def withdraw(self) -> None:
        """Let everything pass from now on."""
        with self._changed:
            self.times = 0


@dataclass
class _Pending:
    """Something the server owes an answer to: one execution, one Sync, or a simple Query that is both."""

    kind: str  # "execute", "query" or "sync"
    cut: Cut | None = None
    flushed: bool = False


class Link:
    """The state of one proxied connection.

    Feed it what each side sent; it gives back what to pass on and whether to cut now. After a cut feed it nothing more.
    """

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._cuts = cuts
        self._client = bytearray()
        self._server = bytearray()
        self._started = False
        self._opaque = False
        self._statements: dict[bytes, bytes] = {}
        self._portals: dict[bytes, bytes] = {}
        self._transaction: list[bytes] = []
        self._pending: deque[_Pending] = deque()
        self._skipping = False
        self._held = bytearray()
        self._finished: Cut | None = None
        self.refusals = 0

    # -- from the client ------------------------------------------------------------------------------------------

    def from_client(self, data: bytes) -> tuple[bytes, bool]:
        """Return the bytes for the server and whether the connection is to be cut after them.

        Encryption is never offered, or nothing could be read: `refusals` counts the requests that the caller must
        answer with one `N` each.
        """
        self._client += data
        out = bytearray()
        while not self._started:
            packet = self._startup()
            if packet is None:
                return bytes(out), False
            out += packet
        if self._opaque:
            out += self._client
            self._client.clear()
        for message in _messages(self._client):
            if self._asked(message[0:1], message[5:]):
                return bytes(out), True
            out += message
        return bytes(out), False

    def _startup(self) -> bytes | None:
        if len(self._client) < 8:
            return None
        length, code = struct.unpack_from("!II", self._client)
        if len(self._client) < length:
            return None
        packet = bytes(self._client[:length])
        del self._client[:length]
        if code in (_SSL_REQUEST, _GSS_REQUEST):
            self.refusals += 1
            return b""
        self._started = True
        self._opaque = code == _CANCEL_REQUEST
        return packet

    def _asked(self, kind: bytes, body: bytes) -> bool:
        """Follow one message of the client; true when it must not reach the server."""
        match kind:
            case b"P":
                name, sql, _ = body.split(b"\0", 2)
                self._statements[name] = sql
            case b"B":
                portal, name, _ = body.split(b"\0", 2)
                self._portals[portal] = self._statements.get(name, b"")
            case b"E":
                return self._execution("execute", self._portals.get(body.split(b"\0", 1)[0], b""))
            case b"Q":
                return self._execution("query", body.rstrip(b"\0"))
            case b"F":
                self._pending.append(_Pending("query"))
            case b"S":
                self._skipping = False
                self._pending.append(_Pending("sync"))
            case b"H":
                self._flushed()
        return False

    def _execution(self, kind: str, sql: bytes) -> bool:
        if self._skipping:
            return False
        if _BEGIN.match(sql):
            self._transaction.clear()
        self._transaction.append(sql)
        cut = next((one for one in self._cuts if one.reserve(sql, self._transaction)), None)
        if cut is not None and cut.loss is Loss.STATEMENT:
            cut.fire()
            return True
        self._pending.append(_Pending(kind, cut))
        return False

    def _flushed(self) -> None:
        # A client that flushes without Sync waits for this reply before it goes on: there is no later moment to cut at.
        for entry in reversed(self._pending):
            if entry.kind != "execute":
                return
            entry.flushed = True

    # -- from the server ------------------------------------------------------------------------------------------

    def from_server(self, data: bytes) -> tuple[bytes, bool]:
        """Return the bytes for the client and whether the connection is to be cut after them."""
        if self._opaque:
            return data, False
        self._server += data
        out = bytearray()
        for message in _messages(self._server):
            (self._held if self._withholding() else out).extend(message)
            if self._answered(message[0:1], message[5:]):
                self._held.clear()
                return bytes(out), True
            if self._held and not self._withholding():
                out += self._held
                self._held.clear()
        return bytes(out), False

    def _withholding(self) -> bool:
        return self._finished is not None or (bool(self._pending) and self._pending[0].cut is not None)

    def _answered(self, kind: bytes, body: bytes) -> bool:
        """Follow one message of the server; true when a chosen reply is complete and must be lost now."""
        if kind == b"E":
            self._fail()
        elif self._pending and kind in (b"C", b"I", b"s"):
            return self._completed(self._pending[0], body)
        elif self._pending and kind == b"Z":
            return self._ready(self._pending.popleft())
        return False

    def _completed(self, head: _Pending, tag: bytes) -> bool:
        if head.cut is not None and head.cut.loss is Loss.COMMIT and not tag.startswith(b"COMMIT"):
            self._drop(head)  # COMMIT of a failed transaction answers ROLLBACK
        if head.kind != "execute":
            return False
        self._pending.popleft()
        self._finished = self._finished or head.cut
        return head.cut is not None and head.flushed and not self._synced() and self._lose()

    def _ready(self, head: _Pending) -> bool:
        self._finished = self._finished or head.cut
        return self._finished is not None and self._lose()

    def _synced(self) -> bool:
        return any(entry.kind == "sync" for entry in self._pending)

    def _lose(self) -> bool:
        assert self._finished is not None
        self._finished.fire()
        self._finished = None
        return True

    def _fail(self) -> None:
        """An error ends everything up to the next Sync, the commit of what came before it included."""
        if self._finished is not None:
            self._finished.give_back()
            self._finished = None
        while self._pending and self._pending[0].kind == "execute":
            self._drop(self._pending.popleft())
        if not self._pending:
            self._skipping = True
        elif self._pending[0].kind == "query":
            self._drop(self._pending[0])

    @staticmethod
    def _drop(entry: _Pending) -> None:
        if entry.cut is not None:
            entry.cut.give_back()
            entry.cut = None

    def close(self) -> None:
        """Give back what was reserved for statements whose reply will never come."""
        if self._finished is not None:
            self._finished.give_back()
            self._finished = None
        while self._pending:
            self._drop(self._pending.popleft())


def _messages(buffer: bytearray) -> Iterator[bytes]:
    """Take the complete messages out of a buffer: type byte, length that counts itself, body."""
    while len(buffer) >= 5:
        (length,) = struct.unpack_from("!I", buffer, 1)
        if len(buffer) <= length:
            return
        message = bytes(buffer[: length + 1])
        del buffer[: length + 1]
        yield message
