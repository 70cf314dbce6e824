"""Records as programs and people read them: without tokens, and without payloads unless they are asked for."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Final

from umt_durable import codec
from umt_durable.engine import failures
from umt_durable.engine.failures import Failure
from umt_durable.errors import DecodingError, PayloadKeyError
from umt_durable.records import Progress, Run
from umt_durable.redaction import redact

Document = dict[str, Any]

HIDDEN: Final = ("args", "result", "error", "digest", "fingerprint", "payload", "codec")


def run_document(run: Run) -> Document:
    """Return a run as programs read it."""
    return visible(run)


def visible(record: Any) -> Document:
    """Return the fields of a record, and of the records in it, that are no payload and no token."""
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name not in HIDDEN}
    return {name: visible(value) if is_dataclass(value) else value for name, value in values.items()}


def state_of(run: Run) -> str:
    """Return where a run stands, as people read it."""
    marks = [f"({run.reason})" if run.reason else "", "paused" if run.paused_at and not run.state.is_terminal else ""]
    asked = "cancel asked" if run.cancel_at and not run.state.is_terminal else ""
    if run.compensate_at:
        asked = "undone" if run.state.is_terminal else asked or "undoing"
    return " ".join(filter(None, [str(run.state), *marks, asked]))


def progress_of(said: Progress | None) -> str | None:
    """Return what the body of a run said of how far it is, as people read it."""
    if said is None:
        return None
    amount = "" if said.done is None else f"{said.done:g}" + ("" if said.total is None else f" of {said.total:g}")
    return ": ".join(filter(None, [said.status, amount])) or None


def shown(data: bytes | None, kind: int = codec.Codec.JSON) -> object:
    """Return a stored value for a person's eyes: as plain JSON, with what its names say is secret masked."""
    if data is None:
        return None
    try:
        return redact(codec.decode(data, codec.EMPTY, kind))
    except DecodingError:
        return f"<{len(data)} bytes that cannot be read>"
    except PayloadKeyError as error:
        return _sealed(error)


def failure_in(data: bytes | None) -> Failure | str | None:
    """Return a stored failure, or what to say instead where it cannot be opened here."""
    if data is None:
        return None
    try:
        return failures.from_bytes(data)
    except PayloadKeyError as error:
        return _sealed(error)


def told(failure: Failure | str | None) -> str | None:
    """Return what stands in a list for a failure."""
    return failure.summary if isinstance(failure, Failure) else failure


def _sealed(error: PayloadKeyError) -> str:
    return f"<sealed with the key {error.key!r}, which is not known here>"
