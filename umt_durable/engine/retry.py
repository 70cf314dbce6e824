"""How often and how soon a failed body is tried again. Pure: it neither waits nor reads a clock."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final

from umt_durable.durations import parse_duration
from umt_durable.errors import (
    DecodingError,
    DefinitionError,
    DurableError,
    DurationError,
    EncodingError,
    FencingError,
    IdempotencyConflictError,
    InputError,
    NonDeterminismError,
    NonRetryableError,
    OpConflictError,
    RunExistsError,
    UncertainOpError,
    UnknownTaskError,
)

logger = logging.getLogger(__name__)

Rule = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]

# Trying again cannot help: the same code would meet the same refusal.
NEVER: Final[tuple[type[BaseException], ...]] = (
    NonRetryableError,
    DefinitionError,
    InputError,
    EncodingError,
    DecodingError,
    NonDeterminismError,
    FencingError,
    IdempotencyConflictError,
    RunExistsError,
    OpConflictError,
    UncertainOpError,
    UnknownTaskError,
)

_MAX_ATTEMPTS: Final = 1_000_000


class RetryAfter(DurableError):
    """Raise this in a body to be tried again after a delay of your own, for example what a server asked for.

    Shape: `delay` replaces the policy's delay and its maximum; the number of attempts and `max_elapsed` still hold.
    """

    def __init__(self, delay: timedelta | float | str, message: str = "") -> None:
        self.delay = parse_duration(delay)
        super().__init__(message or f"to be tried again after {self.delay}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failure is tried again.

    Shape: `max_attempts` counts every attempt, the first included. The n-th failure is followed by a delay of
    `initial * factor ** (n - 1)`, at most `maximum`, shortened at random by up to the fraction `jitter`. No attempt
    begins later than `max_elapsed` after the first one did. `retry_on` and `give_up_on` are exception types or a
    predicate; `give_up_on` decides before `retry_on`.
    Errors: DefinitionError, at construction, for a policy that could not work as it reads.
    """

    max_attempts: int
    initial: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    maximum: timedelta = timedelta(minutes=1)
    jitter: float = 0.0
    max_elapsed: timedelta | None = None
    retry_on: Rule = Exception
    give_up_on: Rule = ()

    NETWORK: ClassVar[RetryPolicy]
    FILE: ClassVar[RetryPolicy]
    NONE: ClassVar[RetryPolicy]

    def __post_init__(self) -> None:
        """Refuse a policy that could not work as it reads."""
        if not _is_whole(self.max_attempts) or not 1 <= self.max_attempts <= _MAX_ATTEMPTS:
            raise DefinitionError(f"max_attempts must be a whole number from 1 to {_MAX_ATTEMPTS}")
        for name in ("initial", "maximum"):
            if not _is_length(getattr(self, name)):
                raise DefinitionError(f"{name} must be a timedelta that is not negative")
        if self.maximum < self.initial:
            raise DefinitionError(f"maximum ({self.maximum}) must not be shorter than initial ({self.initial})")
        if not _is_number(self.factor) or self.factor < 1:
            raise DefinitionError("factor must be a finite number of at least 1")
        if not _is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise DefinitionError("jitter must be a number from 0 to 1")
        if self.max_elapsed is not None and not _is_length(self.max_elapsed):
            raise DefinitionError("max_elapsed must be a timedelta that is not negative, or None")
        for name in ("retry_on", "give_up_on"):
            _check_rule(name, getattr(self, name))

    @classmethod
    def iso(
        cls,
        initial: str = "PT10S",
        *,
        cap: str = "P1D",
        max_attempts: int = 16,
        jitter: float = 0.0,
        max_elapsed: timedelta | None = None,
        retry_on: Rule = Exception,
        give_up_on: Rule = (),
    ) -> RetryPolicy:
        """Make a policy that doubles its delay from `initial` to `cap`, both written as durations (`PT10S`, `P1D`).

        The default of 16 attempts is where ten seconds doubled reach one day.
        Errors: DefinitionError when a duration is not read or the policy could not work.
        """
        try:
            first, last = parse_duration(initial), parse_duration(cap)
        except DurationError as error:
            raise DefinitionError(f"retry policy: {error}") from error
        return cls(max_attempts, first, 2.0, last, jitter, max_elapsed, retry_on, give_up_on)

    @property
    def exception_types(self) -> tuple[type[BaseException], ...]:
        """Give the exception types that the rules name, so that they can be told apart after a restart."""
        rules = [rule if isinstance(rule, tuple) else (rule,) for rule in (self.retry_on, self.give_up_on)]
        return tuple(item for rule in rules for item in rule if isinstance(item, type))

    def is_retryable(self, error: BaseException) -> bool:
        """Say whether this failure may be tried again at all.

        Never for `NonRetryableError`, for refusals that would only repeat themselves, and for what is no `Exception`.
        A predicate that raises counts as no.
        """
        if not isinstance(error, Exception) or isinstance(error, NEVER):
            return False
        if isinstance(error, RetryAfter):
            return True
        try:
            return not _matches(self.give_up_on, error) and _matches(self.retry_on, error)
        except Exception:
            logger.exception("the predicate of a retry policy raised; the failure is final")
            return False

    def next_delay(
        self,
        failures: int,
        rng: Callable[[], float],
        *,
        error: BaseException | None = None,
        elapsed: timedelta = timedelta(0),
    ) -> timedelta | None:
        """Give the delay before the next attempt, or None when there is none.

        Shape: `failures` counts this one; `rng` gives numbers in [0, 1) and is called at most once; `elapsed` is the
        time since the first attempt began.
        """
        if failures < 1:
            raise ValueError("failures counts the failure that is being handled, so it is at least 1")
        if failures >= self.max_attempts or (error is not None and not self.is_retryable(error)):
            return None
        delay = error.delay if isinstance(error, RetryAfter) else self._backoff(failures) * (1 - self.jitter * rng())
        if self.max_elapsed is not None and elapsed + delay > self.max_elapsed:
            return None
        return delay

    def _backoff(self, failures: int) -> timedelta:
        try:
            grown = self.initial.total_seconds() * float(self.factor) ** (failures - 1)
        except OverflowError:
            grown = math.inf if self.initial else 0.0
        # Compared before it is made a timedelta, which ends at 2.7 million years.
        return self.maximum if grown >= self.maximum.total_seconds() else timedelta(seconds=grown)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_length(value: object) -> bool:
    return isinstance(value, timedelta) and value >= timedelta(0)


def _check_rule(name: str, rule: object) -> None:
    types = rule if isinstance(rule, tuple) else (rule,)
    if all(isinstance(item, type) and issubclass(item, BaseException) for item in types):
        return
    if isinstance(rule, type | tuple) or not callable(rule):
        raise DefinitionError(f"{name} must be exception types or a predicate")


def _matches(rule: Rule, error: BaseException) -> bool:
    if isinstance(rule, type | tuple):
        return isinstance(error, rule)
    return bool(rule(error))


RetryPolicy.NETWORK = RetryPolicy(5, timedelta(seconds=1), 4.0, timedelta(minutes=1), jitter=0.25)
RetryPolicy.FILE = RetryPolicy(3, timedelta(seconds=1), 2.0, timedelta(minutes=1))
RetryPolicy.NONE = RetryPolicy(1)
