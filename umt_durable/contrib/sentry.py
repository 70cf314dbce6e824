"""Sentry: the trace of a message goes on when it is published for a run, and each step is a span.

Sentry's own Celery integration makes the rest, and reports failures; where it is not in use nothing is done here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Final

import sentry_sdk
from sentry_sdk import continue_trace, isolation_scope

OP: Final = "umt.step"
INTEGRATION: Final = "celery"


class Sentry:
    """A run's trace in Sentry."""

    def is_on(self) -> bool:
        """Say whether Sentry has been set up with its Celery integration."""
        return sentry_sdk.get_client().get_integration(INTEGRATION) is not None

    def inject(self, headers: MutableMapping[str, object]) -> None:
        """Add nothing: Sentry has changed `apply_async` and `send_task`, and has added its headers."""

    def current(self) -> Mapping[str, str]:
        """Return the headers that Sentry's Celery integration gives to what is called now, if it is to give any."""
        integration = sentry_sdk.get_client().get_integration(INTEGRATION)
        if not getattr(integration, "propagate_traces", True):
            return {}
        headers = {"sentry-trace": sentry_sdk.get_traceparent(), "baggage": sentry_sdk.get_baggage()}
        return {name: value for name, value in headers.items() if value}

    @contextmanager
    def continued(self, headers: Mapping[str, object], *, outermost: bool) -> Iterator[None]:
        """Go on with the trace that headers name. A delivery is Sentry's own business: it has begun one."""
        if outermost:
            yield
            return
        with isolation_scope():
            continue_trace({name: value for name, value in headers.items() if isinstance(value, str)})
            yield

    @contextmanager
    def step(self, key: str, facts: Mapping[str, str | int | bool]) -> Iterator[None]:
        """Make a span of a step, inside that of its delivery. Failures are reported when the run fails, not here."""
        scope = sentry_sdk.get_current_scope()
        parent = scope.span
        if parent is None:
            yield
            return
        span = parent.start_child(op=OP, name=key)
        for name, value in facts.items():
            span.set_data(f"umt.{name}", value)
        scope.span = span
        try:
            yield
        except Exception:
            span.set_status("internal_error")
            raise
        finally:
            scope.span = parent
            span.finish()


def tracer() -> Sentry:
    """Return the tracer of this process."""
    return Sentry()
