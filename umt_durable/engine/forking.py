"""Runs that take up another one: what is asked of a fork, and what of a run's message its retry or fork has."""

from __future__ import annotations

import json
from typing import Final

from umt_durable import texts
from umt_durable.engine.replay import branches_of
from umt_durable.errors import DefinitionError, UnknownStepError, WrongStatusError
from umt_durable.payloads import plain
from umt_durable.records import ForkedRun, RetriedRun
from umt_durable.states import RunState

NOT_RETRIED: Final = frozenset({"chord", "group", "group_index", "eta", "expires", "retries"})
"""What a retry has not of the message of its run: its chord, which failed with it, and its times."""

NOT_FORKED: Final = NOT_RETRIED | {
    "callbacks",
    "errbacks",
    "chain",
    "reply_to",
    "correlation_id",
    "argsrepr",
    "kwargsrepr",
}
"""What a fork has not either: nothing follows it, nobody waits for its reply, and its arguments may be others."""


def check(from_step: object, version: object) -> None:
    """Refuse what no fork can begin from.

    Errors: DefinitionError.
    """
    if not isinstance(from_step, str) or not from_step or not texts.is_storable(from_step):
        raise DefinitionError(f"from_step: the key of a step, as the history gives it, not {from_step!r:.100}")
    check_version(version)


def check_version(version: object) -> None:
    """Refuse what is no version; None passes.

    Errors: DefinitionError.
    """
    if version is None:
        return
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version < 2**31:
        raise DefinitionError(f"version: versions count from 1, not {version!r:.100}")


def check_kept(found: RetriedRun | ForkedRun) -> None:
    """Refuse a run whose steps are undone, or are to be: what it has recorded is no state to go on from.

    Errors: WrongStatusError.
    """
    if found.compensated:
        raise WrongStatusError(found.id, found.state, "what it had done is undone; start a new run instead")


def check_found(found: ForkedRun, from_step: str) -> None:
    """Refuse a run that is under way, or has no such step.

    Errors: WrongStatusError, UnknownStepError.
    """
    if not found.state.is_terminal and found.state is not RunState.QUARANTINED:
        raise WrongStatusError(found.id, found.state, "only a run that has ended or is quarantined can be forked")
    if found.seq is None:
        raise UnknownStepError(found.id, from_step, "")


def around(from_step: str) -> list[str]:
    """Return the keys of the branches that a step is in: to be executed anew they must not count as done."""
    return [branch[:-1] for branch in branches_of(from_step)]


def message_of(envelope: bytes | None) -> bytes | None:
    """Return the message of a fork, made from that of its run."""
    return without(envelope, NOT_FORKED)


def without(envelope: bytes | None, left_out: frozenset[str]) -> bytes | None:
    """Return the message of a run without some of its parts."""
    if envelope is None:
        return None
    kept = {name: value for name, value in json.loads(plain(envelope)).items() if name not in left_out}
    return json.dumps(kept).encode() if kept else None
