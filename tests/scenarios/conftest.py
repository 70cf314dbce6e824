"""The tasks of scenarios that have an app of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support import scenario_apps
from tests.support.scenario_apps import Scenarios
from tests.support.wait import until
from umt_durable.states import RunState


@pytest.fixture
def scenarios(worker_env: dict[str, str]) -> Iterator[Scenarios]:
    """Return the tasks of `tests.support.scenario_apps`, for calling."""
    found = scenario_apps.build(worker_env)
    yield found
    found.durable.stop()
    found.app.close()


@pytest.fixture
def wait_for(scenarios: Scenarios) -> Callable[..., None]:
    """Return a function that waits until runs of these tasks are in a state."""

    def wait(ids: Sequence[str] | str, state: RunState, timeout: float = 60.0) -> None:
        wanted = [ids] if isinstance(ids, str) else list(ids)
        until(
            lambda: all(scenarios.durable.get(run_id).state is state for run_id in wanted),
            timeout=timeout,
            what=f"{len(wanted)} run(s) to be {state}",
        )

    return wait
