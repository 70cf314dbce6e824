"""What a body does about changes of its code and of its input: patches, and the run that continues as new."""

from __future__ import annotations

from typing import Any, NoReturn

from umt_durable.engine.exits import ContinuedAsNew
from umt_durable.engine.passing import Pass
from umt_durable.engine.recording import Body, Recorder, StepOptions
from umt_durable.engine.replay import PATCH, StepKey, branches_of
from umt_durable.errors import DefinitionError
from umt_durable.states import StepKind, StepState


def patched(the_pass: Pass, patch: str) -> bool:
    """Say whether this run, or this branch of it, goes the way of a patch; the answer is recorded and stays.

    It does unless it was past this place before the patch: then recorded steps lie ahead. What was answered around a
    branch holds in it, if that came first, which is the same at each replay.
    """
    the_pass.check()
    text = _key_of(patch)
    own = the_pass.branch.prefix
    for place in reversed(["", *branches_of(own)]):
        if (place, patch) in the_pass.patches:
            return the_pass.patches[place, patch]
    recorder = Recorder(the_pass, StepOptions())
    is_new = not the_pass.is_replaying
    entry, recorded = recorder.recall(own + text, PATCH, StepKind.VALUE, (), {}, is_keyed=True)
    if recorded is not None and recorded.state is not StepState.STARTED:
        answer = bool(recorder.replay(recorded, bool))
    else:
        answer = bool(recorder.execute(entry, recorded, Body(lambda: is_new, bool, PATCH)))
    the_pass.patches[own, patch] = answer
    return answer


def _key_of(patch: str) -> str:
    if not isinstance(patch, str) or not patch:
        raise DefinitionError(f"ctx.patched: a patch has a name, text that is not empty, not {patch!r}")
    return StepKey(PATCH, patch).text


def continue_as_new(the_pass: Pass, args: tuple[Any, ...], kwargs: dict[str, Any], version: int | None) -> NoReturn:
    """Leave the body, and have its run begin anew with other arguments.

    Errors: DefinitionError in a branch, whose run is not its own to end; those of the arguments.
    """
    the_pass.check()
    if the_pass.is_in_branch:
        raise DefinitionError("ctx.continue_as_new is for the body itself: call it once step.parallel has returned")
    the_pass.leave(ContinuedAsNew(the_pass.successor(args, kwargs, version), version))
