"""The embedded pair: shared by all processes of a folder, stopped by the last to leave, whoever was killed before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import guard
from tests.support.embedded import Come, User, kill, pids, rows, run, users_of, valkey
from umt_durable.embedded import PostgresServer, down

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


def url(user: User) -> str:
    assert user.pair is not None
    return user.pair.database_url


def broker(user: User) -> str:
    assert user.pair is not None
    return user.pair.broker_url


def test_the_first_process_starts_both_and_gets_their_urls(home: Path, come: Come) -> None:
    user = come(durable=True)

    assert user.pair is not None
    assert rows(user.pair.database_url, "SELECT current_database(), current_user") == [("umt_durable", "umt")]
    assert valkey(user.pair.broker_url, "CONFIG", "GET", "appendonly") == ["appendonly", "yes"]
    assert user.pair.result_url.startswith("redis+socket://")
    assert user.pair.home == home
    assert None not in pids(home)


def test_another_process_attaches_to_the_same_pair(home: Path, come: Come) -> None:
    first = come()
    before = pids(home)

    second = come()

    assert second.pair == first.pair
    assert pids(home) == before


def test_six_processes_that_come_at_once_share_one_pair(home: Path, come: Come) -> None:
    users = [come(wait=False) for _ in range(6)]

    pairs = {user.attached().pair for user in users}

    assert len(pairs) == 1
    assert (home / "postgres.log").read_text().count("starting PostgreSQL") == 1
    assert (home / "valkey.log").read_text().count("Ready to accept connections") == 1


def test_the_last_one_out_stops_the_pair_and_leaves_no_socket(home: Path, come: Come) -> None:
    first, second = come(), come()
    sockets = PostgresServer(home).home.socket_folder
    before = pids(home)

    first.leave()
    assert pids(home) == before
    second.leave()

    assert pids(home) == NOBODY_LEFT
    assert not sockets.exists()


def test_of_processes_that_leave_at_once_one_is_the_last(home: Path, come: Come) -> None:
    crowd = [come() for _ in range(4)]

    for user in crowd:
        user.say_goodbye()
    for user in crowd:
        user.gone()

    assert pids(home) == NOBODY_LEFT


def test_a_pair_starts_again_with_its_rows_and_messages_at_the_same_urls(home: Path, come: Come) -> None:
    first = come(durable=True)
    rows(url(first), "CREATE TABLE kept AS SELECT 42 AS id")
    valkey(broker(first), "RPUSH", "kept", "message")
    first.leave()

    second = come(durable=True)

    assert second.pair == first.pair
    assert rows(url(second), "SELECT id FROM kept") == [(42,)]
    assert valkey(broker(second), "LRANGE", "kept", "0", "-1") == ["message"]


def test_after_the_owner_is_killed_the_next_attaches_and_the_last_one_stops_it(home: Path, come: Come) -> None:
    owner = come()
    before = pids(home)

    owner.kill()
    assert pids(home) == before
    second, third = come(), come()
    assert pids(home) == before
    third.kill()
    second.leave()

    assert pids(home) == NOBODY_LEFT


def test_after_owner_and_servers_are_killed_no_row_and_no_message_is_lost(home: Path, come: Come) -> None:
    owner = come(durable=True)
    rows(url(owner), "CREATE TABLE kept (id int)")
    for number in range(100):
        rows(url(owner), "INSERT INTO kept VALUES (%s)", number)
    valkey(broker(owner), "RPUSH", "kept", "message")
    postmaster, broker_pid = pids(home)

    owner.kill()
    kill(postmaster)
    kill(broker_pid)
    second = come(durable=True)

    assert rows(url(second), "SELECT count(*), sum(id) FROM kept") == [(100, 4950)]
    assert valkey(broker(second), "LRANGE", "kept", "0", "-1") == ["message"]
    second.leave()
    assert pids(home) == NOBODY_LEFT


def test_a_server_that_died_alone_is_started_again_by_whoever_comes(home: Path, come: Come) -> None:
    first = come(durable=True)
    rows(url(first), "CREATE TABLE kept AS SELECT 42 AS id")
    postmaster, broker_pid = pids(home)

    kill(postmaster)
    second = come(durable=True)

    assert rows(url(second), "SELECT id FROM kept") == [(42,)]
    assert pids(home)[1] == broker_pid
    first.leave()
    assert None not in pids(home)


def test_killing_the_tree_of_the_owner_reaches_no_server(home: Path, come: Come) -> None:
    owner = come()
    before = pids(home)

    kin = {process.pid for process in guard.tree(owner.process.pid)}
    groups = {os.getpgid(pid) for pid in before if pid is not None}

    assert kin.isdisjoint(before)
    assert groups.isdisjoint({os.getpgid(owner.process.pid), os.getpgrp()})


def test_a_pair_without_durability_refuses_who_needs_it_and_runs_on(home: Path, come: Come) -> None:
    come(durable=False)
    before = pids(home)
    late = come(durable=True, wait=False)

    assert "without durability" in late.refusal()

    assert pids(home) == before


BROKEN_VALKEY = """
import sys
from pathlib import Path
from umt_durable.embedded import ensure
from umt_durable.errors import EmbeddedError
try:
    ensure(Path(sys.argv[1]))
except EmbeddedError as error:
    print(error)
"""


def test_a_pair_of_which_one_does_not_start_leaves_the_other_not_running(home: Path, come: Come) -> None:
    come(durable=True).leave()
    for part in (home / "valkey" / "appendonlydir").glob("*.manifest"):
        part.write_text("no manifest at all\n")

    done = run(BROKEN_VALKEY, str(home))

    assert "the embedded Valkey" in done.stdout
    assert "valkey.log" in done.stdout
    assert pids(home) == NOBODY_LEFT


WHERE = """
import json
from umt_durable.embedded import ensure
print(json.dumps(str(ensure(durable=False).home)))
"""


def test_by_default_it_is_in_the_current_folder_and_ignored_by_git(tmp_path: Path) -> None:
    done = run(WHERE, cwd=tmp_path)

    home = tmp_path / ".umt_durable"
    assert json.loads(done.stdout) == str(home)
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / ".gitignore").read_text() == "*\n"


def test_the_environment_names_another_folder(tmp_path: Path) -> None:
    done = run(WHERE, cwd=tmp_path, DURABLE_EMBEDDED_HOME=str(tmp_path / "elsewhere"))

    assert json.loads(done.stdout) == str(tmp_path / "elsewhere")
    assert not (tmp_path / ".umt_durable").exists()


def test_a_home_that_was_deleted_and_made_again_gets_servers_of_its_own(home: Path, come: Come) -> None:
    first = come()
    old = pids(home)
    old_sockets = PostgresServer(home).home.socket_folder
    shutil.rmtree(home)

    second = come()

    assert second.pair != first.pair
    assert set(pids(home)).isdisjoint(old)
    for pid in old:
        kill(pid)
    shutil.rmtree(old_sockets)
