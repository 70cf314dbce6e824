"""Ordinary Celery tasks as steps: what a signature asks for, the message that brings its answer back, a second look.

The message carries a link and an errback to receivers of ours (`bridge.receivers`). Both are known by name only:
whoever executes the task needs nothing of this package.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from celery import states as celery_states
from celery.backends.base import BaseKeyValueStoreBackend
from celery.canvas import Signature, maybe_signature
from celery.utils.log import get_logger
from kombu.exceptions import KombuError

from umt_durable.bridge import calls, sending
from umt_durable.database import Connection
from umt_durable.engine import failures
from umt_durable.engine.answers import PREFIX, Answer, Place, row_of
from umt_durable.engine.failures import Failure
from umt_durable.engine.reporting import Described, Message
from umt_durable.errors import DefinitionError
from umt_durable.redaction import redact_text
from umt_durable.store import outbox, waits

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable

logger = get_logger(__name__)

ANSWERED: Final = "umt_durable.answered"
FAILED: Final = "umt_durable.failed"
READABLE: Final = ("json", "msgpack")
MAX_TEXT: Final = 4_000


def _redis_errors() -> tuple[type[Exception], ...]:
    from redis import exceptions

    return (exceptions.RedisError,)


_AWAY: Final[tuple[type[Exception], ...]] = (OSError, KombuError, ValueError, *_redis_errors())


class CeleryTasks:
    """The ordinary tasks of an app."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    def describe(self, signature: Any, step: str) -> Described:
        """Say what a signature asks for.

        Errors: DefinitionError for what is no signature, for a durable task in it, and for a group, which has no one
        result.
        """
        if not isinstance(signature, Signature):
            found = type(signature).__name__
            raise DefinitionError(f"step {step!r}: step.task takes a signature, as task.s(...) gives one, not {found}")
        if signature.get("subtask_type") == "group":
            raise DefinitionError(f"step {step!r}: a group has no one result; await a chord: chord(tasks, body)")
        for name in _names(signature):
            if self._durable.has_task(name):
                raise DefinitionError(f"step {step!r}: {name} is a durable task; await it with step.call")
        task = self._durable.app.tasks.get(signature.task)
        return Described(_label(signature), _identity(signature), bool(getattr(task, "idempotent", False)))

    def check(self, signature: Any, step: str) -> None:
        """Refuse a signature whose arguments a task that is registered here does not take.

        Errors: InputError naming the step, the task and the argument.
        """
        calls.check_all(self._durable.app, signature, step=step)

    def pack(self, signature: Any, place: Place, token: UUID, queue: str | None) -> Message:
        """Make the message of a task, with link and errback to the step that awaits it.

        Errors: EncodingError.
        """
        app = self._durable.app
        mine = maybe_signature(signature, app=app).clone()
        said = {"run": place.run, "nesting": place.nesting, "step": place.step, "token": token.hex}
        if place.generation:
            said["generation"] = place.generation
        mine.link(self._receiver(ANSWERED, place, said, queue))
        mine.link_error(self._receiver(FAILED, place, {**said, "queue": queue or ""}, queue))
        kept = sending.pack(app, mine, place.row, task_id=str(place.task_id))
        return Message(kept.payload, kept.due, kept.delay)

    def look(self, task_id: str) -> Answer | None:
        """Ask the result backend once how a task ended; None when it does not know, or cannot be asked."""
        return look(self._durable.app, task_id)

    def _receiver(self, name: str, place: Place, said: Mapping[str, object], queue: str | None) -> Signature:
        options = {"task_id": place.receiver(name), "serializer": "json", "ignore_result": True}
        options["queue"] = queue or self._durable.queue_of(name)
        return Signature(name, kwargs=dict(said), options=options, app=self._durable.app)


