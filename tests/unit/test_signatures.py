"""Signatures as they are kept: what JSON cannot hold is named, ids stay, and every part belongs to its app."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature

from umt_durable.bridge import signatures
from umt_durable.errors import DecodingError, EncodingError


@pytest.fixture(name="app")
def own_app() -> Iterator[Celery]:
    """Return an app that is not the current one of this thread."""
    app = Celery("own", broker="memory://", set_as_current=False)
    yield app
    app.close()


def add(app: Celery, *args: Any) -> Signature:
    """Return a signature of a task that is registered nowhere."""
    return app.signature("add", args=args)


def shapes(app: Celery) -> list[Signature]:
    """Return one signature of each shape, some in others."""
    return [
        add(app, 1),
        chain(add(app, 1), add(app), app=app),
        group([chain(add(app, 1), add(app), app=app), add(app, 2)], app=app),
        chord([group([add(app, 1)], app=app), add(app, 2)], chain(add(app), add(app), app=app), app=app),
        chain(add(app), group([add(app), group([add(app)], app=app)], app=app), app=app),
    ]


@pytest.mark.parametrize("number", range(5))
def test_every_part_of_a_signature_that_is_read_belongs_to_the_app(app: Celery, number: int) -> None:
    read = signatures.read(app, signatures.stored(shapes(app)[number], "it"))

    found = [part for part in signatures.parts(read) if isinstance(part, Signature)]
    assert found
    assert all(part.app is app for part in found)


@pytest.mark.parametrize("number", range(5))
def test_i24_the_ids_of_the_parts_are_all_there_and_the_same_each_time(app: Celery, number: int) -> None:
    first, second = (signatures.copied(shapes(app)[number], "it") for _ in range(2))
    for copy in (first, second):
        signatures.name_parts(copy, ["here"])

    ids = [part["options"]["task_id"] for part in signatures.parts(first)]
    assert ids == [part["options"]["task_id"] for part in signatures.parts(second)]
    assert len(set(ids)) == len(ids)


def test_what_json_cannot_hold_is_named_by_its_path(app: Celery) -> None:
    inner = chain(add(app, 1), add(app, {"lines": [1, object()]}), app=app)

    with pytest.raises(EncodingError, match=r"it: \$\.kwargs\.tasks\[1\]\.args\[0\]\.lines\[1\] cannot be stored"):
        signatures.stored(inner, "it")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"task": 7}', b"\xff"])
def test_what_is_no_signature_is_refused(app: Celery, data: bytes) -> None:
    with pytest.raises(DecodingError):
        signatures.read(app, data)
