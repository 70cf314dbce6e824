"""Waiting for facts: register, look, check, park; the outcome is settled once and stays (I8, I9)."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from umt_durable import codec, telemetry
from umt_durable.engine.exits import Canceled, Exit
from umt_durable.engine.failures import mark_recorded
from umt_durable.engine.functions import check_call, check_function
from umt_durable.engine.passing import Pass
from umt_durable.engine.recording import awaited
from umt_durable.engine.replay import beside
from umt_durable.engine.waitables import (
    DEFAULT_POLL,
    MISSING,
    Fact,
    FactAddress,
    FactWait,
    PollPolicy,
    Timer,
    check_limit,
    check_poll,
)
from umt_durable.errors import DecodingError, DefinitionError, FactPayloadError, FactTimeoutError, NonDeterminismError
from umt_durable.failpoints import point
from umt_durable.records import WaitEntry
from umt_durable.states import RunState, WaitState
from umt_durable.store import facts, runs, waits
from umt_durable.store.guard import Guard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait for one fact, and what is asked and called meanwhile."""

    fact: FactWait
    timeout: timedelta | None = None
    poll: timedelta | PollPolicy | None = None
    on_created: Callable[[FactAddress], object] | None = None
    default: Any = MISSING

    def __post_init__(self) -> None:
        check_limit(self.fact.name, "timeout", self.timeout)
        check_poll(self.fact.name, self.poll)
        if self.on_created is not None:
            check_function(f"wait {self.fact.name!r}", "on_created", self.on_created, plain=True)
            check_call(f"wait {self.fact.name!r}", "on_created", self.on_created, None, told="address")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Several waits, of which so many are needed."""

    verb: str
    parts: dict[str | int, FactWait | Timer]
    need: int
    timeout: timedelta | None = None
    poll: timedelta | PollPolicy | None = None

    def __post_init__(self) -> None:
        check_limit(self.verb, "timeout", self.timeout)
        check_poll(self.verb, self.poll)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table of waits, and what belongs to it in the body."""

    key: str
    name: str
    address: str
    fact: FactWait | None = None
    timeout: timedelta | None = None
    until: datetime | None = None
    part_of: str | None = None
    need: int | None = None
    own_mode: str | None = None

    @property
    def mode(self) -> str:
        """Return which fact of its address it takes."""
        return self.own_mode or ("first" if self.fact is None else self.fact.mode)


def wait_for_fact(the_pass: Pass, wait: Wait, *, step_key: str | int | UUID | None = None) -> Fact[Any]:
    """Return what settled the wait, now or when the run is woken."""
    fact = wait.fact
    key = the_pass.keys.make(fact.name, step_key)
    row = Row(key=key, name=fact.name, address=fact.address(the_pass.run_id), fact=fact, timeout=wait.timeout)
    on_created = wait.on_created
    hand_out = None if on_created is None else lambda _: on_created(FactAddress(the_pass.run_id, fact.name, fact.key))
    waiting = Waiting(the_pass, [row], poll=wait.poll, on_created=hand_out)
    entry = waiting.until_settled()[0]
    if entry.state is WaitState.TIMED_OUT:
        if wait.default is MISSING:
            raise mark_recorded(FactTimeoutError(fact.name))
        return Fact(wait.default, "default")
    return _read_fact(the_pass, fact, entry)


def wait_for_group(the_pass: Pass, group: Group, *, step_key: str | int | UUID | None = None) -> list[Fact[Any]] | None:
    """Return what settled the parts that counted, in the order they were settled; None after the group's time-out."""
    key = the_pass.keys.make(group.verb, step_key)
    rows = [Row(key=key, name=group.verb, address=_shape(group), timeout=group.timeout, need=group.need)]
    for label, part in group.parts.items():
        mine = f"{key}\\.{label}"  # no key of a step is written like this
        if isinstance(part, FactWait):
            address = part.address(the_pass.run_id)
            rows.append(Row(key=mine, name=part.name, address=address, fact=part, part_of=key))
        else:
            limits = {"until" if isinstance(part.due, datetime) else "timeout": part.due}
            rows.append(Row(key=mine, name=str(label), address=waits.TIMER, part_of=key, **limits))  # type: ignore[arg-type]
    head, *entries = Waiting(the_pass, rows, poll=group.poll).until_settled()
    if head.state is WaitState.TIMED_OUT:
        return None
    won = [
        (entry.settled_at, entry.seq, _read_part(the_pass, label, part, entry))
        for (label, part), entry in zip(group.parts.items(), entries, strict=True)
        if entry.state in (WaitState.SATISFIED, WaitState.TIMED_OUT)
    ]
    return [fact for _, _, fact in sorted(won, key=lambda one: one[:2])]


def _shape(group: Group) -> str:
    """Return what stands as the address of a group: no fact has it, and on replay it tells other waits apart."""
    return json.dumps(["group", group.need, list(group.parts)], ensure_ascii=False)


