"""What people and programs ask of a run by a fact of a reserved name, applied to it under its lock.

The fact is one INSERT in the caller's transaction, so that one left open blocks no run; a router applies it afterwards,
with the row of the audit where somebody is named.
"""

from __future__ import annotations

import json
from enum import Enum, StrEnum, auto
from typing import Any, Final, NamedTuple, assert_never

from umt_durable import failpoints
from umt_durable.database import Connection
from umt_durable.payloads import opened
from umt_durable.records import FactRecord, LockedRun
from umt_durable.settings import Settings
from umt_durable.states import RunState
from umt_durable.store import audit, runs

MAX_REASON: Final = 1000
_PREFIX: Final = "umt."


class Kind(StrEnum):
    """What can be asked of a run; the name of the fact is `umt.` and this."""

    CANCEL = "cancel"
    RETRY = "retry"
    PAUSE = "pause"
    RESUME = "resume"

    @property
    def fact(self) -> str:
        """Return the name of the fact that asks for it."""
        return _PREFIX + self


class Act(NamedTuple):
    """What a fact asks for, and of which run."""

    kind: Kind
    run_id: str


class Effect(Enum):
    """What applying did: nothing, a run asked to stop, ended, or made ready."""

    NONE = auto()
    ASKED = auto()
    CANCELLED = auto()
    WOKEN = auto()


def act_of(fact: FactRecord) -> Act | None:
    """Return what a fact asks of a run, or None for a fact of the user's."""
    if not fact.name.startswith(_PREFIX) or fact.name.removeprefix(_PREFIX) not in list(Kind):
        return None
    kind, *rest = json.loads(fact.address)
    return Act(Kind(fact.name.removeprefix(_PREFIX)), rest[0]) if kind == "run" else None


def apply(conn: Connection, settings: Settings, fact: FactRecord, act: Act) -> Effect:
    """Do what was asked, if the run can still have it; a terminal one is left as it is (I11, I12)."""
    locked = _lock_highest(conn, act.run_id)
    if locked is None or locked.state.is_terminal:
        return Effect.NONE
    match act.kind:
        case Kind.CANCEL:
            return _cancel(conn, settings, fact, locked)
        case Kind.RETRY:
            return _release(conn, settings, fact, locked)
        case Kind.PAUSE:
            return _pause(conn, fact, locked)
        case Kind.RESUME:
            return _resume(conn, settings, fact, locked)
        case _:
            assert_never(act.kind)


def _lock_highest(conn: Connection, run_id: str) -> LockedRun | None:
    """Lock the run of an id that is not replaced."""
    no, locked = 0, None
    while True:
        # A replaced run is terminal when its lock comes, and a higher nesting is there: the look after that decides.
        highest = next((found for found, _ in runs.of_id(conn, run_id)), None)
        if highest is None or highest == no:
            return locked
        no = highest
        locked = runs.lock(conn, no)
        failpoints.point("router.run_lock.a")


def _cancel(conn: Connection, settings: Settings, fact: FactRecord, locked: LockedRun) -> Effect:
    """End a run that nobody owns, or ask its owner to; where that is asked for, what it has done is undone first."""
    reason = reason_in(fact.payload)
    if fact.actor is not None:
        _record(conn, fact, Kind.CANCEL, locked, f"was {locked.state}")
    if locked.compensates:
        return Effect.NONE  # how the run ends was fixed by the cancel before
    compensates = _asked_in(fact.payload).get("compensate") is True
    if locked.state is RunState.RUNNING:
        asked = runs.flag_cancel(conn, locked.no, reason=reason, compensate=compensates)
        return Effect.ASKED if asked else Effect.NONE
    if compensates and runs.compensate(conn, locked.no, reason=reason, deliver_seconds=settings.deliver_seconds):
        return Effect.WOKEN
    ended = runs.cancel_parked(conn, locked.no, reason=reason, repair_seconds=2 * settings.lease_seconds)
    return Effect.CANCELLED if ended else Effect.NONE


def _release(conn: Connection, settings: Settings, fact: FactRecord, locked: LockedRun) -> Effect:
    """Make a quarantined run ready, with a new crash budget and the version that was asked for."""
    version = version_in(fact.payload)
    found = runs.release_quarantined(conn, locked.no, deliver_seconds=settings.deliver_seconds, version=version)
    if found is None:
        return Effect.NONE
    asked = "" if version is None else f", goes on with version {version}"
    _record(conn, fact, Kind.RETRY, locked, f"was {locked.state}: {found}{asked}")
    return Effect.WOKEN


def _pause(conn: Connection, fact: FactRecord, locked: LockedRun) -> Effect:
    """Keep a run from being claimed; the owner of a running one lets go of it after the step in flight."""
    if not runs.pause(conn, locked.no):
        return Effect.NONE
    _record(conn, fact, Kind.PAUSE, locked, f"was {locked.state}")
    return Effect.ASKED if locked.state is RunState.RUNNING else Effect.NONE


def _resume(conn: Connection, settings: Settings, fact: FactRecord, locked: LockedRun) -> Effect:
    """Let a paused run go on where it stands: what it slept or waited for may be over meanwhile."""
    state = runs.resume(conn, locked.no, deliver_seconds=settings.deliver_seconds)
    if state is None:
        return Effect.NONE
    _record(conn, fact, Kind.RESUME, locked, f"was paused, {state}")
    return Effect.WOKEN if state is RunState.READY else Effect.NONE


def _record(conn: Connection, fact: FactRecord, kind: Kind, locked: LockedRun, detail: str) -> None:
    reason = reason_in(fact.payload)
    audit.add(conn, fact.id, kind, run=locked.no, actor=fact.actor or "unknown", reason=reason, detail=detail)


def version_in(payload: bytes | None) -> int | None:
    """Return the version that a payload asks for."""
    version = _asked_in(payload).get("version")
    return version if isinstance(version, int) and 1 <= version < 2**31 else None


def _asked_in(payload: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(opened(payload) or b"null")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def reason_in(payload: bytes | None) -> str | None:
    """Return the reason in a payload. Whatever else stands there must not keep what was asked from being done."""
    reason = _asked_in(payload).get("reason")
    if not isinstance(reason, str):
        return None
    return reason.replace("\0", "").encode("utf-8", "replace").decode()[:MAX_REASON]
