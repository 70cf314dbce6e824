"""A RabbitMQ server for the tests: one that answers on loopback, else a private one, else one in a container.

Tests never touch what others keep in a shared server: they work in a virtual host of their own, and a server that is
not theirs is cut off by a proxy instead of stopped.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import subprocess
import urllib.parse
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import amqp

from tests.support import guard
from tests.support.ports import answers, free_port
from tests.support.wait import until

USER = PASSWORD = "guest"
_SHARED_PORT = 5672
_MANAGEMENT_PORT = 15672
_BATCH = 8


class NoRabbitError(Exception):
    """No RabbitMQ can be had on this machine; the text says what was tried."""


@dataclass
class Rabbit:
    """A reachable server and the way to administer it.

    Shape: `control` takes the words of a `rabbitmqctl` command, and its input as `stdin`; it returns what it prints.
    Each command starts a virtual machine of its own, which takes half a second or more: virtual hosts are made several
    at a time, and both made and removed beside the tests.
    """

    port: int
    control: Callable[..., str]
    end: Callable[[], None]
    kind: str
    _helper: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rabbitmqctl"), repr=False)
    _spares: list[str] = field(default_factory=list, repr=False)
    _making: Future[list[str]] | None = field(default=None, repr=False)
    _removing: list[Future[None]] = field(default_factory=list, repr=False)

    def take_vhost(self) -> str:
        """Return a new, empty virtual host that the tests' user may use."""
        if not self._spares:
            making = self._making or self._helper.submit(self._new_vhosts)
            self._spares, self._making = making.result(120), None
        name = self._spares.pop()
        if not self._spares:
            self._making = self._helper.submit(self._new_vhosts)
        return name

    def give_back_vhost(self, name: str) -> None:
        """Remove a virtual host some time after this returns; of a server of our own all go with it."""
        if self.kind == "private":
            return
        self._removing.append(self._helper.submit(self.delete_vhost, name))

    def close(self) -> None:
        """Remove what is left of ours, and end the server if it is ours.

        Errors: NoRabbitError of the first virtual host that could not be removed.
        """
        try:
            left = self._spares + (self._making.result(120) if self._making is not None else [])
            for name in left:
                self.give_back_vhost(name)
            for removing in self._removing:
                removing.result(120)
        finally:
            self._helper.shutdown(wait=True)
            self.end()

    def _new_vhosts(self) -> list[str]:
        names = [f"umt-{uuid.uuid4().hex}" for _ in range(_BATCH)]
        self.add_vhosts(names)
        return names

    def add_vhosts(self, names: list[str]) -> None:
        """Make empty virtual hosts that the tests' user may use."""
        everything = {"user": USER, "configure": ".*", "write": ".*", "read": ".*"}
        wanted = {
            "vhosts": [{"name": name} for name in names],
            "permissions": [{"vhost": name, **everything} for name in names],
        }
        self.control("import_definitions", stdin=json.dumps(wanted))

    def delete_vhost(self, name: str) -> None:
        """Remove a virtual host with all it holds; its connections are closed by the server."""
        self.control("delete_vhost", name)

    def url(self, vhost: str, port: int | None = None) -> str:
        """Return the URL of a virtual host, through another port when one is given."""
        return f"amqp://{USER}:{PASSWORD}@127.0.0.1:{port or self.port}/{vhost}"


def connect(port: int, vhost: str) -> amqp.Connection:
    """Return an open AMQP connection."""
    connection = amqp.Connection(
        host=f"127.0.0.1:{port}", userid=USER, password=PASSWORD, virtual_host=vhost, connect_timeout=5
    )
    connection.connect()
    return connection


def speaks_amqp(port: int) -> bool:
    """Return whether the tests' user can log in to the server behind a port."""
    if not answers(port):
        return False
    try:
        connect(port, "/").close()
    except (OSError, amqp.AMQPError):
        return False
    return True


def find(folder: Path) -> Rabbit:
    """Return a RabbitMQ server that the tests may use.

    Errors: NoRabbitError naming every way that was tried.
    """
    tried: list[str] = []
    for way in (_shared, _private, _container):
        try:
            return way(folder)
        except NoRabbitError as reason:
            tried.append(str(reason))
    raise NoRabbitError("no RabbitMQ: " + "; ".join(tried))