def revoke_unanswered(durable: Durable, run: int) -> None:
    """Keep the tasks that a cancelled run still awaits from being started, as far as that can be had.

    A message that has not left is forgotten; one that has is revoked, which workers know only while they live.
    Errors: whatever the broker raises; repeating it is safe.
    """

    def forget(conn: Connection) -> list[str]:
        ids = [json.loads(address)[2].removeprefix(PREFIX) for address in waits.unanswered(conn, run)]
        outbox.forget_unsent(conn, [row_of(UUID(one)) for one in ids])
        return ids

    ids = durable.database.do(forget)
    if ids:
        durable.app.control.revoke(ids)


def look(app: Any, task_id: str) -> Answer | None:
    """Read how a task ended out of the result backend; None when it does not know, or cannot be asked.

    Only backends that keep JSON or msgpack under the task's id are asked: what is stored in another form would have to
    be unpickled (I27).
    """
    backend = app.backend
    if not isinstance(backend, BaseKeyValueStoreBackend) or backend.serializer not in READABLE:
        return None
    try:
        raw = backend.get(backend.get_key_for_task(task_id))
        meta = backend.decode(raw) if raw else {}
    except _AWAY as error:
        logger.warning("the result backend could not be asked for %s: %s", task_id, type(error).__name__)
        return None
    if not isinstance(meta, Mapping):
        return None
    match meta.get("status"):
        case celery_states.SUCCESS:
            return Answer(meta.get("result"))
        case celery_states.FAILURE | celery_states.REVOKED:
            return Answer(failure=stored_failure(meta.get("result"), meta.get("traceback")))
        case _:
            return None


def stored_failure(stored: object, trace: object) -> Failure:
    """Return a failure as a result backend holds it; nothing in it is imported, or believed to be a class."""
    said = stored if isinstance(stored, Mapping) else {}
    args = said.get("exc_message", "")
    args = tuple(args) if isinstance(args, list | tuple) else (args,)
    plain = all(arg is None or isinstance(arg, str | bool | int | float) for arg in args)
    message = _clean(str(args[0]) if len(args) == 1 else str(args))
    name = _clean(str(said.get("exc_type", "Failure")))
    return Failure(
        type=name.rpartition(".")[2],
        qualname=name,
        module=_clean(str(said.get("exc_module", ""))),
        message=message,
        args=tuple(_clean(arg) if isinstance(arg, str) else arg for arg in args) if plain else (message,),
        traceback=_clean(str(trace or "")),
    )


def unread_failure(task_id: str) -> Failure:
    """Return the failure of a task of which nothing more is known than that it failed."""
    said = f"task {task_id} failed; what it raised is not in the result backend, or cannot be read there"
    return Failure(type="Failure", module="", message=said, args=(said,), traceback="")


def raised_failure(error: BaseException, trace: object) -> Failure:
    """Return the failure of a task that was executed by a worker of ours, which hands its exception over."""
    kept = failures.capture(error)
    said = trace if isinstance(trace, str) else "".join(traceback.format_exception(error))
    return replace(kept, traceback=_clean(said))


def _clean(text: str) -> str:
    return redact_text(text).replace("\0", "\ufffd").encode("utf-8", "replace").decode()[:MAX_TEXT]


def _parts(signature: Mapping[str, Any]) -> Iterator[Any]:
    """Give the members, header and body of a canvas, in an order that stays."""
    kwargs = signature.get("kwargs") or {}
    for name in ("tasks", "header", "body") if signature.get("subtask_type") else ():
        inner = kwargs.get(name)
        yield from inner if isinstance(inner, list | tuple) else [] if inner is None else [inner]


def _names(signature: Mapping[str, Any]) -> Iterator[str]:
    if signature.get("subtask_type") is None:
        yield signature["task"]
    for part in _parts(signature):
        yield from _names(part)


def _label(signature: Mapping[str, Any]) -> str:
    names = list(_names(signature))
    return names[0] if signature.get("subtask_type") is None else f"{signature['subtask_type']} of {', '.join(names)}"


def _identity(signature: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells one call from another on replay: the tasks and their arguments, not how they are sent."""
    if signature.get("subtask_type") is None:
        return (signature["task"], list(signature.get("args") or ()), dict(signature.get("kwargs") or {}))
    return (signature["subtask_type"], [list(_identity(part)) for part in _parts(signature)])
