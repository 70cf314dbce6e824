"""Steps that are begun here and completed by whoever holds their token, from anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from umt_durable import codec
from umt_durable.engine.answers import Answer
from umt_durable.engine.failures import mark_recorded
from umt_durable.engine.functions import check_call, check_function
from umt_durable.engine.passing import Pass
from umt_durable.engine.tokens import Begun, sign
from umt_durable.engine.waitables import FactWait, check_limit
from umt_durable.engine.waiting import Row, Waiting
from umt_durable.errors import DecodingError, FactPayloadError, StepTimeoutError
from umt_durable.states import WaitState

MODE = "begin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A step to be begun."""

    name: str
    on_created: Callable[[str], object]
    type: Any = codec.EMPTY
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        check_function(f"step {self.name!r}", "on_created", self.on_created, plain=True)
        check_call(f"step {self.name!r}", "on_created", self.on_created, None, told="token")
        check_limit(self.name, "timeout", self.timeout)


def begin(the_pass: Pass, step: Beginning, *, step_key: str | int | UUID | None = None) -> Any:
    """Return what the step was completed with, or raise what it was failed with, now or when the run is woken."""
    key = the_pass.keys.make(step.name, step_key)
    wait = FactWait(step.name, type=step.type)

    def place(row: Row) -> Begun:
        return Begun(the_pass.run_id, the_pass.nesting, row.key, the_pass.generation)

    known = the_pass.waits.get(key)
    keys: tuple[bytes, ...] = ()
    if known is None or not known.announced:  # before anything is written: without a key nobody could complete it
        keys = the_pass.tokens.keys()

    def announce(row: Row) -> None:
        step.on_created(sign(place(row), keys or the_pass.tokens.keys()))

    address = Begun(the_pass.run_id, the_pass.nesting, key, the_pass.generation).address
    row = Row(key=key, name=step.name, address=address, fact=wait, timeout=step.timeout, own_mode=MODE)
    entry = Waiting(the_pass, [row], on_created=announce).until_settled()[0]
    if entry.state is WaitState.TIMED_OUT:
        raise mark_recorded(StepTimeoutError(f"step {step.name!r} was not completed within {step.timeout}"))
    data = the_pass.payload_of(entry)
    assert data is not None
    answer = Answer.from_bytes(data)
    if answer.failure is not None:
        raise the_pass.exceptions.rebuild(answer.failure.of_step(step.name))
    return _typed(step, answer.result)


def _typed(step: Beginning, value: Any) -> Any:
    if step.type is codec.EMPTY:
        return value
    try:
        return codec.decode(codec.encode(value, codec.EMPTY, where=f"step {step.name!r}").data, step.type)
    except DecodingError as error:
        raise mark_recorded(FactPayloadError(step.name, str(error))) from None
