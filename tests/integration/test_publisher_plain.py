"""Other transports of kombu carry messages too, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.publisher_kit import app_for, drain, ids, publishing, row, rows
from umt_durable.errors import BrokerUnavailableError


def test_messages_pass_through_memory() -> None:
    app = app_for("memory://localhost")

    with publishing(app) as publisher:
        report = publisher.publish([row("plain-memory", 1, properties={"expiration": "5000"}), row("plain-memory", 2)])

        assert len(report.confirmed) == 2
        assert publisher.depth("plain-memory") == 2
        (first, _) = drain(app, "plain-memory")
        assert first.properties["expiration"] == "5000"


def test_messages_pass_through_files(tmp_path: Path) -> None:
    for name in ("in", "control"):
        (tmp_path / name).mkdir()
    folders = {
        "data_folder_in": str(tmp_path / "in"),
        "data_folder_out": str(tmp_path / "in"),
        "control_folder": str(tmp_path / "control"),
    }
    app = app_for("filesystem://", broker_transport_options=folders)

    with publishing(app) as publisher:
        assert len(publisher.publish(rows("plain-files", 3)).confirmed) == 3
    assert sorted(ids(drain(app, "plain-files"))) == ["0", "1", "2"]


def test_one_bad_row_stops_no_other() -> None:
    app = app_for("memory://localhost", task_create_missing_queues=False)
    good, unknown = row("celery"), row("never-declared")

    with publishing(app) as publisher:
        report = publisher.publish([unknown, good])

    assert report.confirmed == {good.key}
    assert report.refused.keys() == {unknown.key}


def test_without_a_marker_no_loss_is_ever_reported() -> None:
    with publishing(app_for("memory://localhost")) as publisher:
        publisher.mark("one")

        assert publisher.incarnation("any") == "any"


def test_a_transport_that_cannot_connect_is_an_outage(tmp_path: Path) -> None:
    app = app_for("sqlalchemy+sqlite:////nowhere/at/all.db")

    with publishing(app) as publisher, pytest.raises(BrokerUnavailableError):
        publisher.publish(rows("q", 1))
