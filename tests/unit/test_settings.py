"""Settings: numbers that make no sense are refused, wherever they come from."""

from __future__ import annotations

import math
from typing import Any

import pytest

from umt_durable.errors import ConfigurationError
from umt_durable.settings import Settings

SECONDS = ("lease_seconds", "poll_seconds", "deliver_seconds", "hold_seconds")


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e12])
def test_a_time_that_is_no_time_is_refused(name: str, value: float) -> None:
    given: dict[str, Any] = {name: value}

    with pytest.raises(ConfigurationError, match=name):
        Settings(**given)


@pytest.mark.parametrize("name", ["max_crashes", "max_publish_attempts", "pool_size"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1])
def test_a_count_that_is_no_count_is_refused(name: str, value: float) -> None:
    given: dict[str, Any] = {name: value}

    with pytest.raises(ConfigurationError, match=name):
        Settings(**given)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "soon"])
def test_what_the_environment_says_is_checked_as_well(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?i)lease_seconds"):
        Settings.load({}, {}, {"DURABLE_LEASE_SECONDS": text})


@pytest.mark.parametrize("value", [math.inf, math.nan, [1], "many"])
def test_a_count_that_cannot_be_read_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(ConfigurationError, match="durable_pool_size"):
        Settings.load({}, {"durable_pool_size": value}, {})


def test_e11_further_names_of_secrets_are_read_from_a_list_or_a_text() -> None:
    assert Settings.load({"redact_keys": ["iban"]}, {}, {}).redact_keys == ("iban",)
    assert Settings.load({}, {}, {"DURABLE_REDACT_KEYS": "iban tax_id"}).redact_keys == ("iban", "tax_id")
    with pytest.raises(ConfigurationError, match="DURABLE_REDACT_KEYS must be a list of texts"):
        Settings.load({}, {}, {"DURABLE_REDACT_KEYS": " "})
    with pytest.raises(ConfigurationError, match="redact_keys must be a list of texts"):
        Settings.load({"redact_keys": 7}, {}, {})
