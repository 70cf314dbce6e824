"""Calls of those who start, look at and operate runs: bad input is a typed error, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration import service_kit as kit
from tests.support.engine import Engine
from umt_durable.database import Connection, Database
from umt_durable.engine.client import Client
from umt_durable.engine.outbox import OutboxClient
from umt_durable.errors import DefinitionError, UnknownStepError
from umt_durable.settings import Settings
from umt_durable.states import RunState

REFUSED: list[tuple[Callable[[Any, str], Any], str]] = [
    (lambda client, run: client.cancel(run, reason=7), "reason must be text"),
    (lambda client, run: client.cancel(run, reason="x" * 1001), "reason must have at most 1000 characters"),
    (lambda client, run: client.cancel(run, actor=7), "actor of fact 'umt.cancel' must be text"),
    (lambda client, run: client.signal(run, "a\ud800"), "the name of a fact holds a NUL or half of a surrogate pair"),
    (lambda client, _: client.list(limit="all"), "limit must be from 1 to 1000, not 'all'"),
    (lambda client, _: client.list(before="first"), "before is the number of a run, not 'first'"),
    (lambda client, _: client.list(before=2**63), "before is the number of a run"),
    (lambda client, _: client.list(states=7), "not iterable"),
    (lambda client, _: client.ops.resolve("k", failed=7, actor="ann"), "op 'k': failed must be text, not 7"),
    (lambda client, _: client.ops.resolve("k", done=1, actor="ann", reason=7), "op 'k': reason must be text, not 7"),
    (lambda client, _: client.ops.list(limit=None), "limit must be from 1 to 1000"),
    (lambda client, _: client.ops.list(states=7), "not iterable"),
    (lambda client, _: client.ops.list(after="a\0"), "after holds a NUL"),
    (lambda client, _: client.ops.list(namespace=7), "namespace must be text"),
]


@pytest.fixture
def run_id(database: Database, settings: Settings) -> str:
    engine = Engine(database, settings)
    engine.task("t")(lambda ctx: None)
    return engine.start("t")


@pytest.mark.parametrize(("bad", "said"), REFUSED)
def test_bad_input_is_a_typed_error_and_changes_nothing(
    database: Database, settings: Settings, conn: Connection, run_id: str, bad: Callable[[Any, str], Any], said: str
) -> None:
    client = Client(database, settings)

    with pytest.raises(DefinitionError) as error:
        bad(client, run_id)

    assert said in str(error.value)
    assert kit.table(conn, "SELECT name FROM {}.fact") == []
    assert client.get(run_id).state is RunState.READY


def test_a_step_that_no_run_can_have_waits_for_no_answer(database: Database, settings: Settings, run_id: str) -> None:
    client = Client(database, settings)

    for step in ("a\0", "a\ud800", 7):
        with pytest.raises(UnknownStepError):
            client.resolve_step(run_id, step, result=1)  # type: ignore[arg-type]  # the point


def test_a_page_of_dead_rows_has_a_size(database: Database, settings: Settings) -> None:
    with pytest.raises(DefinitionError, match="limit must be from 1 to 1000, not 'all'"):
        OutboxClient(database, settings).dead(limit="all")  # type: ignore[arg-type]  # the point
