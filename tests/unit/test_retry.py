from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umt_durable.engine.retry import NEVER, RetryAfter, RetryPolicy
from umt_durable.errors import DefinitionError, DurableError, EncodingError, FencingError, NonRetryableError

SECOND = timedelta(seconds=1)

INVALID: list[dict[str, Any]] = [
    {"max_attempts": 0},
    {"max_attempts": -1},
    {"max_attempts": True},
    {"max_attempts": 2.0},
    {"max_attempts": None},
    {"max_attempts": 10**9},
    {"initial": timedelta(seconds=-1)},
    {"initial": 1},
    {"maximum": timedelta(0)},
    {"maximum": None},
    {"factor": 0.5},
    {"factor": float("nan")},
    {"factor": float("inf")},
    {"factor": "2"},
    {"jitter": -0.1},
    {"jitter": 1.1},
    {"jitter": float("nan")},
    {"max_elapsed": timedelta(seconds=-1)},
    {"max_elapsed": 5},
    {"retry_on": int},
    {"retry_on": (OSError, "TimeoutError")},
    {"retry_on": None},
    {"give_up_on": 3},
]


def no_jitter() -> float:
    return 0.0


def delays(policy: RetryPolicy) -> list[float]:
    found = []
    for failures in range(1, policy.max_attempts + 1):
        delay = policy.next_delay(failures, no_jitter)
        if delay is None:
            assert failures == policy.max_attempts
            break
        found.append(delay.total_seconds())
    return found


@pytest.mark.parametrize("wrong", INVALID, ids=str)
def test_k2_an_invalid_policy_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    valid: dict[str, Any] = {"max_attempts": 3}

    with pytest.raises(DefinitionError, match=next(iter(wrong))):
        RetryPolicy(**(valid | wrong))


def test_e2_the_presets_are_the_stated_classes() -> None:
    assert delays(RetryPolicy.NETWORK) == [1, 4, 16, 60]
    assert RetryPolicy.NETWORK.max_attempts == 5
    assert delays(RetryPolicy.FILE) == [1, 2]
    assert delays(RetryPolicy.NONE) == []


def test_k2_the_iso_curve_doubles_from_ten_seconds_to_a_day() -> None:
    found = delays(RetryPolicy.iso("PT10S", cap="P1D"))

    assert RetryPolicy.iso() == RetryPolicy.iso("PT10S", cap="P1D")
    assert RetryPolicy.iso(jitter=0.5, max_elapsed=60 * SECOND).max_elapsed == 60 * SECOND
    assert found[:4] == [10, 20, 40, 80]
    assert found[-2:] == [10 * 2**13, 86_400]


@pytest.mark.parametrize(("initial", "cap"), [("P1M", "P1D"), ("soon", "P1D"), ("PT10S", "P1Y"), ("P2D", "P1D")])
def test_an_iso_policy_that_could_not_work_is_refused(initial: str, cap: str) -> None:
    with pytest.raises(DefinitionError):
        RetryPolicy.iso(initial, cap=cap)


@given(
    attempts=st.integers(1, 1000),
    failures=st.integers(1, 2000),
    initial=st.floats(0, 1e6),
    factor=st.floats(1, 1e6),
    longer=st.floats(0, 1e8),
    jitter=st.floats(0, 1),
    seed=st.integers(),
)
def test_a_delay_is_never_above_its_bounds(
    attempts: int, failures: int, initial: float, factor: float, longer: float, jitter: float, seed: int
) -> None:
    first = timedelta(seconds=initial)
    policy = RetryPolicy(attempts, first, factor, first + timedelta(seconds=longer), jitter=jitter)

    delay = policy.next_delay(failures, random.Random(seed).random)

    if failures >= attempts:
        assert delay is None
    else:
        assert delay is not None
        assert timedelta(0) <= delay <= policy.maximum
        assert delay >= first * (1 - jitter) - timedelta(microseconds=1)


