"""Chords whose members sleep: the result backend forgets a chord some time after its last part came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery import states as celery_states
from celery.canvas import maybe_signature
from celery.exceptions import ChordError
from celery.utils.log import get_logger

from umt_durable.bridge.envelope import Envelope
from umt_durable.errors import DecodingError, DefinitionError, PayloadKeyError

if TYPE_CHECKING:
    from celery.app.task import Context


logger = get_logger(__name__)


def is_awaited(envelope: Envelope) -> bool:
    """Say whether a chord waits for a run, or for what follows it in its chain."""
    followers: Sequence[Mapping[str, Any]] = envelope.chain
    return envelope.chord is not None or any((each.get("options") or {}).get("chord") for each in followers)


def is_awaited_in(stored: bytes) -> bool:
    """Say the same of a stored message; of one that cannot be read here nothing is known, and nothing is said."""
    try:
        return is_awaited(Envelope.from_bytes(stored))
    except (PayloadKeyError, DecodingError):
        return False


def patience(backend: Any) -> tuple[float | None, str]:
    """Return for how many seconds a backend keeps an unfinished chord (None: for ever), and the setting behind it."""
    if hasattr(backend, "chord_expires"):
        kept, setting = backend.chord_expires, "result_chord_expires"
    else:
        kept, setting = getattr(backend, "expires", None), "result_expires"
    seconds = kept.total_seconds() if isinstance(kept, timedelta) else kept
    return (float(seconds) if seconds else None), setting


def check_sleep(backend: Any, envelope: Envelope, seconds: float) -> None:
    """Refuse a sleep that is longer than the chord around the run is kept.

    Errors: DefinitionError naming the setting.
    """
    if not is_awaited(envelope):
        return
    kept, setting = patience(backend)
    if kept is not None and seconds > kept:
        raise DefinitionError(
            f"a member of a chord would sleep for {timedelta(seconds=seconds)}, but the result backend forgets the "
            f"chord after {timedelta(seconds=kept)} and its body would never run: set {setting} to 0, or higher"
        )


def fail_if_forgotten(backend: Any, request: Context, age_seconds: float) -> None:
    """Make it visible that the backend has forgotten the chord of a run that took longer than that is kept.

    Shape: the body is stored as failed, and its errbacks are called, as for any error of a chord.
    """
    kept, setting = patience(backend)
    if not request.chord or kept is None or age_seconds <= kept or not hasattr(backend, "get_key_for_group"):
        return
    size = backend.get(backend.get_key_for_group(request.group, ".s"))
    if size is not None or backend.get(backend.get_key_for_group(request.group, ".c")) is not None:
        return
    body = maybe_signature(request.chord, app=backend.app)
    if body.id is None or backend.get_state(body.id) in celery_states.READY_STATES:
        return
    logger.error(
        "the result backend forgot chord %s before its member %s ended: see %s", request.group, request.id, setting
    )
    try:
        raise ChordError(f"the result backend forgot this chord before all members had ended: see {setting}")
    except ChordError as error:  # Celery reads the traceback from the stack
        backend.chord_error_from_stack(body, error)


class ClaimedChordError(Exception):
    """Somebody has claimed the body of a chord in the result backend, and has not published it yet."""


def check_unclaimed(backend: Any, request: Context) -> None:
    """Refuse to take the report of a chord's member for done while somebody holds the claim to the chord's body.

    Since Celery 5.7 its Redis backend has the body published by whoever claims it, for some seconds. A process that was
    killed with the claim publishes nothing, and meanwhile reports of members are taken without a word: whoever gives
    the last of them up then loses the chord.
    Errors: ClaimedChordError.
    """
    if request.chord and request.group and hasattr(backend, "_chord_claim_extend_script"):
        held = backend.client.get(backend.get_key_for_group(request.group, ".c"))
        if held is not None and held not in (b"done", "done"):
            raise ClaimedChordError(f"the body of chord {request.group} is claimed by a process that may be dead")
