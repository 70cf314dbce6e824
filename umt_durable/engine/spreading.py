"""The items of a map as child runs on the workers: started with the step that awaits them, known by their keys.

All at once, or so many at a time: then in rounds, each a step of its own, in the order of the keys.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from uuid import uuid5

from umt_durable import codec
from umt_durable.engine import failures
from umt_durable.engine.children import MOST_NAMED, PREFIX, has_result, joined, of_type, told
from umt_durable.engine.ids import NAMESPACE
from umt_durable.engine.parallel import POLICIES, ItemFailure
from umt_durable.engine.passing import Pass
from umt_durable.engine.recording import Recorder
from umt_durable.engine.replay import key_text
from umt_durable.errors import ChildrenFailedError, DefinitionError, EncodingError, InputError
from umt_durable.records import Child, NewRun, StepEntry
from umt_durable.states import RunState, StepKind, StepState
from umt_durable.store import journal

MOST_CONCURRENT: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A map whose items are runs of a durable task. Shape: `items` are pairs of a key and an item."""

    name: str
    task: Any
    items: Sequence[tuple[object, Any]]
    concurrency: int | None
    on_error: str

    def __post_init__(self) -> None:
        if self.on_error not in POLICIES:
            raise DefinitionError(f"step.map {self.name!r}: on_error is fail or collect, not {self.on_error!r}")
        number = 1 if self.concurrency is None else self.concurrency
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_CONCURRENT:
            raise DefinitionError(
                f"step.map {self.name!r}: concurrency must be from 1 to {MOST_CONCURRENT}, not {number!r}"
            )


@dataclass(frozen=True, slots=True)
class _Item:
    """One item: its key as text, and how that is written behind the key of the step."""

    key: str
    at: str
    value: Any


def spread(the_pass: Pass, recorder: Recorder, step: Spread) -> list[Any]:
    """Return the results of all items in their order, now or when the run is woken.

    Errors: ChildrenFailedError of `fail`; DefinitionError for what is no durable task, InputError for an item that it
    does not take, both before anything is written.
    """
    return _Spreading(the_pass, recorder, step).results()


