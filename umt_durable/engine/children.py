"""Child runs: inserted once with the step that awaits them, joined by one wait however many they are (I17).

A child that ends writes one fact at the address of its parent's step. The router wakes the parent when no child of that
step is live, so parent and child are never locked in one transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import uuid5

from umt_durable import codec
from umt_durable.engine import failures
from umt_durable.engine.exits import Canceled
from umt_durable.engine.ids import NAMESPACE
from umt_durable.engine.passing import Pass
from umt_durable.engine.recording import Recorder
from umt_durable.errors import ChildrenFailedError, DefinitionError
from umt_durable.failpoints import point
from umt_durable.records import Child, NewRun, StepEntry
from umt_durable.states import RunState, StepKind, StepState, WaitState
from umt_durable.store import journal, runs, waits
from umt_durable.store.guard import Guard

PREFIX: Final = "umt.join/"
ENDS: Final = ("cancel", "abandon")
INSERTED_AT_ONCE: Final = 1_000
"""How many children one statement inserts, so that none runs into a time limit; one commit has them all."""
MOST_NAMED: Final = 20
"""How many failed children are named in the error of a step; the others are counted."""


def call(
    the_pass: Pass, recorder: Recorder, name: str, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of one child run, or raise what it failed with."""
    tasks = the_pass.reporter.durable_tasks
    identity = (tasks.name(task, name), *_arguments(name, task, args, kwargs))
    entry, recorded = recorder.identify(name, StepKind.CALL, identity, {})
    annotation = tasks.annotation(task)
    the_pass.saw(PREFIX + entry.key)
    if recorded is not None and recorded.state is not StepState.STARTED:
        return recorder.replay(recorded, annotation)

    def plan() -> list[NewRun]:
        return [tasks.plan(task, args, kwargs, _child_id(the_pass, entry.key, 0), name)]

    (child,) = recorder.guarded(lambda: joined(the_pass, entry, recorded, plan, name))
    if has_result(child):
        return recorder.record(entry, name, codec.decode(child.result or b"null", annotation, child.codec), annotation)
    if child.state is RunState.FAILED and child.error is not None:
        recorder.record_known_failure(entry, failures.from_bytes(child.error).of_step(name))
    return recorder.record_failure(entry, name, ChildrenFailedError(f"step {name!r}: {told(child)}"))


def gather(the_pass: Pass, recorder: Recorder, name: str, calls: Sequence[Any]) -> list[Any]:
    """Return the results of child runs in the order of their calls."""
    if isinstance(calls, str) or not isinstance(calls, Iterable):
        raise DefinitionError(f"step {name!r}: give a list of signatures of durable tasks, not {calls!r:.100}")
    tasks, calls = the_pass.reporter.durable_tasks, list(calls)
    identity = [[tasks.name(one, name), *_arguments(name, _signature(name, one), (), {})] for one in calls]
    entry, recorded = recorder.identify(name, StepKind.CALL, (identity,), {})
    the_pass.saw(PREFIX + entry.key)
    if recorded is not None and recorded.state is not StepState.STARTED:
        return _typed(the_pass, calls, recorder.replay(recorded, codec.EMPTY))
    if not calls:
        return _typed(the_pass, calls, recorder.record(entry, name, []))

    def plan() -> list[NewRun]:
        return [tasks.plan(one, (), {}, _child_id(the_pass, entry.key, n), name) for n, one in enumerate(calls)]

    children = recorder.guarded(lambda: joined(the_pass, entry, recorded, plan, name))
    failed = [child for child in children if not has_result(child)]
    if failed:
        more = f"; and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
        named = "; ".join(told(child) for child in failed[:MOST_NAMED]) + more
        error = ChildrenFailedError(f"step {name!r}: {len(failed)} of {len(children)} children failed: {named}")
        recorder.record_failure(entry, name, error)
    values = [codec.decode(child.result or b"null", codec.EMPTY, child.codec) for child in children]
    return _typed(the_pass, calls, recorder.record(entry, name, values))


def spawn(
    the_pass: Pass,
    recorder: Recorder,
    name: str,
    task: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    on_parent_end: str,
) -> str:
    """Insert a child run that nobody awaits, with the record of its step, and return its id."""
    if on_parent_end not in ENDS:
        raise DefinitionError(f"step {name!r}: on_parent_end must be one of {', '.join(ENDS)}, not {on_parent_end!r}")
    tasks = the_pass.reporter.durable_tasks
    identity = (tasks.name(task, name), *_arguments(name, task, args, kwargs), on_parent_end)
    entry, recorded = recorder.identify(name, StepKind.SPAWN, identity, {})
    if recorded is not None and recorded.state is not StepState.STARTED:
        return str(recorder.replay(recorded, str))
    child = tasks.plan(task, args, kwargs, _child_id(the_pass, entry.key, 0), name)
    encoded, _ = codec.round_trip(child.id, str, where=f"step {name!r}")

    def insert(guard: Guard) -> bool | None:
        with guard.conn.transaction():
            cancel = journal.commit(guard, entry, state=StepState.DONE, result=encoded.data, digest=encoded.digest)
            if cancel is not None:
                _insert(the_pass, guard, [child], key=None, on_parent_end=on_parent_end)
        return cancel

    recorder.guarded(lambda: the_pass.attempt.commit(insert, entry.key))
    the_pass.database.notify()
    return child.id


