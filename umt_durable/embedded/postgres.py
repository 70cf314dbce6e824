"""A private Postgres from the binaries of the extra `embedded`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from umt_durable.embedded.account import Account, give, has_name, ids, named_account, succeeds
from umt_durable.embedded.binaries import postgres_folder
from umt_durable.embedded.locks import FileLock
from umt_durable.embedded.process import environment, open_log
from umt_durable.embedded.server import LOCALE, Mode, Server
from umt_durable.errors import EmbeddedError

if TYPE_CHECKING:
    import psycopg

USER: Final = "umt"
DATABASE: Final = "umt_durable"

_ALWAYS_THERE: Final = "postgres"
_SOCKET_PORT: Final = 5432
_CONNECT_SECONDS: Final = 5
# Named like this, the working directory needs no right on its parents: the server's user may enter none of root's.
_HERE: Final = "/proc/self/cwd"
_SETTINGS: Final = {
    "unix_socket_permissions": "0700",
    "shared_buffers": "64MB",
    "max_connections": "200",
    "logging_collector": "off",
    "log_destination": "stderr",
}
_NOT_DURABLE: Final = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
_SIGNALS: Final[dict[Mode, signal.Signals]] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServer(Server):
    """The Postgres of one home, with the database `umt_durable` and its owner `umt`.

    Over its socket it trusts whoever can enter the socket folder, which is the servers' user and root; over loopback it
    asks for the password of the home.
    """

    name: ClassVar[str] = "postgres"
    program: ClassVar[str] = "postgres"
    pid_file: ClassVar[str] = "postmaster.pid"

    @property
    def port(self) -> int:
        """Return the port: of loopback, and in the name of the socket."""
        return self.home.remembered_port(self.name) or _SOCKET_PORT

    @property
    def url(self) -> str:
        """Return the URL of the database: over loopback when `tcp` was asked for, else over the socket."""
        if not self.tcp:
            return self.socket_url
        return f"postgresql://{USER}:{quote(self.home.password(), safe='')}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def socket_url(self) -> str:
        """Return the URL of the database over the socket."""
        return f"postgresql://{USER}@/{DATABASE}?host={quote(str(self.home.socket_folder), safe='')}&port={self.port}"

    def _answers(self) -> bool:
        import psycopg

        try:
            self._connect().close()
        except psycopg.OperationalError as error:
            self._refusal = str(error).strip()
            return False
        return True

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        import psycopg

        return psycopg.connect(
            host=str(self.home.socket_folder),
            port=self.port,
            user=USER,
            dbname=_ALWAYS_THERE,
            options="",
            connect_timeout=_CONNECT_SECONDS,
            autocommit=True,
        )

    def _prepare(self, alive: FileLock) -> None:
        # No process of this server lives, so the file is left over; the number in it may belong to anybody by now.
        (self.data / self.pid_file).unlink(missing_ok=True)
        if not self.data.exists():
            self._initialise(alive)

    def _initialise(self, alive: FileLock) -> None:
        """Make the data folder; it appears under its name only when it is complete.

        An initdb whose starter was killed goes on; since it holds the lock, nobody starts a second one beside it.
        """
        draft = self.home.path / "postgres.new"
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(mode=0o700)
        prefix, account = self._init_identity()
        give(draft, account)
        program = postgres_folder(account) / "initdb"
        user, group, extra = ids(account)
        with open_log(self.log) as log:
            done = subprocess.run(
                [*prefix, str(program), *self._init_options(draft)],
                cwd=draft,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(LOCALE),
                umask=0o077,
                user=user,
                group=group,
                extra_groups=extra,
                pass_fds=(alive.fileno(),),
                check=False,
            )
        if done.returncode != 0:
            raise self._failure("cannot make its data folder")
        give(draft, self.home.account)
        draft.rename(self.data)

    def _init_options(self, folder: Path) -> list[str]:
        return [
            *("-D", self._reach(folder), "-U", USER, "-E", "UTF8", f"--locale={LOCALE}", "--no-instructions"),
            *("--auth-local=trust", "--auth-host=scram-sha-256"),
            *([] if self.durable else ["--no-sync"]),
        ]

    def _init_identity(self) -> tuple[list[str], Account | None]:
        """Return how to run initdb, which works only for a user with a name: a command in front, and an account."""
        nobody = named_account()
        if self.home.account is None and has_name():
            return [], None
        if nobody is None:
            raise EmbeddedError("initdb needs a user with a name, and this system has none: set DURABLE_DATABASE_URL")
        if self.home.account is not None:
            return [], nobody
        unshare = shutil.which("unshare")
        if unshare is None:
            raise self._nameless("the program unshare, which could lend it one, is missing")
        lend = [unshare, "--user", f"--map-user={nobody.uid}"]
        if not succeeds([*lend, "/bin/sh", "-c", ":"], None):
            raise self._nameless("this system does not let it borrow one in a user namespace")
        return lend, None

    def _nameless(self, why: str) -> EmbeddedError:
        return EmbeddedError(
            f"user {os.geteuid()} has no name in the system's user database, which initdb asks for, and {why}: "
            "add an entry for the user, or set DURABLE_DATABASE_URL"
        )

    def _reach(self, folder: Path) -> str:
        return str(folder) if self.home.account is None else _HERE

    def _command(self) -> list[str]:
        settings = {
            **_SETTINGS,
            **({} if self.durable else _NOT_DURABLE),
            "unix_socket_directories": str(self.home.socket_folder),
            "listen_addresses": "127.0.0.1" if self.tcp else "",
            "port": str(self.port),
            "umt_durable.home": str(self.home.path),
        }
        program = postgres_folder(self.home.account) / self.program
        return [str(program), "-D", self._reach(self.data), *_options(settings)]

    def _settle(self, *, fresh: bool) -> None:
        from psycopg import sql

        with self._connect() as conn:
            found = conn.execute(
                "SELECT current_setting('fsync'), current_setting('listen_addresses'),"
                " EXISTS (SELECT FROM pg_database WHERE datname = %s)",
                [DATABASE],
            ).fetchone()
            fsync, listens, exists = found or ("off", "", False)
            if self.durable and fsync != "on":
                raise self._failure("runs without durability already; `umt-durable down` stops it")
            if self.tcp and not listens:
                raise self._failure("runs without a loopback port already; `umt-durable down` stops it")
            if not exists:
                conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
            if self.tcp and fresh:
                verifier = conn.pgconn.encrypt_password(self.home.password().encode(), USER.encode(), b"scram-sha-256")
                change = sql.SQL("ALTER ROLE {} PASSWORD {}")
                conn.execute(change.format(sql.Identifier(USER), sql.Literal(verifier.decode())))

    def _signal(self, pid: int, mode: Mode) -> None:
        os.kill(pid, _SIGNALS[mode])

    def _socket_files(self) -> list[Path]:
        stem = self.home.socket_folder / f".s.PGSQL.{self.port}"
        return [stem, stem.with_name(f"{stem.name}.lock")]


def _options(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
