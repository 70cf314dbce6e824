"""Malformed, refused and unknown messages: dropped with one log line, or left blocked; the worker lives (I26, I27)."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.celery.stage import EMPTY, HINT, Broker, Stage
from tests.support.gates import Gates

pytestmark = pytest.mark.processes

PICKLE = "application/x-python-serialize"
FOREIGN: dict[str, object] = {"task": "rec.hold", "id": "open.bad", "lang": "py"}
LIST_TASK: dict[str, object] = {"task": ["rec.hold"], "id": "open.bad"}


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def stage(broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(broker, redis_url, gates, tmp_path) as stage:
        yield stage


@pytest.fixture
def redis_stage(redis_broker: Broker, redis_url: str, gates: Gates, tmp_path: Path) -> Iterator[Stage]:
    with Stage(redis_broker, redis_url, gates, tmp_path) as stage:
        yield stage


def test_i27_refused_and_malformed_messages_cost_one_log_line_each(stage: Stage, tmp_path: Path) -> None:
    worker = stage.worker()
    bomb = pickle.dumps(([Bomb(tmp_path / "exploded")], {}, {}))
    bad: list[tuple[bytes, dict[str, object], str]] = [
        (bomb, FOREIGN, PICKLE),
        (b"!!python/object/apply:os.getpid []", FOREIGN, "application/x-yaml"),
        (b"{not json", FOREIGN, "application/json"),
        (b'"text"', FOREIGN, "application/json"),
        (b"[1, 2]", FOREIGN, "application/json"),
        (b"[[], [], {}]", FOREIGN, "application/json"),
        (EMPTY, {"task": "rec.hold"}, "application/json"),
        (EMPTY, {"task": "rec.hold", "id": 7}, "application/json"),
        (EMPTY, {**FOREIGN, "compression": "gzip"}, "application/json"),
        (EMPTY, LIST_TASK, "application/json"),
        (EMPTY, {"task": "rec.hold", **HINT}, "application/json"),
        (EMPTY, {"task": "rec.hold", "id": "x" * 256, **HINT}, "application/json"),
        (EMPTY, {"task": "rec.hold", "id": "n", "replaced_task_nesting": "one", **HINT}, "application/json"),
        (EMPTY, {**HINT}, "application/json"),
        (EMPTY, {"task": "rec.nowhere", "lang": "py"}, "application/json"),
    ]

    for body, headers, content_type in bad:
        stage.send(body, headers, content_type)

    stage.assert_works()
    stage.wait_held(0)
    assert worker.text().count("Refused a message") == len(bad)
    assert "Traceback" not in worker.text()
    assert "Unrecoverable" not in worker.text()
    assert not (tmp_path / "exploded").exists()
    assert [body["id"] for body in stage.records("body") if not body["id"].startswith("open.")] == []


def test_item_of_a_redis_list_that_is_no_message_costs_one_log_line(redis_stage: Stage) -> None:
    stage = redis_stage
    worker = stage.worker()
    tag: dict[str, object] = {"delivery_tag": "t", "delivery_info": {"exchange": "", "routing_key": stage.queue}}
    good = {
        "body": "",
        "headers": {},
        "properties": tag,
        "content-type": "application/json",
        "content-encoding": "utf-8",
    }
    items = [
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        *map(encoded, ([], 7, None, {}, {"properties": {}}, {"properties": {"delivery_tag": "t"}})),
        encoded({**good, "headers": ["task"]}),
        encoded({**good, "properties": {**tag, "delivery_info": {}}}),
        encoded({**good, "properties": {**tag, "delivery_tag": "\ud800"}}),
        encoded({**good, "properties": {**tag, "delivery_info": {"exchange": "", "routing_key": "\ud800"}}}),
        encoded({**good, "body": "x", "properties": {**tag, "body_encoding": "base64"}}),
        encoded({**good, "body": "x", "properties": {**tag, "body_encoding": "rot13"}}),
        encoded({**good, "body": 7, "properties": {**tag, "body_encoding": "base64"}}),
    ]

    stage.push(*items)

    stage.assert_works()
    assert worker.text().count("Refused a message") == len(items)
    assert "Traceback" not in worker.text()


def test_i26_a_foreign_message_that_can_never_be_stored_costs_one_log_line(redis_stage: Stage) -> None:
    stage = redis_stage
    worker = stage.worker()
    bad: list[tuple[str, str, str]] = [
        ("rec.hold", "open.long", "x" * 4000),
        ("rec.hold", "open.half", "x\ud800"),
        ("rec.hold", "open.nul", "x\0"),
        ("rec.nowhere", "a\0b", stage.queue),
        ("rec.nowhere", "x\ud800", stage.queue),
    ]

    for task, run, routing_key in bad:
        stage.push(
            encoded(
                {
                    "body": EMPTY.decode(),
                    "headers": {"task": task, "id": run, "lang": "py"},
                    "properties": {
                        "delivery_tag": f"tag {len(run)}{run[:2]!a}",
                        "delivery_info": {"exchange": "", "routing_key": routing_key},
                    },
                    "content-type": "application/json",
                    "content-encoding": "utf-8",
                }
            )
        )

    stage.assert_works()
    stage.wait_held(0)
    assert worker.text().count("Refused a message") == len(bad)
    assert "Traceback" not in worker.text()
    assert stage.records("asked") == []


def encoded(item: object) -> bytes:
    return json.dumps(item).encode()


def test_headers_of_unexpected_types_do_not_hurt_the_worker(redis_stage: Stage) -> None:
    stage = redis_stage
    worker = stage.worker()
    odd: dict[str, Any] = {
        "timelimit": "soon",
        "shadow": {"a": 1},
        "argsrepr": 7,
        "retries": "many",
        "group": [1],
        "stamped_headers": 4,
        "stamps": "none",
        "root_id": 3,
        "eta": "tomorrow",
        "expires": "never",
        "ignore_result": "no",
    }

    for number, (name, value) in enumerate(odd.items()):
        stage.hint("rec.hold", f"open.{number}", **{name: value})
    for number in range(len(odd)):
        stage.wait("returned", id=f"open.{number}")

    stage.gates.close("run")
    stage.hint("rec.hold", **odd)
    stage.gates.wait("run")
    stage.wait_held(0)
    assert "Traceback" not in worker.text()


def test_hint_for_an_unregistered_task_is_acked_and_its_run_stays_blocked(stage: Stage) -> None:
    worker = stage.worker()

    run = stage.hint("rec.of_another_worker", "known.hint")

    worker.wait_for("'rec.of_another_worker' is not registered here")
    stage.wait_held(0)
    stage.assert_works()
    assert stage.result(run).state == "PENDING"
    assert stage.records("asked") == []


def test_foreign_message_of_an_unregistered_task_is_a_failure_only_if_it_is_of_no_run(stage: Stage) -> None:
    worker = stage.worker()

    known = stage.foreign("rec.of_another_worker", "known.foreign")
    strange = stage.foreign("rec.of_another_worker", "strange.foreign")

    with pytest.raises(Exception, match="of_another_worker"):
        stage.result(strange).get(timeout=15)
    worker.wait_for("run 'known.foreign' stays blocked")
    stage.wait_held(0)
    stage.assert_works()
    assert stage.result(known).state == "PENDING"
    assert [asked["id"] for asked in stage.records("asked")] == [known, strange]
