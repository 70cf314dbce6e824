from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umt_durable.durations import format_duration, parse_duration
from umt_durable.errors import DefinitionError, DurationError

READ = [
    ("P1DT2H", timedelta(days=1, hours=2)),
    ("PT15M", timedelta(minutes=15)),
    ("P2W", timedelta(weeks=2)),
    ("P1W2D", timedelta(days=9)),
    ("PT0.5S", timedelta(milliseconds=500)),
    ("PT0.000001S", timedelta(microseconds=1)),
    ("PT0S", timedelta(0)),
    ("PT36H", timedelta(hours=36)),
    ("15m", timedelta(minutes=15)),
    ("1h30m", timedelta(minutes=90)),
    ("2d", timedelta(days=2)),
    ("1w", timedelta(weeks=1)),
    ("0.25s", timedelta(milliseconds=250)),
    (90, timedelta(seconds=90)),
    (0.5, timedelta(milliseconds=500)),
    (timedelta(hours=3), timedelta(hours=3)),
]
REFUSED = [
    ("P1M", "months or years"),
    ("P1Y", "months or years"),
    ("P1Y2M3D", "months or years"),
    ("P1MT1H", "months or years"),
    ("1y", "months or years"),
    ("3mo", "months or years"),
    ("15M", "months or years"),
    ("", "empty"),
    ("  ", "empty"),
    ("-PT1S", "negative"),
    ("-5m", "negative"),
    (-1, "negative"),
    (timedelta(seconds=-1), "negative"),
    ("P", "no amount"),
    ("PT", "no amount"),
    ("P1DT", "no amount"),
    ("pt15m", "not read"),
    ("PT15", "not read"),
    ("15", "not read"),
    ("1m1h", "not read"),
    ("1h 30m", "not read"),
    ("PT1.5M", "not read"),
    ("P0.5D", "not read"),
    ("PT1.0000001S", "not read"),
    ("PT1,5S", "not read"),
    ("\u0661m", "not read"),
    ("9" * 5000 + "d", "not read"),
    ("999999999999999d", "too long"),
    (1e300, "too long"),
    (float("nan"), "finite"),
    (float("inf"), "finite"),
    (True, "bool"),
    (None, "NoneType"),
]


@pytest.mark.parametrize(("text", "expected"), READ)
def test_a_duration_is_read_exactly(text: str | float | timedelta, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_l2_what_has_no_fixed_length_or_is_not_exact_is_refused(text: str, reason: str) -> None:
    with pytest.raises(DurationError, match=reason):
        parse_duration(text)


def test_a_refused_duration_is_a_definition_error_and_a_value_error() -> None:
    assert issubclass(DurationError, DefinitionError)
    assert issubclass(DurationError, ValueError)


def test_a_long_wrong_text_is_not_repeated_in_the_error() -> None:
    with pytest.raises(DurationError) as caught:
        parse_duration("x" * 100_000)

    assert len(str(caught.value)) < 200


@given(st.timedeltas(min_value=timedelta(0)))
def test_a_written_duration_reads_back_the_same(value: timedelta) -> None:
    assert parse_duration(format_duration(value)) == value


def test_a_negative_duration_is_not_written() -> None:
    with pytest.raises(DurationError, match="negative"):
        format_duration(timedelta(seconds=-1))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (timedelta(0), "PT0S"),
        (timedelta(days=2), "P2D"),
        (timedelta(days=1, hours=2), "P1DT2H"),
        (timedelta(seconds=61.5), "PT1M1.5S"),
    ],
)
def test_a_duration_is_written_as_iso_8601(value: timedelta, text: str) -> None:
    assert format_duration(value) == text
