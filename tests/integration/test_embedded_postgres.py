"""The embedded Postgres on its own: starts, stops, crashes, left-over files, its loopback port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support import guard
from tests.support.embedded import START_POSTGRES, MakePostgres, keep_row, kept, kill, postgres_servers, rows, zombie
from tests.support.wait import until
from umt_durable.embedded import PostgresServer
from umt_durable.errors import EmbeddedError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def make(home: Path) -> Iterator[MakePostgres]:
    with postgres_servers(home) as build:
        yield build


@pytest.fixture
def foreigner() -> Iterator[subprocess.Popen[bytes]]:
    """Return a live process that has nothing to do with any server."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def leave_pid(server: PostgresServer, pid: int) -> None:
    """Kill the server and let its pid file and its socket's lock file name another process."""
    socket_lock = server.home.socket_folder / f".s.PGSQL.{server.port}.lock"
    kill(server.pid)
    for path in (server.data / "postmaster.pid", socket_lock):
        _, _, rest = path.read_text().partition("\n")
        path.write_text(f"{pid}\n{rest}")


def test_a_first_start_makes_the_database_and_its_owner(make: MakePostgres) -> None:
    server = make(durable=True)

    server.start()

    (found,) = rows(
        server.url,
        "SELECT current_database(), current_user, pg_encoding_to_char(encoding), datcollate, current_setting('fsync'),"
        " current_setting('listen_addresses'), current_setting('server_version_num')::int / 10000"
        " FROM pg_database WHERE datname = current_database()",
    )
    assert found == ("umt_durable", "umt", "UTF8", "C.UTF-8", "on", "", 18)


def test_a_second_start_finds_the_server_that_runs(make: MakePostgres) -> None:
    first, second = make(), make()
    first.start()

    second.start()

    assert second.pid == first.pid is not None
    assert first.log.read_text().count("starting PostgreSQL") == 1


def test_stop_says_whether_there_was_a_server(make: MakePostgres) -> None:
    server = make()
    server.start()

    answers = [server.stop(), server.stop()]

    assert answers == [True, False]
    assert server.pid is None
    assert not server.home.socket_folder.exists()


def test_a_server_that_never_was_can_be_stopped(make: MakePostgres) -> None:
    assert make().stop() is False


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_it_starts_again_on_the_same_data_and_url(make: MakePostgres, mode: str, tcp: bool) -> None:
    server = make(durable=mode == "immediate", tcp=tcp)
    server.start()
    keep_row(server)
    url, pid = server.url, server.pid

    server.stop("immediate" if mode == "immediate" else "fast")
    server.start()

    assert (server.url, kept(server)) == (url, [(42,)])
    assert server.pid != pid


def test_an_open_connection_does_not_keep_it_from_stopping(make: MakePostgres) -> None:
    server = make()
    server.start()

    with psycopg.connect(server.url) as conn:
        conn.execute("SELECT 1")
        server.stop()

        with pytest.raises(psycopg.OperationalError):
            conn.execute("SELECT 1")


def test_a_killed_postmaster_comes_back_with_every_committed_row(make: MakePostgres) -> None:
    server = make(durable=True)
    server.start()
    keep_row(server)

    kill(server.pid)
    server.start()

    assert kept(server) == [(42,)]


def test_a_start_waits_for_the_processes_of_a_killed_postmaster(make: MakePostgres) -> None:
    server = make()
    server.start()
    pid = server.pid
    assert pid is not None
    (checkpointer,) = (child for child in guard.tree(pid) if "checkpointer" in " ".join(child.cmdline()))
    checkpointer.suspend()

    os.kill(pid, signal.SIGKILL)
    with server.home.lock("postgres.alive") as alive:
        assert not alive.try_exclusive()
    starter = subprocess.Popen(
        [sys.executable, "-c", START_POSTGRES, str(server.home.path)],
        env=guard.clean_environment(),
        stdout=subprocess.PIPE,
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"starting\n"
    checkpointer.resume()

    assert starter.communicate(timeout=60)[0] == b"started\n"
    assert rows(server.url, "SELECT 1") == [(1,)]


def test_a_pid_file_that_names_a_live_foreign_process_is_left_over(
    make: MakePostgres, foreigner: subprocess.Popen[bytes]
) -> None:
    server = make()
    server.start()
    leave_pid(server, foreigner.pid)

    assert server.pid is None
    server.start()

    assert rows(server.url, "SELECT 1") == [(1,)]
    assert foreigner.poll() is None


def test_a_pid_file_that_names_another_home_s_postgres_is_left_over(make: MakePostgres, tmp_path: Path) -> None:
    other = make(place=tmp_path / "other")
    other.start()
    server = make()
    server.start()
    pid = other.pid
    assert pid is not None
    leave_pid(server, pid)

    assert server.pid is None
    server.start()

    assert rows(server.url, "SELECT 1") == [(1,)]
    assert other.pid == pid


def test_a_pid_file_that_names_a_zombie_is_left_over(make: MakePostgres) -> None:
    server = make()
    server.start()
    dead = zombie()
    leave_pid(server, dead.pid)

    server.start()

    assert rows(server.url, "SELECT 1") == [(1,)]
    dead.wait()


def test_a_half_made_data_folder_is_made_again(make: MakePostgres) -> None:
    server = make()
    half = server.home.path / "postgres.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")

    server.start()

    assert rows(server.url, "SELECT 1") == [(1,)]


def test_a_starter_killed_inside_initdb_is_no_obstacle(make: MakePostgres) -> None:
    server = make()
    starter = subprocess.Popen(
        [sys.executable, "-c", START_POSTGRES, str(server.home.path)], env=guard.clean_environment()
    )
    until((server.home.path / "postgres.new" / "global").exists, what="initdb")
    starter.kill()
    starter.wait()

    server.start()

    assert rows(server.url, "SELECT 1") == [(1,)]


def test_several_starters_make_one_server(make: MakePostgres) -> None:
    server = make()
    argv = [sys.executable, "-c", START_POSTGRES, str(server.home.path)]

    starters = [subprocess.Popen(argv, env=guard.clean_environment(), stdout=subprocess.DEVNULL) for _ in range(3)]

    assert [starter.wait(timeout=60) for starter in starters] == [0, 0, 0]
    assert server.log.read_text().count("starting PostgreSQL") == 1


def test_a_failed_start_names_the_log_and_shows_its_end(make: MakePostgres) -> None:
    server = make()
    server.start()
    server.stop()
    (server.data / "postgresql.auto.conf").write_text("no setting at all")

    with pytest.raises(EmbeddedError) as failure:
        server.start()

    assert str(server.log) in str(failure.value)
    assert "syntax error" in str(failure.value)
