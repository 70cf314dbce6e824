"""Named points where a test can kill, stop, delay or fail this process.

Callers write `failpoints.point("step.commit.b")`. Without the environment variable UMT_DURABLE_FAILPOINTS (or the
log below) that is a call of an empty function. With it, each named point acts when it is reached:

    UMT_DURABLE_FAILPOINTS="claim.a=kill;nth=3,relay.delete.b=sleep:500;file:/path/once"

    kill              SIGKILL to this process
    stop              SIGSTOP to this process; the harness resumes it
    sleep:MS          wait that many milliseconds
    raise:TYPE        raise one of RAISABLE; `OperationalError` is what psycopg raises for a broken connection
    exit:CODE         leave at once, without clean-up

    ;nth=K            act at the K-th time the point is reached in this process, and only then
    ;p=0.01           act with that probability; `;seed=S` makes the draws repeatable
    ;file:PATH        act only if PATH could be created, so that a restarted process does not act again; it then holds
                      the number of the process that acts

UMT_DURABLE_FAILPOINTS_LOG=/path appends the name of each point, the first time each process reaches it.

Names end in `.b` and `.a`, before and after what they stand beside, or in `.r`, reply lost: the database has committed
and the caller does not learn of it. Such a point stands where an error means that: use `raise:OperationalError`.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Never

from umt_durable.errors import ConfigurationError

ENVIRONMENT: Final = "UMT_DURABLE_FAILPOINTS"
ENVIRONMENT_LOG: Final = "UMT_DURABLE_FAILPOINTS_LOG"

NAMES: Final[tuple[str, ...]] = (
    "enqueue.commit.b",
    "enqueue.commit.a",
    "enqueue.commit.r",
    "intake.insert.b",
    "intake.insert.a",
    "intake.commit.b",
    "intake.commit.a",
    "intake.commit.r",
    "intake.ack.b",
    "claim.b",
    "claim.a",
    "claim.r",
    "claim.journal_read.b",
    "claim.journal_read.a",
    "step.grant.b",
    "step.grant.a",
    "step.grant.r",
    "step.body.b",
    "step.body.a",
    "step.encode.a",
    "step.commit.b",
    "step.commit.a",
    "step.commit.r",
    "items.commit.b",
    "items.commit.a",
    "items.commit.r",
    "txstep.user_sql.a",
    "txstep.commit.b",
    "txstep.commit.a",
    "txstep.commit.r",
    "ledger.claim.a",
    "ledger.user_sql.a",
    "ledger.commit.b",
    "ledger.commit.a",
    "ledger.commit.r",
    "ledger.record.a",
    "op.begin.b",
    "op.begin.a",
    "op.begin.r",
    "op.call.b",
    "op.call.a",
    "op.done.b",
    "op.done.a",
    "op.done.r",
    "sleep.suspend.b",
    "sleep.suspend.a",
    "sleep.suspend.r",
    "wait.key_lock.a",
    "wait.run_lock.a",
    "wait.look.a",
    "wait.commit.b",
    "wait.commit.a",
    "wait.announce.b",
    "wait.commit.r",
    "task.send.b",
    "task.send.a",
    "child.insert.a",
    "signal.commit.b",
    "signal.commit.a",
    "signal.commit.r",
    "router.key_lock.a",
    "router.run_lock.a",
    "router.commit.b",
    "router.commit.a",
    "router.commit.r",
    "hb.send.b",
    "hb.reply.r",
    "sweep.select.a",
    "sweep.update.a",
    "sweep.commit.b",
    "sweep.commit.a",
    "sweep.commit.r",
    "timer.select.a",
    "timer.commit.b",
    "timer.commit.a",
    "timer.commit.r",
    "redispatch.select.a",
    "redispatch.commit.b",
    "redispatch.commit.a",
    "redispatch.commit.r",
    "rescan.select.a",
    "rescan.commit.b",
    "rescan.commit.a",
    "rescan.commit.r",
    "doubt.commit.b",
    "doubt.commit.a",
    "doubt.commit.r",
    "event.commit.b",
    "event.commit.a",
    "event.commit.r",
    "relay.claim.b",
    "relay.claim.a",
    "relay.claim.r",
    "relay.publish.b",
    "relay.publish.a",
    "relay.confirm.r",
    "relay.delete.b",
    "relay.delete.a",
    "relay.delete.r",
    "relay.marker.b",
    "relay.marker.a",
    "release.commit.b",
    "release.commit.a",
    "release.commit.r",
    "continue.commit.b",
    "continue.commit.a",
    "continue.commit.r",
    "handover.commit.b",
    "handover.commit.a",
    "handover.commit.r",
    "quarantine.commit.b",
    "quarantine.commit.a",
    "quarantine.commit.r",
    "undo.commit.b",
    "undo.commit.a",
    "undo.commit.r",
    "retry.commit.b",
    "retry.commit.a",
    "retry.commit.r",
    "cancel.commit.b",
    "cancel.commit.a",
    "cancel.commit.r",
    "finish.commit.b",
    "finish.commit.a",
    "finish.commit.r",
    "finish.result.b",
    "finish.result.a",
    "finish.callback.b",
    "finish.callback.a",
)

RAISABLE: Final[tuple[str, ...]] = (
    "OSError",
    "ConnectionError",
    "ConnectionResetError",
    "TimeoutError",
    "RuntimeError",
    "MemoryError",
    "OperationalError",
)

_MAX_SLEEP_MS: Final = 600_000


@dataclass(frozen=True, slots=True)
class Action:
    """What one point does, and when."""

    verb: str
    argument: str = ""
    nth: int | None = None
    probability: float = 1.0
    once_file: Path | None = None
    draw: random.Random = field(default_factory=random.Random, compare=False)
    hits: itertools.count[int] = field(default_factory=lambda: itertools.count(1), compare=False)

    def reach(self, name: str) -> None:
        """Act, if this is the hit that was asked for."""
        hit = next(self.hits)
        if self.nth is not None and hit != self.nth:
            return
        if self.probability < 1.0 and self.draw.random() >= self.probability:
            return
        if self.once_file is not None and not _create(self.once_file):
            return
        match self.verb:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(int(self.argument) / 1000)
            case "exit":
                os._exit(int(self.argument))
            case _:
                _raise(self.argument, name)


class FailPoints:
    """The points that act in this process, and the log of those it reached."""

    def __init__(self, actions: Mapping[str, Action], log: Path | None = None) -> None:
        self.actions = dict(actions)
        self.log = log
        self._unseen = dict.fromkeys(NAMES, None)
        os.register_at_fork(after_in_child=self._forget)

    def point(self, name: str) -> None:
        """Log the point and act as configured.

        Errors: ConfigurationError when the name is not one of NAMES; what the action raises.
        """
        if name not in _DECLARED:
            raise ConfigurationError(f"{name!r} is not a declared fail point; add it to NAMES")
        if self.log is not None and self._unseen.pop(name, name) is None:
            _append(self.log, name)
        action = self.actions.get(name)
        if action is not None:
            action.reach(name)

    def _forget(self) -> None:
        self._unseen = dict.fromkeys(NAMES, None)


def parse(text: str) -> dict[str, Action]:
    """Read the value of UMT_DURABLE_FAILPOINTS.

    Errors: ConfigurationError, naming the entry, for an undeclared name or anything else that would not act as meant.
    """
    actions: dict[str, Action] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, rest = entry.partition("=")
        if not equals or name not in _DECLARED:
            raise _wrong(entry, f"{name!r} is not a declared fail point")
        if name in actions:
            raise _wrong(entry, "the point is named twice")
        verb, *modifiers = rest.split(";")
        actions[name] = _action(entry, verb, modifiers)
    return actions


def install(text: str, log: Path | None = None) -> None:
    """Make the points of `text` act in this process from now on; an empty text without a log makes all inert."""
    global point
    point = FailPoints(parse(text), log).point if text or log is not None else _inert


def _action(entry: str, text: str, modifiers: list[str]) -> Action:
    verb, _, argument = text.partition(":")
    match verb:
        case "kill" | "stop" if not argument:
            pass
        case "sleep" if argument.isdecimal() and int(argument) <= _MAX_SLEEP_MS:
            pass
        case "exit" if argument.isdecimal() and int(argument) <= 255:
            pass
        case "raise" if argument in RAISABLE:
            pass
        case _:
            known = f"kill, stop, sleep:MS, exit:CODE, raise: one of {', '.join(RAISABLE)}"
            raise _wrong(entry, f"{text!r} is no action ({known})")
    nth, probability, once_file, draw = None, 1.0, None, random.Random()
    for modifier in modifiers:
        match modifier.replace(":", "=", 1).split("=", 1):
            case ["nth", value] if value.isdecimal() and int(value) > 0:
                nth = int(value)
            case ["p", value] if _is_probability(value):
                probability = float(value)
            case ["seed", value] if value:
                draw.seed(value)
            case ["file", value] if value.startswith("/"):
                once_file = Path(value)
            case _:
                raise _wrong(entry, f"{modifier!r} is no modifier (nth=K, p=0.01, seed=S, file:/PATH)")
    return Action(verb, argument, nth, probability, once_file, draw)


def _is_probability(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False


def _wrong(entry: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"{ENVIRONMENT}: in {entry!r}: {reason}")


def _raise(type_name: str, name: str) -> Never:
    if type_name == "OperationalError":
        from psycopg import OperationalError

        raise OperationalError(f"fail point {name}")
    errors: dict[str, type[Exception]] = {
        error.__name__: error
        for error in (OSError, ConnectionError, ConnectionResetError, TimeoutError, RuntimeError, MemoryError)
    }
    raise errors[type_name](f"fail point {name}")


def _create(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, str(os.getpid()).encode())
    finally:
        os.close(descriptor)
    return True


def _append(path: Path, name: str) -> None:
    # One write in append mode, so that lines of several processes never mix.
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, f"{name}\n".encode())
    finally:
        os.close(descriptor)


def _inert(name: str) -> None:
    """Do nothing: no point acts in this process."""


def _from_environment(environ: Mapping[str, str]) -> Callable[[str], None]:
    text, log = environ.get(ENVIRONMENT, ""), environ.get(ENVIRONMENT_LOG)
    if not text and not log:
        return _inert
    return FailPoints(parse(text), Path(log) if log else None).point


_DECLARED: Final = frozenset(NAMES)

point: Callable[[str], None] = _from_environment(os.environ)