def _run(argv: list[str], env: dict[str, str] | None = None, stdin: str = "") -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env, input=stdin)
    if done.returncode != 0:
        raise NoRabbitError(f"{argv[0]} {argv[1]} failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


# -- one that runs already --------------------------------------------------------------------------------------------


def _shared(_folder: Path) -> Rabbit:
    if not speaks_amqp(_SHARED_PORT):
        raise NoRabbitError(f"none answers on loopback port {_SHARED_PORT}")
    for control in (_shared_ctl, _management):
        try:
            control("list_vhosts")
        except NoRabbitError:
            continue
        return Rabbit(_SHARED_PORT, control, lambda: None, "shared")
    raise NoRabbitError(f"the one on loopback port {_SHARED_PORT} lets us make no virtual host")


def _shared_ctl(*words: str, stdin: str = "") -> str:
    program = shutil.which("rabbitmqctl")
    if program is None:
        raise NoRabbitError("rabbitmqctl is not on PATH")
    return _run([program, "-q", *words], stdin=stdin)


def _management(*words: str, stdin: str = "") -> str:
    """Do the few commands of `rabbitmqctl` that the tests need through the management plug-in."""

    def ask(method: str, path: str, body: str = "") -> str:
        login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", _MANAGEMENT_PORT, timeout=10)
        try:
            connection.request(method, f"/api/{path}", body, headers)
            reply = connection.getresponse()
            text = reply.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise NoRabbitError(f"management plug-in: {error}") from error
        finally:
            connection.close()
        if reply.status >= 300:
            raise NoRabbitError(f"management plug-in: {reply.status} {text[:200]}")
        return text

    match words:
        case ["list_vhosts"]:
            return ask("GET", "vhosts")
        case ["import_definitions"]:
            return ask("POST", "definitions", stdin)
        case ["delete_vhost", name]:
            return ask("DELETE", f"vhosts/{urllib.parse.quote(name, safe='')}")
        case ["list_queues", "-p", name, *_]:
            return ask("GET", f"queues/{urllib.parse.quote(name, safe='')}")
        case _:
            raise NoRabbitError(f"management plug-in: no form of {words[0]}")


# -- a private one ----------------------------------------------------------------------------------------------------


def _private(folder: Path) -> Rabbit:
    server = _script("rabbitmq-server")
    ctl = _script("rabbitmqctl")
    home = folder / "rabbitmq"
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    env = guard.clean_environment(_settings(home, port))
    guard.watch(home)
    log = home / "server.log"
    epmd = shutil.which("epmd")
    started = [guard.spawn([epmd], log, env, cwd=home)] if epmd else []
    started.append(guard.spawn([server], log, env, cwd=home))

    def close() -> None:
        for process in reversed(started):
            guard.kill_all(guard.tree(process.pid))
            process.wait(timeout=10)
        guard.kill_all(guard.strays(folders=[str(home)]) if not epmd else [])

    def tail() -> str:
        return log.read_text(errors="replace")[-2000:]

    try:
        until(lambda: speaks_amqp(port) or started[-1].poll() is not None, timeout=60, what="RabbitMQ", diagnose=tail)
        if started[-1].poll() is not None:
            raise NoRabbitError(f"{server} does not start: {tail()[-300:]}")
    except AssertionError as late:
        close()
        raise NoRabbitError(f"{server} does not answer: {str(late)[-300:]}") from late
    except BaseException:
        close()
        raise

    def control(*words: str, stdin: str = "") -> str:
        return _run([ctl, "-q", *words], env, stdin)

    return Rabbit(port, control, close, "private")


def _script(name: str) -> str:
    """Return the server's own script: Debian's wrapper on PATH only serves root, and only the machine's own node."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin")
    if found is None:
        raise NoRabbitError(f"{name} is not on PATH")
    with open(found, "rb") as file:
        wrapped = re.search(rb"^\s*(/\S*/rabbitmq/bin)/", file.read(20_000), re.MULTILINE)
    inner = Path(os.fsdecode(wrapped[1])) / name if wrapped else None
    return str(inner) if inner is not None and inner.exists() else found


def _settings(home: Path, port: int) -> dict[str, str]:
    (home / "rabbitmq.conf").write_text(
        f"listeners.tcp.local = 127.0.0.1:{port}\nlog.console.level = warning\ndisk_free_limit.absolute = 1MB\n"
    )
    (home / "enabled_plugins").write_text("[].\n")
    (home / "env.conf").write_text("")
    return {
        "HOME": str(home),
        "RABBITMQ_NODENAME": f"umt-{uuid.uuid4().hex[:12]}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_PORT": str(free_port()),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_FLAGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": str(home / "env.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
        "RABBITMQ_LOG_BASE": str(home),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_PID_FILE": str(home / "pid"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "generated"),
        "RABBITMQ_SCHEMA_DIR": str(home / "schema"),
    }


# -- one in a container -----------------------------------------------------------------------------------------------


def _container(_folder: Path) -> Rabbit:
    docker = shutil.which("docker")
    if docker is None:
        raise NoRabbitError("docker is not on PATH")
    _run([docker, "info"])
    name = f"umt-rabbitmq-{uuid.uuid4().hex[:12]}"
    _run([docker, "run", "--detach", "--rm", "--name", name, "--publish", "127.0.0.1::5672", "rabbitmq:3-alpine"])

    def close() -> None:
        _run([docker, "rm", "--force", name])

    try:
        port = int(_run([docker, "port", name, "5672"]).rsplit(":", 1)[1])
        until(lambda: speaks_amqp(port), timeout=120, what="RabbitMQ in a container")
    except BaseException:
        close()
        raise

    def control(*words: str, stdin: str = "") -> str:
        return _run([docker, "exec", "--interactive", name, "rabbitmqctl", "-q", *words], stdin=stdin)

    return Rabbit(port, control, close, "container")
