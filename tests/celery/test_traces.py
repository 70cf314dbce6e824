"""One trace from the caller through every delivery of a run to what it calls, as OpenTelemetry and Sentry see it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.result import AsyncResult

from tests.celery.traced import APP, EVENTS, SPANS, read
from tests.support.apps import Tasks
from tests.support.guard import clean_environment
from tests.support.wait import until
from tests.support.workers import Pool, Serve, Worker
from umt_durable.bridge.envelope import Envelope
from umt_durable.database import Connection
from umt_durable.failpoints import ENVIRONMENT
from umt_durable.states import RunState

pytestmark = [pytest.mark.processes, pytest.mark.redis_by_default]

only_redis = pytest.mark.parametrize("broker", ["redis"], indirect=True)

KEPT = {"traced.sent", "traced.packed", "traced.paid"}
FAMILY = {*KEPT, "traced.labelled", "umt_durable.answered", "traced.child"}
FOLLOWERS = {"run/traced.sent", "run/traced.member", "run/traced.linked"}


@pytest.fixture
def spans(tmp_path: Path, worker_env: dict[str, str]) -> Path:
    """Return the file that OpenTelemetry's spans of this test go to."""
    worker_env[SPANS] = str(tmp_path / "spans.jsonl")
    return tmp_path / "spans.jsonl"


@pytest.fixture
def events(tmp_path: Path, worker_env: dict[str, str]) -> Path:
    """Return the file that Sentry's envelopes of this test go to."""
    worker_env[EVENTS] = str(tmp_path / "sentry.jsonl")
    return tmp_path / "sentry.jsonl"


