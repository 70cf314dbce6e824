"""One act on many runs: chosen by a filter, counted, confirmed, and done one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import click

from umt_durable.bridge.console import emit, say
from umt_durable.bridge.durable import Durable
from umt_durable.durations import parse_duration
from umt_durable.engine.client import hidden
from umt_durable.errors import (
    DurationError,
    InputError,
    UnknownRunError,
    UnknownStepError,
    UnknownTaskError,
    WrongStatusError,
)
from umt_durable.states import PAUSED, RunState, divide
from umt_durable.store import diagnosis

BATCH: Final = 500

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Filter:
    """Which runs an act is for, as the options of its command say."""

    task: str | None
    queue: str | None
    states: Sequence[str]
    age: timedelta | None
    dry_run: bool
    yes: bool

    @property
    def is_given(self) -> bool:
        """Say whether runs are chosen at all."""
        return not (self.task is None and self.queue is None) or bool(self.states) or self.age is not None


@dataclass(frozen=True, slots=True)
class Act:
    """What is done to each run, the states it is possible in, and whether the run has to be paused or not.

    Shape: `takes_paused` says whether paused runs can be chosen as such, whatever their state.
    """

    name: str
    do: Callable[[str], object]
    states: Collection[RunState]
    paused: bool | None = None
    takes_paused: bool = True


def filters(command: F) -> F:
    """Give a command the options that choose many runs, as the parameter `chosen`, and make its RUN optional."""
    options = (
        click.argument("run_id", metavar="[RUN]", required=False),
        click.option("--task", metavar="NAME", help="Instead of RUN: all runs of this task …"),
        click.option("--queue", metavar="NAME", help="… in this queue …"),
        click.option(
            "--state",
            "states",
            multiple=True,
            type=click.Choice([*map(str, RunState), PAUSED]),
            help="… in this state, or paused; may be repeated …",
        ),
        click.option("--older-than", metavar="DURATION", callback=_age, help="… started longer ago than this: 1h, 2d."),
        click.option("--dry-run", is_flag=True, help="Say how many there are, and do nothing."),
        click.option("--yes", is_flag=True, help="Do not ask."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def chosen(run_id: str | None, given: dict[str, Any]) -> Filter | None:
    """Return the filter of a command's options, or None where it names one run.

    Errors: a usage error for neither or both.
    """
    found = Filter(given["task"], given["queue"], given["states"], given["older_than"], given["dry_run"], given["yes"])
    if (run_id is None) is not found.is_given:
        raise click.UsageError("name a RUN, or choose runs by --task, --queue, --state or --older-than")
    if run_id is not None and (found.dry_run or found.yes):
        raise click.UsageError("--dry-run and --yes are for runs chosen by --task, --queue, --state or --older-than")
    return None if run_id is not None else found


def do_to_many(durable: Durable, act: Act, which: Filter, *, as_json: bool) -> None:
    """Do an act to all runs that a filter chooses now; one that has changed meanwhile is passed over.

    Runs of this package's own tasks are chosen by `--task` alone: whoever clears out does not mean the answers on their
    way.
    """
    wanted, paused = divide(which.states or act.states)
    wrong = [str(state) for state in wanted if state not in act.states]
    if paused and not act.takes_paused:
        wrong.append(PAUSED)
    if wrong:
        raise click.UsageError(f"{act.name} is not possible for {wrong[0]} runs")
    ids = _ids(durable, act, which, wanted, or_paused=paused)
    if not as_json:
        say(f"{len(ids)} runs to {act.name}")
    done = 0
    if not which.dry_run and ids:
        _confirm(act, len(ids), yes=which.yes)
        done = sum(_did(act, run_id) for run_id in ids)
        if not as_json:
            say(f"{act.name}: {done} done, {len(ids) - done} passed over")
    if as_json:
        emit({"act": act.name, "chosen": len(ids), "done": done, "dry_run": which.dry_run}, [], as_json=True)


def _ids(durable: Durable, act: Act, which: Filter, states: Sequence[RunState], *, or_paused: bool) -> list[str]:
    given: dict[str, Any] = {"states": states, "task": which.task, "paused": act.paused, "age": which.age}
    given |= {"queue": which.queue, "or_paused": or_paused, "own": hidden(which.task, internal=False)}
    ids: dict[str, None] = {}
    after = 0
    while True:
        page = durable.database.do(partial(diagnosis.select_runs, **given, after=after, limit=BATCH))
        ids.update(dict.fromkeys(run_id for _, run_id in page))
        if len(page) < BATCH:
            return list(ids)
        after = page[-1][0]


def _confirm(act: Act, count: int, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"--yes is needed to {act.name} {count} runs without a terminal; --dry-run only counts")
    click.confirm(f"{act.name} {count} runs?", abort=True, err=True)


def _did(act: Act, run_id: str) -> bool:
    try:
        act.do(run_id)
    except (WrongStatusError, UnknownRunError, UnknownStepError, InputError, UnknownTaskError):
        return False
    return True


def _age(_: click.Context, __: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    try:
        return parse_duration(value)
    except DurationError as error:
        raise click.BadParameter(str(error)) from None
