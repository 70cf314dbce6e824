"""What the tests of steps that await an ordinary task share: one run, and ordinary tasks that the test answers for."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from tests.support.clock import Clock
from tests.support.engine import Engine, RecordingReporter
from umt_durable.database import Database
from umt_durable.engine.answers import Answer, Place, bring
from umt_durable.engine.context import TaskContext
from umt_durable.engine.outcomes import Outcome
from umt_durable.engine.reporting import Described, Message
from umt_durable.errors import InputError
from umt_durable.settings import Settings
from umt_durable.store import outbox

TIMEOUT = timedelta(minutes=4)


class Outside:
    """The ordinary tasks of a queue that is not there: it keeps what is sent, and says what the test lets it know."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Place, UUID]] = []
        self.known: Answer | None = None
        self.looks = 0
        self.refused: Any = None

    def describe(self, signature: Any, step: str) -> Described:
        """Take any value as a signature."""
        return Described(str(signature), (signature,), False)

    def check(self, signature: Any, step: str) -> None:
        """Refuse what the test says is refused."""
        if signature == self.refused:
            raise InputError("print", [("order", "missing")], step=step)

    def pack(self, signature: Any, place: Place, token: UUID, queue: str | None) -> Message:
        """Keep what is to be sent."""
        self.sent.append((signature, place, token))
        return Message(b"{}")

    def leave(self, database: Database) -> None:
        """Have what was sent leave, as a relay does: its rows are gone."""
        rows = [place.row for _, place, _ in self.sent]
        assert database.do(lambda conn: outbox.forget_unsent(conn, rows)) > 0

    def look(self, task_id: str) -> Answer | None:
        """Say what the test knows."""
        self.looks += 1
        return self.known


class Play:
    """One run of a task that awaits another, delivered as often as the test wants."""

    def __init__(self, engine: Engine, name: str = "awaits") -> None:
        self.engine, self.outside, self.name = engine, Outside(), name
        self.options: dict[str, Any] = {}
        self.signature = "print"
        self.caught: list[str] = []

        @engine.task(name)
        def awaits(ctx: TaskContext) -> Any:
            try:
                return ctx.step.task("label", self.signature, **self.options)
            except Exception as error:
                self.caught.append(f"{type(error).__name__}: {error}")
                raise

        self.run = engine.start(name)

    def deliver(self) -> Outcome:
        """Deliver a hint of the run."""
        return self.engine.process().deliver(self.run, self.name, reporter=RecordingReporter(ordinary=self.outside))

    def bring(self, answer: Answer, token: str | None = None) -> bool:
        """Bring an answer as the receivers do."""
        _, place, own = self.outside.sent[0]
        said = own.hex if token is None else token
        return bring(self.engine.database, self.engine.settings, place, token=said, answer=answer, by="receiver")

    def pass_time(self, clock: Clock, *, seconds: float) -> None:
        """Let time pass, and wake what is due."""
        clock.advance(seconds=seconds)
        self.engine.timers()


@pytest.fixture(name="play")
def make_play(database: Database, settings: Settings) -> Iterator[Play]:
    """Return a run on an engine."""
    engine = Engine(database, settings)
    yield Play(engine)
    engine.close()