def call(env: dict[str, str], *arguments: str) -> str:
    """Make a call in a process of its own; return the run's id."""
    program = [sys.executable, "-m", "tests.celery.traced", *arguments]
    done = subprocess.run(program, env=clean_environment(env), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def names(file: Path) -> list[str]:
    """Return the names of what was written down so far."""
    return [str(one["name"]) for one in read(file)]


def wait_for(file: Path, wanted: set[str], timeout: float = 90.0) -> list[dict[str, Any]]:
    """Return what was written down once it has these names."""
    until(lambda: wanted <= set(names(file)), timeout=timeout, what=f"{wanted}", diagnose=lambda: str(names(file)))
    return read(file)


def result_of(tasks: Tasks, run: str) -> Any:
    """Return the result of a run, once it has one."""
    return AsyncResult(run, app=tasks.app).get(timeout=90)


def assert_one_trace(found: list[dict[str, Any]], trace: str) -> None:
    """Assert that all spans of calls, deliveries and steps belong to one trace."""
    known = ("umt.step", "request")
    ours = [one for one in found if "traced." in one["name"] or "umt_durable." in one["name"] or one["name"] in known]
    assert {one["trace"] for one in ours} == {trace}, [(one["name"], one["trace"]) for one in ours]


@pytest.mark.parametrize(
    ("suspensions", "pool"),
    [(0, "prefork"), (1, "threads"), (3, "prefork")],
    ids=["0-prefork", "1-threads", "3-prefork"],
)
def test_d2_a_run_is_one_trace_through_suspensions_links_chain_and_what_it_sends(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    spans: Path,
    suspensions: int,
    pool: Pool,
) -> None:
    start_worker(app=APP, pool=pool)

    run = call(worker_env, "run", str(suspensions))

    trace = result_of(tasks, run)
    found = wait_for(spans, {"apply_async/traced.run", "run/traced.run", "request", *FOLLOWERS})
    assert_one_trace(found, trace)
    deliveries = {one["id"] for one in found if one["name"] == "run/traced.run"}
    assert len(deliveries) == suspensions + 1
    steps = [one for one in found if one["name"] == "umt.step"]
    assert {one["parent"] for one in steps} <= deliveries
    assert {one["attributes"]["umt.run_id"] for one in steps} == {run}
    executed = [one["attributes"]["umt.step"] for one in steps if one["attributes"]["umt.replayed"] == "False"]
    assert executed.count("send") == 1
    assert sum(one["attributes"]["umt.replayed"] == "True" for one in steps) >= suspensions
    assert {one["status"] for one in found} == {"UNSET"}
    assert [one["exceptions"] for one in found if one["exceptions"]] == []


@only_redis
def test_d2_the_trace_survives_a_killed_finisher_and_a_relay_elsewhere_that_is_followed_by_nobody(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    serve: Callable[..., Serve],
    worker_env: dict[str, str],
    spans: Path,
    tmp_path: Path,
) -> None:
    once = f"finish.commit.a=kill;file:{tmp_path / 'killed'}"
    worker_env["DURABLE_HOLD_SECONDS"] = "2"
    start_worker(app=APP, env={**worker_env, ENVIRONMENT: once, "DURABLE_WORKER_SERVICES": "0"})
    serve("all", app=APP, env={name: value for name, value in worker_env.items() if name != SPANS})

    run = call(worker_env, "run", "1")

    found = wait_for(spans, {"run/traced.run", *FOLLOWERS}, timeout=120.0)
    trace = result_of(tasks, run)
    assert (tmp_path / "killed").exists(), "no finisher was killed"
    assert_one_trace(found, trace)


@only_redis
def test_d2_a_relay_that_is_followed_goes_on_with_the_trace_of_the_run(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    serve: Callable[..., Serve],
    worker_env: dict[str, str],
    spans: Path,
    tmp_path: Path,
) -> None:
    once = f"finish.commit.a=kill;file:{tmp_path / 'killed'}"
    worker_env["DURABLE_HOLD_SECONDS"] = "2"
    start_worker(app=APP, env={**worker_env, ENVIRONMENT: once, "DURABLE_WORKER_SERVICES": "0"})
    serve("all", app=APP)

    run = call(worker_env, "run", "0")

    found = wait_for(spans, FOLLOWERS, timeout=120.0)
    trace = result_of(tasks, run)
    assert (tmp_path / "killed").exists(), "no finisher was killed"
    assert_one_trace(found, trace)
    assert "apply_async/traced.member" in {one["name"] for one in found}


@only_redis
def test_d2_a_run_that_is_enqueued_with_the_callers_rows_belongs_to_the_callers_trace(
    tasks: Tasks, start_worker: Callable[..., Worker], worker_env: dict[str, str], spans: Path
) -> None:
    start_worker(app=APP, pool="threads")

    run = call(worker_env, "enqueue", "0")

    trace = result_of(tasks, run)
    assert_one_trace(wait_for(spans, {"run/traced.run", "run/traced.sent", "request"}), trace)


@only_redis
def test_a_failed_step_and_its_failed_run_are_each_reported_once_with_the_real_exception(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    wait_for_state: Callable[..., None],
    spans: Path,
    events: Path,
) -> None:
    start_worker(app=APP, pool="prefork")

    run = call(worker_env, "fail", "1")

    wait_for_state(run, RunState.FAILED)
    until(lambda: names(spans).count("run/traced.fail") == 2, what="both deliveries")
    failed = [one for one in read(spans) if one["status"] == "ERROR"]
    assert [one["name"] for one in failed] == ["umt.step", "run/traced.fail"]
    assert failed[0]["exceptions"] == ["tests.celery.traced.PaymentError"]
    assert len(failed[1]["exceptions"]) == 1
    until(lambda: [one for one in read(events) if one["type"] == "event"], what="Sentry to be told")
    [told] = [one for one in read(events) if one["type"] == "event"]
    assert "PaymentError" in told["exceptions"]


@only_redis
def test_an_attempt_that_is_tried_again_is_no_error(
    tasks: Tasks, start_worker: Callable[..., Worker], worker_env: dict[str, str], spans: Path, events: Path
) -> None:
    start_worker(app=APP, pool="threads")

    run = call(worker_env, "again")

    trace = result_of(tasks, run)
    until(lambda: names(spans).count("run/traced.again") == 2, what="both deliveries")
    assert_one_trace(read(spans), trace)
    [first] = [one for one in read(spans) if "celery.retry.reason" in one["attributes"]]
    assert "not yet" in first["attributes"]["celery.retry.reason"]
    assert {one["status"] for one in read(spans)} == {"UNSET"}
    assert [one for one in read(events) if one["type"] == "event"] == []


@pytest.mark.parametrize(("suspensions", "pool"), [(1, "prefork"), (3, "threads")], ids=["1-prefork", "3-threads"])
def test_sentry_sees_one_trace_and_no_error_in_a_suspension(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    worker_env: dict[str, str],
    events: Path,
    suspensions: int,
    pool: Pool,
) -> None:
    start_worker(app=APP, pool=pool)

    run = call(worker_env, "run", str(suspensions))

    trace = result_of(tasks, run)
    found = wait_for(events, {"traced.sent", "traced.member", "traced.linked"})
    ours = [one for one in found if str(one["name"]).startswith("traced.")]
    assert {one["trace"] for one in ours} == {trace}, ours
    assert [one["name"] for one in ours].count("traced.run") == suspensions + 1
    assert "send" in [step for one in ours for step in one["steps"]]
    assert [one for one in found if one["type"] == "event"] == []


@only_redis
def test_sentry_keeps_the_trace_where_a_relay_publishes(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    serve: Callable[..., Serve],
    worker_env: dict[str, str],
    events: Path,
    tmp_path: Path,
) -> None:
    once = f"finish.commit.a=kill;file:{tmp_path / 'killed'}"
    worker_env["DURABLE_HOLD_SECONDS"] = "2"
    start_worker(app=APP, env={**worker_env, ENVIRONMENT: once, "DURABLE_WORKER_SERVICES": "0"})
    serve("all", app=APP)

    run = call(worker_env, "run", "0")

    found = wait_for(events, {"traced.sent", "traced.member", "traced.linked"}, timeout=120.0)
    trace = result_of(tasks, run)
    assert (tmp_path / "killed").exists(), "no finisher was killed"
    assert {one["trace"] for one in found if str(one["name"]).startswith("traced.")} == {trace}


@only_redis
def test_d2_without_a_tracer_a_run_stores_nothing_of_one_and_has_a_derived_id(
    tasks: Tasks, start_worker: Callable[..., Worker], conn: Connection, schema: str
) -> None:
    start_worker(app=APP, pool="threads")

    first, second = (tasks.app.send_task("traced.run", (number,)) for number in (0, 1))
    local = tasks.one_step.delay(1)

    ids = {result_of(tasks, one.id) for one in (first, second)}
    assert len(ids) == 2
    assert all(len(one) == 32 for one in ids)
    assert local.get(timeout=60) == 1
    stored = conn.execute(f"SELECT envelope FROM {schema}.run".encode()).fetchall()
    kept = [Envelope.from_bytes(envelope).headers for (envelope,) in stored]
    assert kept == [{}] * len(kept)


# -- what leaves by the outbox, and children ---------------------------------------------------------------------------


def ended(file: Path, kept: set[str], *, children: int, of: str) -> list[dict[str, Any]]:
    """Return what was written down once these tasks were executed, and so many children."""
    wanted = {of + name for name in kept}

    def are_there() -> bool:
        found = names(file)
        return wanted <= set(found) and found.count(f"{of}traced.child") >= children

    until(are_there, timeout=120.0, what=f"{wanted}", diagnose=lambda: str(names(file)))
    return read(file)


@only_redis
@pytest.mark.parametrize("relay", ["followed", "followed by nobody"])
def test_d2_awaited_tasks_children_and_what_a_step_keeps_in_the_outbox_belong_to_the_trace_of_the_run(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    serve: Callable[..., Serve],
    worker_env: dict[str, str],
    spans: Path,
    relay: str,
) -> None:
    start_worker(app=APP, pool="prefork", env={**worker_env, "DURABLE_WORKER_SERVICES": "0"})
    followed = relay == "followed"
    serve("all", app=APP, env={name: value for name, value in worker_env.items() if followed or name != SPANS})

    run = call(worker_env, "family")

    traces = result_of(tasks, run)
    found = ended(spans, FAMILY, children=2, of="run/")
    assert set(traces) == {traces[0]}
    assert_one_trace(found, traces[0])
    spans_of = {one["id"]: one["name"] for one in found}
    ancestors = {one["name"]: spans_of.get(one["parent"]) for one in found}
    if followed:
        assert ancestors["run/traced.labelled"] == "apply_async/traced.labelled"
        assert ancestors["apply_async/traced.labelled"] == "run/traced.family"
    else:
        assert ancestors["run/traced.labelled"] == "run/traced.family"
    assert ancestors["apply_async/traced.child"] == "run/traced.family"


@only_redis
def test_sentry_sees_awaited_tasks_children_and_what_a_step_keeps_in_the_outbox_in_the_trace_of_the_run(
    tasks: Tasks,
    start_worker: Callable[..., Worker],
    serve: Callable[..., Serve],
    worker_env: dict[str, str],
    events: Path,
) -> None:
    start_worker(app=APP, pool="threads", env={**worker_env, "DURABLE_WORKER_SERVICES": "0"})
    serve("all", app=APP)

    run = call(worker_env, "family")

    traces = result_of(tasks, run)
    found = ended(events, FAMILY, children=2, of="")
    assert set(traces) == {traces[0]}
    ours = [one for one in found if str(one["name"]).startswith(("traced.", "umt_durable."))]
    assert {one["trace"] for one in ours} == {traces[0]}, ours
    assert [one for one in found if one["type"] == "event"] == []


@only_redis
@pytest.mark.parametrize("tracer", ["opentelemetry", "sentry", "both"])
def test_d2_what_a_caller_keeps_in_the_outbox_belongs_to_the_callers_trace(
    start_worker: Callable[..., Worker], worker_env: dict[str, str], spans: Path, events: Path, tracer: str
) -> None:
    left_out = {"opentelemetry": EVENTS, "sentry": SPANS}.get(tracer)
    worker_env.pop(left_out or "", None)
    start_worker(app=APP, pool="threads")

    call(worker_env, "keep")

    if tracer != "sentry":
        found = ended(spans, KEPT, children=0, of="run/")
        (request,) = [one for one in found if one["name"] == "request"]
        assert_one_trace(found, request["trace"])
    if tracer != "opentelemetry":
        seen = ended(events, KEPT, children=0, of="")
        (asked,) = [one for one in seen if one["name"] == "request"]
        assert {one["trace"] for one in seen if str(one["name"]).startswith("traced.")} == {asked["trace"]}


@only_redis
def test_d2_without_a_tracer_nothing_of_one_is_kept_in_the_outbox(
    worker_env: dict[str, str], conn: Connection, schema: str
) -> None:
    call(worker_env, "keep")

    assert conn.execute(f"SELECT DISTINCT trace FROM {schema}.outbox_event".encode()).fetchall() == [(None,)]
