"""Leaving the embedded pair: what forked children count for, and stopping it on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import guard
from tests.support.embedded import Come, kill, pids, run, users_of
from tests.support.wait import until
from umt_durable.embedded import down
from umt_durable.errors import EmbeddedError

NOBODY_LEFT = (None, None)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "home"
    yield path
    down(path, force=True)


@pytest.fixture
def come(home: Path) -> Iterator[Come]:
    """Return a function that starts a user process of the home and returns once the pair runs for it."""
    with users_of(home) as come:
        yield come


# -- forked children --------------------------------------------------------------------------------------------------

FORK = """
import json, os, sys
from pathlib import Path
from umt_durable.embedded import ensure
pair = ensure(Path(sys.argv[1]), durable=False)
child = os.fork()
if child == 0:
    {child}
print(json.dumps([pair.database_url, pair.broker_url, pair.result_url, str(pair.home)]), flush=True)
print(child, flush=True)
sys.stdin.readline()
"""
STAYS = "import signal; signal.pause()"
RUNS_ITS_EXIT_HANDLERS = "sys.exit(0)"
BECOMES_A_USER = "ensure(Path(sys.argv[1]), durable=False); print('child', flush=True); import signal; signal.pause()"


def test_a_child_that_outlives_its_killed_parent_still_uses_the_pair(home: Path, come: Come) -> None:
    parent = come(program=FORK.format(child=STAYS))
    child = psutil.Process(int(parent.line()))
    before = pids(home)
    parent.process.kill()
    parent.process.wait()

    come().leave()
    assert pids(home) == before
    kill(child.pid)
    come().leave()

    assert pids(home) == NOBODY_LEFT


def test_a_parent_that_ends_in_order_leaves_for_its_children_too(home: Path, come: Come) -> None:
    parent = come(program=FORK.format(child=STAYS))
    child = psutil.Process(int(parent.line()))

    parent.say_goodbye()
    parent.process.wait(timeout=60)

    assert pids(home) == NOBODY_LEFT
    kill(child.pid)


def test_a_child_that_runs_its_exit_handlers_stops_nothing(home: Path, come: Come) -> None:
    parent = come(program=FORK.format(child=RUNS_ITS_EXIT_HANDLERS))
    child = psutil.Process(int(parent.line()))
    before = pids(home)

    until(lambda: not guard.lives(child), what="the child's exit")

    assert pids(home) == before
    parent.leave()
    assert pids(home) == NOBODY_LEFT


def test_a_child_that_asks_for_itself_is_a_user_of_its_own(home: Path, come: Come) -> None:
    parent = come(program=FORK.format(child=BECOMES_A_USER), wait=False)
    told = [parent.line() for _ in range(3)]
    child = psutil.Process(next(int(line) for line in told if line.strip().isdecimal()))
    before = pids(home)

    parent.say_goodbye()
    parent.process.wait(timeout=60)

    assert pids(home) == before
    kill(child.pid)


# -- down -------------------------------------------------------------------------------------------------------------


def test_down_refuses_while_a_process_uses_the_pair_and_names_it(home: Path, come: Come) -> None:
    user = come()
    before = pids(home)

    with pytest.raises(EmbeddedError, match=f"in use by process {user.process.pid}"):
        down(home)

    assert pids(home) == before


def test_down_by_force_stops_it_under_its_users(home: Path, come: Come) -> None:
    user = come()

    assert down(home, force=True) is True

    assert pids(home) == NOBODY_LEFT
    user.leave()


def test_down_stops_a_pair_that_a_killed_process_left_running(home: Path, come: Come) -> None:
    come().kill()
    assert None not in pids(home)

    assert down(home) is True
    assert down(home) is False

    assert pids(home) == NOBODY_LEFT


def test_down_makes_no_folder_where_there_is_none(home: Path) -> None:
    assert down(home) is False

    assert not home.exists()


SELF_DOWN = """
import sys
from pathlib import Path
from umt_durable.embedded import down, ensure
home = Path(sys.argv[1])
ensure(home, durable=False)
print(down(home), down(home), ensure(home, durable=False) is not None)
"""


def test_a_process_may_stop_the_pair_that_it_uses_itself(home: Path) -> None:
    done = run(SELF_DOWN, str(home))

    assert done.stdout == "True False True\n"
    assert pids(home) == NOBODY_LEFT
