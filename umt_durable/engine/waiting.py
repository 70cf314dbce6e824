"""Waiting for facts: register, look, check, park; the outcome is settled once and stays (I8, I9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal
from uuid import UUID

from umt_durable import codec, telemetry
from umt_durable.engine.exits import Canceled, Exit
from umt_durable.engine.failures import mark_recorded
from umt_durable.engine.passing import LONGEST, Pass
from umt_durable.errors import DefinitionError, FactTimeoutError, NonDeterminismError
from umt_durable.failpoints import point
from umt_durable.records import WaitEntry
from umt_durable.states import RunState, WaitState
from umt_durable.store import facts, waits
from umt_durable.store.guard import Guard

DEFAULT_POLL = timedelta(minutes=1)
MODES = ("first", "latest")
RESERVED = "umt."
MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Fact:
    """What settled a wait: its payload, and where it came from."""

    payload: Any
    source: Literal["fact", "check", "default"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a body waits for."""

    name: str
    key: str | None
    check: Callable[[], Any] | None
    timeout: timedelta | None
    poll: timedelta | None
    mode: str
    default: Any

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.key is not None:
            check_key(self.name, self.key)
        if self.mode not in MODES:
            raise DefinitionError(f"wait {self.name!r}: mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        for label, value in (("timeout", self.timeout), ("poll", self.poll)):
            if value is not None and (not isinstance(value, timedelta) or not timedelta(0) <= value <= LONGEST):
                raise DefinitionError(f"wait {self.name!r}: {label} must be a timedelta from 0 to {LONGEST.days} days")

    def address(self, run_id: str) -> str:
        """Return where the fact is said."""
        return waits.run_address(run_id, self.name) if self.key is None else waits.key_address(self.name, self.key)


def check_name(name: str) -> None:
    """Refuse a name no fact can have.

    Errors: DefinitionError.
    """
    if not isinstance(name, str) or not name or len(name) > 255 or "\0" in name:
        raise DefinitionError(f"{name!r} is no name for a fact: 1 to 255 characters")
    if name.startswith(RESERVED):
        raise DefinitionError(f"{name!r}: names under {RESERVED!r} are reserved")


def check_key(name: str, key: object) -> None:
    """Refuse a key no fact can be emitted under.

    Errors: DefinitionError.
    """
    fits = isinstance(key, str) and 0 < len(key) <= 255 and "\0" not in key
    if not fits or any("\ud800" <= character <= "\udfff" for character in str(key)):
        raise DefinitionError(f"the key of fact {name!r} must be text of 1 to 255 characters, not {key!r}")


def wait_for_fact(the_pass: Pass, wait: Wait, *, step_key: str | int | UUID | None = None) -> Fact:
    """Return what settled the wait, now or when the run is woken."""
    key = the_pass.keys.make(wait.name, step_key)
    recorded = the_pass.waits.get(key)
    if key in the_pass.journal or (recorded is not None and recorded.address != wait.address(the_pass.run_id)):
        found = recorded.address if recorded is not None else f"the step {key!r}"
        the_pass.condemn(NonDeterminismError(found, f"a wait for {wait.address(the_pass.run_id)}"))
    the_pass.saw(key)
    replayed = recorded is not None and recorded.state is not WaitState.PENDING
    try:
        with the_pass.span(key, "wait", replayed=replayed):
            settled = _settle(the_pass, wait, key, recorded)
    except Exit as how:
        the_pass.leave(how)
    telemetry.count(telemetry.Counter.REPLAYED_STEP)
    return _outcome(wait, settled)


def _settle(the_pass: Pass, wait: Wait, key: str, recorded: WaitEntry | None) -> WaitEntry:
    """Return the wait with its outcome; park the run until there is one."""
    while recorded is None or recorded.state is WaitState.PENDING:
        recorded = _register(the_pass, wait, key, recorded)
        if recorded.state is WaitState.PENDING and wait.check is not None:
            recorded = _check(the_pass, wait, recorded)
        if recorded.state is WaitState.PENDING:
            poll = None if wait.check is None else wait.poll or DEFAULT_POLL
            the_pass.suspend(RunState.WAITING, waits=[key], poll=poll, until=f"for the fact {wait.name}")
            recorded = _read(the_pass, key)
    return recorded


def _outcome(wait: Wait, entry: WaitEntry) -> Fact:
    if entry.state is WaitState.TIMED_OUT:
        if wait.default is MISSING:
            raise mark_recorded(FactTimeoutError(wait.name))
        return Fact(wait.default, "default")
    payload = None if entry.payload is None else codec.decode(entry.payload)
    return Fact(payload, "check" if entry.fact is None else "fact")


def _register(the_pass: Pass, wait: Wait, key: str, recorded: WaitEntry | None) -> WaitEntry:
    """Record the wait and look for its fact, under the lock of the address, in statements of their own (I8)."""
    address = wait.address(the_pass.run_id)
    seq = the_pass.next_seq() if recorded is None else recorded.seq

    def register(guard: Guard) -> bool | None:
        conn = guard.conn
        with conn.transaction():
            waits.lock_address(conn, address)
            point("wait.key_lock.a")
            cancel = waits.register(
                guard, key=key, seq=seq, name=wait.name, address=address, mode=wait.mode, timeout=wait.timeout
            )
            if cancel is False:
                fact = facts.look_for(conn, address, run=guard.token.run, of_run=wait.key is None, mode=wait.mode)
                point("wait.look.a")
                if fact is not None:
                    waits.settle(conn, guard.token.run, key, state=WaitState.SATISFIED, fact=fact)
            point("wait.commit.b")
        point("wait.commit.a")
        return cancel

    if the_pass.attempt.write(register, cancel=bool):
        raise Canceled("cancelled")
    return _read(the_pass, key)


def _check(the_pass: Pass, wait: Wait, entry: WaitEntry) -> WaitEntry:
    """Ask the body's own check, with no lock held, and settle the wait by a true answer."""
    assert wait.check is not None
    the_pass.attempt.prove()  # user code is entered: the run must still be ours, and not cancelled
    answer = wait.check()
    if not answer:
        return entry
    encoded, _ = codec.round_trip(answer, codec.EMPTY, where=f"the check of wait {wait.name!r}")
    if the_pass.attempt.write(lambda guard: waits.settle_by_check(guard, entry.key, payload=encoded.data), cancel=bool):
        raise Canceled("cancelled")
    return _read(the_pass, entry.key)


def _read(the_pass: Pass, key: str) -> WaitEntry:
    run = the_pass.attempt.token.run
    entries = {entry.key: entry for entry in the_pass.attempt.read(lambda guard: waits.of_run(guard.conn, run))}
    the_pass.waits.update(entries)
    return entries[key]
