"""What `durable doctor` makes of what it was told, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task
from click.testing import CliRunner
from kombu.entity import Queue

from umt_durable import Durable, DurableTask, TaskContext
from umt_durable.bridge import checks_database, checks_runs, checks_settings, checks_tasks, doctor
from umt_durable.bridge.cli import durable as durable_group
from umt_durable.bridge.findings import Finding, Level, many
from umt_durable.settings import Settings
from umt_durable.store.diagnosis import DeadEvents, OpenTransaction, Server, StillRuns, Timeouts

SETTINGS = Settings(database_url="postgresql://shop@db:5432/shop")
SERVER = Server(
    version=180004,
    encoding="UTF8",
    is_standby=False,
    fsync="on",
    synchronous_commit="on",
    full_page_writes="on",
    backend=4711,
    clock=1000.0,
    connections=10,
    max_connections=100,
)


@pytest.fixture(autouse=True)
def _no_shared_tasks_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the apps of these tests their own tasks only: `shared_task` adds to every app of the process."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())


def levels(findings: Iterator[Finding]) -> dict[str, Level]:
    """Return the worst level of each check that is not well; each of these must come with a fix."""
    worst: dict[str, Level] = {}
    for finding in findings:
        if finding.level is not Level.OK:
            assert finding.fix, finding
            worst[finding.check] = max(worst.get(finding.check, Level.OK), finding.level, key=list(Level).index)
    return worst


# -- database ---------------------------------------------------------------------------------------------------------


def test_a_sound_server_needs_nothing() -> None:
    assert levels(checks_database.server(SERVER, "db")) == {}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 140010}, {"database": Level.FAIL}),
        ({"is_standby": True}, {"database": Level.FAIL}),
        ({"encoding": "SQL_ASCII"}, {"database": Level.WARN}),
        ({"fsync": "off"}, {"durability": Level.FAIL}),
        ({"synchronous_commit": "off"}, {"durability": Level.FAIL}),
        ({"full_page_writes": "off"}, {"durability": Level.FAIL}),
        ({"synchronous_commit": "local"}, {}),
        ({"connections": 90}, {"connections": Level.WARN}),
    ],
    ids=str,
)
def test_a_server_is_judged_by_version_role_and_what_a_commit_is_worth(
    change: dict[str, Any], expected: dict[str, Level]
) -> None:
    assert levels(checks_database.server(replace(SERVER, **change), "db")) == expected


@pytest.mark.parametrize(("local", "is_well"), [(1001.0, True), (998.0, True), (1010.0, False), (900.0, False)])
def test_a_clock_that_is_far_off_is_told(local: float, is_well: bool) -> None:
    assert (levels(checks_database.clock(SERVER, local)) == {}) is is_well


def test_a_pooler_is_known_by_the_process_id_it_makes_up() -> None:
    assert levels(checks_database.pooler(SERVER, SETTINGS, 4711)) == {}
    assert levels(checks_database.pooler(SERVER, SETTINGS, 1)) == {"pooler": Level.FAIL}
    assert levels(checks_database.pooler(SERVER, replace(SETTINGS, pooler=True), 1)) == {}


def test_a_pooler_is_suspected_at_its_usual_port() -> None:
    settings = replace(SETTINGS, database_url="postgresql+psycopg://shop@db:6432/shop")

    assert levels(checks_database.pooler(SERVER, settings, 4711)) == {"pooler": Level.WARN}


def test_a_pooler_that_refuses_our_start_up_options_is_named() -> None:
    found = checks_database.unreachable("FATAL:  unsupported startup parameter: options")

    assert (found.check, found.level) == ("pooler", Level.FAIL)
    assert "durable_pooler" in found.fix


def test_missing_time_limits_are_told_with_what_to_set() -> None:
    found = list(checks_database.timeouts(Timeouts(0, 3000, 60000), SETTINGS))

    assert [each.level for each in found] == [Level.WARN]
    assert "statement_timeout = '10s'" in found[0].fix
    assert "idle_in_transaction_session_timeout = '15s'" in found[0].fix
    assert "lock_timeout" not in found[0].fix.replace("idle_in_transaction_session_timeout", "")
    assert levels(checks_database.timeouts(Timeouts(10000, 3000, 15000), SETTINGS)) == {}


def test_a_transaction_that_has_been_open_for_long_is_told_with_how_to_end_it() -> None:
    old = OpenTransaction(99, "psql", "idle in transaction", 3600)

    [found] = checks_database.transactions(old)

    assert found.level is Level.WARN
    assert "pg_terminate_backend(99)" in found.fix
    assert levels(checks_database.transactions(replace(old, seconds=5))) == {}
    assert levels(checks_database.transactions(None)) == {}


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("doctor", broker="redis://", backend="redis://", set_as_current=False)
    app.conf.update(result_chord_expires=0, result_expires=0)
    yield app
    app.close()


def of_settings(app: Celery, *, longest: float | None = None, **conf: Any) -> dict[str, Level]:
    app.conf.update(conf)
    return levels(checks_settings.celery_settings(app.conf, SETTINGS, longest_parked=longest))


def test_settings_that_keep_everything_need_nothing(app: Celery) -> None:
    assert of_settings(app, longest=1e9) == {}


@pytest.mark.parametrize(
    ("conf", "level"),
    [
        ({"task_always_eager": True}, Level.FAIL),
        ({"worker_pool": "eventlet"}, Level.FAIL),
        ({"worker_prefetch_multiplier": 0}, Level.WARN),
        ({"worker_prefetch_multiplier": 40}, Level.WARN),
        ({"accept_content": ["json", "pickle"]}, Level.FAIL),
        ({"accept_content": ["application/x-python-serialize"]}, Level.FAIL),
        ({"result_accept_content": ["yaml"]}, Level.FAIL),
        ({"task_serializer": "pickle"}, Level.FAIL),
        ({"result_serializer": "pickle"}, Level.FAIL),
        ({"task_ignore_result": True}, Level.WARN),
        ({"result_backend": None}, Level.WARN),
        ({"result_backend": "rpc://"}, Level.WARN),
        ({"result_chord_expires": None, "result_expires": timedelta(days=1)}, Level.WARN),
        ({"result_chord_expires": 60}, Level.WARN),
        ({"task_default_delivery_mode": 1}, Level.WARN),
    ],
    ids=str,
)
def test_each_setting_that_endangers_durability_is_told(app: Celery, conf: dict[str, Any], level: Level) -> None:
    found = of_settings(app, **conf)

    assert list(found.values()) == [level]
    assert next(iter(found)) in {*conf, "task_queues"}


def test_a_chord_that_ends_before_its_members_wake_is_a_failure(app: Celery) -> None:
    day = 86400.0

    assert of_settings(app, result_chord_expires=7 * day, longest=3 * day) == {}
    assert of_settings(app, result_chord_expires=7 * day, longest=14 * day) == {"result_chord_expires": Level.FAIL}


def test_results_that_end_before_their_run_are_a_failure(app: Celery) -> None:
    assert of_settings(app, result_expires=7200, longest=3600.0) == {}
    assert of_settings(app, result_expires=3600, longest=7200.0) == {"result_expires": Level.FAIL}


@pytest.mark.parametrize(
    ("seconds", "level"), [(3600, None), (120, None), (100, Level.WARN), (59, Level.FAIL), (0, Level.FAIL)]
)
def test_a_visibility_timeout_shorter_than_hints_are_held_is_told(
    app: Celery, seconds: int, level: Level | None
) -> None:
    found = of_settings(app, broker_transport_options={"visibility_timeout": seconds})

    assert found == ({} if level is None else {"visibility_timeout": level})


def test_a_visibility_timeout_shorter_than_the_lease_is_a_failure(app: Celery) -> None:
    app.conf.broker_transport_options = {"visibility_timeout": 200}
    settings = replace(SETTINGS, lease_seconds=300.0)

    found = levels(checks_settings.celery_settings(app.conf, settings, longest_parked=None))

    assert found == {"visibility_timeout": Level.FAIL}


# -- acks -------------------------------------------------------------------------------------------------------------


def pinned(ctx: TaskContext) -> None:
    """Be the body of a durable task."""


def own_body(self: Any) -> None:
    """Be the body of a task with a class of its own."""


def of_acks(app: Celery) -> dict[str, Level]:
    app.finalize(auto=True)
    return levels(checks_tasks.acks(app))


def test_app_wide_ack_settings_do_not_reach_durable_tasks(app: Celery) -> None:
    app.conf.update(
        task_acks_late=False,
        task_acks_on_failure_or_timeout=False,
        task_reject_on_worker_lost=False,
        task_retry_on_worker_lost=True,
    )
    Durable(app).task(pinned, name="doctor.pinned")
    app.finalize(auto=True)

    [found] = checks_tasks.acks(app)

    assert found.level is Level.OK
    assert "1 durable task pins its acks" in found.what


@pytest.mark.parametrize(
    ("name", "value"), [("acks_late", False), ("reject_on_worker_lost", False), ("retry_on_worker_lost", True)]
)
@pytest.mark.parametrize("key", ["doctor.pinned", "*"])
def test_an_annotation_that_overrides_a_pin_is_a_failure(app: Celery, key: str, name: str, value: bool) -> None:
    app.conf.task_annotations = {key: {name: value}}
    Durable(app).task(pinned, name="doctor.pinned")

    assert of_acks(app) == {"acks": Level.FAIL}
    [found] = checks_tasks.acks(app)
    assert f"{name} of doctor.pinned is made {value} by task_annotations" in found.what
    assert found.fix.startswith(f"take {name} out of task_annotations")


@pytest.mark.parametrize(
    ("name", "value"), [("acks_late", False), ("reject_on_worker_lost", False), ("retry_on_worker_lost", True)]
)
def test_a_class_that_overrides_a_pin_is_a_failure(app: Celery, name: str, value: bool) -> None:
    Durable(app)
    own = type("Own", (DurableTask,), {"abstract": True, name: value})
    app.task(own_body, name="doctor.own", base=own, bind=True, shared=False)

    assert of_acks(app) == {"acks": Level.FAIL}
    [found] = checks_tasks.acks(app)
    assert f"{name} of doctor.own is made {value} by its class" in found.what


@pytest.mark.parametrize("name", ["Request", "Strategy"])
def test_a_task_that_is_received_by_celery_itself_is_a_failure(app: Celery, name: str) -> None:
    app.conf.task_annotations = {"doctor.pinned": {name: getattr(Task, name)}}
    Durable(app).task(pinned, name="doctor.pinned")

    assert of_acks(app) == {"acks": Level.FAIL}


@pytest.mark.parametrize("name", ["acks_on_failure", "acks_on_timeout", "acks_on_failure_or_timeout"])
def test_acks_after_a_failure_do_not_matter_to_a_durable_task(app: Celery, name: str) -> None:
    app.conf.task_annotations = {"doctor.pinned": {name: False}}
    Durable(app).task(pinned, name="doctor.pinned")

    assert of_acks(app) == {}


# -- the exit status --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "longest", "status"),
    [
        ({}, None, 0),
        ({"result_backend": None}, None, 0),
        ({"worker_pool": "eventlet"}, None, 1),
        ({"task_always_eager": True}, None, 1),
        ({"accept_content": ["json", "pickle"]}, None, 1),
        ({"broker_transport_options": {"visibility_timeout": 30}}, None, 1),
        ({"result_expires": 3600}, 7200.0, 1),
        ({"result_chord_expires": 3600}, 7200.0, 1),
        ({"task_annotations": {"*": {"acks_late": False}}}, None, 1),
        ({"task_annotations": {"*": {"reject_on_worker_lost": False}}}, None, 1),
        ({"task_annotations": {"*": {"retry_on_worker_lost": True}}}, None, 1),
        ({"task_annotations": {"*": {"Strategy": Task.Strategy}}}, None, 1),
    ],
    ids=str,
)
def test_doctor_exits_with_1_for_each_setting_under_which_runs_can_be_lost(
    app: Celery, monkeypatch: pytest.MonkeyPatch, conf: dict[str, Any], longest: float | None, status: int
) -> None:
    app.conf.update(conf)
    Durable(app).task(pinned, name="doctor.pinned")
    app.finalize(auto=True)

    def examine(project: object) -> Iterator[Finding]:
        yield from checks_settings.celery_settings(app.conf, SETTINGS, longest_parked=longest)
        yield from checks_tasks.acks(app)

    monkeypatch.setattr(doctor, "examine", examine)
    done = CliRunner().invoke(durable_group, ["doctor"])

    assert done.exit_code == status, done.output
    assert ("fail\t" in done.output) is (status == 1)


def test_a_queue_that_a_restart_of_the_broker_loses_is_named(app: Celery) -> None:
    kept, gone = Queue("kept"), Queue("gone", durable=False)  # type: ignore[no-untyped-call]  # kombu is untyped
    app.conf.task_queues = [kept, gone]

    [found] = [
        each
        for each in checks_settings.celery_settings(app.conf, SETTINGS, longest_parked=None)
        if each.level is not Level.OK
    ]

    assert "gone" in found.what
    assert "kept" not in found.what


# -- runs -------------------------------------------------------------------------------------------------------------


def test_no_worker_is_worse_when_runs_wait() -> None:
    assert levels(checks_runs.workers([], [], 0)) == {"workers": Level.WARN}
    assert levels(checks_runs.workers([], [], 3)) == {"workers": Level.FAIL}


def test_one_is_not_told_as_many() -> None:
    runs = [StillRuns("pay", 1, "late", number, "r1") for number in (1, 2)]
    found = [
        *(each for number in (1, 2) for each in checks_runs.workers([], [], number)),
        *(
            each
            for number in (1, 2)
            for each in checks_runs.outbox(number, [DeadEvents("cancel", "", number)], 0, SETTINGS)
        ),
        *checks_runs.still(runs, runs, is_staffed=True),
    ]

    for one, more in (
        ("1 run is ready", "2 runs are ready"),
        ("1 message waits in", "2 messages wait in"),
        ("1 message of type cancel was given up", "2 messages of type cancel were given up"),
        ("1 ready run of pay@1 waits", "2 ready runs of pay@1 wait"),
        ("1 run of pay is parked", "2 runs of pay are parked"),
    ):
        assert any(one in each.what for each in found), one
        assert any(more in each.what for each in found), more


def test_services_that_workers_do_not_run_must_be_served() -> None:
    elsewhere = replace(SETTINGS, worker_services=False)

    assert levels(checks_runs.missing_services([], SETTINGS)) == {}
    assert levels(checks_runs.missing_services([], elsewhere)) == {"services": Level.FAIL}


def test_counters_that_only_a_defect_raises_are_told() -> None:
    assert levels(checks_runs.counters({"published": 5, "system_retry": 0})) == {}
    assert levels(checks_runs.counters({"rescan_hit": 2})) == {"defects": Level.WARN}


def test_long_lists_of_names_are_cut() -> None:
    assert many(["a", "b"]) == "a, b"
    assert many(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
