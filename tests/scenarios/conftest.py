"""What the scenarios share: the tasks as a producer sees them, and looks at their runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support import apps
from tests.support.wait import until
from umt_durable.states import RunState


@pytest.fixture
def tasks(worker_env: dict[str, str]) -> Iterator[apps.Tasks]:
    """Return the tasks of the workers, for enqueuing from this process."""
    tasks = apps.build(worker_env)
    yield tasks
    tasks.durable.stop()
    tasks.app.close()


@pytest.fixture
def wait_for_state(tasks: apps.Tasks) -> Callable[..., None]:
    """Return a function that waits until runs are in a state."""

    def wait(ids: Sequence[str] | str, state: RunState, timeout: float = 60.0) -> None:
        wanted = [ids] if isinstance(ids, str) else list(ids)

        def look() -> bool:
            return all(tasks.durable.get(run_id).state is state for run_id in wanted)

        until(look, timeout=timeout, what=f"{len(wanted)} run(s) to be {state}")

    return wait
