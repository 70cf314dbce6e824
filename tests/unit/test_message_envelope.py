"""What a run remembers of its message comes back as it was."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.message_kit import json_values
from umt_durable.bridge.message import (
    Envelope,
)
from umt_durable.errors import DecodingError, EncodingError


def test_nothing_is_stored_when_nothing_differs() -> None:
    assert Envelope().to_bytes() is None
    assert Envelope.from_bytes(None) == Envelope.from_bytes(b"") == Envelope()


def test_values_that_are_zero_or_false_are_kept() -> None:
    envelope = Envelope(group_index=0, ignore_result=False)

    assert Envelope.from_bytes(envelope.to_bytes()) == envelope


def test_datetimes_and_uuids_in_signatures_survive() -> None:
    moment, number = datetime(2026, 11, 29, 12, tzinfo=UTC), uuid4()
    signature = {"task": "t", "args": [moment, number, Decimal("1.10"), b"\xff"], "kwargs": {}, "options": {}}

    back = Envelope.from_bytes(Envelope(callbacks=[signature], stamps={"at": moment}).to_bytes())

    assert back.callbacks == [signature]
    assert back.stamps == {"at": moment}


@given(
    headers=st.dictionaries(st.text(), json_values, max_size=3),
    text=st.none() | st.text(),
    number=st.none() | st.integers(0, 2**31),
    signatures=st.lists(st.dictionaries(st.text(), json_values, max_size=2), max_size=2),
)
def test_the_stored_form_gives_back_the_envelope(
    headers: dict[str, Any], text: str | None, number: int | None, signatures: list[dict[str, Any]]
) -> None:
    envelope = Envelope(
        headers=headers, root_id=text, group_index=number, argsrepr=text, chain=signatures, stamps=headers
    )

    back = Envelope.from_bytes(envelope.to_bytes())

    assert [back.headers, back.root_id, back.group_index, list(back.chain), back.stamps] == [
        *(headers, text, number, signatures, headers)
    ]


def test_a_signature_that_json_cannot_hold_is_named() -> None:
    with pytest.raises(EncodingError) as refused:
        Envelope(errbacks=[{"task": "t", "args": [object()]}]).to_bytes()

    assert refused.value.path == "$.errbacks"


@pytest.mark.parametrize("stored", [b"{", b"[]", b"\xff", b'{"a": {"__type__": "nonsense", "__value__": 1}}'])
def test_a_broken_stored_form_is_an_error_with_a_name(stored: bytes) -> None:
    with pytest.raises(DecodingError):
        Envelope.from_bytes(stored)


def test_a_field_of_a_later_version_is_passed_over() -> None:
    assert Envelope.from_bytes(b'{"root_id": "r", "invented_later": 1}') == Envelope(root_id="r")
