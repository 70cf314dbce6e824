"""The servers that the suite runs against: private ones, or those that the suite's own variables name.

TEST_BROKER     the broker instead of a private one, for the kind that its scheme says
TEST_BACKEND    the Redis for results instead of a private one; with REDIS_HOST and REDIS_PORT where the suite's
                tasks find its database 0
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.support import guard
from tests.support.ports import answers, free_port
from tests.support.rabbit import NoRabbitError, find
from tests.support.wait import until
from umt_durable.embedded.binaries import valkey_program

BROKERS: Final = ("redis", "rabbitmq")
_SCHEMES: Final = {"redis": "redis", "amqp": "rabbitmq", "pyamqp": "rabbitmq"}


class NoBrokerError(Exception):
    """The suite cannot be run against a broker on this machine; the text says why and what would help."""


@contextmanager
def servers(broker: str, folder: Path) -> Iterator[dict[str, str]]:
    """Start what one run needs and give the environment that leads its tests there.

    Errors: NoBrokerError.
    """
    given = given_broker(os.environ)
    with ExitStack() as stack:
        environment = stack.enter_context(_results(folder))
        if given is not None and given[0] == broker:
            yield {**environment, "TEST_BROKER": given[1]}
        elif broker == "redis":
            yield {**environment, "TEST_BROKER": environment["TEST_BACKEND"]}
        else:
            yield {**environment, "TEST_BROKER": stack.enter_context(_vhost(folder))}


def given_broker(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the kind and URL of the broker that the environment names, None when it names none.

    Errors: NoBrokerError for a kind that is not tested.
    """
    url = environ.get("TEST_BROKER", "")
    if not url:
        return None
    scheme = url.partition(":")[0]
    if scheme not in _SCHEMES:
        raise NoBrokerError(f"TEST_BROKER: {scheme} is not tested; use one of {', '.join(sorted(_SCHEMES))}")
    return _SCHEMES[scheme], url


@contextmanager
def _results(folder: Path) -> Iterator[dict[str, str]]:
    """Give a Redis server: some tests count what is in it, and reach it without a password."""
    if os.environ.get("TEST_BACKEND"):
        kept = {name: os.environ[name] for name in ("REDIS_HOST", "REDIS_PORT") if name in os.environ}
        yield {"TEST_BACKEND": os.environ["TEST_BACKEND"], **kept}
        return
    port = free_port()
    home = folder / f"valkey-{port}"
    home.mkdir(parents=True)
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--save", ""]
    options += ["--set-proc-title", "no"]  # a title would hide from the watchdog whose process it is
    program = str(valkey_program(None))
    process = guard.spawn([program, *options], home / "server.log", guard.clean_environment(), cwd=home)
    try:
        until(lambda: answers(port), timeout=30, what="Valkey", diagnose=(home / "server.log").read_text)
        url = f"redis://127.0.0.1:{port}/0"
        yield {"TEST_BACKEND": url, "REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(port)}
    finally:
        guard.end(process)


@contextmanager
def _vhost(folder: Path) -> Iterator[str]:
    """Give a virtual host of our own."""
    try:
        server = find(folder)
    except NoRabbitError as reason:
        raise NoBrokerError(f"{reason}. Start one, or name one in TEST_BROKER, or use --broker redis") from reason
    try:
        vhost = server.take_vhost()
        yield server.url(vhost)
        server.give_back_vhost(vhost)
    finally:
        server.close()
