"""OpenTelemetry: the trace of a message goes on when it is published for a run, and each step is a span.

`opentelemetry-instrumentation-celery` makes the spans of calls and deliveries; needed here is its API alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Status, StatusCode

from umt_durable.engine.attempt import AlreadyRecordedError
from umt_durable.redaction import DEFAULT as REDACTOR

SPAN: Final = "umt.step"
_tracer: Final = trace.get_tracer("umt_durable")


class OpenTelemetry:
    """A run's trace in OpenTelemetry."""

    def is_on(self) -> bool:
        """Say whether there is anything that records spans; the API alone comes with libraries that never use it."""
        return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)

    def inject(self, headers: MutableMapping[str, object]) -> None:
        """Add the current trace, as the application's propagators write it, unless the headers have one."""
        carrier = self.current()
        if not any(name in headers for name in carrier):
            headers.update(carrier)

    def current(self) -> Mapping[str, str]:
        """Return the carrier of the current trace, as the application's propagators write it."""
        carrier: dict[str, str] = {}
        if _is_current():
            propagate.inject(carrier)
        return carrier

    @contextmanager
    def continued(self, headers: Mapping[str, object], *, outermost: bool) -> Iterator[None]:
        """Go on with the trace that headers name, as the application's propagators read it."""
        if outermost and _is_current():
            yield
            return
        carrier = {name: value for name, value in headers.items() if isinstance(value, str)}
        token = context.attach(propagate.extract(carrier))
        try:
            yield
        finally:
            context.detach(token)

    @contextmanager
    def step(self, key: str, facts: Mapping[str, str | int | bool]) -> Iterator[None]:
        """Make a span of a step. An exception is recorded in it; a run that is parked or cancelled is none."""
        attributes = {f"umt.{name}": value for name, value in facts.items()}
        span = _tracer.start_as_current_span(
            SPAN, attributes={"umt.step": key, **attributes}, record_exception=False, set_status_on_exception=False
        )
        with span as current:
            try:
                yield
            except AlreadyRecordedError:
                raise
            except Exception as error:
                _record(current, error)
                raise


def tracer() -> OpenTelemetry:
    """Return the tracer of this process."""
    return OpenTelemetry()


def _is_current() -> bool:
    return trace.get_current_span().get_span_context().is_valid


def _record(span: trace.Span, error: Exception) -> None:
    """Record an exception with its secrets masked."""
    if not span.is_recording():
        return
    text = REDACTOR.redact_text(str(error))
    stack = REDACTOR.redact_text("".join(traceback.format_exception(error)))
    span.record_exception(error, attributes={"exception.message": text, "exception.stacktrace": stack})
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {text}"))
