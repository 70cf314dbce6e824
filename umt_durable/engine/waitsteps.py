"""The steps that wait for facts and timers, as a body calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypedDict, TypeVar, overload

from umt_durable import codec
from umt_durable.engine.beginning import Beginning, begin
from umt_durable.engine.failures import mark_recorded
from umt_durable.engine.passing import Pass
from umt_durable.engine.recording import StepOptions
from umt_durable.engine.waitables import (
    MISSING,
    Check,
    Fact,
    FactAddress,
    FactWait,
    PollPolicy,
    Waitable,
    Waitables,
    read_waitables,
)
from umt_durable.engine.waiting import Group, Wait, wait_for_fact, wait_for_group
from umt_durable.errors import DefinitionError, FactTimeoutError

V = TypeVar("V")

_SAID: Final = "whoever says the fact says it under that name; keep it, or ask ctx.patched which of the two to wait for"


class GroupOptions(TypedDict, total=False):
    """The keywords of a wait for several facts and timers."""

    timeout: timedelta | None
    poll: timedelta | PollPolicy | None


class WaitOptions(GroupOptions, total=False):
    """The keywords of a wait for one fact, but for its `type`."""

    key: str | None
    check: Check | None
    mode: str
    on_created: Callable[[FactAddress], object] | None
    default: Any


class WaitSteps:
    """The part of the vocabulary that waits."""

    _pass: Pass
    _options: StepOptions

    @overload
    def wait_for_fact(
        self,
        name: str,
        *,
        type: type[V],
        key: str | None = None,
        check: Check | None = None,
        timeout: timedelta | None = None,
        poll: timedelta | PollPolicy | None = None,
        mode: str = "first",
        on_created: Callable[[FactAddress], object] | None = None,
        default: Any = MISSING,
    ) -> Fact[V]: ...

    @overload
    def wait_for_fact(
        self,
        name: str,
        *,
        type: Any = codec.EMPTY,
        key: str | None = None,
        check: Check | None = None,
        timeout: timedelta | None = None,
        poll: timedelta | PollPolicy | None = None,
        mode: str = "first",
        on_created: Callable[[FactAddress], object] | None = None,
        default: Any = MISSING,
    ) -> Fact[Any]: ...

    def wait_for_fact(
        self,
        name: str,
        *,
        type: Any = codec.EMPTY,
        key: str | None = None,
        check: Check | None = None,
        timeout: timedelta | None = None,
        poll: timedelta | PollPolicy | None = None,
        mode: str = "first",
        on_created: Callable[[FactAddress], object] | None = None,
        default: Any = MISSING,
    ) -> Fact[Any]:
        """Park the run until a fact of this name was said to it, or with `key` was emitted under that key (I8).

        Shape: `check` is asked after the wait is registered, with no lock held, and again every `poll` (default a
        minute); its first true answer settles the wait and is the payload. One that takes an argument is given a
        psycopg Connection to our database, in autocommit, that may only read; a coroutine function takes none.
        `mode`: the `first` or the `latest` fact, or the next of a `queue`. `type`: what the payload is read as, like a
        step's return annotation. `on_created` is called with the address to say the fact at, once the wait is there;
        again after a crash in the middle of it. With `default` a time-out gives a Fact with that payload instead of the
        error.
        Errors: FactTimeoutError after `timeout`, FactPayloadError for a fact that is not of `type`; either outcome is
        recorded and never changes.
        """
        self._pass.check()
        self._options.refuse_undo(f"wait {name!r}")
        self._options.refuse_for_bodies(f"wait {name!r}")
        self._options.refuse_renaming(f"wait {name!r}", _SAID)
        fact = FactWait(name, key=key, check=check, mode=mode, type=type)
        wait = Wait(fact=fact, timeout=timeout, poll=poll, on_created=on_created, default=default)
        return wait_for_fact(self._pass, wait, step_key=self._options.key)

    @overload
    def begin(
        self,
        name: str,
        *,
        type: type[V],
        on_created: Callable[[str], object],
        timeout: timedelta | None = None,
    ) -> V: ...

    @overload
    def begin(
        self,
        name: str,
        *,
        type: Any = codec.EMPTY,
        on_created: Callable[[str], object],
        timeout: timedelta | None = None,
    ) -> Any: ...

    def begin(
        self,
        name: str,
        *,
        type: Any = codec.EMPTY,
        on_created: Callable[[str], object],
        timeout: timedelta | None = None,
    ) -> Any:
        """Begin a step that somebody else completes, park the run until then, and return the result.

        Shape: `on_created` is called with the step's token once the step is there; again after a crash in the middle of
        it, with the same one. Whoever has the token calls `durable.complete(token, result)` or `durable.fail(token,
        error)`, anywhere; the first counts. `type`: what the result is read as, like a step's return annotation.
        Errors: what the step was failed with, as itself if its class is registered, else StepFailedError;
        StepTimeoutError after `timeout`, when the token has no use any more; FactPayloadError for a result that is not
        of `type`; each recorded. ConfigurationError without a key to sign with, before anything is written.
        """
        self._pass.check()
        self._options.refuse_undo(f"step {name!r}")
        self._options.refuse_for_bodies(f"step {name!r}")
        self._options.refuse_renaming(f"step {name!r}", "its token names the step as it was begun")
        step = Beginning(name=name, on_created=on_created, type=type, timeout=timeout)
        return begin(self._pass, step, step_key=self._options.key)

    def wait_any(
        self, waits: Waitables, *, timeout: timedelta | None = None, poll: timedelta | PollPolicy | None = None
    ) -> Fact[Any]:
        """Park the run until the first of several facts and timers; the others are cancelled with it (I9).

        Shape: a mapping of labels to waits, or a list; each a FactWait, a Timer, a fact's name, a timedelta or a
        datetime. The Fact says by its `label` which one it was.
        Errors: FactTimeoutError after `timeout`, recorded; DefinitionError for none, or more than 64.
        """
        return self._wait("wait_any", waits, 1, timeout, poll)[0]

    @overload
    def wait_all(
        self,
        waits: Mapping[str, Waitable],
        *,
        timeout: timedelta | None = None,
        poll: timedelta | PollPolicy | None = None,
    ) -> dict[str, Fact[Any]]: ...

    @overload
    def wait_all(
        self, waits: Sequence[Waitable], *, timeout: timedelta | None = None, poll: timedelta | PollPolicy | None = None
    ) -> list[Fact[Any]]: ...

    def wait_all(
        self, waits: Waitables, *, timeout: timedelta | None = None, poll: timedelta | PollPolicy | None = None
    ) -> dict[str, Fact[Any]] | list[Fact[Any]]:
        """Park the run until all of several facts and timers have come; give them in the order they were asked for.

        Errors: FactTimeoutError after `timeout`, recorded; DefinitionError for more than 64.
        """
        won = {fact.label: fact for fact in self._wait("wait_all", waits, None, timeout, poll)}
        if isinstance(waits, Mapping):
            return {label: won[label] for label in waits}
        return [won[place] for place in range(len(waits))]

    def wait_quorum(
        self, n: int, waits: Waitables, *, timeout: timedelta | None = None, poll: timedelta | PollPolicy | None = None
    ) -> list[Fact[Any]]:
        """Park the run until `n` of several facts and timers have come; give these in the order they came.

        Errors: FactTimeoutError after `timeout`, recorded; DefinitionError when `n` is not from 1 to their number.
        """
        return self._wait("wait_quorum", waits, n, timeout, poll)

    def _wait(
        self,
        verb: str,
        given: Waitables,
        need: int | None,
        timeout: timedelta | None,
        poll: timedelta | PollPolicy | None,
    ) -> list[Fact[Any]]:
        self._pass.check()
        self._options.refuse_undo(f"step.{verb}")
        self._options.refuse_for_bodies(f"step.{verb}")
        self._options.refuse_renaming(f"step.{verb}", "it has no name of its own; key= tells several apart")
        parts = read_waitables(verb, given)
        if need is None and not parts:
            return []
        wanted = len(parts) if need is None else need
        if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= len(parts):
            raise DefinitionError(f"step.{verb}: {wanted!r} of {len(parts)} waits can never come")
        group = Group(verb=verb, parts=parts, need=wanted, timeout=timeout, poll=poll)
        won = wait_for_group(self._pass, group, step_key=self._options.key)
        if won is None:
            raise mark_recorded(FactTimeoutError(verb))
        return won
