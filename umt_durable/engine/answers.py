"""Answers of ordinary tasks: what they say, and how they come to the step that waits for one.

Whoever brings an answer has to know the step's token; it then becomes a fact at an address that only this step has, and
the router does the rest. A person's decision about the step is such a fact too, so a step has one outcome, however many
bring one.
"""

from __future__ import annotations

import hmac
import json
import logging
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID, uuid5

from umt_durable import codec, telemetry
from umt_durable.database import Database
from umt_durable.engine import failures
from umt_durable.engine.failures import Failure
from umt_durable.engine.ids import NAMESPACE
from umt_durable.services import router
from umt_durable.settings import Settings
from umt_durable.store import facts, waits

logger = logging.getLogger(__name__)

PREFIX: Final = "umt.task/"
"""How the keys of these waits and the names of their facts begin; a user's wait or fact is never called like that."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a task ended: by a result, or by a failure."""

    result: Any = None
    failure: Failure | None = None

    def to_bytes(self, where: str) -> bytes:
        """Return the answer as the payload of a fact.

        Errors: EncodingError for a result that cannot be stored.
        """
        failure = None if self.failure is None else self.failure.to_bytes().decode()
        return codec.encode({"result": self.result, "failure": failure}, codec.EMPTY, where=where).data

    @classmethod
    def from_bytes(cls, payload: bytes) -> Answer:
        """Read the payload of a fact."""
        said: Any = codec.decode(payload)
        failure = said["failure"]
        return cls(said["result"], None if failure is None else failures.from_bytes(failure.encode()))


def row_of(task_id: UUID) -> UUID:
    """Return the id of the outbox row that holds the message of an awaited task."""
    return uuid5(task_id, "message")


@dataclass(frozen=True, slots=True)
class Place:
    """Which step an answer is for: a run's, by its key in the journal, in one generation of the run."""

    run: str
    nesting: int
    step: str
    generation: int = 0

    @property
    def task_id(self) -> UUID:
        """Return the Celery id of the task whose end the step waits for: the same however often it is sent."""
        return self._derived("task")

    @property
    def row(self) -> UUID:
        """Return the id of the outbox row that holds the task's message."""
        return row_of(self.task_id)

    @property
    def wait(self) -> str:
        """Return the key of the step's wait."""
        return PREFIX + self.step

    @property
    def address(self) -> str:
        """Return where the answer is said."""
        return waits.run_address(self.run, f"{PREFIX}{self.task_id}")

    def receiver(self, kind: str) -> str:
        """Return the id of the run that brings a kind of answer."""
        return str(self._derived(f"answer/{kind}"))

    def _derived(self, kind: str) -> UUID:
        again = [self.generation] if self.generation else []
        return uuid5(NAMESPACE, json.dumps([kind, self.run, self.nesting, self.step, *again]))


def bring(database: Database, settings: Settings, place: Place, *, token: str, answer: Answer, by: str) -> bool:
    """Say an answer to the step that waits for it; False when there is no such step, or the token is not its own.

    Shape: `by` is the id of the run that brings it; the same one brings it once.
    Errors: EncodingError; DatabaseUnavailableError.
    """
    found = database.do(lambda conn: waits.awaited(conn, place.run, place.nesting, place.wait))
    # In constant time: how far a guess was right must not show.
    if found is None or not hmac.compare_digest(found.token.hex.encode(), token.encode("utf-8", "replace")):
        telemetry.count(telemetry.Counter.ANSWER_REFUSED)
        logger.warning("an answer for step %r of run %.100r is refused: it is not its own", place.step, place.run)
        return False
    payload = answer.to_bytes(f"the answer for step {place.step!r}")
    parameters = {
        "run": place.run,
        "name": json.loads(found.address)[2],
        "payload": payload,
        "actor": None,
        "dedupe": None,
        "fact": uuid5(NAMESPACE, json.dumps([found.address, by])),
    }
    fact = database.do(lambda conn: facts.ask(conn, parameters))
    if fact is not None:
        router.route(database, settings, fact)
        database.notify()
    return fact is not None
