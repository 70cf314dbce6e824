"""Signatures as JSON keeps them: the parts they have, the ids of these, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid5

from celery.canvas import Signature
from kombu.utils import json as kombu_json
from kombu.utils.functional import maybe_list

from umt_durable.engine.ids import NAMESPACE
from umt_durable.errors import DecodingError, EncodingError
from umt_durable.payloads import plain

if TYPE_CHECKING:
    from celery import Celery

_dumps: Final[Callable[[Any], str]] = kombu_json.dumps
_loads: Final[Callable[[bytes], Any]] = kombu_json.loads
_as_list: Final[Callable[[Any], list[Any] | None]] = maybe_list


def stored(signature: Mapping[str, Any], where: str) -> bytes:
    """Return a signature as the outbox keeps it.

    Errors: EncodingError, naming the path, for what JSON cannot hold.
    """
    try:
        return _dumps(dict(signature)).encode()
    except Exception as error:
        path, reason = _culprit(signature, "$", error)
        raise EncodingError(where, path, str(reason)[:200]) from error


def copied(signature: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a signature as JSON gives it back, sharing nothing with it.

    Errors: as `stored`.
    """
    copy: dict[str, Any] = _loads(stored(signature, where))
    return copy


def read(app: Celery, payload: bytes) -> Signature:
    """Read what `stored` made.

    Errors: DecodingError; PayloadKeyError.
    """
    data = plain(payload)
    try:
        found = _loads(data)
    except ValueError as error:
        raise DecodingError(f"the stored signature cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("task"), str):
        raise DecodingError("the stored value is no signature")
    return of(app, found)


def of(app: Celery, signature: Mapping[str, Any]) -> Signature:
    """Return a signature of an app, with all its parts.

    Celery leaves inner ones to the app that is current in the thread, which in a process with several may be another.
    """
    found: Signature = Signature.from_dict(signature, app=app)
    for part in parts(found):
        if isinstance(part, Signature):
            part._app = app
    return found


def parts(signature: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give a signature and the members, headers and bodies it is made of."""
    yield signature
    kwargs = signature.get("kwargs") or {}
    for name in ("tasks", "header", "body") if signature.get("subtask_type") else ():
        inner = kwargs.get(name)
        for part in inner if isinstance(inner, list) else [inner]:
            if isinstance(part, dict):
                yield from parts(part)


def links(signature: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the callbacks of all parts of a signature."""
    found = [link for part in parts(signature) for link in _as_list((part.get("options") or {}).get("link")) or ()]
    return [link for link in found if isinstance(link, dict)]


def name_parts(signature: dict[str, Any], place: Sequence[object]) -> None:
    """Give each part of a signature that has no id the one of its place."""
    options = signature["options"] = dict(signature.get("options") or {})
    options.setdefault("task_id", str(derive(place)))
    kwargs = signature.get("kwargs") or {}
    for part in ("tasks", "header"):
        members = kwargs.get(part)
        if isinstance(members, list):
            for index, member in enumerate(members):
                if isinstance(member, dict):
                    name_parts(member, [*place, part, index])
        elif isinstance(members, dict):
            name_parts(members, [*place, part])
    if isinstance(kwargs.get("body"), dict):
        name_parts(kwargs["body"], [*place, "body"])


def derive(place: Sequence[object]) -> UUID:
    """Return the id that belongs to a place in the family of a run."""
    return uuid5(NAMESPACE, json.dumps(list(place)))


def _culprit(value: Any, path: str, error: Exception) -> tuple[str, Exception]:
    """Return where inside a value JSON fails, and why."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"{path}.{name}", inner) for name, inner in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    for place, inner in parts:
        try:
            _dumps(inner)
        except Exception as inside:  # noqa: BLE001 - each encoder fails in its own way; the deepest one is told
            return _culprit(inner, place, inside)
    return path, error