class _Spreading:
    """One map on its way from its items to their results."""

    def __init__(self, the_pass: Pass, recorder: Recorder, step: Spread) -> None:
        self._pass, self._recorder, self._step = the_pass, recorder, step
        self._tasks = the_pass.reporter.durable_tasks
        self._task = _task_name(the_pass, step)
        self._annotation = self._tasks.annotation(step.task)

    def results(self) -> list[Any]:
        """Return the results in the order of the items, each typed by the task."""
        is_whole = self._step.concurrency is None
        texts = [(key_text(self._step.name, key), item) for key, item in self._step.items]
        pairs = sorted(texts, key=lambda pair: pair[0])
        kind = StepKind.CALL if is_whole else StepKind.VALUE
        identity = (self._task, [list(pair) for pair in pairs], self._step.concurrency)
        entry, recorded = self._recorder.identify(self._step.name, kind, identity, {})
        keys = self._pass.keys.items(self._step.name, entry.key, [key for key, _ in self._step.items])
        at = {str(key): text for (key, _), text in zip(self._step.items, keys, strict=True)}
        items = [_Item(key, at[key], value) for key, value in pairs]
        found = self._round(entry, recorded, items, 0) if is_whole else self._rounds(entry, recorded, items)
        return [self._typed(found[str(key)], str(key)) for key, _ in self._step.items]

    def _rounds(self, entry: journal.Entry, recorded: StepEntry | None, items: list[_Item]) -> dict[str, Any]:
        """Execute so many at a time; each round has its own outcome, and the next begins once all of it have ended."""
        size = self._step.concurrency or 1
        found: dict[str, Any] = {}
        if recorded is None or recorded.state is StepState.STARTED:
            self._plan(entry.key, items)  # a bad item is refused before the first round is written
            self._recorder.record(entry, self._step.name, size)
        else:
            self._recorder.replay(recorded, int)
        for first in range(0, len(items), size):
            here, identity = items[first : first + size], [self._task, first]
            key = f"{entry.key}\\.{first // size + 1}"  # no key of a step is written like this
            one, known = self._recorder.recall(key, self._step.name, StepKind.CALL, (identity,), {}, is_keyed=True)
            found |= self._round(one, known, here, len(items) - first - len(here))
        return found

    def _round(self, entry: journal.Entry, recorded: StepEntry | None, items: list[_Item], left: int) -> dict[str, Any]:
        """Return what became of some items, by their keys; `left` is how many are not begun before these have ended."""
        self._pass.saw(PREFIX + entry.key)
        if recorded is not None and recorded.state is not StepState.STARTED:
            found = self._recorder.replay(recorded, codec.EMPTY)
        elif not items:
            found = self._recorder.record(entry, self._step.name, [])
        else:
            children = self._recorder.guarded(
                lambda: joined(self._pass, entry, recorded, lambda: self._plan(entry.key, items), self._step.name)
            )
            found = self._outcomes(entry, items, children, left)
        return {item.key: value for item, value in zip(items, found, strict=True)}

    def _plan(self, step: str, items: Iterable[_Item]) -> list[NewRun]:
        return [self._plan_one(step, item) for item in items]

    def _plan_one(self, step: str, item: _Item) -> NewRun:
        the_pass = self._pass
        where = ["item", the_pass.run_id, the_pass.nesting, the_pass.in_generation(step), item.at]
        child_id = str(uuid5(NAMESPACE, json.dumps(where)))
        try:
            return self._tasks.plan(self._step.task, (item.value,), {}, child_id, self._step.name)
        except (InputError, EncodingError, DefinitionError) as error:
            error.add_note(f"in {item.key!r} of step.map {self._step.name!r}")
            raise

    def _outcomes(self, entry: journal.Entry, items: list[_Item], children: list[Child], left: int) -> list[Any]:
        """Record what became of some items; of `fail`, raise for those that failed."""
        failed = [(item, child) for item, child in zip(items, children, strict=True) if not has_result(child)]
        if self._step.on_error == "collect":
            return list(self._recorder.record(entry, self._step.name, [self._kept(child) for child in children]))
        if failed:
            self._recorder.record_failure(entry, self._step.name, self._error(failed, len(items), left))
        return list(self._recorder.record(entry, self._step.name, [_value(child) for child in children]))

    def _error(self, failed: list[tuple[_Item, Child]], count: int, left: int) -> ChildrenFailedError:
        named = "; ".join(f"{item.key!r}: {told(child)}" for item, child in failed[:MOST_NAMED])
        more = f"; and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
        rest = f"; {left} were not begun" if left else ""
        return ChildrenFailedError(
            f"step {self._step.name!r}: {len(failed)} of {count} items failed: {named}{more}{rest}"
        )

    def _kept(self, child: Child) -> dict[str, Any]:
        """Return what is recorded of an item where failures are collected: its result, or its failure."""
        if has_result(child):
            return {"result": _value(child)}
        if child.state is RunState.FAILED and child.error is not None:
            # Without the traceback: the child's own run has it, and thousands would not fit into one entry.
            failure = replace(failures.from_bytes(child.error).of_step(self._step.name), traceback="", cause=None)
        else:
            error = ChildrenFailedError(f"step {self._step.name!r}: {told(child)}")
            failure = replace(failures.capture(error, step=self._step.name), traceback="")
        return {"failure": failure.to_bytes().decode()}

    def _typed(self, outcome: Any, key: str) -> Any:
        if self._step.on_error != "collect":
            return of_type(outcome, self._annotation)
        if "failure" in outcome:
            failure = failures.from_bytes(outcome["failure"].encode())
            return ItemFailure(key, self._pass.exceptions.rebuild(failure))
        return of_type(outcome["result"], self._annotation)


def _task_name(the_pass: Pass, step: Spread) -> str:
    """Return the name of the task that each item is a run of.

    Errors: DefinitionError for what cannot travel to a worker.
    """
    if inspect.isroutine(step.task) or isinstance(step.task, partial | Mapping):
        kind = "a signature" if isinstance(step.task, Mapping) else "a function of this process"
        raise DefinitionError(
            f"step.map {step.name!r}: with workers=True fn must be a durable task, or its name, not {kind}:"
            f" {step.task!r}"
        )
    return the_pass.reporter.durable_tasks.name(step.task, step.name)


def _value(child: Child) -> Any:
    return codec.decode(child.result or b"null", codec.EMPTY, child.codec)
