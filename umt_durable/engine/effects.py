"""What a body says of an external effect, and what its functions are told and may answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeAlias, TypeVar

from umt_durable.engine.context import AttemptToken, current_context
from umt_durable.engine.functions import check_call, check_function
from umt_durable.errors import DefinitionError, NotAppliedError
from umt_durable.ledger import Ledger
from umt_durable.session import Binding

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

MISSING: Final = object()


class Policy(StrEnum):
    """What is done about an effect of which nobody knows whether it was applied."""

    IDEMPOTENT_KEY = "idempotent_key"  # call again: the provider honours info.idempotency_key
    FENCED = "fenced"  # look up, then call: the provider compares info.turn in both
    PARK = "park"  # ask a person


@dataclass(frozen=True, slots=True)
class Done(Generic[R_co]):
    """A look-up found that the effect was applied; its result is what the provider said then."""

    result: R_co


@dataclass(frozen=True, slots=True)
class NotDone:
    """A look-up found that the effect was not applied, so that it is called now."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A look-up could not find out: it is tried again as the step's policy says, and then a person is asked."""


Reconciled: TypeAlias = Done[R] | NotDone | Unknown | type[NotDone] | type[Unknown]


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What the functions of an effect are told.

    Shape: `resumed` says that an earlier try may have applied the effect. `idempotency_key` is the same for all
    attempts and runs. `turn` grows each time the effect is begun or taken over, across runs: it is what a provider that
    compares tokens gets. `attempt_token` is that of this execution; fences of two runs do not compare.
    """

    op_key: str
    namespace: str
    resumed: bool
    idempotency_key: str
    turn: int
    attempt_token: AttemptToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a body asks for.

    Errors: DefinitionError for what could never work, before anything is written.
    """

    op_key: str
    do: Callable[[OpInfo], Any]
    reconcile: Callable[[OpInfo], Any] | None
    commit: Callable[[Any, Any], object] | None
    policy: Policy | None
    request: Any
    not_applied: Collection[type[Exception]]
    binding: Binding

    def __post_init__(self) -> None:
        name = f"effect {self.op_key!r}"
        if not isinstance(self.op_key, str) or not self.op_key:
            raise DefinitionError(f"{self.op_key!r} is no op key: it is text that is not empty")
        if self.do is None:
            raise DefinitionError(f"{name}: do is missing")
        # Found out later that one cannot be called, nobody knows whether the effect was applied.
        for label, given in (("do", ("info",)), ("reconcile", ("info",)), ("commit", ("tx", "result"))):
            if (function := getattr(self, label)) is not None:
                check_function(name, label, function, plain=True)
                check_call(name, label, function, *given, told=", ".join(given))
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise DefinitionError(f"{name}: policy must be one of Policy, not {self.policy!r}")
        if self.policy is Policy.FENCED and self.reconcile is None:
            raise DefinitionError(
                f"{name}: Policy.FENCED needs reconcile=, a look-up that carries info.turn: without it a late call of "
                "an earlier attempt can still be applied first"
            )
        if self.policy is Policy.PARK and self.reconcile is not None:
            raise DefinitionError(f"{name}: Policy.PARK asks a person, so reconcile= would never be called")
        if not isinstance(self.not_applied, list | tuple | set | frozenset):
            raise DefinitionError(f"{name}: not_applied holds exception classes, not {self.not_applied!r}")
        for cls in self.not_applied:
            if not isinstance(cls, type) or not issubclass(cls, Exception):
                raise DefinitionError(f"{name}: not_applied holds exception classes, not {cls!r}")
        self._check_commit()

    def _check_commit(self) -> None:
        if self.commit is not None and isinstance(self.binding, Ledger):
            raise DefinitionError(
                f"effect {self.op_key!r}: commit= writes where the op ledger is, in the database of the runs; write to"
                " another one in a step.transaction after it"
            )

    @property
    def asks_a_person(self) -> bool:
        """Say whether nothing was declared that could decide what an earlier try has done."""
        return self.policy is Policy.PARK or (self.policy is None and self.reconcile is None)

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """Return the exceptions of `do` which say that nothing was applied."""
        return (NotAppliedError, *self.not_applied)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Return what tells this request from another one: what was given as such, or is bound to `do`."""
        if self.request is not MISSING:
            return (self.request,)
        if isinstance(self.do, functools.partial):
            return (list(self.do.args), dict(self.do.keywords))
        return ()


def with_attempt_token(
    database: Binding | None,
    op_key: str,
    fn: Callable[[OpInfo], R],
    *,
    commit: Callable[[Any, R], object] | None = None,
    **options: Any,
) -> R:
    """Be `step.effect` of the current body, under the name that other packages have for it.

    Shape: `database` is what `on=` takes; None is our own. `options` are those of `step.effect`.
    Errors: as `step.effect`; DurableError outside a durable body.
    """
    result: R = current_context().step.effect(op_key, fn, commit=commit, on=database, **options)
    return result
