"""Following a run through the tracers of an application: what is asked of one, and which there are.

No tracer is imported here. The module that speaks to one is loaded once the application, or a library of its, has
imported that tracer. Where none is switched on nothing is stored and nothing is done.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from importlib import import_module
from typing import Final, Protocol

from umt_durable import texts

logger = logging.getLogger(__name__)

BAGGAGE: Final = "baggage"
CARRIER: Final = ("traceparent", "tracestate", BAGGAGE, "sentry-trace")
"""The headers of a message that say which trace it belongs to: W3C's, and Sentry's own."""

NESTED: Final = "headers"
"""The header that holds headers: what Celery gives a task as `request.headers`, and where Sentry looks."""

_TRACE_ID: Final = {
    "traceparent": re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"),
    "sentry-trace": re.compile(r"([0-9a-f]{32})-[0-9a-f]{16}(?:-[01])?"),
}
_MODULES: Final = {
    "opentelemetry.trace": "umt_durable.contrib.opentelemetry",
    "sentry_sdk": "umt_durable.contrib.sentry",
}


class Tracer(Protocol):
    """One tracer, as far as runs need it. None of these raises an error of its own."""

    def is_on(self) -> bool:
        """Say whether the application has switched it on; nothing else is asked of it before."""

    def inject(self, headers: MutableMapping[str, object]) -> None:
        """Add the current trace to the headers of a message that names none."""

    def current(self) -> Mapping[str, str]:
        """Return the carrier of the current trace; an empty one where there is none."""

    def continued(self, headers: Mapping[str, object], *, outermost: bool) -> AbstractContextManager[None]:
        """Go on with the trace that headers name; `outermost`: only where no trace is current."""

    def step(self, key: str, facts: Mapping[str, str | int | bool]) -> AbstractContextManager[None]:
        """Show the execution of one step, and the exception it ends in."""


_tracers: dict[str, Tracer | None] = {}
_carried: ContextVar[Mapping[str, object] | None] = ContextVar("umt_durable.carried", default=None)
_NOTHING: Final = nullcontext()


def tracers() -> list[Tracer]:
    """Return the tracers that are switched on in this process."""
    for package, module in _MODULES.items():
        if package in sys.modules and package not in _tracers:
            _tracers[package] = _load(module)
    return [one for one in _tracers.values() if one is not None and one.is_on()]


def _load(module: str) -> Tracer | None:
    try:
        found: Tracer = import_module(module).tracer()
    except ImportError as error:
        logger.warning("runs are not followed by %s, its version does not fit: %s", module.rpartition(".")[2], error)
        return None
    return found


def inject(headers: MutableMapping[str, object]) -> None:
    """Add the current trace to the headers of a message that names none."""
    for tracer in tracers():
        tracer.inject(headers)


def current() -> dict[str, str]:
    """Return the carrier of the current trace, for who publishes later; an empty one where there is none."""
    found: dict[str, str] = {}
    for tracer in tracers():
        for name, value in tracer.current().items():
            # Each tracer reads its own entries of a baggage, and passes the others on.
            found[name] = f"{found[name]},{value}" if name == BAGGAGE and name in found else value
    return {name: value for name, value in found.items() if texts.is_storable(value)}


def continued(headers: Mapping[str, object], *, outermost: bool = False) -> AbstractContextManager[None]:
    """Go on with the trace that headers name; `outermost`: only where no trace is current."""
    return _each([tracer.continued(headers, outermost=outermost) for tracer in tracers()])


def step(key: str, facts: Mapping[str, str | int | bool]) -> AbstractContextManager[None]:
    """Show the execution of one step, in each tracer."""
    return _each([tracer.step(key, facts) for tracer in tracers()])


def _each(contexts: list[AbstractContextManager[None]]) -> AbstractContextManager[None]:
    if not contexts:
        return _NOTHING
    return contexts[0] if len(contexts) == 1 else _all(contexts)


@contextmanager
def _all(contexts: list[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


def on_behalf_of(headers: Mapping[str, object]) -> AbstractContextManager[None]:
    """Publish for a run outside its body: in its trace, and with its carrier where no tracer here writes another."""
    carrier = {name: headers[name] for name in CARRIER if name in headers}
    return _publishing(carrier, headers) if carrier else _NOTHING


def in_trace_of(carrier: Mapping[str, str] | None) -> AbstractContextManager[None]:
    """Publish what somebody kept in the outbox: in his trace, and with his carrier where no tracer here writes another.

    Shape: `carrier` is what `current` gave him.
    """
    return _publishing(carrier, carrier) if carrier else _NOTHING


@contextmanager
def _publishing(carrier: Mapping[str, object], headers: Mapping[str, object]) -> Iterator[None]:
    token = _carried.set(carrier)
    try:
        with continued(headers):
            yield
    finally:
        _carried.reset(token)


def carry(headers: MutableMapping[str, object]) -> None:
    """Add the carrier of whom is published for, where the headers of a message have none."""
    carrier = _carried.get()
    if carrier is None or any(name in headers for name in (*CARRIER, *carrier)):
        return
    headers.update(carrier)
    if "sentry-trace" in carrier:
        known = headers.get(NESTED)
        headers[NESTED] = {**(known if isinstance(known, Mapping) else {}), **carrier}


def trace_id(headers: Mapping[str, object]) -> str | None:
    """Return the id of the trace that headers name, 32 hex digits, or None."""
    for name, pattern in _TRACE_ID.items():
        found = headers.get(name)
        match = pattern.fullmatch(found) if isinstance(found, str) else None
        if match is not None and match[1].strip("0"):
            return match[1]
    return None
