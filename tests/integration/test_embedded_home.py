"""One embedded Postgres and its home: what it was asked for, its loopback port, its paths, what others may see."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support import guard
from tests.support.embedded import START_POSTGRES, MakePostgres, keep_row, kept, postgres_servers, rows
from umt_durable.embedded import PostgresServer
from umt_durable.errors import EmbeddedError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def make(home: Path) -> Iterator[MakePostgres]:
    with postgres_servers(home) as build:
        yield build


def test_a_server_without_durability_is_not_taken_for_a_durable_one(make: MakePostgres) -> None:
    make(durable=False).start()

    with pytest.raises(EmbeddedError, match=r"without durability.*down"):
        make(durable=True).start()


def test_a_server_without_a_port_is_not_taken_for_one_with(make: MakePostgres) -> None:
    make(tcp=False).start()

    with pytest.raises(EmbeddedError, match=r"without a loopback port.*down"):
        make(tcp=True).start()


def test_loopback_asks_for_the_password_of_the_home(make: MakePostgres) -> None:
    server = make(tcp=True)
    server.start()

    assert rows(server.url, "SELECT inet_server_addr()::text") == [("127.0.0.1/32",)]
    assert rows(server.socket_url, "SELECT inet_server_addr()::text") == [(None,)]
    for wrong in ({"password": "guessed"}, {"password": ""}):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(make_conninfo(server.url, **wrong), passfile="/dev/null")
    assert stat.S_IMODE((server.home.path / "password").stat().st_mode) == 0o600
    assert str(conninfo_to_dict(server.url)["password"]) not in server.log.read_text()


def test_a_port_that_was_taken_meanwhile_is_replaced_for_a_new_process(make: MakePostgres) -> None:
    first = make(tcp=True)
    first.start()
    keep_row(first)
    first.stop()
    lurker = subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(first.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert lurker.stdout is not None
    assert lurker.stdout.readline() == b"listening\n"
    taken = first.port

    with pytest.raises(EmbeddedError, match=r"postgres\.log"):
        first.start()
    second = make(tcp=True)
    second.start()
    lurker.communicate(b"")

    assert second.port != taken
    assert kept(second) == [(42,)]


LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    print("listening", flush=True)
    sys.stdin.read()
"""


def test_a_long_path_of_the_home_does_not_matter_to_the_socket(make: MakePostgres, tmp_path: Path) -> None:
    server = make(place=tmp_path / ("long-" * 40) / "a home with spaces, ünïcode & %41?")

    server.start()

    assert rows(server.url, "SELECT 1") == [(1,)]
    assert len(os.fsencode(server.home.socket_folder / ".s.PGSQL.65535.lock")) <= 107


def test_two_homes_are_two_servers(make: MakePostgres, tmp_path: Path) -> None:
    one, two = make(), make(place=tmp_path / "other")
    one.start()
    two.start()

    keep_row(one)

    assert one.pid != two.pid
    with pytest.raises(psycopg.errors.UndefinedTable):
        kept(two)


def test_a_copied_home_does_not_meet_the_server_of_the_original(make: MakePostgres, tmp_path: Path) -> None:
    one = make()
    one.start()
    keep_row(one)
    one.stop()
    shutil.copytree(one.home.path, tmp_path / "copy")
    two = make(place=tmp_path / "copy")
    if one.home.account is not None:
        for path in [two.data, *two.data.rglob("*")]:
            os.chown(path, one.home.account.uid, one.home.account.gid)

    one.start()
    two.start()
    rows(two.url, "DELETE FROM kept")

    assert kept(one) == [(42,)]


def test_a_home_that_was_moved_while_its_server_ran_says_so(make: MakePostgres, tmp_path: Path) -> None:
    server = make()
    server.start()
    old_sockets = server.home.socket_folder
    (tmp_path / "home").rename(tmp_path / "moved")
    moved = make(place=tmp_path / "moved")

    with pytest.raises(EmbeddedError, match=r"(?s)lives but does not answer.*down"):
        moved.start()

    assert moved.stop() is True
    moved.start()
    assert rows(moved.url, "SELECT 1") == [(1,)]
    old_sockets.rmdir()


def test_wipe_needs_a_stopped_server_and_leaves_an_empty_one(make: MakePostgres) -> None:
    server = make()
    server.start()
    keep_row(server)

    with pytest.raises(EmbeddedError, match="stop it"):
        server.wipe()
    server.stop()
    server.wipe()
    server.start()

    with pytest.raises(psycopg.errors.UndefinedTable):
        kept(server)


def test_as_a_context_manager_it_runs_inside_the_block_only(home: Path) -> None:
    with PostgresServer(home, durable=False) as server:
        assert server.pid is not None

    assert server.pid is None


def test_nothing_is_open_to_others_whatever_the_umask(home: Path) -> None:
    loose = f"import os; os.umask(0)\n{START_POSTGRES}"
    subprocess.run([sys.executable, "-c", loose, str(home)], env=guard.clean_environment(), check=True)
    server = PostgresServer(home)

    open_ones = [
        path
        for path in [
            home,
            server.data,
            server.home.socket_folder,
            *home.iterdir(),
            *server.home.socket_folder.iterdir(),
        ]
        if stat.S_IMODE(path.stat().st_mode) & 0o077 and path.name != ".gitignore"
    ]
    server.stop()

    assert open_ones == []
