"""What the tests of effects share: a provider's answers as functions of an effect, and zombies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support import provider
from tests.support.clock import Clock
from tests.support.engine import Engine, Gate, in_thread, take_over
from tests.support.provider import Provider
from umt_durable import Done, NotDone, OpInfo
from umt_durable.engine.outcomes import Finished, Outcome, Parked
from umt_durable.states import OpState, Reason, RunState

OP = "ship:17"


@dataclass
class Shipping:
    """`do` and `reconcile` against a provider; the first call stops before it, within it or after it, if told to."""

    provider: Provider
    stop: str = ""
    gate: Gate = field(default_factory=Gate)
    infos: list[OpInfo] = field(default_factory=list)
    looked: list[OpInfo] = field(default_factory=list)
    look_gate: Gate | None = None

    def do(self, info: OpInfo) -> int:
        """Call the provider."""
        self.infos.append(info)
        first = len(self.infos) == 1
        if first and self.stop == "before the call":
            self.gate.pass_through()
        answer = provider.apply(info, address=self.provider.address, hold=first and self.stop == "in the network")
        if first and self.stop == "after the call":
            self.gate.pass_through()
        return answer

    def reconcile(self, info: OpInfo) -> Done[int] | NotDone:
        """Look up with the turn, as a fencing provider wants it."""
        self.looked.append(info)
        found = provider.look_up(info, address=self.provider.address)
        if self.look_gate is not None:
            self.look_gate.pass_through()
        return NotDone() if found is None else Done(found)

    def wait_stopped(self) -> None:
        """Wait until the first call has come to where it stops."""
        if self.stop == "in the network":
            self.provider.wait_held()
        else:
            self.gate.wait_reached()

    def go_on(self) -> None:
        """Let the first call go on."""
        if self.stop == "in the network":
            self.provider.release()
        else:
            self.gate.open()


def with_a_zombie(engine: Engine, clock: Clock, shipping: Shipping, *, task: str = "t") -> tuple[str, Outcome, Any]:
    """Have a run's first process stop where the shipping says, its heir execute the run, and then the first one go on.

    Shape: the run's id, what became of it with the heir, and what became of it with the zombie.
    """
    run_id, zombie, heir = engine.start(task), engine.process(), engine.process()
    with in_thread(lambda: zombie.deliver(run_id, task)) as late:
        shipping.wait_stopped()
        zombie.freeze()
        take_over(engine, clock)
        outcome = heir.deliver(run_id, task)
        shipping.go_on()
    return run_id, outcome, late[0]


def assert_succeeded(outcome: object, value: object) -> None:
    """Check that a run has ended well."""
    assert isinstance(outcome, Finished), outcome
    assert (outcome.state, outcome.value) == (RunState.SUCCEEDED, value), outcome.error


def assert_visibly_uncertain(engine: Engine, run_id: str, outcome: object, op: str = OP) -> None:
    """Check that a run is parked for a person, and that its op is listed for one."""
    assert outcome == Parked(RunState.QUARANTINED, Reason.UNCERTAIN_OP)
    run = engine.client.get(run_id)
    assert (run.state, run.reason) == (RunState.QUARANTINED, Reason.UNCERTAIN_OP)
    assert [(found.op_key, found.state) for found in engine.client.ops.list()] == [(op, OpState.UNCERTAIN)]
    assert engine.client.ops.get(op).waiting == 1