def _signature(name: str, given: Any) -> Any:
    """Return a signature, which brings arguments of its own."""
    if not hasattr(given, "args"):
        raise DefinitionError(f"step {name!r}: give signatures, such as task.s(...), not {given!r:.100}")
    return given


def _arguments(name: str, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return what a child is called with: what is given beside its task, or what its signature brings."""
    if not hasattr(task, "args"):
        return list(args), dict(kwargs)
    if args or kwargs:
        raise DefinitionError(f"step {name!r}: a signature brings arguments of its own; give none beside it")
    return list(task.args or ()), dict(task.kwargs or {})


def joined(
    the_pass: Pass, entry: journal.Entry, recorded: StepEntry | None, plan: Callable[[], list[NewRun]], name: str
) -> list[Child]:
    """Start the children if that was not done, and return them once all have ended; leave the body until then."""
    key, run = PREFIX + entry.key, the_pass.attempt.token.run
    if recorded is None:
        _start(the_pass, entry, plan(), name)

    def read(guard: Guard) -> WaitState:
        entries = {one.key: one for one in waits.of_run(guard.conn, run)}
        the_pass.waits.update(entries)
        return entries[key].state

    while the_pass.attempt.read(read) is WaitState.PENDING:
        the_pass.suspend(RunState.WAITING, waits=[key], until=f"for the children of {name}")
    place = the_pass.in_generation(entry.key)
    children = the_pass.attempt.read(lambda guard: runs.children(guard.conn, run, place))
    return [_opened(the_pass, child) for child in children]


def _opened(the_pass: Pass, child: Child) -> Child:
    result, error = (None if data is None else the_pass.opened(data) for data in (child.result, child.error))
    return replace(child, result=result, error=error)


def _start(the_pass: Pass, entry: journal.Entry, children: list[NewRun], name: str) -> None:
    """Write step, wait and children in one transaction; a repeat after a lost reply makes no second ones."""
    seq, run = the_pass.next_seq(), the_pass.attempt.token.run
    place = the_pass.in_generation(entry.key)
    address = waits.join_address(run, place)

    def start(guard: Guard) -> journal.Started | None:
        with guard.conn.transaction():
            started = journal.send(guard, entry, again=None)
            if started is not None and started.granted:
                waits.await_children(guard, key=PREFIX + entry.key, seq=seq, name=name, address=address)
                _insert(the_pass, guard, children, key=place, on_parent_end="cancel")
                point("child.insert.a")
        return started

    reply = the_pass.attempt.write(start, cancel=lambda started: started is not None and started.cancel)
    assert reply is not None
    if reply.cancel:
        raise Canceled("cancelled")
    the_pass.database.notify()


def _insert(the_pass: Pass, guard: Guard, children: list[NewRun], *, key: str | None, on_parent_end: str) -> None:
    for first in range(0, len(children), INSERTED_AT_ONCE):
        runs.insert_children(
            guard,
            children[first : first + INSERTED_AT_ONCE],
            key=key,
            first=first,
            on_parent_end=on_parent_end,
            deliver_seconds=the_pass.deliver_seconds,
        )


def _child_id(the_pass: Pass, step: str, place: int) -> str:
    step = the_pass.in_generation(step)
    return str(uuid5(NAMESPACE, json.dumps(["child", the_pass.run_id, the_pass.nesting, step, place])))


def _typed(the_pass: Pass, calls: list[Any], values: list[Any]) -> list[Any]:
    """Return recorded results as the types their tasks declare."""
    tasks = the_pass.reporter.durable_tasks
    return [of_type(value, tasks.annotation(one)) for one, value in zip(calls, values, strict=True)]


def of_type(value: Any, annotation: Any) -> Any:
    if annotation is codec.EMPTY:
        return value
    return codec.decode(codec.encode(value, codec.EMPTY, where="the result of a child").data, annotation)


def has_result(child: Child) -> bool:
    """Say whether a child ended with a result: one whose place was taken by what is no run has none."""
    return child.state is RunState.SUCCEEDED and child.result is not None


def told(child: Child) -> str:
    """Say of a child that did not succeed what became of it."""
    if child.state is RunState.FAILED and child.error is not None:
        return f"{child.task} ({child.id}) failed: {failures.from_bytes(child.error).summary}"
    if child.state is RunState.SUCCEEDED:
        return f"{child.task} ({child.id}) ended without a result: it was ignored, or what took its place is no run"
    return f"{child.task} ({child.id}) was cancelled: {child.reason or 'no reason given'}"
