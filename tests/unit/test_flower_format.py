"""What the format hook for Flower makes of its copy of a task."""

from __future__ import annotations

from types import FunctionType

from celery.events.state import Task

from umt_durable.bridge.flower import format_task


def test_hook_is_a_plain_function_as_flower_demands() -> None:
    assert isinstance(format_task, FunctionType)


def test_parked_run_says_where_it_stands_in_rows_of_its_own() -> None:
    parked = Task(
        uuid="r",
        state="RETRY",
        result="'durable: waiting fact approved'",
        exception="waiting fact approved",
        traceback="",
    )

    shown = format_task(parked)

    assert (shown.state, shown.durable_state, shown.durable_until) == ("RETRY", "waiting", "fact approved")
    assert shown.exception is None
    assert {"durable_state", "durable_until"} < set(shown._fields)
    assert shown.as_dict()["durable_state"] == "waiting"


def test_finished_run_keeps_nothing_of_an_earlier_wait() -> None:
    done = Task(uuid="r", state="SUCCESS", result="7", exception="sleeping sleep nap for 0:05:00")

    shown = format_task(done)

    assert (shown.result, shown.exception) == ("7", None)
    assert "durable_state" not in shown.as_dict()


def test_run_that_is_executed_again_shows_no_result_of_its_wait() -> None:
    again = Task(uuid="r", state="STARTED", result="durable: sleeping sleep nap", exception="sleeping sleep nap")

    assert format_task(again).result is None


def test_ordinary_tasks_stay_as_they_are() -> None:
    retried = Task(uuid="r", state="RETRY", exception="OSError('away')", traceback="tb", result=None)
    failed = Task(uuid="f", state="FAILURE", exception="ValueError('sleeping')", traceback="tb")

    assert (format_task(retried).exception, retried.traceback) == ("OSError('away')", "tb")
    assert format_task(failed).exception == "ValueError('sleeping')"
