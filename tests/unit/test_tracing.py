"""The carrier of a run: which trace its headers name, and what of them goes on with what is published for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from umt_durable import tracing
from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.hint import hint_headers
from umt_durable.bridge.reading import custom_headers

ROOT = Path(__file__).resolve().parents[2]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
W3C = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
SENTRY = {"sentry-trace": f"{TRACE}-{SPAN}-1", "baggage": "sentry-environment=test"}


class Following:
    """A tracer whose current trace has a carrier that the test gives."""

    def __init__(self, carrier: dict[str, str]) -> None:
        self.carrier = carrier

    def current(self) -> dict[str, str]:
        return self.carrier


@pytest.mark.parametrize(
    ("headers", "trace"),
    [
        (W3C, TRACE),
        (SENTRY, TRACE),
        ({"sentry-trace": f"{TRACE}-{SPAN}"}, TRACE),
        ({**SENTRY, "traceparent": f"00-{TRACE[::-1]}-{SPAN}-00"}, TRACE[::-1]),
        ({}, None),
        ({"traceparent": 7}, None),
        ({"traceparent": f"00-{TRACE}"}, None),
        ({"traceparent": f"00-{TRACE.upper()}-{SPAN}-01"}, None),
        ({"traceparent": f"00-{'0' * 32}-{SPAN}-01"}, None),
    ],
)
def test_the_id_of_a_trace_is_read_from_what_names_one(headers: dict[str, object], trace: str | None) -> None:
    assert tracing.trace_id(headers) == trace


def test_what_is_published_for_a_run_has_its_carrier_and_no_other_header_of_it() -> None:
    headers: dict[str, object] = {"task": "t", "mine": 1}

    with tracing.on_behalf_of({**W3C, "private": "x"}):
        tracing.carry(headers)

    assert headers == {"task": "t", "mine": 1, **W3C}


def test_what_was_kept_in_the_outbox_has_the_whole_carrier_of_who_kept_it() -> None:
    headers: dict[str, object] = {"task": "t"}

    with tracing.in_trace_of({"b3": "1-2-1", "baggage": "tenant=7"}):
        tracing.carry(headers)
    with tracing.in_trace_of(None):
        tracing.carry(headers)

    assert headers == {"task": "t", "b3": "1-2-1", "baggage": "tenant=7"}


def test_the_current_carrier_is_that_of_every_tracer_with_the_baggage_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "tracers", lambda: [Following({**W3C, "baggage": "tenant=7"}), Following(SENTRY)])

    assert tracing.current() == {**W3C, **SENTRY, "baggage": "tenant=7,sentry-environment=test"}


def test_what_a_row_cannot_hold_is_left_out_of_a_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "tracers", lambda: [Following({**W3C, "tracestate": "a=\0", "baggage": "\ud800"})])

    assert tracing.current() == {"traceparent": W3C["traceparent"]}


def test_a_message_that_names_a_trace_keeps_its_own() -> None:
    headers: dict[str, object] = {"traceparent": "other"}

    with tracing.on_behalf_of(W3C):
        tracing.carry(headers)
    tracing.carry(headers)

    assert headers == {"traceparent": "other"}


def test_sentrys_headers_are_where_sentry_looks_for_them_too() -> None:
    headers: dict[str, object] = {"headers": {"mine": 1}}

    with tracing.on_behalf_of(SENTRY):
        tracing.carry(headers)

    assert headers == {**SENTRY, "headers": {"mine": 1, **SENTRY}}


def test_headers_inside_the_header_of_that_name_are_kept_and_go_with_every_hint() -> None:
    sent = {"task": "t", "id": "i", **SENTRY, "headers": {**SENTRY, "sentry-task-enqueued-time": 1.5}}
    known = Envelope(headers=custom_headers(sent))

    first, later = (hint_headers("i", 0, "t", gen, known) for gen in (0, 3))

    assert first["headers"] == sent["headers"]
    assert later["headers"] == SENTRY, "the time of the call says nothing about a later hint"
    assert custom_headers({"task": "t", "headers": {}}) == {}


def test_no_tracer_is_switched_on_by_what_this_package_imports() -> None:
    program = (
        "import sys; from umt_durable import Durable, tracing; print(tracing.tracers(), 'sentry_sdk' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == "[] False", done.stderr
