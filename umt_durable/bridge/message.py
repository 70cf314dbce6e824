"""Celery messages: telling ours from foreign ones, reading both, and what a run keeps of them.

A message with our header is a *hint* that a run may be ready; one for a durable task without it is *foreign* and is
read into a TaskMessage, from which the run is made. Only JSON and msgpack are ever read, whatever the app accepts
elsewhere. No database is touched here.
"""

from __future__ import annotations

from umt_durable.bridge.context import request_context, restore_request
from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.hint import HEADER, hint, is_hint
from umt_durable.bridge.reading import TaskMessage, parse_delivery, parse_publish

__all__ = [
    "HEADER",
    "Envelope",
    "TaskMessage",
    "hint",
    "is_hint",
    "parse_delivery",
    "parse_publish",
    "request_context",
    "restore_request",
]
