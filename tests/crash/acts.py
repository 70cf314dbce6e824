"""What is done in a cell so that a process comes to its point, and what it has to end in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.crash.app import ROUTED
from tests.crash.caller import KEY
from tests.crash.scene import UNHEARD, Scene
from tests.support import guard
from tests.support.queues import QUEUE
from tests.support.wait import until
from umt_durable.states import RunState
from umt_durable.store import outbox

GATE: Final = "gate"
BOTH: Final = (QUEUE, UNHEARD)


@dataclass(frozen=True, slots=True)
class End:
    """What the run of a cell has to end in.

    Shape: `repeats` is how many steps more than once each may be entered; `needed` are some that have to be, `unwanted`
    some that must not. `is_thawed_first`: what stands still holds what the run is made of.
    """

    run: str
    result: Any = None
    state: RunState = RunState.SUCCEEDED
    repeats: int = 1
    needed: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    is_thawed_first: bool = False


def simple(name: str, *arguments: Any, result: Any, repeats: int = 1) -> Callable[[Scene], End]:
    """Return the act of calling a task."""

    def act(scene: Scene) -> End:
        scene.begin()
        task = getattr(scene.tasks, name, None) or getattr(scene.more, name)
        run = task.delay(*arguments).id
        scene.strike()
        return End(run, result, repeats=repeats)

    return act


def linked(scene: Scene) -> End:
    """Have a callback follow the run."""
    scene.begin()
    run = scene.tasks.one_step.apply_async((4,), link=scene.tasks.note.s(step="followed")).id
    scene.strike()
    scene.thaw()  # RabbitMQ may have given the callback's message to what stands still
    until(lambda: scene.body_log.count(step="followed") >= 1, timeout=60, what="the callback to be called")
    return End(run, 4)


def held(scene: Scene) -> End:
    """Have a step stand at a gate while the lease of its process is renewed."""
    scene.gates.close(GATE)
    scene.begin()
    run = scene.tasks.one_step.delay(4, GATE).id
    scene.strike()
    scene.gates.open(GATE)
    return End(run, 4)


def waiter(scene: Scene) -> End:
    """Have a run wait for a fact that a user's transaction says."""
    scene.begin()
    run = scene.tasks.waiter.delay("go").id
    scene.wait_state(run, RunState.WAITING)
    scene.say(run, 5)
    scene.strike()
    return End(run, 5)


def awaiter(scene: Scene) -> End:
    """Have a step wait for an ordinary task, whose message RabbitMQ may give to what stands still."""
    scene.begin()
    run = scene.more.awaiter.delay(3).id
    scene.strike()
    return End(run, 4, is_thawed_first=True)


def announcer(scene: Scene) -> End:
    """Have a run hand out the address of its wait."""
    scene.begin()
    run = scene.more.announcer.delay().id
    scene.strike()
    scene.say(run, 5)
    return End(run, 5)


def undoing(scene: Scene) -> End:
    """Cancel a run while it is executed, so that its worker has to have it undone."""
    scene.gates.close(GATE)
    scene.begin()
    run = scene.more.undoer.delay(GATE).id
    scene.gates.wait(GATE)
    scene.tasks.durable.cancel(run, compensate=True)
    scene.gates.open(GATE)
    scene.strike()
    return End(run, state=RunState.CANCELLED, needed=("pick", "hold", "undo-1"), unwanted=("never",))


def leaver(scene: Scene) -> End:
    """Ask a worker to shut down in the middle of a run."""
    scene.gates.close(GATE)
    worker = scene.begin()
    run = scene.tasks.ten_steps.delay(5, GATE).id
    scene.gates.wait(GATE)
    worker.term()
    # The pool learns of it by and by; a step that is over before is followed by another one.
    until(lambda: "Warm shutdown" in worker.text(), what="the worker to be asked")
    scene.gates.open(GATE)
    scene.strike(needs_heir=True)
    return End(run, list(range(1, 11)))


def event(scene: Scene) -> End:
    """Have a relay make a run of an event."""
    scene.begin()
    scene.tasks.durable.outbox.emit(ROUTED, {"value": 4})
    scene.strike()
    until(lambda: scene.tasks.durable.list(task="tests.one_step"), timeout=60, what="the run of the event")
    [run] = scene.tasks.durable.list(task="tests.one_step")
    return End(run.id, 4)


