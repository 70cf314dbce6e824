"""What whoever holds the token of a begun step does with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, assert_never
from uuid import UUID, uuid4

from umt_durable import texts
from umt_durable.bound import Caller
from umt_durable.database import Connection
from umt_durable.engine import failures
from umt_durable.engine.answers import Answer
from umt_durable.engine.tokens import Begun, Tokens, read
from umt_durable.errors import DefinitionError, ExpiredTokenError, StaleTokenError, UnknownRunError, UsedTokenError
from umt_durable.records import Completed
from umt_durable.session import caller
from umt_durable.states import CompletionOutcome
from umt_durable.store import facts

T = TypeVar("T")


class Completing:
    """The verbs on begun steps: mixed into `Client`."""

    _tokens: Tokens

    if TYPE_CHECKING:

        def _do(self, work: Callable[[Connection], T], at: str | None = None) -> T: ...

        def _call(self, who: Caller, name: str, parameters: Mapping[str, Any]) -> tuple[Any, ...] | None: ...

        def _route(self, fact: UUID) -> None: ...

    def complete(self, token: str, result: Any = None, *, conn: object = None, actor: str | None = None) -> UUID:
        """Say what the begun step of a token gave, and return the id of the fact that says so; the first counts.

        Said again with the same result it changes nothing and gives the id of the first.
        Errors: InvalidTokenError, StaleTokenError, ExpiredTokenError; UsedTokenError when the step has ended otherwise;
        UnknownRunError; EncodingError for a result that cannot be stored; ConfigurationError without a key.
        """
        return self._end_step(token, Answer(result), conn, actor)

    def fail(self, token: str, error: str | Exception, *, conn: object = None, actor: str | None = None) -> UUID:
        """Say that the begun step of a token failed, and return the id of the fact that says so; the first counts.

        Shape: a text makes the step raise StepFailedError; an exception is raised there as itself if its class is
        registered, else as StepFailedError.
        Errors: as for `complete`.
        """
        if not isinstance(error, str | Exception) or error == "":
            raise DefinitionError(f"error must be a text or an exception, not {error!r}")
        failure = failures.decided(error) if isinstance(error, str) else failures.capture(error)
        return self._end_step(token, Answer(failure=failure), conn, actor)

    def _end_step(self, token: str, answer: Answer, conn: object, actor: str | None) -> UUID:
        texts.check("actor", actor)
        begun = read(token, self._tokens.keys())
        parameters = {
            "run": begun.run,
            "nesting": begun.nesting,
            "key": begun.step,
            "generation": begun.generation,
            "payload": answer.to_bytes(f"the result of step {begun.step!r}"),
            "actor": actor,
            "fact": uuid4(),
        }
        if conn is None:
            done = self._do(partial(facts.complete, parameters=parameters), "signal.commit")
        else:
            row = self._call(caller(conn), "complete_step", parameters)
            assert row is not None
            done = facts.read_completed(row)
        fact = _checked(begun, done)
        if conn is None:
            self._route(fact)
        return fact


def _checked(begun: Begun, done: Completed) -> UUID:
    """Return the fact that counts, or raise why there is none of this token."""
    match done.outcome:
        case CompletionOutcome.DONE | CompletionOutcome.SAME:
            assert done.fact is not None
            return done.fact
        case CompletionOutcome.USED:
            raise UsedTokenError(begun.run, begun.step, "was completed with something else before: the first counts")
        case CompletionOutcome.ENDED:
            raise UsedTokenError(begun.run, begun.step, "was not completed before its run ended")
        case CompletionOutcome.EXPIRED:
            raise ExpiredTokenError(begun.run, begun.step)
        case CompletionOutcome.STALE:
            raise StaleTokenError(begun.run, begun.step)
        case CompletionOutcome.UNKNOWN:
            raise UnknownRunError(begun.run)
        case _:
            assert_never(done.outcome)