def test_a_count_that_leaves_the_failure_out_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RetryPolicy.NETWORK.next_delay(0, no_jitter)


def test_jitter_shortens_by_up_to_its_fraction() -> None:
    policy = RetryPolicy(3, 10 * SECOND, jitter=0.5)

    assert policy.next_delay(1, lambda: 0.0) == 10 * SECOND
    assert policy.next_delay(1, lambda: 0.5) == 7.5 * SECOND
    assert policy.next_delay(1, lambda: 1.0) == 5 * SECOND


def test_no_attempt_begins_after_the_time_allowed() -> None:
    policy = RetryPolicy(10, 10 * SECOND, 1.0, max_elapsed=30 * SECOND)

    assert policy.next_delay(1, no_jitter, elapsed=20 * SECOND) == 10 * SECOND
    assert policy.next_delay(1, no_jitter, elapsed=21 * SECOND) is None


@pytest.mark.parametrize("kind", [*NEVER, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_can_only_fail_again_is_never_tried_again(kind: type[BaseException]) -> None:
    class Own(kind):  # type: ignore[misc, valid-type]  # a subclass of the parameter
        def __init__(self) -> None:
            pass

    policy = RetryPolicy(5, retry_on=BaseException)

    assert not policy.is_retryable(Own())
    assert policy.next_delay(1, no_jitter, error=Own()) is None


def test_the_named_refusals_are_never_tried_again() -> None:
    policy = RetryPolicy.NETWORK

    for error in (NonRetryableError("no"), EncodingError("step 'x'", "$", "why"), FencingError(1, 2)):
        assert not policy.is_retryable(error)


def test_types_decide_and_giving_up_comes_first() -> None:
    policy = RetryPolicy(3, retry_on=(OSError, KeyError), give_up_on=FileNotFoundError)

    assert policy.is_retryable(TimeoutError())
    assert policy.is_retryable(KeyError("k"))
    assert not policy.is_retryable(FileNotFoundError())
    assert not policy.is_retryable(ValueError())
    assert policy.exception_types == (OSError, KeyError, FileNotFoundError)


def test_a_predicate_decides() -> None:
    policy = RetryPolicy(3, retry_on=lambda error: "busy" in str(error))

    assert policy.is_retryable(RuntimeError("busy"))
    assert not policy.is_retryable(RuntimeError("broken"))
    assert policy.exception_types == ()


def test_a_predicate_that_raises_means_no(caplog: pytest.LogCaptureFixture) -> None:
    policy = RetryPolicy(3, retry_on=lambda error: error.code == 503)  # type: ignore[attr-defined]  # the bug under test

    assert not policy.is_retryable(RuntimeError())
    assert "predicate" in caplog.text


def test_retry_after_sets_the_delay_within_the_other_bounds() -> None:
    policy = RetryPolicy(3, SECOND, maximum=SECOND, jitter=1.0, retry_on=OSError, max_elapsed=timedelta(hours=1))

    assert policy.next_delay(1, lambda: 0.9, error=RetryAfter(90)) == 90 * SECOND
    assert policy.next_delay(3, no_jitter, error=RetryAfter(90)) is None
    assert policy.next_delay(1, no_jitter, error=RetryAfter("2h")) is None
    assert isinstance(RetryAfter(1), DurableError)


@pytest.mark.parametrize("delay", [-1, float("nan"), "soon"])
def test_retry_after_refuses_a_delay_that_is_none(delay: float | str) -> None:
    with pytest.raises(DefinitionError):
        RetryAfter(delay)


def test_a_policy_is_a_value() -> None:
    assert RetryPolicy(3) == RetryPolicy(3)
    assert hash(RetryPolicy(3)) == hash(RetryPolicy(3))
    with pytest.raises(AttributeError):
        RetryPolicy.NETWORK.max_attempts = 9  # type: ignore[misc]  # frozen: that is the test
