"""Pausing tasks and queues: their ready runs wait until somebody resumes them, those that are executed go on."""

from __future__ import annotations

from uuid import uuid4

from umt_durable import texts
from umt_durable.engine.client import Access, check_person
from umt_durable.errors import DefinitionError
from umt_durable.session import caller
from umt_durable.states import OWN, Scope
from umt_durable.store import pauses
from umt_durable.store.pauses import Pause


class Pauses(Access):
    """What is paused as a whole, for one schema.

    Shape: `conn` as for the verbs on runs: what was asked then holds if and only if the caller commits (I2).
    """

    def pause(self, scope: Scope, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Have the ready runs of a task or queue wait, and those that become ready; False where it is paused already.

        Errors: DefinitionError for a name, actor or reason that cannot be stored; AutocommitError;
        DatabaseUnavailableError.
        """
        return self._act("pause_all", scope, name, actor, reason, conn)

    def resume(self, scope: Scope, name: str, *, actor: str, reason: str | None = None, conn: object = None) -> bool:
        """Let the runs of a task or queue go on, as fast as hints leave; False where it is not paused.

        Errors: as `pause`.
        """
        return self._act("resume_all", scope, name, actor, reason, conn)

    def list(self) -> list[Pause]:
        """Read what is paused, the oldest pause first."""
        return self._do(pauses.listed)

    def knows_queue(self, name: str) -> bool:
        """Say whether a live worker's task or a run that has not ended has a queue of this name."""
        return self._do(lambda conn: pauses.knows_queue(conn, name))

    def _act(self, statement: str, scope: Scope, name: str, actor: str, reason: str | None, conn: object) -> bool:
        check_person(actor, reason)
        if name is None:
            raise DefinitionError(f"{scope}: a name is missing")
        texts.check(f"the name of the {scope}", name)
        if scope is Scope.TASK and name.startswith(OWN):
            raise DefinitionError(f"{name!r} is a task of this package, which brings answers: it cannot be paused")
        given = pauses.parameters(scope, name, audit=uuid4(), actor=actor, reason=reason)
        if conn is not None:
            row = self._call(caller(conn), statement, given)
            return row is not None and bool(row[0])
        done = self._do(lambda own: pauses.act(own, statement, given))
        self._notify()
        return done