def drifter(scene: Scene) -> End:
    """Have a run quarantined, whose code asks for other steps than it recorded."""
    scene.begin()
    run = scene.more.drifter.delay().id
    scene.strike()
    return End(run, state=RunState.QUARANTINED)


def foreign(scene: Scene) -> End:
    """Have a message taken in that a producer sent who knows nothing of the product."""
    scene.begin()
    run = scene.foreign("tests.one_step", 4)
    scene.strike()
    # RabbitMQ leaves what is not acked to whoever has it, as long as that one's connection stands.
    return End(run, 4, is_thawed_first=True)


def orphan(scene: Scene) -> End:
    """Have a run taken over whose worker was killed."""
    scene.gates.close(GATE)
    doomed = scene.bystander("doomed")
    run = scene.tasks.one_step.delay(4, GATE).id
    scene.gates.wait(GATE)
    doomed.kill9()
    scene.begin()
    scene.clock.advance(seconds=float(scene.env["DURABLE_LEASE_SECONDS"]) + 1)
    scene.strike()
    scene.gates.open(GATE)
    return End(run, 4, repeats=2)


def unheard(scene: Scene) -> End:
    """Lose the message of a run in a queue."""
    scene.begin()
    run = scene.tasks.one_step.apply_async((4,), queue=UNHEARD).id
    until(lambda: scene.broker.depth(UNHEARD) == 1, what="the message to be published")
    until(lambda: outbox.status(scene.conn)[0] == 0, what="the relay to know that")
    scene.purge(UNHEARD)
    scene.clock.advance(seconds=scene.tasks.durable.settings.deliver_seconds + 1)
    scene.strike(heir_queues=BOTH, needs_heir=True)
    return End(run, 4)


def caller(scene: Scene) -> End:
    """Have an application ask for something, and then ask again, as it does when it has no answer."""
    verb = scene.cell.point.partition(".")[0]
    scene.bystander("worker")
    run = "" if verb == "enqueue" else scene.tasks.waiter.delay("go").id
    if run:
        scene.wait_state(run, RunState.WAITING)
    argv = [sys.executable, "-m", "tests.crash.caller", verb, *([run] if run else [])]
    process = guard.spawn(argv, scene.once.with_name("caller.log"), guard.clean_environment(scene.acting()))
    try:
        scene.strike()
        if scene.cell.what in ("drop", "lose"):
            assert process.wait(timeout=60) == 0, scene.once.with_name("caller.log").read_text()
        return _again(scene, verb, run)
    finally:
        if scene.cell.what == "stop":
            scene.thaw()
            assert process.wait(timeout=60) == 0, scene.once.with_name("caller.log").read_text()
        guard.end(process, grace=0.0)


def _again(scene: Scene, verb: str, run: str) -> End:
    tasks = scene.tasks
    match verb:
        case "enqueue":
            return End(str(tasks.one_step.enqueue(4, idempotency_key=KEY).id), 4)
        case "signal":
            tasks.durable.signal(run, "go", 5, dedupe=KEY)
            return End(run, 5)
        case _:
            tasks.durable.cancel(run)
            return End(run, state=RunState.CANCELLED)


ACTS: Final[dict[str, Callable[[Scene], End]]] = {
    "ten_steps": simple("ten_steps", result=list(range(1, 11))),
    "linked": linked,
    "held": held,
    "booking": simple("booking", 3, result=3),
    "elsewhere": simple("elsewhere", 6, result=6),
    "shipping": simple("shipping", "ship:17", result=1),
    "sleeper": simple("sleeper", 2.5, 1, result=1),
    "waiter": waiter,
    "announcer": announcer,
    "picker": simple("picker", 6, result=list(range(6)), repeats=6),
    "flaky_run": simple("flaky_run", 1, result=2),
    "looper": simple("looper", 1, 4, result=4),
    "undoing": undoing,
    "parent": simple("parent", 3, result=[3, 4]),
    "awaiter": awaiter,
    "drifter": drifter,
    "leaver": leaver,
    "event": event,
    "foreign": foreign,
    "orphan": orphan,
    "unheard": unheard,
    "caller": caller,
}
