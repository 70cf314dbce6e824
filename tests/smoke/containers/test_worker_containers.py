"""The tests of `tests/smoke/nodes` once more, on containers: the worker is in the image of the project's Dockerfile."""

from __future__ import annotations

from tests.smoke.nodes.test_worker_nodes import (
    pytestmark,
    test_a_durable_task_survives_each_way_to_end_its_worker,
    test_a_restart_and_a_broker_that_goes_away_keep_what_sleeps,
    test_a_second_worker_takes_over_from_the_one_that_was_killed,
    test_the_set_up_answers_pings_and_runs_durable_and_ordinary_tasks,
)

__all__ = [
    "pytestmark",
    "test_a_durable_task_survives_each_way_to_end_its_worker",
    "test_a_restart_and_a_broker_that_goes_away_keep_what_sleeps",
    "test_a_second_worker_takes_over_from_the_one_that_was_killed",
    "test_the_set_up_answers_pings_and_runs_durable_and_ordinary_tasks",
]
