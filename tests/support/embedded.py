"""Processes that use an embedded pair, for the tests of its life: each is a real one that can leave or be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tests.support import guard, skips
from umt_durable.embedded import Pair, PostgresServer, ValkeyServer
from umt_durable.embedded.resp import Connection, Reply

ENSURE = """
import json, sys
from pathlib import Path
from umt_durable.embedded import ensure
pair = ensure(Path(sys.argv[1]), durable=sys.argv[2] == "durable")
print(json.dumps([pair.database_url, pair.broker_url, pair.result_url, str(pair.home)]), flush=True)
sys.stdin.readline()
"""

START_POSTGRES = """
import sys
from pathlib import Path
from umt_durable.embedded import PostgresServer
print("starting", flush=True)
PostgresServer(Path(sys.argv[1]), durable=False).start()
print("started", flush=True)
"""

MakePostgres = Callable[..., PostgresServer]
Come = Callable[..., "User"]


@contextmanager
def postgres_servers(home: Path) -> Iterator[MakePostgres]:
    """Give a function that makes servers, of this home unless told otherwise; they are stopped at the end."""
    made: list[PostgresServer] = []

    def build(*, durable: bool = False, tcp: bool = False, place: Path = home) -> PostgresServer:
        server = PostgresServer(place, durable=durable, tcp=tcp)
        guard.watch(server.home.path)
        made.append(server)
        return server

    yield build
    for server in made:
        if server.home.path.exists():
            server.stop("immediate")


@dataclass
class User:
    """A process that called `ensure` and stays until it is told to leave."""

    process: subprocess.Popen[str]
    pair: Pair | None = None
    lines: list[str] = field(default_factory=list)

    @classmethod
    def launch(cls, home: Path, *, durable: bool = True, uid: int | None = None, program: str = ENSURE) -> User:
        """Start the process without waiting for it."""
        guard.watch(home)
        argv = [*as_user(uid), "-c", program, str(home), "durable" if durable else "quick"]
        return cls(
            subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd="/",
                env=guard.clean_environment(),
            )
        )

    @classmethod
    def come(cls, home: Path, *, durable: bool = True, uid: int | None = None, program: str = ENSURE) -> User:
        """Start the process and return once the pair runs for it."""
        return cls.launch(home, durable=durable, uid=uid, program=program).attached()

    def attached(self) -> User:
        """Wait until the pair runs for this process."""
        line = self.line()
        database, broker, result, place = json.loads(line)
        self.pair = Pair(database, broker, result, Path(place))
        return self

    def line(self) -> str:
        """Return the next line that the process prints; its error output when it ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the user process ended: {self.process.communicate()[1]}")
        return line

    def refusal(self) -> str:
        """Return what the process wrote as it failed."""
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode != 0
        return errors

    def leave(self) -> None:
        """Let the process end in order."""
        self.say_goodbye()
        self.gone()

    def say_goodbye(self) -> None:
        """Tell the process to end, without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def gone(self) -> None:
        """Wait until the process has ended in order."""
        _, errors = self.process.communicate(timeout=60)
        assert (self.process.returncode, errors) == (0, "")

    def kill(self) -> None:
        """Kill the process, with nothing of it left to run."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Make sure that the process is gone and its pipes are closed."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=30)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def as_user(uid: int | None) -> list[str]:
    """Return the interpreter, run by a user that has no account unless the number has one."""
    if uid is None:
        return [sys.executable]
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        skips.missing("only root can act as other users, through setpriv")
    argv = [setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", sys.executable]
    trial = subprocess.run([*argv, "-c", "import psycopg, psutil"], cwd="/", capture_output=True, check=False)
    if trial.returncode != 0:
        skips.missing("this interpreter is installed where no other user can run it")
    return argv


def pids(home: Path) -> tuple[int | None, int | None]:
    """Return the pids of both servers of a home."""
    return PostgresServer(home).pid, ValkeyServer(home).pid


def kill(pid: int | None) -> None:
    """Kill a server and wait until it and its children are gone; a zombie is."""
    assert pid is not None
    family = guard.tree(pid)
    os.kill(pid, signal.SIGKILL)
    assert not guard.wait_gone(family)


def zombie() -> subprocess.Popen[bytes]:
    """Return a process that has ended and that nobody reaped."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    return process


def rows(url: str, query: str, *values: object) -> list[tuple[Any, ...]]:
    """Run one statement in a connection and transaction of its own and return its rows."""
    with psycopg.connect(url) as conn:
        cursor = conn.execute(query.encode(), values)
        return cursor.fetchall() if cursor.description else []


def keep_row(server: PostgresServer) -> None:
    """Commit one row into a new table."""
    rows(server.url, "CREATE TABLE kept (id int)")
    rows(server.url, "INSERT INTO kept VALUES (42)")


def kept(server: PostgresServer) -> list[tuple[int]]:
    """Return what `keep_row` committed."""
    return rows(server.url, "SELECT id FROM kept")


def valkey(url: str, *words: str) -> Reply:
    """Run one command over the socket that a URL names."""
    path = url.partition("://")[2].partition("?")[0]
    with Connection(Path(path)) as connection:
        return connection.command(*words)


@contextmanager
def users_of(home: Path) -> Iterator[Come]:
    """Give a function that makes processes use the pair of a home; none of them is left at the end."""
    made: list[User] = []

    def come(*, durable: bool = False, program: str = ENSURE, wait: bool = True) -> User:
        user = User.launch(home, durable=durable, program=program)
        made.append(user)
        return user.attached() if wait else user

    yield come
    for user in made:
        user.close()


def run(program: str, *arguments: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, which must succeed."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=guard.clean_environment(extra),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
