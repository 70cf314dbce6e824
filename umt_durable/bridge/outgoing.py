"""What leaves for the broker, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from umt_durable.redaction import DEFAULT as REDACTOR

PERSISTENT = 2
MOST_URGENT = 9


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message that is ready to leave.

    Shape: `queue` is declared before the message is sent, when set; `properties` are AMQP's, by their names there.
    `once`: it is handed to the broker at most once, and alone, so that little is in doubt when the broker fails.
    Units: `priority` is 0 to 9 and higher is sooner, on every broker; `expiration` is milliseconds when it is text,
    seconds when it is a number.
    """

    key: UUID
    exchange: str
    routing_key: str
    queue: str | None
    body: bytes
    content_type: str
    content_encoding: str
    headers: Mapping[str, object]
    properties: Mapping[str, object]
    once: bool = False

    @property
    def priority(self) -> int | None:
        """Give the wished priority inside 0 to 9, or None when the message has none."""
        wish = self.properties.get("priority")
        if not isinstance(wish, int):
            return None
        return max(0, min(MOST_URGENT, wish))

    def basic_properties(self) -> dict[str, object]:
        """Give the properties but the priority, persistent unless the message says otherwise."""
        found = {name: value for name, value in self.properties.items() if name != "priority" and value is not None}
        found.setdefault("delivery_mode", PERSISTENT)
        expiration = found.get("expiration")
        if isinstance(expiration, int | float):
            found["expiration"] = str(int(expiration * 1000))
        return found


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a batch.

    Shape: `confirmed` was taken by the broker; `refused` gives the reason for each row that cannot be sent as it is,
    `hopeless` for each that never can. No row of the batch is in two of them. `doubtful` were handed over, at least in
    part, and it is not known whether they arrived.
    """

    confirmed: frozenset[UUID]
    refused: Mapping[UUID, str]
    hopeless: Mapping[UUID, str] = field(default_factory=dict)
    doubtful: frozenset[UUID] = frozenset()


@dataclass(slots=True)
class Tally:
    """A report while it is being made."""

    confirmed: set[UUID] = field(default_factory=set)
    refused: dict[UUID, str] = field(default_factory=dict)
    begun: set[UUID] = field(default_factory=set)

    @property
    def doubtful(self) -> frozenset[UUID]:
        """The messages that were handed over, and of which the broker has said nothing."""
        return frozenset(key for key in self.begun if not self.is_settled(key))

    def begin(self, key: UUID) -> None:
        """Note that this message is about to be handed over: from now on it may arrive."""
        self.begun.add(key)

    def take_back(self, key: UUID) -> None:
        """Note that the broker has said that it did not take this message, through no fault of the message."""
        self.begun.discard(key)

    def confirm(self, key: UUID) -> None:
        """Note that the broker has this message."""
        self.confirmed.add(key)

    def refuse(self, key: UUID, reason: str) -> None:
        """Note why this message, and no other, did not leave."""
        self.refused[key] = reason

    def is_settled(self, key: UUID) -> bool:
        """Say whether the outcome of this message is known."""
        return key in self.confirmed or key in self.refused

    def report(self) -> Report:
        """Give the finished report."""
        return Report(frozenset(self.confirmed), dict(self.refused), doubtful=self.doubtful)


class Broker(Protocol):
    """One connection to one kind of broker.

    Errors: every method but `alive` raises BrokerUnavailableError or one of `lost`, and none is called afterwards.
    """

    @property
    def lost(self) -> tuple[type[BaseException], ...]:
        """List the exceptions which mean that the connection is of no further use."""

    def alive(self) -> bool:
        """Say whether the connection still stands, as far as that is known without a question to the broker."""

    def publish(self, batch: Sequence[Outgoing], tally: Tally) -> None:
        """Send the batch; every row is settled in `tally`, or an error is raised."""

    def depth(self, queue: str) -> int | None:
        """Count the messages ready in a queue; None when there is no such queue or the broker does not tell."""

    def holds(self, marker: str) -> bool:
        """Say whether the marker of that name is still there."""

    def put(self, marker: str) -> None:
        """Put the marker of that name there, unless it is there already."""


def windows(batch: Sequence[Outgoing], size: int) -> Iterator[Sequence[Outgoing]]:
    """Give a batch in parts of at most `size` messages; each that may leave once alone, after the others."""
    many = [row for row in batch if not row.once]
    for start in range(0, len(many), size):
        yield many[start : start + size]
    for row in batch:
        if row.once:
            yield [row]


def reason(error: BaseException) -> str:
    """Give one line that says what went wrong, without secrets."""
    text = REDACTOR.redact_text(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