def _read_part(the_pass: Pass, label: str | int, part: FactWait | Timer, entry: WaitEntry) -> Fact[Any]:
    if isinstance(part, Timer):
        return Fact(None, "timer", label)
    return _read_fact(the_pass, part, entry, label)


def _read_fact(the_pass: Pass, wait: FactWait, entry: WaitEntry, label: str | int | None = None) -> Fact[Any]:
    data = the_pass.payload_of(entry)
    try:
        payload = codec.decode(b"null" if data is None else data, wait.type)
    except DecodingError as error:
        raise mark_recorded(FactPayloadError(wait.name, str(error))) from None
    return Fact(payload, "check" if entry.fact is None else "fact", label)


def _is_same(recorded: WaitEntry, row: Row) -> bool:
    """Say whether a recorded wait is one that the code asks for; a begun step's may be that of a run retried since."""
    if row.own_mode is not None or recorded.mode == row.own_mode:
        return recorded.mode == row.own_mode
    return recorded.address == row.address


class Waiting:
    """Rows of the table of waits, of which the first decides when the body goes on; the others are its parts."""

    def __init__(
        self,
        the_pass: Pass,
        rows: Sequence[Row],
        *,
        poll: timedelta | PollPolicy | None = None,
        on_created: Callable[[Row], object] | None = None,
    ) -> None:
        """Wait for rows; `on_created` is called with the first once it is there, and pending."""
        self._pass, self._rows, self._poll, self._on_created = the_pass, rows, poll, on_created
        self._head = rows[0]
        self._checks = [row for row in rows if row.fact is not None and row.fact.check is not None]

    def until_settled(self) -> list[WaitEntry]:
        """Return the rows once the first is settled; park the run until then."""
        self._identify()
        replayed = self._is_over()
        try:
            with self._pass.span(self._head.key, "wait", replayed=replayed):
                self._settle()
        except Exit as how:
            self._pass.leave(how)
        telemetry.count(telemetry.Counter.REPLAYED_STEP, int(replayed))
        return [self._pass.waits[row.key] for row in self._rows]

    def _settle(self) -> None:
        if self._head.key not in self._pass.waits:
            self._register()
        while not self._is_over():
            self._announce()
            for row in self._checks:
                self._check(row)
            self._end_if_due()
            if not self._is_over():
                self._park()

    def _identify(self) -> None:
        """Compare the rows with what is recorded: the same ones, or none."""
        found = self._mismatch()
        if found is not None:
            keys = [row.key for row in self._rows if row.key in self._pass.waits or row.key in self._pass.journal]
            self._pass.differs(found, keys)
            self._go_beside()
        for row in self._rows:
            self._pass.saw(row.key)

    def _mismatch(self) -> NonDeterminismError | None:
        the_pass = self._pass
        is_new = self._head.key not in the_pass.waits
        for row in self._rows:
            recorded = the_pass.waits.get(row.key)
            if row.key in the_pass.journal:
                return NonDeterminismError(f"the step {row.key!r}", f"a wait for {row.address}")
            if (recorded is None) is not is_new or (recorded is not None and not _is_same(recorded, row)):
                return NonDeterminismError(getattr(recorded, "address", "no wait"), f"a wait for {row.address}")
        return None

    def _go_beside(self) -> None:
        """Wait under keys of these very waits, where others are recorded under their own."""
        addresses = codec.fingerprint([row.address for row in self._rows], {})
        old, new = self._head.key, beside(self._head.key, "wait", addresses)
        self._rows = [
            replace(row, key=new + row.key.removeprefix(old), part_of=None if row.part_of is None else new)
            for row in self._rows
        ]
        self._head = self._rows[0]
        self._checks = [row for row in self._rows if row.fact is not None and row.fact.check is not None]

    def _is_over(self) -> bool:
        entry = self._pass.waits.get(self._head.key)
        return entry is not None and entry.state is not WaitState.PENDING

    def _is_pending(self, row: Row) -> bool:
        return not self._is_over() and self._pass.waits[row.key].state is WaitState.PENDING

    def _register(self) -> None:
        """Record the waits and look for their facts, under their addresses' locks, in statements of their own (I8)."""
        the_pass = self._pass
        seqs = {row.key: the_pass.next_seq() for row in self._rows}
        contradicted: list[str] = []

        def register(guard: Guard) -> bool | None:
            contradicted.clear()
            with guard.conn.transaction():
                self._lock(guard)
                point("wait.key_lock.a")
                cancel = self._write(guard, seqs)
                if cancel is False:
                    contradicted.extend(self._look(guard))
                point("wait.commit.b")
            point("wait.commit.a")
            return cancel

        if the_pass.attempt.write(register, cancel=bool, lost="wait.commit.r"):
            raise Canceled("cancelled")
        for name in contradicted:
            telemetry.count(telemetry.Counter.CONTRADICTING_FACT)
            logger.warning("fact %r had come several times, not always with the payload that settled its wait", name)
        self._read()

    def _lock(self, guard: Guard) -> None:
        addresses = sorted({row.address for row in self._rows if row.fact is not None})
        if len(addresses) == 1:
            waits.lock_address(guard.conn, addresses[0])
        elif addresses:
            waits.lock_addresses(guard.conn, addresses)

    def _write(self, guard: Guard, seqs: dict[str, int]) -> bool | None:
        cancel: bool | None = False
        for row in self._rows:
            cancel = waits.register(
                guard,
                key=row.key,
                seq=seqs[row.key],
                name=row.name,
                address=row.address,
                mode=row.mode,
                timeout=row.timeout,
                until=row.until,
                part_of=row.part_of,
                need=row.need,
                announced=self._on_created is None,
            )
            if cancel is not False:
                break
        return cancel

    def _look(self, guard: Guard) -> list[str]:
        """Settle what has its fact already, in the order of the rows, until no more is needed."""
        conn, run = guard.conn, guard.token.run
        contradicted = []
        for row in self._rows:
            if row.fact is None:
                continue
            of_run = row.fact.key is None
            fact = facts.look_for(conn, row.address, run=run, of_run=of_run, mode=row.mode)
            point("wait.look.a")
            ends = None if fact is None else waits.settle(conn, run, row.key, state=WaitState.SATISFIED, fact=fact)
            if ends is not None and fact is not None and of_run and row.mode == "first":
                contradicted += [row.name] if facts.contradicting(conn, row.address, fact, run=run) else []
            if ends:
                break
        return contradicted

    def _announce(self) -> None:
        """Have the body hand the address out; noted only afterwards, so a crash in between does it again."""
        entry = self._pass.waits[self._head.key]
        if self._on_created is None or entry.announced or not self._is_pending(self._head):
            return
        self._pass.attempt.prove()  # user code is entered: the run must still be ours, and not cancelled
        self._on_created(self._head)
        point("wait.announce.b")
        if self._pass.attempt.write(lambda guard: waits.announce(guard, self._head.key), cancel=bool):
            raise Canceled("cancelled")

    def _check(self, row: Row) -> None:
        """Ask the body's own check, with no lock held, and settle the wait by a true answer."""
        if not self._is_pending(row):
            return
        assert row.fact is not None
        self._pass.attempt.prove()  # user code is entered, as above
        answer = self._ask(row.fact)
        if not answer:
            return
        encoded, _ = codec.round_trip(answer, row.fact.type, where=f"the check of wait {row.name!r}")

        def settle(guard: Guard) -> bool | None:
            return waits.settle_by_check(guard, row.key, payload=encoded.data, part_of=row.part_of)

        if self._pass.attempt.write(settle, cancel=bool):
            raise Canceled("cancelled")
        self._read()

    def _ask(self, fact: FactWait) -> Any:
        check: Callable[..., Any] | None = fact.check
        assert check is not None
        if not fact.reads:
            return awaited(self._pass, check(), preemptible=True)
        with self._pass.database.reading() as conn:
            answer = check(conn)
            if inspect.iscoroutine(answer):
                answer.close()
                raise DefinitionError(f"wait {fact.name!r}: a check that gives a coroutine takes nothing")
            return answer

    def _end_if_due(self) -> None:
        """Time out what is overdue, here: timers look at parked runs only, and this one is needed again."""
        if not any(self._is_pending(row) and self._pass.waits[row.key].due for row in self._rows):
            return

        def end(guard: Guard) -> bool | None:
            with guard.conn.transaction():
                if self._head.own_mode is not None:  # what was said in time counts, routed or not
                    self._lock(guard)
                cancel = runs.lock_grant(guard)
                if cancel is False and self._head.own_mode is not None:
                    self._look(guard)
                if cancel is False:
                    waits.time_out(guard.conn, guard.token.run)
            return cancel

        if self._pass.attempt.write(end, cancel=bool):
            raise Canceled("cancelled")
        self._read()

    def _park(self) -> None:
        pending = [row.key for row in self._rows if self._is_pending(row)]
        what = self._head.name if self._head.need is None else f"{self._head.name} of {len(self._rows) - 1} waits"
        self._pass.suspend(RunState.WAITING, waits=pending, poll=self._next_poll(), until=f"for the fact {what}")
        self._read()

    def _next_poll(self) -> timedelta | None:
        if not self._checks:
            return None
        if isinstance(self._poll, PollPolicy):
            return self._poll.next_after(timedelta(seconds=self._pass.waits[self._head.key].age_seconds))
        return DEFAULT_POLL if self._poll is None else self._poll

    def _read(self) -> None:
        run = self._pass.attempt.token.run
        mine = [row.key for row in self._rows]
        entries = self._pass.attempt.read(lambda guard: waits.of_run(guard.conn, run, mine))
        self._pass.waits.update((entry.key, entry) for entry in entries)
